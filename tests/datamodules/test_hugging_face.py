"""Data sets of Hugging Face's library, made here and saved: nothing is downloaded."""

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules.hugging_face import HuggingFaceImages

datasets = pytest.importorskip("datasets")
LABELS = datasets.ClassLabel(names=["dog", "cat"])


def made(start: int, images: int = 10, labels: Any = LABELS, **others: Any) -> Any:
    """Images of which each has its number as its red, cats and dogs in turn."""
    named = labels is LABELS
    columns = {
        "image": [Image.new("RGB", (4, 4), (start + number, 0, 0)) for number in range(images)],
        "label": [number % 2 if named else ("dog", "cat")[number % 2] for number in range(images)],
        "domain": [("ink", "oil")[number // 2 % 2] for number in range(images)],
    }
    kinds = {"image": datasets.Image(), "label": labels, "domain": datasets.Value("string")}
    return datasets.Dataset.from_dict(columns | others, features=datasets.Features(kinds))


def saved(root: Path, **splits: Any) -> str:
    datasets.DatasetDict(splits).save_to_disk(str(root))
    return str(root)


def test_saved_splits_are_kept_and_classes_come_in_the_order_of_the_label(tmp_path: Path) -> None:
    root = saved(tmp_path / "pets", train=made(0), validation=made(50), test=made(100, 4))
    source = HuggingFaceImages("Pets", root, domain="domain", size=4)
    pool = source.load()
    assert (source.class_names, source.domain_names) == (("dog", "cat"), ("ink", "oil"))
    assert pool.images[:, 0, 0, 0].tolist() == [*range(10), *range(100, 104)]
    assert pool.test.tolist() == [False] * 10 + [True] * 4
    assert pool.labels.tolist() == [0, 1] * 7
    assert pool.domains.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("form", ["dict", "one", "parquet"])
def test_a_single_split_is_drawn(tmp_path: Path, form: str) -> None:
    root, data = tmp_path / "pets", made(0, 20, datasets.Value("string"))
    if form == "dict":
        saved(root, train=data)
    elif form == "one":
        data.save_to_disk(str(root))
    else:
        root.mkdir()
        data.to_parquet(root / "train.parquet")
    pools = [HuggingFaceImages("Pets", str(root), size=4, split_seed=seed).load() for seed in (0, 0, 1)]
    assert HuggingFaceImages("Pets", str(root)).class_names == ("cat", "dog")
    assert pools[0].labels.tolist() == [1, 0] * 10
    assert pools[0].labels[pools[0].test].bincount().tolist() == [2, 2]
    assert torch.equal(pools[0].test, pools[1].test)
    assert not torch.equal(pools[0].test, pools[2].test)


def test_a_table_names_no_files_outside_of_the_data_set(tmp_path: Path) -> None:
    root, secret = tmp_path / "pets", tmp_path / "secret.png"
    root.mkdir()
    for number in range(10):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(root / f"{number}.png")
    (root / "0.png").rename(secret)
    kinds = {"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}}
    features = datasets.Features(kinds | {"label": datasets.Value("string")})

    def load(first: Path) -> Any:
        images = [{"bytes": None, "path": str(path)} for path in (first, *(root / f"{n}.png" for n in range(1, 10)))]
        data = datasets.Dataset.from_dict({"image": images, "label": ["dog", "cat"] * 5}, features=features)
        data.cast_column("image", datasets.Image(decode=False)).to_parquet(root / "train.parquet")
        return HuggingFaceImages("Pets", str(root), size=4).load()

    with pytest.raises(ConfigurationError, match=r"row 0 names '.*secret\.png', which is no file of the data"):
        load(secret)
    secret.rename(root / "0.png")
    assert load(root / "0.png").images[:, 0, 0, 0].tolist() == [*range(10)]


def test_a_test_split_may_be_left_out(tmp_path: Path) -> None:
    root = saved(tmp_path / "pets", train=made(0), test=made(100))
    pool = HuggingFaceImages("Pets", root, test=None, size=4).load()
    assert (len(pool.labels), int(pool.test.sum())) == (10, 2)


def test_copies_of_test_images_do_not_train(tmp_path: Path) -> None:
    root = saved(tmp_path / "pets", train=made(0), test=made(8, 4))
    with pytest.warns(UserWarning, match="2 training images are copies of test images"):
        pool = HuggingFaceImages("Pets", root, size=4).load()
    assert pool.images[~pool.test][:, 0, 0, 0].tolist() == list(range(8))


def test_a_damaged_image_is_named_by_its_row(tmp_path: Path) -> None:
    whole, stream = made(0, 4), io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, format="PNG")
    broken = [{"bytes": stream.getvalue()[: 20 + 60 * (number != 2)], "path": None} for number in range(4)]
    root = saved(tmp_path / "pets", train=made(0, 4, image=broken), test=whole)
    with pytest.raises(ConfigurationError, match=r"cannot decode the image of row 2 of .*pets") as refused:
        HuggingFaceImages("Pets", root, size=4).load()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"image": "img"}, r"has no column img, it has image, label, domain; name them as"),
        ({"image": "label"}, r"the column label holds ClassLabel.*, no images"),
        ({"test": "validation"}, r"has no split validation, it has train, test; name the splits"),
        ({"train": "all"}, r"has no split all, it has train, test"),
        ({"name": "CIFAR-10"}, r"data\.source\.init_args\.name: "),
        ({"root": "nowhere"}, r"Pets is not in nowhere: there is no such folder"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path: Path, arguments: dict[str, str], said: str) -> None:
    given = {"name": "Pets", "root": saved(tmp_path / "pets", train=made(0), test=made(100))}
    with pytest.raises(ConfigurationError, match=said) as refused:
        HuggingFaceImages(**(given | arguments))
    assert "\n" not in str(refused.value)


def test_several_labels_an_image_are_refused(tmp_path: Path) -> None:
    several = made(0, 4, labels=datasets.Sequence(datasets.Value("string")), label=[["dog"], ["cat", "dog"]] * 2)
    with pytest.raises(ConfigurationError, match=r"the column label holds .*, expected one name or number a row"):
        HuggingFaceImages("Pets", saved(tmp_path / "pets", train=several))


def test_rows_without_a_label_and_unlike_splits_are_refused(tmp_path: Path) -> None:
    unlabelled = saved(tmp_path / "one", train=made(0), test=made(100, 2, label=[0, -1]))
    with pytest.raises(ConfigurationError, match=r"row 11 has -1 as its label; leave out rows without one"):
        HuggingFaceImages("Pets", unlabelled)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"empty is no data set of Hugging Face"):
        HuggingFaceImages("Pets", str(tmp_path / "empty"))


def test_no_network_and_no_library_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*given: Any, **kept: Any) -> None:
        raise ConnectionError("Couldn't reach 'who/pets' on the Hub\n(offline)")

    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", offline)
        with pytest.raises(
            ConfigurationError, match=r"cannot have who/pets from the Hugging Face Hub \(.*\); put"
        ) as said:
            HuggingFaceImages("Pets", str(tmp_path / "data"), hub="who/pets")
    assert "\n" not in str(said.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigurationError, match=r"needs datasets: pip install 'federated-prompt-benchmark\[hugg"):
        HuggingFaceImages("Pets", str(tmp_path / "data"), hub="who/pets")


def damage_state(root: Path, content: str) -> None:
    made(0).save_to_disk(str(root))
    (root / "state.json").write_text(content)


def damage_info(root: Path, content: str) -> None:
    made(0).save_to_disk(str(root))
    (root / "dataset_info.json").write_text(content)


def damage_dict(root: Path, content: str) -> None:
    saved(root, train=made(0))
    (root / "dataset_dict.json").write_text(content)


def damage_arrow(root: Path, content: str) -> None:
    made(0).save_to_disk(str(root))
    next(root.glob("*.arrow")).write_text(content)


def lone_file(name: str) -> Callable[[Path, str], None]:
    def make(root: Path, content: str) -> None:
        root.mkdir()
        (root / name).write_text(content)

    return make


def readme(root: Path, content: str) -> None:
    root.mkdir()
    made(0).to_parquet(root / "train.parquet")
    (root / "README.md").write_text(content)


@pytest.mark.parametrize(
    ("make", "content"),
    [
        (damage_state, "[]"),
        (damage_state, "{}"),
        (damage_state, "no JSON"),
        (damage_info, "[]"),
        (damage_dict, "{}"),
        (damage_dict, '{"splits": 3}'),
        (damage_arrow, "no Arrow"),
        (readme, "---\na: [\n---\n"),
        (lone_file("a.zip"), "garbage"),
        (lone_file("train.parquet"), "garbage"),
        (lone_file("state.json"), "{}"),
    ],
)
def test_damaged_data_sets_are_one_line(tmp_path: Path, make: Callable[[Path, str], None], content: str) -> None:
    make(tmp_path / "pets", content)
    with pytest.raises(ConfigurationError, match=r"pets is no data set of Hugging Face \(\w+: .*\); put") as refused:
        HuggingFaceImages("Pets", str(tmp_path / "pets"))
    assert "\n" not in str(refused.value)


def test_an_empty_name_on_the_hub_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"hub is empty; name a data set of the Hub, such as ylecun/mnist"):
        HuggingFaceImages("Pets", str(tmp_path), hub="")


@pytest.mark.parametrize("ends", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_and_a_lack_of_memory_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: type[BaseException]
) -> None:
    def stop(*given: Any, **kept: Any) -> None:
        raise ends

    monkeypatch.setattr(datasets, "load_dataset", stop)
    with pytest.raises(ends):
        HuggingFaceImages("Pets", str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "labels", "names"),
    [
        ("string", ["10", "2", "0", "1", "11"] * 2, ("0", "1", "2", "10", "11")),
        ("int64", [10, 2, 0, 1, 11] * 2, ("0", "1", "2", "10", "11")),
        ("float64", [10.0, 2.0, 0.0, 1.0, 11.0] * 2, ("0", "1", "2", "10", "11")),
        ("bool", [True, False] * 5, ("False", "True")),
        ("string", ["dog ", "cat"] * 5, ("cat", "dog")),
    ],
)
def test_labels_are_the_texts_that_other_sources_make_of_them(
    tmp_path: Path, kind: str, labels: list[Any], names: tuple[str, ...]
) -> None:
    root = saved(tmp_path / "pets", train=made(0, labels=datasets.Value(kind), label=labels))
    source = HuggingFaceImages("Pets", root)
    assert source.class_names == names
    texts = [str(int(label)) if kind == "float64" else str(label).strip() for label in labels]
    assert [names[label] for label in source.labels] == texts


@pytest.mark.parametrize(
    ("kind", "labels", "said"),
    [
        ("float64", [float("nan"), 1.0, 2.0, 1.0], r"row 0 has nan as its label; leave out rows without one"),
        ("float64", [1.0, None, 2.0, 1.0], r"row 1 has None as its label"),
        ("string", ["a", "b", "", "b"], r"row 2 has '' as its label"),
        ("string", ["a", "\x1b[31mb", "a", "a"], r"the name '\\x1b\[31mb' has signs that cannot be printed"),
        ("string", ["caf\u00e9", "cafe\u0301", "a", "a"], r"the class names .* read alike"),
        ("binary", [b"a", b"b", b"a", b"b"], r"row 0 has in its column label b'a': expected a name or a number"),
    ],
)
def test_labels_that_are_none_are_refused(tmp_path: Path, kind: str, labels: list[Any], said: str) -> None:
    root = saved(tmp_path / "pets", train=made(0, 4, labels=datasets.Value(kind), label=labels))
    with pytest.raises(ConfigurationError, match=said):
        HuggingFaceImages("Pets", root)


def test_where_the_librarys_copy_lies_is_said_and_can_be_chosen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    root = tmp_path / "pets"
    root.mkdir()
    made(0).to_parquet(root / "train.parquet")
    HuggingFaceImages("Pets", str(root), cache=str(tmp_path / "kept"))
    (said,) = [message for message in caplog.messages if "keeps a copy" in message]
    assert f"keeps a copy of the data set in {tmp_path / 'kept'}" in said
    assert not (root / ".cache").exists()
