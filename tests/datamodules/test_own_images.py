"""The user's own images: in folders, and listed in an index."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.records.grouped_runs import group, read_runs
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.run.cli import main
from datamodules.own_images import DomainFolders, ImageFolders, ImageIndex

ROOT = Path(__file__).parents[2]
DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def draw(at: Path, *colour: int, size: int = 4) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), colour).save(at, format="PNG")


def fill(root: Path, *folders: str, images: int = 5) -> Path:
    """Images of a colour each in these folders."""
    for number, folder in enumerate(folders):
        for image in range(images):
            draw(root / folder / f"{image}.png", number, image, 0)
    return root


def pacs(root: Path, shade: int = 0) -> None:
    for domain, style in enumerate(DOMAINS):
        for label, name in enumerate(CLASSES):
            for number in range(5):
                draw(root / style / name / f"{number}.png", 30 * label, 40 * domain + shade, 10 * number, size=32)


def write_index(root: Path, *lines: str) -> Path:
    fill(root, "a", images=4)
    (root / "index.csv").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize("method", ["fedvpt", "pfedpg"])
def test_pacs_runs_by_ten_lines_of_the_documentation(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = next(iter(re.findall(r"`pacs.yaml`:\n\n```yaml\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)))
    assert len(text.splitlines()) == 10
    (tmp_path / "pacs.yaml").write_text(text.replace("fedvpt", method))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    pacs(tmp_path / "data/PACS")
    monkeypatch.chdir(tmp_path)
    small = ["--config=pacs.yaml", "--data.source.init_args.size=32", "--trainer.max_epochs=1"]
    main(["fit", *small, "--run_dir=runs/one"])
    record = read_record("runs/one")
    assert (record.dataset, record.client_names) == ("PACS", DOMAINS)
    assert not verify_record("runs/one")
    if method == "fedvpt":  # other images of the name are no second seed
        pacs(tmp_path / "other/PACS", shade=7)
        other = ["--data.source.init_args.root=other/PACS", "--seed_everything=1"]
        main(["fit", *small, *other, "--run_dir=runs/two"])
        runs, problems, again = read_runs([Path("runs")])
        assert not problems + again
        assert read_record("runs/two").images_sha256 != record.images_sha256
        assert len(group(runs)) == len({run.dataset for run in runs}) == 2


def test_a_folder_is_split_by_class_and_seed(tmp_path: Path) -> None:
    fill(tmp_path, "cat", "dog", images=10)
    (tmp_path / "cat/0.png").rename(tmp_path / "cat/0.PNG")
    (tmp_path / "dog/.hidden.png").write_text("no image")
    made = ImageFolders("Pets", str(tmp_path), size=4)
    pool = made.load()
    assert (made.class_names, made.domain_names) == (("cat", "dog"), ("",))
    assert torch.equal(pool.labels, pool.images[:, 0, 0, 0].long())
    assert pool.labels[pool.test].bincount().tolist() == [2, 2]
    other = ImageFolders("Pets", str(tmp_path), size=4, split_seed=1).load()
    assert not torch.equal(pool.test, other.test)


def test_classes_that_are_numbers_come_in_the_order_of_the_numbers(tmp_path: Path) -> None:
    fill(tmp_path, "2", "10", "1")
    assert ImageFolders("Digits", str(tmp_path), size=4).class_names == ("1", "2", "10")
    names = ["10/0.png", "2/0.png", "1/0.png", "2/1.png", "10/1.png", "1/1.png"]
    frame = pd.DataFrame({"path": names, "label": [int(name.partition("/")[0]) for name in names]})
    frame.assign(split=["train"] * 3 + ["test"] * 3).to_csv(tmp_path / "index.csv", index=False)
    listed = ImageIndex("Digits", str(tmp_path), size=4)
    assert listed.class_names == ("1", "2", "10")
    pool = listed.load()
    assert (pool.labels.tolist(), pool.test.tolist()) == ([0, 0, 1, 1, 2, 2], [False, True] * 3)
    fill(tmp_path, "ten")
    assert ImageFolders("Words", str(tmp_path), size=4).class_names == ("1", "10", "2", "ten")


def test_given_sides_are_kept_and_copies_of_test_images_do_not_train(tmp_path: Path) -> None:
    fill(tmp_path, "train/cat", "train/dog", "test/cat", "test/dog", images=3)
    (tmp_path / "train/cat/2.png").write_bytes((tmp_path / "test/cat/0.png").read_bytes())
    with pytest.warns(UserWarning, match="Pets: 1 training images are copies of test images and do not train"):
        pool = ImageFolders("Pets", str(tmp_path), size=4).load()
    assert pool.images[pool.test][:, 0, 0, 0].tolist() == [2, 2, 2, 3, 3, 3]
    assert (~pool.test).sum() == 5


def test_the_only_image_of_a_class_trains(tmp_path: Path) -> None:
    fill(tmp_path, "dog")
    draw(tmp_path / "cat/0.png", 9)
    for seed in range(5):
        pool = ImageFolders("Pets", str(tmp_path), size=4, split_seed=seed).load()
        assert pool.labels[pool.test].tolist() in ([1], [1, 1])


def test_domains_are_split_one_by_one(tmp_path: Path) -> None:
    fill(tmp_path, "ink/cat", "ink/dog", "oil/train/cat", "oil/train/dog", "oil/test/cat", "oil/test/dog")
    made = DomainFolders("Art", str(tmp_path), size=4)
    pool = made.load()
    assert (made.class_names, made.domain_names) == (("cat", "dog"), ("ink", "oil"))
    assert [int((pool.test & (pool.domains == domain)).sum()) for domain in range(2)] == [2, 10]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_index_says_domain_side_and_group(tmp_path: Path, suffix: str) -> None:
    fill(tmp_path, "a", images=4)
    columns = {
        "path": [f"a/{n}.png" for n in (3, 2, 1, 0)],
        "label": list("yxyx"),
        "split": ["test", "train", "train", "test"],
    }
    frame = pd.DataFrame(
        {
            **columns,
            "split": ["test", "train", "train", "test"],
            "domain": ["d", "d", "c", "c"],
            "group": ["", "p", "p", ""],
        }
    )
    getattr(frame, {"csv": "to_csv", "parquet": "to_parquet"}[suffix])(tmp_path / f"index.{suffix}", index=False)
    made = ImageIndex("Pets", str(tmp_path), index=f"index.{suffix}", size=4)
    pool = made.load()
    assert (made.class_names, made.domain_names) == (("x", "y"), ("c", "d"))
    assert pool.images[:, 1, 0, 0].tolist() == [0, 1, 2, 3]  # by domain, class and path
    assert pool.labels.tolist() == [0, 1, 0, 1]
    assert pool.test.tolist() == [True, False, False, True]
    assert pool.group[1] == pool.group[2]


def test_groups_of_an_index_are_drawn_whole(tmp_path: Path) -> None:
    fill(tmp_path, "a", images=40)
    rows = [f"a/{n}.png,{'xy'[n % 2]},{n // 4}" for n in range(40)]
    pool = ImageIndex("Pets", str(write_index(tmp_path, "path,label,group", *rows)), size=4).load()
    assert pool.test.sum() == 8
    assert not set(pool.group[pool.test].tolist()) & set(pool.group[~pool.test].tolist())


def test_a_split_by_groups_follows_its_seed_and_tests_near_a_fifth_of_a_class(tmp_path: Path) -> None:
    fill(tmp_path, "a", images=120)
    sizes = [2, 9, 3, 7, 1, 4, 12, 5, 8, 6, 1, 2]  # of a class's twelve patients
    patients = np.repeat(np.arange(24), sizes * 2)
    rows = [f"a/{n}.png,{'xy'[patient // 12]},{patient}" for n, patient in enumerate(patients)]
    root = str(write_index(tmp_path, "path,label,group", *rows))
    found = set()
    for seed in range(6):
        pool = ImageIndex("Pets", root, size=4, split_seed=seed).load()
        assert not set(pool.group[pool.test].tolist()) & set(pool.group[~pool.test].tolist())
        for label in (0, 1):
            assert abs(int((pool.test & (pool.labels == label)).sum()) - 12) <= 6
        assert torch.equal(ImageIndex("Pets", root, size=4, split_seed=seed).load().test, pool.test)
        found.add(tuple(pool.test.tolist()))
    assert len(found) == 6


def test_groups_too_few_to_draw_from_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "a", images=8)
    rows = [f"a/{n}.png,{'xy'[n % 2]},{n % 2}" for n in range(8)]
    with pytest.raises(ConfigurationError, match=r"Pets: too few groups to draw a test split of whole ones"):
        ImageIndex("Pets", str(write_index(tmp_path, "path,label,group", *rows)), size=4).load()


@pytest.mark.parametrize("sides", [("train", "test"), ("Train", "val")])
def test_sides_of_a_split_are_no_domains(tmp_path: Path, sides: tuple[str, str]) -> None:
    fill(tmp_path, *(f"{side}/{name}" for side in sides for name in ("cat", "dog")))
    with pytest.raises(ConfigurationError, match=r"which are sides of a split and no domains"):
        DomainFolders("Art", str(tmp_path), size=4)


def test_a_damaged_parquet_index_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "a", images=4)
    pd.DataFrame({"path": ["a/0.png"], "label": ["x"]}).to_parquet(tmp_path / "index.parquet", index=False)
    whole = (tmp_path / "index.parquet").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 3):
            damaged[place] = rng.integers(256)
        (tmp_path / "index.parquet").write_bytes(damaged)
        with contextlib.suppress(ConfigurationError):
            ImageIndex("Pets", str(tmp_path), index="index.parquet", size=4)


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        ([], r"expected a folder for each of at least two classes"),
        (["cat"], r"at least two classes in .*, got 1"),
        (["train/cat", "train/dog", "test/cat"], r"/train has the class dog, .*/test has not: name the classes alike"),
        (["train/cat", "test/cat", "val/cat"], r"holds val beside train and test"),
        (["ink/cat", "oil/cat"], r"ink holds the folder cat, .* read by DomainFolders"),
    ],
)
def test_folders_of_another_form_are_refused(tmp_path: Path, folders: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        ImageFolders("Pets", str(fill(tmp_path, *folders)), size=4).load()
    assert "\n" not in str(refused.value)


def test_a_class_of_one_domain_and_an_empty_one_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "ink/cat", "ink/dog", "oil/cat")
    with pytest.raises(ConfigurationError, match=r"Art: .*ink has the class dog, .*oil has not: .*ImageIndex"):
        DomainFolders("Art", str(tmp_path))
    (tmp_path / "oil/dog").mkdir()
    with pytest.raises(ConfigurationError, match=r"oil/dog holds no image"):
        DomainFolders("Art", str(tmp_path)).load()
    with pytest.raises(ConfigurationError, match=r"at least two domains, it has 0; ImageFolders reads"):
        DomainFolders("Art", str(tmp_path / "oil/dog"))


def test_links_out_of_the_folder_and_what_is_no_image_are_refused(tmp_path: Path) -> None:
    root = fill(tmp_path / "pets", "cat", "dog")
    draw(tmp_path / "outside.png", 1)
    (root / "cat/link.png").symlink_to(tmp_path / "outside.png")
    with pytest.raises(ConfigurationError, match=r"link\.png leads outside of the data set's folder"):
        ImageFolders("Pets", str(root), size=4).load()
    (root / "cat/link.png").unlink()
    (root / "cat/text.png").write_text("no image")
    with pytest.raises(ConfigurationError, match=r"cannot decode the image .*text\.png"):
        ImageFolders("Pets", str(root), size=4).load()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["path,class", "a/0.png,x"],
            r"no column label; call the image's file path and its class label \(optional: domain, split, group\); "
            r"its columns are path, class$",
        ),
        (["path,label"], r"index\.csv lists no image"),
        (["path,label", "a/0.png,"], r"row 2 has an empty label"),
        (["path,label", "a/0.png,x", "./a/0.png,y"], r"row 3 names \./a/0\.png, as row 2 does"),
        (["path,label,split", "a/0.png,x,val"], r"row 2: split must be train or test, got 'val'"),
        (["path,label,split,group", "a/0.png,x,train,p", "a/1.png,y,test,p"], r"the group 'p' is on both sides"),
        (["path,label", "a/0.png,x"], r"at least two classes in the column label, got one"),
        (["path,label", "a/0.png,x", "a/9.png,y"], r"cannot read the image .*a/9\.png: No such file or directory$"),
        (["path,label", "a/9.png,x", "a/0.png,y", "a/8.png,y"], r"a/9\.png: .* \(2 of 3 files are missing\)$"),
        (["path,label", "a/0.png,x", "../b.png,y"], r"\.\./b\.png"),
        (["path,label,split", "a/0.png,x,train", "a/1.png,y,test"], r"Pets has no training images of y"),
        (["path,label,split", "a/0.png,x,train", "a/1.png,y,train"], r"Pets has no test images"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, lines: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        ImageIndex("Pets", str(write_index(tmp_path, *lines)), size=4).load()
    assert "\n" not in str(refused.value)


def test_a_link_to_nothing_counts_as_missing(tmp_path: Path) -> None:
    root = write_index(tmp_path, "path,label", "a/8.png,x", "a/0.png,y", "a/9.png,y")
    (root / "a/8.png").symlink_to("nowhere.png")
    with pytest.raises(ConfigurationError, match=r"a/8\.png: .* \(2 of 3 files are missing\)$"):
        ImageIndex("Pets", str(root), size=4).load()


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 61, "CIFAR-10", "office_caltech10"])
def test_a_name_is_short_and_of_no_other_data_set(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.source\.init_args\.name: "):
        ImageFolders(name, str(fill(tmp_path, "cat", "dog")))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_whole_numbers_that_came_as_floats_are_whole_again(tmp_path: Path, suffix: str) -> None:
    fill(tmp_path, "a", images=4)
    frame = pd.DataFrame({"path": [f"a/{n}.png" for n in range(4)], "label": [10.0, 2.0, 1.0, 2.0]})
    getattr(frame, {"csv": "to_csv", "parquet": "to_parquet"}[suffix])(tmp_path / f"index.{suffix}", index=False)
    made = ImageIndex("Digits", str(tmp_path), index=f"index.{suffix}", size=4)
    assert made.class_names == ("1", "2", "10")
    assert made.load().labels.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([True, False, True], ("False", "True")),
        ([1.5, 10.0, 2.0], ("1.5", "2.0", "10.0")),
        ([-1, 10, 2], ("-1", "2", "10")),
        (["b ", "a", "b"], ("a", "b")),
    ],
)
def test_labels_of_other_kinds_have_one_text_each(tmp_path: Path, labels: list, names: tuple[str, ...]) -> None:
    frame = pd.DataFrame({"path": ["a/0.png", "a/1.png", "a/2.png"], "label": labels})
    for suffix, write in (("csv", frame.to_csv), ("parquet", frame.to_parquet)):
        write(tmp_path / f"index.{suffix}", index=False)
        assert ImageIndex("Pets", str(tmp_path), index=f"index.{suffix}").class_names == names


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1.0, float("nan"), 2.0], r"row 2 has an empty label"),
        (["x", None, "y"], r"row 2 has an empty label"),
        ([["x"], ["y", "x"], ["y"]], r"row 1 has array.*: expected a name or a number"),
        (["x", "\x1b[31my", "z"], r"the name '\\x1b\[31my' has signs that cannot be printed"),
        (["caf\u00e9", "cafe\u0301", "tea"], r"the class names 'cafe\\u0301' and 'caf\\xe9' read alike"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, labels: list, said: str) -> None:
    frame = pd.DataFrame({"path": ["a/0.png", "a/1.png", "a/2.png"], "label": labels, "notes": [["any"], None, ["x"]]})
    frame.to_parquet(tmp_path / "index.parquet", index=False)
    with pytest.raises(ConfigurationError, match=said) as refused:
        ImageIndex("Pets", str(tmp_path), index="index.parquet")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,label,label\na/0.png,x,y\n", r"index\.csv has 2 columns label; leave one"),
        ("path,label\na/0.png,é\na/1.png,y\n".encode("latin-1"), r"no text in UTF-8 .*; save it as UTF-8"),
        ("path,label\na/0.png,x\na/1.png,y\n".encode("utf-16"), r"no text in UTF-8 .*; save it as UTF-8"),
        ("path,label\na/0.png,x\na/1.png,y\n".encode("utf-16-le"), r"no text in UTF-8 .*; save it as UTF-8"),
        ("path|label\na/0.png|x\n", r"no column path, label; .* its columns are path\|label"),
        ("path,label,split\na/0.png,x,train\na/1.png,y,train\n", r"every image is given as train; give some as test"),
    ],
)
def test_tables_of_another_form_say_what_to_do(tmp_path: Path, text: str | bytes, said: str) -> None:
    fill(tmp_path, "a", images=2)
    (tmp_path / "index.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=said) as refused:
        ImageIndex("Pets", str(tmp_path), size=4).load()
    assert "\n" not in str(refused.value)


def test_a_table_is_separated_by_semicolons_too(tmp_path: Path) -> None:
    fill(tmp_path, "a", images=2)
    (tmp_path / "index.csv").write_text("path;label;split\na/0.png;x, the first;train\na/1.png;y;test\n")
    assert ImageIndex("Pets", str(tmp_path)).class_names == ("x, the first", "y")


@pytest.mark.parametrize(("one", "other"), [("caf\u00e9", "cafe\u0301"), ("cat", "cat "), ("caf\u00e9", " cafe\u0301")])
def test_folders_whose_names_read_alike_are_refused(tmp_path: Path, one: str, other: str) -> None:
    root = fill(tmp_path, one, other, "dog")
    with pytest.raises(ConfigurationError, match=r"the class names .* and .* read alike"):
        ImageFolders("Pets", str(root))
    root = fill(tmp_path / "sides", f"train/{one}", f"test/{other}", "train/dog", "test/dog")
    with pytest.raises(ConfigurationError, match=r"the class names .* and .* read alike"):
        ImageFolders("Pets", str(root))
    root = fill(tmp_path / "domains", *(f"{domain}/{name}" for domain in (one, other) for name in ("a", "b")))
    with pytest.raises(ConfigurationError, match=r"the domain names .* and .* read alike"):
        DomainFolders("Pets", str(root))


def test_names_that_differ_in_case_are_told_of(tmp_path: Path) -> None:
    fill(tmp_path, "Cat", "cat", "dog")
    with pytest.warns(UserWarning, match=r"class names differ in upper and lower case alone: Cat and cat; if they"):
        assert ImageFolders("Pets", str(tmp_path)).class_names == ("Cat", "cat", "dog")


@pytest.mark.filterwarnings("error")
def test_classes_without_a_test_image_are_named(tmp_path: Path) -> None:
    rows = [f"a/{n}.png,{label},{side}" for n, (label, side) in enumerate([*KNOWN, *UNTESTED, ("eell", "train")])]
    fill(tmp_path, "a", images=len(rows))
    (tmp_path / "index.csv").write_text("\n".join(["path,label,split", *rows]))
    said = r"Pets: no test image of a0, a1, a2, a3, a4 and 2 more, and a single image of eell: accuracy says nothing"
    with pytest.warns(UserWarning, match=said):
        ImageIndex("Pets", str(tmp_path), size=4).load()


KNOWN = [("eel", "train"), ("eel", "test")]
UNTESTED = [(f"a{n}", "train") for n in range(7) for _ in range(2)]


@pytest.mark.parametrize("link", [True, False])
def test_one_file_in_two_classes_is_refused(tmp_path: Path, link: bool) -> None:
    fill(tmp_path, "cat", "dog")
    if link:
        (tmp_path / "dog/new.png").symlink_to(tmp_path / "cat/0.png")
    else:
        (tmp_path / "dog/new.png").hardlink_to(tmp_path / "cat/0.png")
    said = r"cat/0\.png \(cat\) and dog/new\.png \(dog\) are one file in two classes"
    with pytest.raises(ConfigurationError, match=said):
        ImageFolders("Pets", str(tmp_path), size=4).load()
    (tmp_path / "index.csv").write_text("path,label\ncat/0.png,x\ndog/new.png,y\n")
    with pytest.raises(ConfigurationError, match=r"cat/0\.png \(x\) and dog/new\.png \(y\) are one file in"):
        ImageIndex("Pets", str(tmp_path), size=4).load()


def test_a_class_folder_that_is_a_link_to_another_class_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "cat", "dog")
    (tmp_path / "eel").symlink_to(tmp_path / "cat")
    with pytest.raises(ConfigurationError, match=r"cat/0\.png \(cat\) and eel/0\.png \(eel\) are one file in two clas"):
        ImageFolders("Pets", str(tmp_path), size=4).load()


def test_equal_pixels_are_on_one_side_of_a_drawn_split(tmp_path: Path) -> None:
    fill(tmp_path, "cat", "dog", images=20)
    for number in range(10):  # saved anew, as other files of the same pixels
        with Image.open(tmp_path / f"cat/{number}.png") as image:
            image.save(tmp_path / f"cat/again{number}.png", compress_level=0)
    for seed in range(5):
        pool = ImageFolders("Pets", str(tmp_path), size=4, split_seed=seed).load()
        shown = {tuple(pixels) for pixels in pool.images[pool.test][:, :, 0, 0].tolist()}
        assert len(pool.labels) == 50
        assert pool.test.sum() == 10
        assert not shown & {tuple(pixels) for pixels in pool.images[~pool.test][:, :, 0, 0].tolist()}


def test_equal_pixels_in_two_classes_are_told_of(tmp_path: Path) -> None:
    fill(tmp_path, "cat", "dog", images=20)
    for number in range(3):
        (tmp_path / f"dog/copy{number}.png").write_bytes((tmp_path / f"cat/{number}.png").read_bytes())
    said = r"Pets: 6 images have the same pixels as one of another class \(first: cat/0\.png and dog/copy0\.png\)"
    with pytest.warns(UserWarning, match=said):
        ImageFolders("Pets", str(tmp_path), size=4).load()


SYSTEM = ("__MACOSX", "@eaDir", "lost+found", "#recycle", "$RECYCLE.BIN", "System Volume Information", "Thumbs.db")


@pytest.mark.parametrize("name", SYSTEM)
def test_folders_of_systems_are_no_classes(tmp_path: Path, name: str) -> None:
    fill(tmp_path, "ink/cat", "ink/dog", "oil/cat", "oil/dog", name, f"{name}/A", f"ink/{name}", f"ink/cat/{name}")
    with pytest.warns(UserWarning, match=rf"system are no classes and passed over: {re.escape(name)}"):
        made = DomainFolders("Art", str(tmp_path), size=4)
    assert (made.domain_names, made.class_names) == (("ink", "oil"), ("cat", "dog"))
    assert len(made.load().labels) == 20
    assert ImageFolders("Ink", str(tmp_path / "ink"), size=4).class_names == ("cat", "dog")


@pytest.mark.parametrize("sides", [("Train", "Test"), ("train", "val"), ("training", "testing"), ("train",)])
def test_sides_of_other_names_say_how_sides_are_called(tmp_path: Path, sides: tuple[str, ...]) -> None:
    fill(tmp_path, *(f"{side}/{name}" for side in sides for name in ("cat", "dog")))
    said = rf"holds {' and '.join(sorted(sides))}, which are sides of a split and no classes; sides are called train"
    with pytest.raises(ConfigurationError, match=said):
        ImageFolders("Pets", str(tmp_path))
    (tmp_path / "all").mkdir()
    for domain in ("ink", "oil"):
        fill(tmp_path / "all" / domain, *(f"{side}/{name}" for side in sides for name in ("cat", "dog")))
    with pytest.raises(ConfigurationError, match=said):
        DomainFolders("Art", str(tmp_path / "all"))


def test_a_directory_of_a_run_of_own_images_has_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fill(tmp_path, "data/cat", "data/dog"))
    source = "{class_path: ImageFolders, init_args: {name: My (new) pets_1, root: data, size: 32}}"
    options = [f"--data.source={source}", "--data.partition={class_path: IID, init_args: {num_clients: 2}}"]
    main(["fit", "--config=headtune_digits", *options, "--trainer.max_epochs=1", "--trainer.accelerator=cpu"])
    (made,) = Path("runs").iterdir()
    assert made.name.startswith("headtune-my-new-pets-1-s0-")
