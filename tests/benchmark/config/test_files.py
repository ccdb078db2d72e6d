"""Configuration files: method x suite in either order, files that stand on others, and a table's cell as one file."""

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusal import refused

import methods
from benchmark.commands import main as benchmark_main
from benchmark.config.files import read_content, read_layers
from benchmark.config.given_files import with_files_read
from benchmark.errors import ConfigurationError
from benchmark.run.cli import main

CONFIGS = Path(__file__).parents[3] / "configs"
METHODS = {path.stem: path for path in sorted(CONFIGS.glob("methods/*.yaml"))}
SUITES = sorted(CONFIGS.glob("suites/*.yaml"))
SCALES = sorted(CONFIGS.glob("scales/*.yaml"))
RUNS = sorted(CONFIGS.glob("*.yaml"))


def options(*paths: Path) -> dict[str, Any]:
    """Return the options of files that make one layer."""
    (layer,) = read_layers(paths)
    return layer.options


def resolved(*arguments: str) -> dict[str, Any]:
    """The configuration that ``lightning-cli fit`` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        main(["fit", *arguments, "--print_config"])
    assert ended.value.code in (0, None)
    return dict(yaml.safe_load(printed.getvalue()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("method: mine\nmodel: methods.FedVPT\n")
    Path("suite.yaml").write_text(
        "data: inner.yaml\ntrainer: {max_epochs: 9}\n"
        "model: {init_args: {training: {lr: 1, epochs: 2}, num_prompts: 3}}\n"
        "per_method:\n- {methods: [mine], model.init_args.training: {lr: 5}, model.init_args.num_prompts: null}\n"
        "- {methods: [mine, other], trainer.max_epochs: 4, data.source.init_args.size: 5}\n"
    )
    Path("inner.yaml").write_text("batch_size: 8\npartition: IID\n")
    return tmp_path


# --- the files that are there ---


def test_methods_and_suites_know_each_other() -> None:
    assert {yaml.safe_load(path.read_text())["method"] for path in METHODS.values()} == set(METHODS)
    known = set(methods.__all__)
    models = [options(path)["model"] for path in METHODS.values()]
    classes = [model["class_path"] if isinstance(model, dict) else model for model in models]
    assert {name.removeprefix("methods.") for name in classes} == known
    for suite in SUITES:
        entries = yaml.safe_load(suite.read_text())["per_method"]
        assert {name for entry in entries for name in entry["methods"]} <= set(METHODS)


@pytest.mark.parametrize(
    "path", [*METHODS.values(), *SUITES, *SCALES, *RUNS], ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_a_file_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert max(map(len, lines)) <= 120
    search = next((number for number, line in enumerate(lines) if line.startswith("search:")), len(lines))
    assert path.parent.name in ("suites", "scales") or sum(not line.startswith("#") for line in lines[:search]) <= 7
    assert len(lines) - search <= 7


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_run_file_is_a_method_on_a_suite(path: Path) -> None:
    method, suite = (path.parent / entry for entry in yaml.safe_load(path.read_text())["base"])
    assert options(path) == options(method, suite) == options(suite, method)


def test_either_order_resolves_to_the_same_and_options_win_over_both() -> None:
    prox, suite = METHODS["fedprox"], CONFIGS / "suites" / "digits.yaml"
    first = resolved(f"--config={prox}", f"--config={suite}")
    assert (
        first
        == resolved(f"--config={suite}", "-c", str(prox))
        == resolved("--config", str(RUNS[0].with_stem("fedprox_digits")))
    )
    assert first["model"]["class_path"] == "methods.FedProx"
    assert first["model"]["init_args"]["training"]["lr"] == 0.01
    assert first["data"]["batch_size"] == 64
    assert not {"base", "method", "per_method"} & set(first)
    between = resolved(f"--config={suite}", "--model.init_args.training.lr=0.5", f"--config={prox}")
    assert between["model"]["init_args"]["training"] == first["model"]["init_args"]["training"] | {"lr": 0.5}


def test_a_method_that_a_later_file_would_replace_is_refused(folder: Path) -> None:
    Path("first.yaml").write_text("base: [methods/fedvpt, suites/digits]\ndata: {batch_size: 5}\n")
    given = METHODS["fedrep"]
    with pytest.raises(ConfigurationError) as refusal:
        read_layers([given, Path("first.yaml")])
    assert str(refusal.value) == (
        f"{given} is the method fedrep, and first.yaml, given after it, brings the method fedvpt, which would win; "
        f"give {given} last, or leave it out"
    )
    assert read_layers([METHODS["fedvpt"], Path("first.yaml")])[0].method == "fedvpt"


@pytest.mark.parametrize("name", ["fedrep", "pfedpg", "fedavg"])
def test_a_later_file_of_a_method_takes_the_place_of_that_of_a_base(name: str, folder: Path) -> None:
    Path("first.yaml").write_text("base: [methods/fedvpt, suites/digits]\ndata: {batch_size: 5}\n")
    Path("other.yaml").write_text(f"base: [methods/{name}, suites/digits]\ndata: {{batch_size: 5}}\n")
    assert resolved("--config=first.yaml", f"--config={METHODS[name]}") == resolved("--config=other.yaml")


def test_an_option_before_a_file_wins_as_one_after_it() -> None:
    run, options = (
        f"--config={RUNS[0].with_stem('fedprox_digits')}",
        ["--trainer.max_epochs=3", "--model.training.lr=0.5"],
    )
    before, after = resolved(*options, run), resolved(run, *options)
    assert before == after
    assert (before["trainer"]["max_epochs"], before["model"]["init_args"]["training"]["lr"]) == (3, 0.5)
    other = resolved("--model=FedAvg", run)
    assert other == resolved(run, "--model=FedAvg")
    assert other["model"]["class_path"] == "methods.FedAvg"


def test_a_scale_changes_a_suite_that_stands_before_it() -> None:
    run, scale = CONFIGS / "pfedpg_office_caltech10.yaml", CONFIGS / "scales" / "deit_tiny_112px.yaml"
    paper, small = resolved(f"--config={run}"), resolved(f"--config={run}", f"--config={scale}")
    training = paper["model"]["init_args"]["training"]
    assert small["model"]["init_args"]["training"] == training | {"epochs": 1}
    assert (
        small["model"]["init_args"]["backbone"]["class_path"] == paper["model"]["init_args"]["backbone"]["class_path"]
    )
    assert small["model"]["init_args"]["backbone"]["init_args"]["name"] == "deit_tiny_patch16_224"
    assert small["trainer"] == paper["trainer"] | {"precision": "bf16-mixed"}
    assert small["data"]["source"]["init_args"] == paper["data"]["source"]["init_args"] | {"size": 112}


def test_a_method_named_by_an_option_takes_what_a_suite_says_for_all() -> None:
    config = resolved("--model=FedVPT", f"--config={CONFIGS / 'suites' / 'digits.yaml'}")
    assert config["model"]["class_path"] == "methods.FedVPT"
    assert config["model"]["init_args"]["training"]["lr"] == 0.01


# --- how they are put together ---


@pytest.mark.parametrize("order", [["mine.yaml", "suite.yaml"], ["suite.yaml", "mine.yaml"]])
def test_a_suite_says_what_single_methods_have(folder: Path, order: list[str]) -> None:
    assert options(*map(Path, order)) == {
        "model": {"class_path": "methods.FedVPT", "init_args": {"training": {"lr": 5}}},
        "data": {"batch_size": 8, "partition": "IID", "source": {"init_args": {"size": 5}}},
        "trainer": {"max_epochs": 4},
    }


def test_other_methods_have_what_a_suite_says_for_all(folder: Path) -> None:
    Path("mine.yaml").write_text("method: another\nmodel: {class_path: methods.FedVPT, init_args: {depth: 2}}\n")
    found = options(Path("suite.yaml"), Path("mine.yaml"))
    assert found["model"]["init_args"] == {"depth": 2, "training": {"lr": 1, "epochs": 2}, "num_prompts": 3}
    assert found["trainer"] == {"max_epochs": 9}


def test_a_base_is_read_first_and_seen_from_the_file_that_names_it(folder: Path) -> None:
    Path("deep").mkdir()
    Path("deep/run.yaml").write_text("base: [../mine.yaml, ../suite.yaml]\ntrainer: {max_epochs: 1}\n")
    Path("on_top.yaml").write_text("base: [deep/run.yaml]\nrun_dir: here\n")
    suite, run, top = read_layers([Path("on_top.yaml")])
    assert suite.options == options(Path("mine.yaml"), Path("suite.yaml"))
    assert (run.options, top.options) == ({"trainer": {"max_epochs": 1}}, {"run_dir": "here"})


@pytest.mark.parametrize("method", ["", "method: fedvpt\n"])
def test_a_file_that_names_a_class_wins_over_the_suite_that_it_stands_on(folder: Path, method: str) -> None:
    own = {"class_path": "methods.FedVPT", "init_args": {"num_prompts": 3, "training": {"lr": 0.5, "epochs": 3}}}
    more = {"model": own, "data": {"batch_size": 32}, "trainer": {"max_epochs": 2}}
    Path("own.yaml").write_text(method + yaml.safe_dump({"base": ["suites/digits"], **more}))
    found = resolved("--config=own.yaml")
    training = found["model"]["init_args"]["training"]
    assert found["model"]["class_path"] == "methods.FedVPT"
    assert (found["model"]["init_args"]["num_prompts"], training["lr"], training["epochs"]) == (3, 0.5, 3)
    assert (found["data"]["batch_size"], found["trainer"]["max_epochs"]) == (32, 2)
    Path("later.yaml").write_text(yaml.safe_dump(more))
    again = resolved(f"--config={CONFIGS / 'suites/digits.yaml'}", "--config=later.yaml")
    assert (again["data"], again["trainer"]) == (found["data"], found["trainer"])
    assert again["model"]["init_args"]["training"]["lr"] == 0.5
    earlier = resolved("--config=later.yaml", f"--config={CONFIGS / 'suites/digits.yaml'}")
    assert earlier["trainer"]["max_epochs"] == 10


def test_a_plain_file_changes_a_run_that_stands_before_it(folder: Path) -> None:
    Path("plain.yaml").write_text("trainer: {max_epochs: 1}\nmodel: {init_args: {training: {lr: 0.0625}}}\n")
    run = CONFIGS / "fedvpt_digits.yaml"
    expected = resolved(f"--config={run}", "--trainer.max_epochs=1", "--model.training.lr=0.0625")
    assert resolved(f"--config={run}", "--config=plain.yaml") == expected
    assert expected["model"]["init_args"]["training"]["lr"] == 0.0625


def test_files_between_keep_their_places(folder: Path) -> None:
    Path("plain.yaml").write_text("trainer: {max_epochs: 2}\n")
    layers = read_layers([Path("suite.yaml"), Path("plain.yaml"), Path("mine.yaml")])
    assert [(layer.path.name, layer.at) for layer in layers] == [("mine.yaml", 0), ("plain.yaml", 1)]
    layers = read_layers([Path("plain.yaml"), Path("mine.yaml")])
    assert [(layer.path.name, layer.at) for layer in layers] == [("plain.yaml", 0), ("mine.yaml", 1)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("base: [bad.yaml]\n", "bad.yaml is a base of itself; take one of the bases out"),
        ("base: [between.yaml]\n", "bad.yaml is a base of itself; take one of the bases out"),
        ("base: [gone.yaml]\n", "gone.yaml cannot be read: there is no such file"),
        ("base: suite.yaml\n", "bad.yaml: base: expected a list of configuration files, got suite.yaml"),
        ("base: [1]\n", "bad.yaml: base: expected a list of configuration files, got [1]"),
        ("base: [list.yaml]\n", "list.yaml holds a list; expected configuration keys"),
        ("method: [1]\n", "bad.yaml: method: expected the name by which suites know it, got [1]"),
        ("per_method: {lr: 1}\n", "bad.yaml: per_method[0]: expected methods (a list of names) and the options"),
        ("per_method: [{methods: fedvpt}]\n", "bad.yaml: per_method[0]: expected methods (a list of names)"),
        ("method: x\nper_method: [{methods: [x], data.size: 1}]\ndata: gone\n", "data is a single value before"),
        (
            "data: [gone.yaml]\n",
            "bad.yaml: data: expected files, as seen from it, and mappings; there is no file 'gone.y",
        ),
        ("data: [[1]]\n", "bad.yaml: data: expected files, as seen from it, and mappings; got [1]"),
        ("data: [list.yaml]\n", "bad.yaml: data: expected files, as seen from it, and mappings; got [1]"),
    ],
)
def test_files_that_cannot_be_put_together_are_refused_in_one_line(folder: Path, content: str, words: str) -> None:
    Path("bad.yaml").write_text(content)
    Path("between.yaml").write_text("base: [bad.yaml]\n")
    Path("list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigurationError) as caught:
        read_layers([Path("bad.yaml")])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def _chain(key: str, number: int) -> None:
    """A file ``l0.yaml`` that names another one, and so on."""
    for n in range(number):
        Path(f"l{n}.yaml").write_text(f"{key}: l{n + 1}.yaml\n" if key == "x" else f"{key}: [l{n + 1}.yaml]\n")
    Path(f"l{number}.yaml").write_text("run_dir: x\n")


def _fan(key: str) -> None:
    """Eight files, each of which names the next one ten times."""
    for n in range(8):
        Path(f"l{n}.yaml").write_text(f"{key}: [{', '.join([f'l{n + 1}.yaml'] * 10)}]\n")
    Path("l8.yaml").write_text("run_dir: x\n")


BOMBS = {
    "a chain of bases": (lambda: _chain("base", 2000), "is named by a file that another one names, and so on 40 times"),
    "a chain of inclusions": (lambda: _chain("x", 2000), "is named by a file that another one names, and so on 40 t"),
    "bases ten times each": (lambda: _fan("base"), "is named after 1,000 files of one configuration; name fewer"),
    "inclusions ten times each": (lambda: _fan("x"), "is named after 1,000 files of one configuration; name fewer"),
    "much in a file that is named often": (
        lambda: [
            Path("l0.yaml").write_text(f"x: [{', '.join(['l1.yaml'] * 900)}]\n"),
            Path("l1.yaml").write_text(f"y: [{', '.join(['1'] * 900)}]\n"),
        ],
        "the files of one configuration hold more than 20,000 values",
    ),
    "a million keys": (
        lambda: Path("l0.yaml").write_text("".join(f"key{n}: 1\n" for n in range(1_000_000))),
        "bytes; at most 1,048,576 are read",
    ),
    "many keys": (
        lambda: Path("l0.yaml").write_text("".join(f"k{n}: 1\n" for n in range(60_000))),
        "more than 50,000 values; expected a file that one wrote",
    ),
    "a base that is a FIFO": (
        lambda: [os.mkfifo("l1.yaml"), Path("l0.yaml").write_text("base: [l1.yaml]\n")],
        "l1.yaml cannot be read: it is no regular file",
    ),
    "a base in a loop of links": (
        lambda: [os.symlink("l1.yaml", "l1.yaml"), Path("l0.yaml").write_text("base: [l1.yaml]\n")],
        "l1.yaml cannot be read: Too many levels of symbolic links",
    ),
    "a base with a NUL": (
        lambda: Path("l0.yaml").write_text('base: ["a\\0b"]\n'),
        "cannot be read: embedded null byte",
    ),
}


@pytest.mark.parametrize("command", ["--config=l0.yaml", "--data=l0.yaml"])
@pytest.mark.parametrize("case", BOMBS)
def test_files_that_name_too_much_are_refused_soon(case: str, command: str, folder: Path) -> None:
    made, words = BOMBS[case]
    made()
    if command.startswith("--data") and "bas" in case:
        pytest.skip("the files of data stand on no others")
    began = time.process_time()
    with pytest.raises(ConfigurationError) as caught:
        with_files_read(["fit", command, "--model=FedVPT", "--data.batch_size=1"])
    assert time.process_time() - began < 2
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_inclusions_of_what_makes_a_cell_are_bounded_alike(folder: Path) -> None:
    for made, words in (
        (lambda: _chain("x", 2000), "is named by a file that another one names, and so on 40 times"),
        (
            lambda: [Path(f"l{n}.yaml").write_text("x: " + "[" * 30 + f"l{n + 1}.yaml" + "]" * 30) for n in range(3)],
            "more than 40 mappings and lists inside each other, with its files",
        ),
        (lambda: _fan("x"), "is named after 1,000 files of one configuration"),
        (BOMBS["much in a file that is named often"][0], "hold more than 20,000 values"),
    ):
        made()
        with pytest.raises(ConfigurationError, match=words):
            read_content(Path("l0.yaml"))


# --- data of several files ---


def test_data_of_several_files_and_mappings_are_put_together(folder: Path) -> None:
    Path("source.yaml").write_text("source: {class_path: a.A, init_args: {size: 1, root: x}}\n")
    Path("plain.yaml").write_text("data: [source.yaml, inner.yaml, {source: {init_args: {size: 2}}, batch_size: 4}]\n")
    data = {"source": {"class_path": "a.A", "init_args": {"size": 2, "root": "x"}}, "partition": "IID", "batch_size": 4}
    assert options(Path("plain.yaml")) == {"data": data}
    Path("mine.yaml").write_text(
        "method: mine\ndata: inner.yaml\nper_method:\n- {methods: [mine], data: [inner.yaml, source.yaml]}\n"
    )
    assert options(Path("mine.yaml"))["data"] == {
        **data,
        "batch_size": 8,
        "source": data["source"] | {"init_args": {"size": 1, "root": "x"}},
    }


def test_files_and_options_replace_a_suites_source_and_partition(folder: Path) -> None:
    run, names = CONFIGS / "fedvpt_digits.yaml", ("sources/digits", "partitions/dirichlet_shared")
    given = resolved(f"--config={run}", *(f"--data={name}" for name in names))
    assert given["data"]["partition"]["class_path"] == "datamodules.partition.DirichletShared"
    assert given["data"]["source"]["class_path"] == "datamodules.digits.DigitDomains"
    Path("plain.yaml").write_text(f"data: [{CONFIGS / names[0]}.yaml, {CONFIGS / names[1]}.yaml]\n")
    assert resolved(f"--config={run}", "--config=plain.yaml") == given
    assert resolved("--config=plain.yaml", f"--config={run}")["data"]["partition"] != given["data"]["partition"]


@pytest.mark.parametrize("data", ["sources/digits", "configs/sources/digits.yaml"])
def test_a_file_anywhere_names_those_that_came_with_the_code(folder: Path, data: str) -> None:
    Path("named.yaml").write_text(f"base: [methods/headtune, configs/suites/digits.yaml]\ndata: [{data}]\n")
    Path("single.yaml").write_text(f"data: {data}\n")
    given = resolved("--config=named.yaml")
    assert given["model"]["class_path"] == "methods.HeadTune"
    assert given["data"]["source"]["class_path"] == "datamodules.digits.DigitDomains"
    assert resolved("--config=methods/headtune", "--config=suites/digits", "--config=single.yaml") == given
    Path("configs/sources").mkdir(parents=True)
    Path("configs/sources/digits.yaml").write_text("batch_size: 3\n")
    assert options(Path("single.yaml")) == {"data": {"batch_size": 3}}  # one of the present folder goes before


def test_a_name_that_is_none_is_answered_with_those_like_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, main, ["fit", "--config=fedvpt_digits", "--data=digits"])
    assert "there is no configuration 'digits' (did you mean sources/digits or suites/digits?); `benchmark con" in line


# --- a cell of a table ---


TABLE = """
title: Mine
presets:
  demo: {seeds: [3], data: [{name: digits, label: In domains, suite: digits, overrides: [--trainer.max_epochs=4]}]}
rows:
  - {label: pFedPG, method: pfedpg, point: local}
  - {label: Slower, method: pfedpg, name: pfedpg_slow, point: local, overrides: {demo: [--model.server_lr=0.01]}}
"""


def test_a_cell_is_printed_as_a_file_that_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    (tmp_path / "mine.yaml").write_text(TABLE)
    table = ["table", str(tmp_path / "mine.yaml"), "--print_config"]
    assert benchmark_main([*table, "Slower", "digits"]) == 0
    cell = tmp_path / "cell.yaml"
    cell.write_text(capsys.readouterr().out)
    assert cell.read_text().startswith("# Mine: Slower on In domains, preset demo.\n")
    printed = yaml.safe_load(cell.read_text())
    assert (printed["seed_everything"], printed["trainer"]["max_epochs"]) == (3, 4)
    assert printed["model"]["init_args"]["server_lr"] == 0.01
    again = resolved(f"--config={cell}")
    assert {key: again[key] for key in printed} == printed
    assert set(again) - set(printed) == {"run_dir", "ckpt_path"}
    assert benchmark_main([*table, "Slower", "digits", "--seeds", "5"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed | {"seed_everything": 5}
    assert benchmark_main([*table, "Slower", "digits", "--seeds", "5", "6"]) == 2
    assert "--print_config prints one run, and --seeds gives 5 6; give one seed" in capsys.readouterr().err
    assert benchmark_main([*table, "Nobody", "digits"]) == 2
    assert "has no row 'Nobody'; it has pFedPG, Slower" in capsys.readouterr().err
    assert benchmark_main([*table, "pFedPG", "office"]) == 2
    assert "has no data group 'office'; it has digits" in capsys.readouterr().err


def test_a_label_of_several_data_groups_is_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    table = ["table", "pfedpt_table1", "--preset", "paper", "--print_config", "pFedPT"]
    assert benchmark_main([*table, "iid, CNN"]) == 2
    said = "has several data groups 'iid, CNN'; say which: cifar10_iid_cnn, cifar100_iid_cnn"
    assert said in capsys.readouterr().err
