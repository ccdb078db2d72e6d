"""Identity of a cell: one name for one run, however it is written, and another name for every other run."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace, lazy_instance

from benchmark.cells.identity import content_hash
from benchmark.config.files import read_layers
from benchmark.config.given_options import given_options
from benchmark.config.parser import load
from benchmark.errors import ConfigurationError

ROOT = Path(__file__).parents[3]


def given(*overrides: str) -> dict[str, Any]:
    """Return the options that command-line arguments give."""
    return given_options([], overrides)


# --- one run, one name ---


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """FedVPT on the digits, all of it in one file."""
    monkeypatch.chdir(ROOT)
    (layer,) = read_layers([Path("configs/fedvpt_digits.yaml")])
    path = tmp_path / "flat.yaml"
    path.write_text(yaml.safe_dump(layer.options))
    return path


def test_a_run_has_one_name_in_files_in_one_file_and_on_the_command_line(flat: Path) -> None:
    parts = ["configs/methods/fedvpt.yaml", "configs/suites/digits.yaml"]
    name = content_hash(parts, [])
    overrides = [f"--{key}={value}" for key, value in yaml.safe_load(flat.read_text()).items()]
    assert content_hash(parts[::-1], []) == name
    assert content_hash(["configs/fedvpt_digits.yaml"], []) == name
    assert content_hash([str(flat)], []) == name
    assert content_hash([], overrides) == name
    assert content_hash(parts, ["--data=configs/sources/digits.yaml", "--model.training.lr=1e-1"]) == name


def test_an_option_that_moves_from_an_override_into_a_file_changes_no_name(flat: Path, tmp_path: Path) -> None:
    overrides = ["--model.training.lr=5e-4", "--trainer.max_epochs=8", "--data.transform.size=24"]
    scale = tmp_path / "scale.yaml"
    scale.write_text("model: {init_args: {training: {lr: 0.0005}}}\ntrainer.max_epochs: 8\n")
    run = "configs/fedvpt_digits.yaml"
    name = content_hash([run], overrides)
    assert name != content_hash([run], [])
    assert content_hash([run, str(scale)], overrides[2:]) == name
    assert content_hash([run, str(scale)], ["--trainer.max_epochs=8", *overrides[2:]]) == name
    assert content_hash([run, str(scale)], ["--trainer.max_epochs=9", *overrides[2:]]) != name
    own = tmp_path / "own.yaml"
    own.write_text(f"base: [{flat}, scale.yaml]\ndata: data.yaml\n")
    (tmp_path / "data.yaml").write_text("transform: {size: 24}\n")
    assert content_hash([str(own)], []) == name


@pytest.mark.parametrize(
    "ways",
    [
        ["--model.training.lr=1", "--model.init_args.training.lr=1", "--model={training: {lr: 1}}"],
        ["--model=a.B", "--model.class_path=a.B", "--model={class_path: a.B}"],
        ["--model=a.B", "--model={class_path: a.B, init_args: {}}"],
        ["--x=5e-4", "--x=0.0005", "--x=5.0e-04"],
        ["--x=[5e-4, {y: 1}]", "--x=[0.0005, {'y': 1}]"],
        ["--x.root={data_dir}", "--x={root: {data_dir}}"],
    ],
)  # fmt: skip
def test_ways_to_write_an_option(ways: list[str]) -> None:
    assert all(given(way) == given(ways[0]) for way in ways)


def test_later_values_win() -> None:
    assert given("--x=1", "--y=2", "--x=3") == given("--y=2", "--x=3") == {"x": 3, "y": 2}
    assert given("--t={a: 1, b: 2}", "--t={b: 3}") == given("--t.b=3", "--t.a=1") == {"t": {"a": 1, "b": 3}}
    assert given("--x=hub", "--x=file") == given("--x=file")
    assert given("--data.source=a.Digits", "--data.source=a.Cifar") == given("--data.source=a.Cifar")
    assert given("--m=a.A", "--m.k=1", "--m=a.A") == given("--m=a.A", "--m.k=1")
    known = given("--data.source={class_path: a.A, init_args: {root: x}}", "--data.source=a.B", "--data.source.root=y")
    assert known == given("--data.source=a.B", "--data.source.root=y")  # nothing of A's is left


# --- another run, another name ---


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["--x=1"], ["--x='1'"]),
        (["--x=1"], ["--x=1.0"]),
        (["--x=true"], ["--x='true'"]),
        (["--x=null"], []),
        (["--x=null"], ["--x=''"]),
        (["--x=010"], ["--x=8"]),
        (["--x=1:30"], ["--x=90"]),
        (["--x=yes"], ["--x=true"]),
        (["--x={data_dir}/a"], ["--x=a"]),
        (["--x=[1, 2]"], ["--x=[2, 1]"]),
        (["--x.y=1"], ["--x=1"]),
        (["--m=a.A"], ["--m=a.B"]),
        (["--m=a.A", "--m.k=1", "--m=a.B"], ["--m=a.B"]),  # B takes k from A where it has one
        (["--m=a.A", "--m.k=1", "--m=a.B"], ["--m=a.C", "--m.k=1", "--m=a.B"]),
        (["--m=a.A", "--m=a.B"], ["--m=a.B"]),  # and from an instance that is the default
        (["--m.k=1", "--m=a.A"], ["--m=a.A", "--m.k=1"]),
        (["--t={lr: 1}", "--t=null", "--t.b=2"], ["--t.b=2"]),  # the default's other values are gone
        (["--t={lr: 1}", "--t=null", "--t.b=2"], ["--t={lr: 1}", "--t.b=2"]),
        (["--l+=a.A", "--l+=a.B"], ["--l+=a.B", "--l+=a.A"]),
        (["--l=[a.A]", "--l+=a.B"], ["--l=[a.B]"]),
        (["--l=[{class_path: a.A, k: 1}]", "--l=[a.A]"], ["--l=[a.A]"]),  # the entry keeps its k
        (["--l=[a.A]", "--l.k=1"], ["--l=[a.A]"]),
    ],
)
def test_what_makes_another_run(one: list[str], other: list[str]) -> None:
    assert content_hash([], one) != content_hash([], other)


def test_method_suite_and_what_a_suite_says_of_a_method_change_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = {
        content_hash([f"configs/methods/{method}.yaml", f"configs/suites/{suite}.yaml"], overrides)
        for method in ("fedvpt", "fedvptdeep", "fedrod", "fedper")
        for suite in ("digits", "office_vit")
        for overrides in ([], *([f"--data=configs/partitions/{name}.yaml"] for name in ("iid", "at_most_classes")))
    }
    assert len(names) == 4 * 2 * 3


@pytest.mark.parametrize(
    "override", ["trainer.max_epochs=3", "--trainer.max_epochs", "--seed_everything=3", "--config=x"]
)
def test_what_is_no_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigurationError, match="is not of the form --key=value, or sets what the runner sets itself"):
        given(override)


# --- what lightning-cli's parser makes of it ---


class Part:
    """Something that a class is chosen for."""


class Small(Part):
    """Without a size."""

    def __init__(self, rate: float = 0.5, tags: dict[str, int] | None = None) -> None: ...


class Sized(Part):
    """With a size."""

    def __init__(self, size: int = 1, rate: float | None = 0.25, inner: Part | None = None) -> None: ...


SEVEN: Any = lazy_instance(Sized, size=7)


class Wide(Part):
    """With another size by default, and a part of its own."""

    def __init__(self, size: int | None = 2, inner: Part | None = SEVEN) -> None: ...


PARTS = [f"{__name__}.{part.__name__}" for part in (Small, Sized, Wide)]
VALUES = [
    *PARTS,
    "null", "{size: 1}", "{size: 3, rate: 1e-3}", "{rate: null}", "{tags: {a: 1}}", "{inner: {size: 4}}",
    *(f"{{class_path: {part}, init_args: {{size: 3}}}}" for part in PARTS[1:]),
    f"{{class_path: {PARTS[0]}, init_args: {{rate: 0.001}}}}",
]  # fmt: skip
OPTIONS = [
    *(f"--model={value}" for value in VALUES if value != "null"),
    *("--model.size=1", "--model.init_args.size=3", "--model.rate=0.001", "--model.tags.b=2", "--model.tags=null"),
    *(f"--model.inner={value}" for value in VALUES),
    *("--model.inner.size=3", "--model.init_args.inner.init_args.size=1", "--model.inner.class_path=" + PARTS[1]),
    *("--data.more=[1]", "--data.more+=1", "--data.more+=[2]", "--data.batch=8", "--data.batch=08", "--data.batch=8.0"),
    *(f"--data.parts{sign}={value}" for sign in ("", "+") for value in (PARTS[0], f"[{PARTS[1]}]", "null", "[]")),
    *("--data.parts.size=3", f"--data.parts=[{{class_path: {PARTS[1]}, init_args: {{size: 3}}}}]"),
]


def test_two_runs_that_share_a_name_are_parsed_to_the_same() -> None:
    """Of options drawn at random, which agree more often than a user's."""

    class Data:
        def __init__(
            self, batch: float = 1, more: list[int] | None = None, parts: list[Part] | Part | None = None
        ) -> None: ...

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Part, "model", required=True)
    parser.add_class_arguments(Data, "data")
    draw = random.Random(0)
    parsed: dict[str, Namespace] = {}
    met = 0
    for _ in range(120):
        place = draw.choice(("--model", "--data"))
        options = draw.choices([option for option in OPTIONS if option.startswith(place)], k=draw.randint(1, 3))
        try:
            found = parser.parse_args([*([f"--model={PARTS[0]}"] if place == "--data" else []), *options])
        except Exception:
            continue  # no run
        name = content_hash([], options)
        met += name in parsed
        assert parsed.setdefault(name, found) == found, options
    assert met > 10
    assert len(parsed) > 20


@pytest.mark.parametrize(
    "text", ["1", "-1", "0.5", "5e-4", "+1e3", "1E5", "true", "null", "[1, 2e-3]", "'1'", "a.B", "{x"]
)
def test_a_value_is_read_as_the_command_line_reads_it(text: str) -> None:
    try:
        assert given(f"--x={text}")["x"] == load(text)
    except yaml.YAMLError:
        assert given(f"--x={text}")["x"] == text


def test_a_renamed_option_leaves_a_cell_its_name() -> None:
    name = content_hash([], ["--data.cohort_width=4", "--data.batch_size=8"])
    assert content_hash([], ["--data.clients_at_once=4", "--data.batch_size=8"]) == name
    assert content_hash([], ["--data.clients_at_once=5", "--data.batch_size=8"]) != name
