"""Subgroups by columns of an index: whose they are in the pool, what is refused, and runs that keep them."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from federation import CONF, ShallowViT, TinyImages, build
from lightning import seed_everything
from PIL import Image
from refusal import refused

from benchmark.commands import main as command
from benchmark.errors import ConfigurationError
from benchmark.records.hashes import config_hash
from benchmark.records.keeping import keep_record
from benchmark.records.kept_rounds import KeptRounds
from benchmark.records.predictions import PREDICTIONS
from benchmark.records.record_file import MORE_FILES, OPTIONAL_FILES, read_record
from benchmark.records.stored_run import StoredRun, verify_record
from benchmark.records.subgroups import NOT_GIVEN, SUBGROUPS, subgroups_parquet_of
from benchmark.run.cli import main
from benchmark.run.differences import differences
from benchmark.run.fit import fit
from datamodules.federated import FederatedDataModule
from datamodules.own_images import ImageIndex
from datamodules.partition import DomainPerClient
from datamodules.several_data_sets import SeveralDataSets
from datamodules.subgroups import subgroups_of
from methods import HeadTune

AGES = ("10", "2", "")


def draw(root: Path, header: str = "path,label,domain,split,sex,age,id", size: int = 32, images: int = 24) -> Path:
    """An index whose red is an image's number, in an order of its own, with sex and age by this number."""
    root.mkdir(parents=True, exist_ok=True)
    lines = []
    for n in reversed(range(images)):
        Image.new("RGB", (size, size), (n, 0, 200)).save(root / f"{n}.png")
        facts = {"path": f"{n}.png", "label": "ab"[n % 2], "domain": "xy"[n // 2 % 2]}
        facts |= {"split": "test" if n % 3 == 0 else "train", "sex": "FM"[n % 5 % 2], "age": AGES[n // 4 % 3]}
        facts |= {"id": f"p{n}", "group": f"g{n}", "one": "1", "none": ""}
        lines.append(",".join(facts[name] for name in header.split(",")))
    (root / "index.csv").write_text("\n".join([header, *lines]) + "\n")
    return root


def number_of(source: ImageIndex) -> list[int]:
    return source.load().images[:, 0, 0, 0].tolist()


def test_values_are_those_of_the_pools_images(tmp_path: Path) -> None:
    root = draw(tmp_path)
    shutil.copy(root / "3.png", root / "4.png")  # image 3 tests, so that 4, a copy, does not train
    source = ImageIndex("Pets", str(root), size=4)
    assert source.image_columns == ("domain", "sex", "age", "id")
    with pytest.warns(UserWarning, match="1 training images are copies of test images"):
        numbers = number_of(source)
    assert len(numbers) == 23
    assert source.image_column("id") == [f"p{number}" for number in numbers]
    assert source.image_column("age") == [AGES[number // 4 % 3] for number in numbers]
    with pytest.warns(UserWarning, match="are copies"):
        assert number_of(again := ImageIndex("Pets", str(root), size=4)) == numbers  # from the cache
    assert again.image_column("id") == source.image_column("id")
    rows = source.load().test.nonzero().flatten().numpy()
    found = subgroups_of(source, "age", rows)
    assert [*found] == ["2", "10", NOT_GIVEN]
    assert {numbers[row] for row in found["2"]} == {n for n in range(0, 24, 3) if AGES[n // 4 % 3] == "2"}


def test_numbers_of_a_parquet_index_lose_no_zero_and_a_null_is_not_given(tmp_path: Path) -> None:
    root = draw(tmp_path)
    table = pd.read_csv(root / "index.csv", dtype={"age": "Int64"})
    assert table["age"].isna().any()
    table.astype({"age": "float64"}).to_parquet(root / "index.parquet")
    source = ImageIndex("Pets", str(root), "index.parquet", size=4)
    numbers = number_of(source)
    assert source.image_column("age") == [AGES[number // 4 % 3] for number in numbers]


def test_several_data_sets_have_the_columns_that_all_of_them_have(tmp_path: Path) -> None:
    one = draw(tmp_path / "a", "path,label,split,sex,age", size=4)
    other = draw(tmp_path / "b", "path,label,split,id,sex", size=4, images=10)
    both = SeveralDataSets([ImageIndex("A", str(one), size=4), ImageIndex("B", str(other), size=4)])
    assert both.image_columns == ("sex",)
    numbers = both.load().images[:, 0, 0, 0].tolist()
    assert both.image_column("sex") == ["FM"[number % 5 % 2] for number in numbers]
    assert SeveralDataSets([ImageIndex("A", str(one), size=4), TinyImages()]).image_columns == ()


def data(root: Path, subgroups: Any, keep: Any = "last", **more: Any) -> FederatedDataModule:
    source = ImageIndex("Pets", str(root), size=4)
    return FederatedDataModule(source, DomainPerClient(), keep_predictions=keep, subgroups=subgroups, **more)


@pytest.mark.parametrize(
    ("subgroups", "said"),
    [
        (["sexe"], r"Pets: there is no column 'sexe' \(did you mean sex\?\); columns are domain, sex, age"),
        (["group"], "the column group of an index says where an image is, of which class, or on which side"),
        (["sex", "path"], "the column path of an index says where"),
        (["label"], "the column label of an index"),
        (["split"], "the column split of an index"),
        ([], r"is a list of columns of an index, such as \[sex, age_band\], from one to 20 and each once; got \[\]"),
        (["sex", "sex"], r"and each once; got \['sex', 'sex'\]"),
        ([f"c{n}" for n in range(21)], "from one to 20"),
    ],
)
def test_columns_that_name_no_subgroups_are_refused(subgroups: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said) as told:
        data(draw(tmp_path), subgroups)
    assert "\n" not in str(told.value)


def test_subgroups_ask_for_kept_images_and_for_an_index(tmp_path: Path) -> None:
    root = draw(tmp_path)
    for keep in (None, "none"):
        with pytest.raises(ConfigurationError, match=r"this one keeps none; give data\.keep_predictions=last, or"):
            data(root, ["sex"], keep)
    assert data(root, ["sex", "domain"], None, metrics="clinical").kept_rounds == "last"
    with pytest.raises(ConfigurationError, match=r"TinyImages come without columns; list them in an index with a col"):
        build("HeadTune", "--data.subgroups=[sex]", "--data.keep_predictions=last")


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("none", None, "the column none is empty for all 8 held-out images; fill it in, or leave it out"),
        ("one", None, "has the one value '1' for all 8 held-out images: there is nothing to compare"),
        ("id", None, "has 8 values in 8 held-out images, and at most 4 are compared there; give a column"),
        ("sex", "F\x1b[2J", "has signs that cannot be printed"),
        ("sex", "F", None),
    ],
)
def test_columns_without_subgroups_to_compare_are_refused(
    column: str, values: str | None, said: str | None, tmp_path: Path
) -> None:
    root = draw(tmp_path, "path,label,split,sex,id,one,none", size=4)
    if values:
        text = (root / "index.csv").read_text()
        (root / "index.csv").write_text(text.replace(",F,", f",{values},"))
    source = ImageIndex("Pets", str(root), size=4)
    rows = source.load().test.nonzero().flatten().numpy()
    if said is None:
        assert [*subgroups_of(source, column, rows)] == ["F", "M"]
        return
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(")) as told:
        subgroups_of(source, column, rows)
    assert "\n" not in str(told.value)


class Numbered(TinyImages):
    """Images of which as many as are given share a number."""

    def __init__(self, of_each: int) -> None:
        super().__init__()
        self.of_each = of_each

    def image_column(self, name: str) -> list[str]:
        return [str(image // self.of_each) for image in range(176)]


def test_there_are_fewer_than_fifty_subgroups() -> None:
    with pytest.raises(ConfigurationError, match="the column id has 60 values in 120 held-out images, and at most 49"):
        subgroups_of(Numbered(2), "id", np.arange(120))
    assert [*subgroups_of(Numbered(3), "id", np.arange(120))] == [str(number) for number in range(40)]


def test_an_index_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    source = ImageIndex("Pets", str(draw(tmp_path, size=4)), size=4)
    source.load()
    draw(tmp_path, size=4, images=12)
    with pytest.raises(ConfigurationError, match="was changed while the images were read"):
        source.image_column("sex")


def options(root: Path, folder: Path, *more: str, rounds: int = 2) -> list[str]:
    source = {"name": "Pets", "root": str(root), "size": "32"}
    return [
        *("fit", *(f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml"))),
        "--data.source=datamodules.ImageIndex",
        *(f"--data.source.init_args.{name}={value}" for name, value in source.items()),
        *("--data.partition=datamodules.DomainPerClient", "--data.clients_per_round=2", "--data.evaluate_local=true"),
        *("--data.metrics=clinical", f"--trainer.max_epochs={rounds}", f"--run_dir={folder}"),
        *(more or ("--data.subgroups=[age,sex]",)),
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    main(options(root, folder))
    return folder


def test_a_run_keeps_the_subgroups_of_its_scored_images(root: Path, run: Path) -> None:
    stored = StoredRun(run)
    assert verify_record(run) == []
    assert {*OPTIONAL_FILES} <= {*read_record(run).files}
    source = ImageIndex("Pets", str(root), size=32)
    numbers = number_of(source)
    assert stored.subgroups["column"].unique().tolist() == ["age", "sex"]
    for column, rows in stored.subgroups.groupby("column", observed=True):
        expected = {
            row: (AGES[n // 4 % 3] or NOT_GIVEN) if column == "age" else "FM"[n % 5 % 2]
            for row, n in enumerate(numbers)
        }
        assert {*rows["image"]} == {*stored.predictions["image"]} == {r for r, n in enumerate(numbers) if n % 3 == 0}
        assert all(expected[image] == value for image, value in zip(rows["image"], rows["value"], strict=True))


def test_show_and_a_mistake_end_to_end(
    root: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["show", str(run), "--subgroups", "sex"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "test images after aggregation by sex" in said
    assert "sensitivity after local training by sex" in said
    line = refused(
        capsys, main, options(root, tmp_path / "a", "--data.subgroups=[domain]", "--data.keep_predictions=none")
    )
    assert "this one keeps none" in line
    line = refused(capsys, main, options(root, tmp_path / "b", "--data.subgroups=sex"))
    assert "subgroups" in line
    assert not (tmp_path / "b").exists()
    line = refused(capsys, main, options(root, tmp_path / "c", "--data.subgroups=[id]"))
    assert "the column id has 8 values in 8 held-out images, and at most 4 are compared there" in line
    assert not (tmp_path / "c").exists()


def test_a_kept_copy_says_nothing_of_single_images_and_verifies(run: Path, tmp_path: Path) -> None:
    kept = keep_record(run, tmp_path, "copy")
    assert not (kept / SUBGROUPS).exists()
    assert SUBGROUPS in read_record(kept).files
    assert verify_record(kept) == []


def test_a_changed_file_and_one_without_a_scored_image_do_not_verify(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "changed")
    (tmp_path / "changed" / SUBGROUPS).write_bytes(subgroups_parquet_of({"sex": {"F": [0], "M": [3]}}))
    (problem,) = verify_record(tmp_path / "changed")
    assert "subgroups.parquet was changed after the run" in problem
    stored = StoredRun(run)
    vars(stored)["subgroups"] = stored.subgroups.iloc[1:]  # as if the run had written it so
    (problem,) = stored.problems
    assert problem.endswith("subgroups.parquet does not give the record's images")


def test_killed_and_moved_runs_write_the_same_bytes(
    root: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = KeptRounds.take

    def killed(self: KeptRounds, round: int, *more: Any) -> None:
        take(self, round, *more)
        if round == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(KeptRounds, "take", killed)
        with pytest.raises(SystemExit):
            main(options(root, tmp_path / "run"))
    assert (tmp_path / "run" / SUBGROUPS).read_bytes() == (run / SUBGROUPS).read_bytes()
    assert not (tmp_path / "run" / "record.json").exists()
    checkpoint = f"--ckpt_path={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}"
    main([*options(root, tmp_path / "moved"), checkpoint])
    main([*options(root, tmp_path / "run"), checkpoint])
    for folder in ("run", "moved"):
        for name in OPTIONAL_FILES:
            assert (tmp_path / folder / name).read_bytes() == (run / name).read_bytes(), (folder, name)
        assert verify_record(tmp_path / folder) == []


def test_a_start_without_them_leaves_none_of_another_start(root: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    shutil.copy(run / SUBGROUPS, tmp_path / "a")
    main(options(root, tmp_path / "a", "--data.keep_predictions=last", rounds=1))
    assert not (tmp_path / "a" / SUBGROUPS).exists()
    files = read_record(tmp_path / "a").files
    assert {*MORE_FILES} <= {*files}
    assert SUBGROUPS not in files
    assert (tmp_path / "a" / PREDICTIONS).exists()


def test_they_change_no_result_and_are_in_no_hash() -> None:
    one, other, old = ({"data": more} for more in ({"subgroups": ["sex"]}, {"subgroups": None}, {}))
    assert config_hash(one) == config_hash(other) == config_hash(old)
    assert differences(old, one) == []


def test_a_run_without_a_directory_says_so(tmp_path: Path) -> None:
    held = data(draw(tmp_path, size=32), ["sex"], seed=3)
    seed_everything(3)
    method = HeadTune(2, 2, ShallowViT())
    with pytest.raises(ConfigurationError, match=r"data\.subgroups keeps a file of subgroups, and the run has no dir"):
        fit(method, held, rounds=1, accelerator="cpu", enable_progress_bar=False)
