"""``benchmark init`` looks at images as they lie there, and what it writes runs."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from benchmark.commands import main
from benchmark.run import cli

RNG = np.random.default_rng(0)


def images(folder: Path, count: int) -> None:
    """So many pictures of noise."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(RNG.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / f"{number}.png")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(config: str) -> bool:
    """Return whether a configuration makes a method and data that fit together."""
    made = cli.FederatedCLI(["--config", config], run=False)
    made.datamodule.setup()
    return made.model.num_clients == made.datamodule.num_clients


def test_folders_of_classes_are_dealt_to_clients(capsys: pytest.CaptureFixture[str]) -> None:
    for name, count in {"cat": 40, "dog": 30, "2": 50}.items():
        images(Path("pets") / name, count)
    assert main(["init", "pets", "--method", "pfedpg"]) == 0
    assert (
        "120 images of 3 classes (fewest: 30 of dog), dealt to 2 clients by Dirichlet(0.5)" in capsys.readouterr().out
    )
    made = yaml.safe_load(Path("first.yaml").read_text())
    assert made["base"] == ["methods/pfedpg", "suites/digits"]
    assert made["data"]["source"]["init_args"] == {"name": "pets", "root": "pets"}
    assert runs("first.yaml")


def test_folders_of_domains_are_clients(capsys: pytest.CaptureFixture[str]) -> None:
    for domain in ("photo", "sketch"):
        for name in ("cat", "dog"):
            images(Path("doms") / domain / name, 8)
    assert main(["init", "doms", "--out", "own.yaml", "--name", "Two domains", "--method", "promptfl"]) == 0
    assert "32 images of 2 classes (fewest: 16 of cat), 2 domains, one a client" in capsys.readouterr().out
    made = yaml.safe_load(Path("own.yaml").read_text())
    assert made["base"] == ["methods/promptfl", "suites/digits_clip"]
    assert made["data"]["source"]["init_args"]["name"] == "Two domains"
    assert runs("own.yaml")


def test_an_index_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    images(Path("scans"), 40)
    lines = [f"{number}.png,{'ill' if number % 3 else 'well'}" for number in range(40)]
    Path("scans/index.csv").write_text("\n".join(["path,label", *lines]))
    assert main(["init", "scans"]) == 0
    assert "40 images of 2 classes (fewest: 14 of well)" in capsys.readouterr().out
    assert runs("first.yaml")


@pytest.mark.parametrize(("tested", "clients", "least"), [(50, 2, 10), (70, 3, 10), (8, 2, 2)])
def test_given_sides_are_counted_as_they_are(tested: int, clients: int, least: int) -> None:
    """Deal few test images, fewer than a fifth, to fewer clients."""
    for name in ("cat", "dog"):
        images(Path("pets/train") / name, 250)
        images(Path("pets/test") / name, tested // 2)
    assert main(["init", "pets"]) == 0
    made = yaml.safe_load(Path("first.yaml").read_text())["data"]["partition"]["init_args"]
    assert made == {"alpha": 0.5, "num_clients": clients, "min_size": least}
    assert runs("first.yaml")


@pytest.mark.parametrize("name", ["1e3", "null", "1_000", "on", "2020-01-01", "0x1F", "it's", "é b"])
def test_any_name_of_a_folder_stays_a_text(name: str) -> None:
    """Read what is written with the parser of runs."""
    chosen = ["--name", "its"] if name == "it's" else []  # a data set's name has no apostrophe
    for each in ("cat", "dog"):
        images(Path(name) / each, 10)
    assert main(["init", name, *chosen]) == 0
    made = cli.FederatedCLI(["--config", "first.yaml"], run=False)
    Path("kept.yaml").write_text(made.parser.dump(made.config, skip_validation=True))  # as a run keeps it
    source = cli.FederatedCLI(["--config", "kept.yaml"], run=False).config.data.source.init_args
    assert (source.name, source.root) == (chosen[-1] if chosen else name, name)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no folder nowhere; give the one that holds the images"),
        (["empty"], "empty holds no folders; put the images of each class into a folder"),
        (["mixed"], "mixed mixes folders of classes and of domains: a holds folders, b does not"),
        (["mixed", "--method", "fedvtp"], "there is no method 'fedvtp'; expected one of atpfl, coop"),
        (["mixed", "--out", "there.yaml"], "there.yaml is there already; give another file with --out"),
        (["few"], "few: 4 images are too few for 2 clients, of which each trains on some and is tested on others"),
        (["lone"], "lone: domain 'c' has 1 image, and a client needs one to train on and one to be tested on"),
        (["sided"], "sided: 8 training and 1 test images are too few for 2 clients, of which each trains on some and"),
        (["one"], "one: domain 'd' has 19 images, all on one side of the split, and a client needs one to train on"),
        (["lost"], "cannot read the image lost/none.png"),
    ],
)
def test_what_cannot_be_looked_at_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    images(Path("mixed/a/cat"), 1)
    images(Path("mixed/b"), 1)
    images(Path("few/cat"), 2)
    images(Path("few/dog"), 2)
    lines = [f"{number}.png,{'ab'[number % 2]},{'c' if number == 20 else 'd'}" for number in range(21)]
    for folder, more in (("lone", []), ("lost", ["none.png,a,d"])):
        images(Path(folder), 21)
        Path(folder, "index.csv").write_text("\n".join(["path,label,domain", *lines, *more]))
    sided = [f"{number}.png,{'ab'[number % 2]},{'train' if number else 'test'}" for number in range(9)]
    one = [f"{number}.png,{'ab'[number % 2]},{'cd'[number > 1]},train" for number in range(21)]
    one[0] = one[0].replace("c,train", "c,test")
    for folder, header, rows in (("sided", "path,label,split", sided), ("one", "path,label,domain,split", one)):
        images(Path(folder), 21)
        Path(folder, "index.csv").write_text("\n".join([header, *rows]))
    Path("there.yaml").write_text("mine")
    assert main(["init", *arguments]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert Path("there.yaml").read_text() == "mine"
    assert not Path("first.yaml").exists()
