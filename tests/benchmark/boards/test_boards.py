"""Boards: frozen of kept runs, ranked by hand-computed numbers, and open to runs of the same setting alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from finished_run import write_finished_run
from recorded_results import kept_images, record_of

from benchmark.boards import submit as module
from benchmark.boards.board import Board, names_of_boards, read_board, write_board
from benchmark.boards.freeze import freeze
from benchmark.boards.ranking import long_form, ranking, scored
from benchmark.boards.submit import check_support, submit
from benchmark.commands import main
from benchmark.errors import ConfigurationError
from benchmark.locks import FileLock
from benchmark.metrics import METRICS
from benchmark.records.drawn_images import values_in
from benchmark.records.grouped_runs import read_run
from benchmark.records.metrics_table import COLUMNS
from benchmark.records.predictions import PREDICTIONS, images_of, parquet_of
from benchmark.records.record import RunRecord
from benchmark.records.record_file import write_record
from benchmark.tables.cells import make_cells
from benchmark.tables.layout import load_table

ROOT = Path(__file__).parents[3]
NAME = "rooms_v1"
#: Of the twelve kept images: 3 of 5, 2 of 4 and 2 of 3 are right.
KEPT = [0.6, 0.5, 2 / 3]
TABLE = {
    "title": "Rooms",
    "metric": "accuracy",
    "presets": {
        "demo": {
            "note": "Three <rooms> | of one house.",
            "seeds": [0, 1],
            "data": [{"name": "rooms", "label": "all rooms", "columns": [{"statistic": "average"}]}],
        }
    },
    "rows": [
        {"label": "Floor", "name": "floor", "configs": ["floor.yaml"], "point": "server"},
        {"label": "Trained", "name": "trained", "configs": ["trained.yaml"], "point": "local"},
    ],
}


#: The files of runs that were written, by what they were written of: tests write the same few runs again and again.
WRITTEN: dict[str, dict[str, bytes]] = {}


def write(folder: Path, seed: int, values: list[float], **other: Any) -> Path:
    """A finished run of three clients, of the arguments of :func:`write_anew`."""
    of = json.dumps([seed, values, other], sort_keys=True)
    if of not in WRITTEN:
        write_anew(folder, seed, values, **other)
        WRITTEN[of] = {path.name: path.read_bytes() for path in folder.iterdir()}
        return folder
    folder.mkdir(parents=True)
    for name, content in WRITTEN[of].items():
        (folder / name).write_bytes(content)
    return folder


def write_anew(folder: Path, seed: int, values: list[float], kept: bool = False, rounds: int = 2, **other: Any) -> None:
    """Write a run; other arguments are the method's, or ``images``, ``first`` and ``backbone``."""
    arguments = {"backbone": {"class_path": other.pop("backbone", "PaperCNN")}}
    kept_round = other.pop("kept_round", 2)
    images, first = other.pop("images", "f" * 64), other.pop("first", 5)
    more = other.pop("data", {})
    source = {"class_path": "datamodules.CIFAR10", "init_args": {"root": other.pop("root", "data")}}
    config = {
        "seed_everything": seed,
        "model": {"class_path": "methods.FedVPT", "init_args": arguments | other},
        "data": {"source": source, "partition": {"class_path": "datamodules.OneDomainPerClient"}, **more},
        "trainer": {"max_epochs": rounds},
    }
    sizes = {"a": 5, "b": 4, "c": 3}
    tested = dict(iter(kept_images().groupby("client")))
    clients = [
        {
            "name": name,
            "train_classes": [first, 0],
            "test_classes": np.bincount(tested[number]["label"], minlength=3).tolist(),
            "test": tested[number]["image"].tolist(),
        }
        for number, name in enumerate(sizes)
    ]
    metrics = [
        (number, client, point, "test", "accuracy", value if number else 0.0)
        for number in range(3)
        for point in ("server", "local")
        for client, value in enumerate(values)
    ]
    on_val = [(n, c, "server", "val", "accuracy", KEPT[c] if n == 1 else 0.1) for n in range(3) for c in range(3)]
    metrics += on_val if kept_round == 1 else []
    record = record_of(
        (*sizes,),
        seed,
        method="FedVPT",
        dataset="CIFAR10",
        setting="domains",
        test_sizes=(*sizes.values(),),
        manifest_hash="",
        environment={},
        rounds=rounds,
        communication={"up_bytes": 1500.0, "down_bytes": 500.0, "up_floats": 375.0, "down_floats": 125.0},
        seconds={"total": 90.0, "training": 2.0, "evaluation": 1.0},
        peak_memory_bytes=1,
        images_sha256=images,
        code={},
    )
    parts = [kept_images(point) for point in ("server", "local")]
    parts += [kept_images("server").assign(split="val")] if kept_round == 1 else []
    rows = pd.concat(parts).sort_values(["point", "split", "client", "image"])
    rows["round"] = kept_round
    table, manifest = pd.DataFrame(metrics, columns=list(COLUMNS)), {"clients": clients, "images_sha256": images}
    write_finished_run(folder, record, table, yaml.safe_dump(config), rows if kept else None, **manifest)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with the kept runs of a table: its floor, and a row that is better but for one client."""
    return write_results(tmp_path, monkeypatch)


def write_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    (folder / "rooms.yaml").write_text(yaml.safe_dump(TABLE))
    for name in ("floor", "trained"):
        (folder / f"{name}.yaml").write_text("model: methods.FedVPT\n")
    table = load_table("rooms.yaml")
    values = {"Floor": [0.5, 0.6, 0.7], "Trained": [0.7, 0.9, 0.6]}
    for (_, label, seed), cell in make_cells(table, "demo", table.presets["demo"]).items():
        write(folder / "results" / "runs" / cell.name, seed, [v - 0.02 * seed for v in values[label]], lr=len(label))
    return folder / "results"


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Board, Path]:
    """The board of these runs, and the folder that freezing has left; frozen once."""
    folder = tmp_path_factory.mktemp("frozen")
    with pytest.MonkeyPatch.context() as patch:
        results = write_results(folder, patch)
        return freeze(NAME, "rooms.yaml", "demo", "rooms", "Floor", results), results


@pytest.fixture
def board(frozen: tuple[Board, Path], results: Path) -> Board:
    made, left = frozen
    shutil.copytree(left, results, dirs_exist_ok=True)
    return made


def given(folder: Path, **other: Any) -> list[Path]:
    """Runs of somebody else with both seeds."""
    return [write(folder / f"s{seed}", seed, KEPT, kept=True, **other) for seed in (0, 1)]


def test_a_board_holds_what_its_runs_share(board: Board, results: Path) -> None:
    assert names_of_boards(results) == [NAME]
    assert read_board(NAME, results) == board
    assert (board.metric, board.floor, board.note) == ("accuracy", "Floor", "Three <rooms> | of one house.")
    assert [(row.label, row.point, row.submitted) for row in board.rows] == [
        ("Floor", "server", False),
        ("Trained", "local", False),
    ]
    setting = board.setting
    assert (setting.dataset, setting.images_sha256, setting.client_rounds) == ("CIFAR10", "f" * 64, 6)
    assert setting.splits.keys() == {"0", "1"}


def test_rows_are_ranked_beside_the_floor(board: Board, results: Path) -> None:
    """By hand: means 60 and 58, 73.33 and 71.33; the clients' differences are 20, 30 and -10 under both seeds."""
    best, floor = scored(board, results)
    assert (best.row.label, floor.row.label) == ("Trained", "Floor")
    assert best.averages == pytest.approx([220 / 3, 214 / 3])
    page = ranking(board, results)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    assert lines[2][:4] == ["1", "Trained (after local training)", "72.33 ± 1.41", "+13.33"]
    # t of two degrees of freedom, 4.3027, times 20.8167 / sqrt(3), the standard error of clients; seeds are alike.
    assert lines[2][4] == "-38.38 to +65.04"
    assert lines[2][5:] == ["59.00 ± 1.41", "2.0", "2", "1.5", ""]
    assert lines[3][:6] == ["2", "Floor", "59.00 ± 1.41", "", "", "49.00 ± 1.41"]
    assert lines[3][-1] == "the floor"
    assert "Three &lt;rooms&gt; \\| of" in page


def test_values_are_kept_by_client(board: Board, results: Path) -> None:
    found = long_form(board, results)
    assert len(found) == 2 * 2 * 3
    first = ["Floor", 0, "a", 5, 5, "accuracy", 0.5]
    assert found.iloc[0].tolist() == first


def test_a_row_is_added_and_marked_where_it_is_below_the_floor(board: Board, results: Path, tmp_path: Path) -> None:
    made = submit(NAME, "Mine & yours", given(tmp_path / "theirs", lr=0.5), "local", results)
    assert made.remarks == ()
    row = made.board.rows[-1]
    assert (row.label, row.point, row.submitted) == ("Mine & yours", "local", True)
    assert row.runs == {str(seed): f"mine_yours-{NAME}-s{seed}-675bdfd4" for seed in (0, 1)}
    kept = results / "runs" / row.runs["0"]
    assert {path.name for path in kept.iterdir()} == {
        *("config.yaml", "metrics.parquet", "classes.parquet", "manifest.json", "record.json")
    }
    assert read_board(NAME, results) == made.board
    # 58.89 on average, 0.11 below the floor's 59.
    line = next(line for line in ranking(made.board, results).splitlines() if "Mine &amp; yours" in line)
    assert "| 58.89 ± 0.00 | -0.11 |" in line
    assert line.endswith("| below the floor, submitted |")
    with pytest.raises(ConfigurationError, match="has a row 'Mine & yours' already"):
        submit(NAME, "Mine & yours", given(tmp_path / "again", lr=0.6), "local", results)


def broken(folder: Path) -> list[Path]:
    """Runs, one of which has other predictions than accuracies."""
    first, second = given(folder)
    (first / PREDICTIONS).write_bytes((first / PREDICTIONS).read_bytes()[:-1])
    return [first, second]


def other_scores(folder: Path) -> list[Path]:
    """Runs whose accuracies are not those of their predictions, with all hashes made anew."""
    return [write(folder / f"s{seed}", seed, [0.8, 0.5, 2 / 3], kept=True) for seed in (0, 1)]


def few_images(folder: Path) -> list[Path]:
    """Runs whose predictions are of some images, right as often as all."""
    runs = [write(folder / f"s{seed}", seed, [1.0, 1.0, 1.0], kept=True) for seed in (0, 1)]
    for run in runs:
        rows = pd.read_parquet(run / PREDICTIONS)
        right = rows[rows["prediction"] == rows["label"]]
        (run / PREDICTIONS).write_bytes(parquet_of(right))
        finish_again(run)
    return runs


def best_on_val(folder: Path) -> list[Path]:
    """Runs that keep the images of the round that was best on held-out images, the first."""
    return given(folder, kept_round=1, data={"keep_predictions": "best_on_val"})


def test_a_mean_over_classes_is_of_classes_with_as_many_images(board: Board, results: Path, tmp_path: Path) -> None:
    run = read_run(write(tmp_path / "s0", 0, KEPT, data={"min_support": 5}))
    with pytest.raises(ConfigurationError, match=r"auroc with data\.min_support=5, expected data\.min_support=1"):
        check_support(replace(board, metric="auroc"), run, results)
    check_support(board, run, results)  # of accuracy


def no_manifest(folder: Path) -> list[Path]:
    """Runs whose partition is taken on their word."""
    runs = given(folder)
    (runs[0] / "manifest.json").unlink()
    return runs


def forged(**columns: Callable[[pd.DataFrame], Any]) -> Callable[[Path], list[Path]]:
    """Runs whose predictions have other columns, and scores that fit them."""

    def made(folder: Path) -> list[Path]:
        runs = given(folder)
        for run in runs:
            rows = pd.read_parquet(run / PREDICTIONS)
            rows = rows.assign(**{name: of(rows) for name, of in columns.items()})
            rows.to_parquet(run / PREDICTIONS)
            metrics = pd.read_parquet(run / "metrics.parquet")
            for client, own in rows.query("point == 'server'").groupby("client"):
                last = (metrics["client"] == client) & (metrics["round"] == 2)
                metrics.loc[last, "value"] = float((own["label"] == own["prediction"]).mean())
            metrics.to_parquet(run / "metrics.parquet")
            finish_again(run)
        return runs

    return made


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (few_images, "does not have every test image of every client once at the point 'server'"),
        (no_manifest, "manifest.json"),
        (lambda f: given(f, images="e" * 64), "not on this board: images sha256"),
        (lambda f: given(f, backbone="Other"), "not on this board: backbone 'Other', expected 'PaperCNN'"),
        (lambda f: given(f, rounds=3), "9 rounds of a client, expected at most 6"),
        (lambda f: given(f, first=6), "the partition of seed 0 is another one"),
        (lambda f: given(f)[:1], "one run for each of the seeds 0, 1; got 0"),
        (lambda f: given(f)[:1] * 2, "one run for each of the seeds 0, 1; got 0, 0"),
        (lambda f: [write(f / f"s{s}", s, KEPT, kept=True, lr=s) for s in (0, 1)], "differ in more than their seed"),
        (lambda f: [write(f / f"s{s}", s, KEPT) for s in (0, 1)], "has no predictions.parquet"),
        (
            best_on_val,
            "its images are of round 1, and a board reads the last one; run it with --data.keep_predictions=last",
        ),
        (broken, "predictions.parquet was changed after"),
        (other_scores, "predictions.parquet does not give the record's accuracies"),
        (lambda f: [f / "nothing"], "nothing has no record.json: there is no such directory"),
        (forged(image=lambda rows: rows["image"] + 1000), "has other test images for client 0 than manifest.json"),
        (forged(label=lambda rows: rows["prediction"]), "has other numbers of images of the classes for client"),
    ],
)
def test_what_is_not_of_the_board_is_refused_and_nothing_is_written(
    made: Any, said: str, board: Board, results: Path, tmp_path: Path
) -> None:
    runs = made(tmp_path / "theirs")
    before = sorted(results.rglob("*"))
    with pytest.raises(ConfigurationError, match=said):
        submit(NAME, "Mine", runs, "server", results)
    assert sorted(results.rglob("*")) == before
    assert read_board(NAME, results) == board


def also_auroc(folder: Path, values: dict[int, float]) -> None:
    """Write a run anew with the AUROC of some clients, the same in each round."""
    metrics, kept = pd.read_parquet(folder / "metrics.parquet"), (folder / PREDICTIONS).exists()
    also = [metrics[metrics["client"] == c].assign(metric="auroc", value=value) for c, value in values.items()]
    (folder / "metrics.parquet").unlink()
    write_record(folder, written_record(folder), pd.concat([metrics, *also], ignore_index=True), predictions=kept)


def auroc_board(results: Path, floor: dict[int, float], trained: dict[int, float]) -> None:
    """Freeze a board that ranks by AUROC, which its floor lacks of some clients, as where they have one class."""
    for folder in (results / "runs").iterdir():
        also_auroc(folder, floor if folder.name.startswith("floor") else trained)
    freeze(NAME, "rooms.yaml", "demo", "rooms", "Floor", results, "auroc")


@pytest.mark.parametrize(
    ("trained", "named"), [({0: 0.7}, "b"), ({0: 0.7, 1: float("nan")}, "b"), ({0: 0.7, 1: 0.8, 2: 0.9}, "c")]
)
def test_a_row_of_other_clients_than_the_floors_is_not_frozen(
    trained: dict[int, float], named: str, results: Path
) -> None:
    said = rf"trained-rooms-s\d.* has other clients with a finite auroc .* than the floor .*: {named};"
    with pytest.raises(ConfigurationError, match=said):
        auroc_board(results, {0: 0.5, 1: 0.6}, trained)
    assert names_of_boards(results) == []


def test_a_row_of_other_clients_than_the_floors_is_not_taken(results: Path, tmp_path: Path) -> None:
    auroc_board(results, {0: 0.5}, {0: 0.7})
    runs, made = given(tmp_path / "theirs"), {}
    rows = pd.read_parquet(runs[0] / PREDICTIONS).query("point == 'server' and split == 'test'")
    for client, own in rows.groupby("client"):
        made[client] = float(values_in(METRICS["auroc"], images_of(own), np.ones((1, len(own)), "int32"))[0])
    for folder in runs:
        also_auroc(folder, made)
    before = sorted(results.rglob("*"))
    with pytest.raises(ConfigurationError, match=r"theirs/s\d has other clients with a finite auroc .*: b;"):
        submit(NAME, "Mine", runs, "server", results)
    assert sorted(results.rglob("*")) == before


def test_one_process_at_a_time_adds_to_a_board(board: Board, results: Path, tmp_path: Path) -> None:
    runs, lock = given(tmp_path / "theirs"), FileLock(results / "boards" / f".{NAME}.lock")
    assert lock.acquire()
    lock.write("held")
    with pytest.raises(ConfigurationError, match=f"is being added to the board {NAME} by process .*; wait for it"):
        submit(NAME, "Mine", runs, "server", results)
    lock.release()
    assert len(submit(NAME, "Mine", runs, "server", results).board.rows) == 3
    assert not lock.path.exists()


def test_a_submission_that_was_killed_before_the_page_is_repeated(
    board: Board, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = given(tmp_path / "theirs")
    killed, write = iter([KeyboardInterrupt]), module.write_ranking

    def write_ranking(*given: Any) -> Any:
        for error in killed:
            raise error
        return write(*given)

    monkeypatch.setattr(module, "write_ranking", write_ranking)
    with pytest.raises(KeyboardInterrupt):
        submit(NAME, "Mine", runs, "server", results)
    page, _ = submit(NAME, "Mine", runs, "server", results).files
    assert "| Mine |" in page.read_text()
    with pytest.raises(ConfigurationError, match="has a row 'Mine' already"):
        submit(NAME, "Mine", given(tmp_path / "others", lr=0.3), "server", results)


def test_a_board_has_one_partition_for_each_seed(results: Path) -> None:
    for folder in (results / "runs").glob("trained-*"):
        record = written_record(folder)
        shutil.rmtree(folder)
        write(folder, record.seed, [0.7, 0.9, 0.6], lr=7, first=6)
    with pytest.raises(ConfigurationError, match="has another partition than other runs with seed 0"):
        freeze(NAME, "rooms.yaml", "demo", "rooms", "Floor", results)


@pytest.mark.parametrize("killed_at", ["the second run", "the board"])
def test_what_a_killed_submission_has_kept_is_taken_over(
    killed_at: str, board: Board, results: Path, tmp_path: Path
) -> None:
    runs = given(tmp_path / "theirs")
    made = submit(NAME, "Mine", runs, "server", results).board
    if killed_at == "the second run":
        (results / "runs" / made.rows[-1].runs["1"] / "record.json").unlink()
    write_board(board, results)
    assert submit(NAME, "Mine", runs, "server", results).board == read_board(NAME, results) == made
    write_board(board, results)
    with pytest.raises(ConfigurationError, match="holds another record of the same name"):
        submit(NAME, "Mine", given(tmp_path / "others", lr=0.3), "server", results)
    assert all((results / "runs" / folder / "record.json").is_file() for folder in made.rows[-1].runs.values())


@pytest.mark.parametrize("failing", ["keep_record", "ranking", "write_board"])
def test_of_a_submission_that_fails_nothing_stays(
    failing: str, board: Board, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, before = given(tmp_path / "theirs"), sorted(results.rglob("*"))
    true = getattr(module, failing)

    def fails(*given: Any) -> Any:
        if failing != "keep_record" or "-s1-" in given[2]:
            raise ConfigurationError("the disk is full")
        return true(*given)

    monkeypatch.setattr(module, failing, fails)
    with pytest.raises(ConfigurationError, match="the disk is full"):
        submit(NAME, "Mine", runs, "server", results)
    assert (sorted(results.rglob("*")), read_board(NAME, results)) == (before, board)


def finish_again(folder: Path, **fields: Any) -> None:
    """Write a run's record anew after its files were changed."""
    record = replace(written_record(folder), **fields)
    write_record(folder, record, pd.read_parquet(folder / "metrics.parquet"), predictions=True)


def test_the_metric_that_ranks_is_made_again_of_the_predictions(results: Path, tmp_path: Path) -> None:
    """Recalls of client a, by hand: one of two, one of two, one of one; their mean is 2/3."""
    for folder in (results / "runs").iterdir():
        metrics = pd.read_parquet(folder / "metrics.parquet")
        (folder / "metrics.parquet").unlink()
        also = metrics.assign(metric="balanced_accuracy")
        write_record(folder, written_record(folder), pd.concat([metrics, also], ignore_index=True))
    freeze(NAME, "rooms.yaml", "demo", "rooms", "Floor", results, "balanced_accuracy")
    runs = given(tmp_path / "theirs")
    for folder in runs:
        metrics = pd.read_parquet(folder / "metrics.parquet")
        also = metrics.assign(metric="balanced_accuracy", value=0.9)
        pd.concat([metrics, also], ignore_index=True).to_parquet(folder / "metrics.parquet")
        finish_again(folder)
    with pytest.raises(ConfigurationError, match=r"client 0 give a balanced_accuracy of 0\.666667, recorded is 0\.9"):
        submit(NAME, "Mine", runs, "server", results)


def written_record(folder: Path) -> RunRecord:
    """Return the record of a run of three clients."""
    content = json.loads((folder / "record.json").read_text())
    known = {name: content[name] for name in RunRecord.__dataclass_fields__ if name in content}
    return replace(RunRecord(**known), client_names=("a", "b", "c"), test_sizes=(5, 4, 3))


def test_other_code_and_a_moved_folder_of_data_are_no_obstacle(board: Board, results: Path, tmp_path: Path) -> None:
    runs = given(tmp_path / "theirs", root="/elsewhere")
    for folder in runs:
        finish_again(folder, code={"benchmark.no_such_module": "0" * 64})
    made = submit(NAME, "Mine", runs, "server", results)
    assert made.remarks == ("made by other code than this: benchmark/no_such_module.py",)
    assert "/elsewhere" not in (results / "runs" / made.board.rows[-1].runs["0"] / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "Rooms"}, "a board is called by a-z"),
        ({"table_name": "nothing"}, "nothing"),
        ({"preset_name": "paper"}, "no preset 'paper'"),
        ({"group_name": "cellar"}, "has no data 'cellar'; it has rooms"),
        ({"metric": "charm"}, "there is no metric 'charm'"),
        ({"floor": "Cellar"}, "the floor 'Cellar' is no row; rows are Floor, Trained"),
    ],
)
def test_freezing_says_what_is_not_there(changed: dict[str, str], said: str, results: Path) -> None:
    usual = {"name": NAME, "table_name": "rooms.yaml", "preset_name": "demo", "group_name": "rooms", "floor": "Floor"}
    with pytest.raises(ConfigurationError, match=said):
        freeze(**(usual | changed), results_dir=results)  # type: ignore[arg-type]
    assert names_of_boards(results) == []


def test_a_board_is_frozen_once_and_of_whole_rows(board: Board, results: Path) -> None:
    with pytest.raises(ConfigurationError, match="is frozen"):
        freeze(NAME, "rooms.yaml", "demo", "rooms", "Floor", results)
    (results / "runs" / board.rows[1].runs["1"] / "record.json").unlink()
    with pytest.raises(ConfigurationError, match="the row 'Trained' has no run trained-rooms-s1"):
        freeze("rooms_v2", "rooms.yaml", "demo", "rooms", "Floor", results)


def test_labels_that_look_alike_in_a_folders_name_are_rows_of_their_own(
    board: Board, results: Path, tmp_path: Path
) -> None:
    labels = ["My method", "my-method!", "方法", "![x](https://host/p.png) a\\|99"]
    for number, label in enumerate(labels):
        made = submit(NAME, label, given(tmp_path / str(number), lr=0.1 * number), "server", results)
    assert len({run for row in made.board.rows for run in row.runs.values()}) == 2 * len(made.board.rows)
    assert r"\!\[x\](https://host/p.png) a\\\|99" in ranking(made.board, results)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("trained-rooms-s0", "../../trained-rooms-s0"), r"is not a board of this version: rows\.1\.runs\.0"),
        ((f'"name": "{NAME}"', '"name": "../../README_v1"'), "it calls itself '../../README_v1'"),
        (('"label": "Trained"', '"label": "Floor"'), "need labels of their own"),
        (('"floor": "Floor"', '"floor": "Cellar"'), "one that is called 'Cellar'"),
        (('"metric": "accuracy"', '"metric": "charm"'), "there is no metric 'charm'"),
        (('"1": "trained', '"2": "trained'), "the row 'Trained' has other seeds than the board"),
        (('"1": ', '"x": '), "its seeds are numbers, got '0, x'"),
    ],
)
def test_a_board_that_is_no_board_is_refused_in_a_line(
    change: tuple[str, str], said: str, board: Board, results: Path
) -> None:
    path = results / "boards" / f"{NAME}.json"
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ConfigurationError, match=said):
        read_board(NAME, results)


def test_nothing_is_frozen_of_runs_without_the_metric(results: Path) -> None:
    with pytest.raises(ConfigurationError, match="auroc"):
        freeze(NAME, "rooms.yaml", "demo", "rooms", "Floor", results, "auroc")
    assert names_of_boards(results) == []


def test_the_command_freezes_shows_lists_and_takes_runs(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", "freeze", NAME, "rooms.yaml", "--preset=demo", "--data=rooms", "--floor=Floor"]) == 0
    page = results / "boards" / f"{NAME}.md"
    assert "| 1 | Trained (after local training) |" in page.read_text()
    runs = [str(folder) for folder in given(tmp_path / "theirs")]
    assert main(["board", "submit", NAME, *runs, "--label=Mine"]) == 0
    assert "| 3 | Mine |" in page.read_text()
    assert main(["board", "show", NAME]) == 0
    assert page.read_text() in capsys.readouterr().out
    assert main(["board", "list"]) == 0
    assert capsys.readouterr().out == f"{NAME:36} Rooms: all rooms, 3 rows\n"
    assert main(["board", "show", "rooms_v3"]) == 2
    assert "there is no board 'rooms_v3'" in capsys.readouterr().err


@pytest.mark.parametrize("name", names_of_boards(ROOT / "results"))
def test_committed_boards_are_what_their_runs_give(name: str) -> None:
    board = read_board(name, ROOT / "results")
    folder = ROOT / "results" / "boards"
    assert ranking(board, ROOT / "results") == (folder / f"{name}.md").read_text()
    assert long_form(board, ROOT / "results").to_csv(index=False) == (folder / f"{name}.csv").read_text()
