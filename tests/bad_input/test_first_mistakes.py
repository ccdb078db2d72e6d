"""A newcomer's first mistakes, and impossible paths: one line with the remedy, mostly before a library is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from federation import CONF
from refusal import refused

from benchmark.backbones.vit import TimmViT
from benchmark.checks.command import check
from benchmark.commands import main as benchmark_main
from benchmark.config.given_files import with_files_read
from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.run import start
from benchmark.run.cli import main
from benchmark.run.device_errors import of_device

ROOT = Path(__file__).parents[2]
NOBODY = "~no-such-user-here/x"
LONG = "n" * 5000


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


BEFORE_LIBRARIES = {
    "nothing": ([], "neither a method nor data are given; begin with lightning-cli fit --config fedvpt_digits"),
    "a method alone": (
        ["--config=methods/fedvpt"],
        "fedvpt.yaml is a method, and its backbone, data and rounds are missing; add a suite: --config suites/digits, "
        "or for CLIP --config suites/digits_clip",
    ),
    "a method by its class alone": (
        ["--model=FedVPT"],
        "a method is given, and its backbone, data and rounds are miss",
    ),
    "a suite alone": (["--config=suites/digits"], "gives options of a method, and no file says which; add --config"),
    "a misspelled file": (
        ["--config=configs/fedvpt_digit.yaml"],
        "configs/fedvpt_digit.yaml cannot be read: there is no such file, seen from ",
    ),
    "what is like it": (["--config=configs/fedvpt_digit.yaml"], "(did you mean fedvpt_digits or "),
    "a misspelled name": (
        ["--config", "fedvpt_digit"],
        "there is no configuration 'fedvpt_digit' (did you mean fedvpt_",
    ),
    "a misspelled data file": (["--config=fedvpt_digits", "--data=sources/digit"], "(did you mean sources/digits"),
    "rounds": (["--config=fedvpt_digits", "--rounds=3"], "no option 'rounds'; did you mean trainer.max_epochs?"),
    "a seed": (["--config=fedvpt_digits", "--seed", "3"], "no option 'seed'; did you mean seed_everything?"),
    "a misspelled option": (["--confg=fedvpt_digits"], "there is no option 'confg'; did you mean config?"),
    "a misspelled group": (
        ["--config=fedvpt_digits", "--trianer.max_epochs=3"],
        "there is no option 'trianer.max_epochs'; did you mean trainer.max_epochs?",
    ),
    "a run directory of nobody": (
        ["--config=fedvpt_digits", f"--run_dir={NOBODY}"],
        f"{NOBODY}: this machine has no user of this name; write the whole path",
    ),
    "a run directory with a long name": (
        ["--config=fedvpt_digits", f"--run_dir={LONG}"],
        "... (5,000 characters): no file can have so long a name; give another path",
    ),
    "a configuration with a long name": ([f"--config={LONG}"], "there is no configuration 'nnnnnn"),
    "a configuration file with a long name": ([f"--config={LONG}.yaml"], "cannot be read: there is no such file"),
}


@pytest.mark.parametrize("case", BEFORE_LIBRARIES)
def test_first_mistakes_are_answered_with_what_to_do(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, words = BEFORE_LIBRARIES[case]
    line = refused(capsys, start.main, ["fit", *options])
    assert words in line
    assert len(line) < 700


def test_to_score_without_a_run_asks_for_its_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --run_dir=RUN_DIR of a run to test, or begin with" in refused(capsys, start.main, ["test"])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("lightning-cli fit --config=fedvpt_digit", "did you mean fedvpt_digits or"),
        ("lightning-cli fit --config nosuch.yaml", "error: nosuch.yaml cannot be read: there is no such file"),
        ("lightning-cli fit --config methods/fedvppt --config suites/digits", "did you mean methods/fedvpt or"),
        ("lightning-cli fit --config methods/fedvpt --config suites/digit", "did you mean suites/digits or"),
        ("lightning-cli fit --config fedvpt_digits --data sources/pac", "did you mean sources/pacs"),
        ("lightning-cli fit --config fedvpt_digits --model methods.FedVTP", "(did you mean methods.FedVPT or"),
        ("lightning-cli fit --config fedvpt_digits --model FedVTP", "(did you mean FedVPT or"),
        ("lightning-cli fit --config fedvpt_digits --data datamodules.Cifar10O", "there is no configuration"),
        ("lightning-cli fit --config fedvpt_digits --data.source datamodules.Cifar10O", "datamodules.CIFAR10 or"),
        ("benchmark check methods.FedVTP", "there is no 'methods.FedVTP' (did you mean methods.FedVPT or"),
        ("lightning-cli fitt", "error: there is no command 'fitt' (did you mean fit?); commands are fit, "),
        ("benchmark tabel", "benchmark: there is no command 'tabel' (did you mean table?); commands are table, tune"),
        ("benchmark table nosuch", "benchmark: there is no table configs/tables/nosuch.yaml; tables here: "),
        ("benchmark tune tabel1", "tabel1.yaml (did you mean table1 or "),
        ("benchmark show nosuch", "nosuch has no record.json: there is no such directory"),
        ("benchmark verify nosuch", "nosuch has no record.json: there is no such directory"),
        ("benchmark resume nosuch", "nosuch is no folder; give the directory that the run named"),
        ("benchmark predict nosuch .", "nosuch is no folder; give the directory that the run named"),
        ("benchmark predict . nosuch", "there is no nosuch; give an image"),
        ("benchmark figure fig5", "there is no figure 'fig5'"),
        ("benchmark board show nosuch_v1", "there is no board 'nosuch_v1'"),
        ("benchmark export nosuch out", "nosuch is no folder; give the directory that the run named"),
    ],
)
def test_first_mistakes_are_told_before_libraries_are_imported(command: str, said: str) -> None:
    program, *arguments = command.split()
    entry = {"lightning-cli": "benchmark.run.start", "benchmark": "benchmark.commands"}[program]
    lines = (
        f"import sys\nfrom {entry} import main\ntry:\n    code = main({arguments})\nexcept SystemExit as ended:\n"
        "    code = ended.code\nslow = {'torch', 'lightning', 'jsonargparse', 'numpy', 'pandas'}\n"
        "print(code, sorted(slow & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, capture_output=True, text=True, timeout=60)
    *before, last = ended.stdout.splitlines()
    assert last in ("2 []", "1 []" if "verify" in command else ""), ended.stderr
    told = [*before, *ended.stderr.splitlines()]
    assert len(told) == 1
    assert said in told[0]


LATER = {
    "a method of CLIP on a suite without": (
        ["--config=methods/promptfl", "--config=suites/digits"],
        "there is no option 'model.init_args.backbone'; the method takes model.init_args.clip: take a suite for "
        "it, such as --config suites/digits_clip",
    ),
    "a method without CLIP on a suite of it": (
        ["--config=methods/fedvpt", "--config=suites/digits_clip"],
        "there is no option 'model.init_args.clip'; the method takes model.init_args.backbone: take a suite "
        "for it, such as --config suites/digits",
    ),
    "a data set by its name": (
        ["--config=fedvpt_digits", "--data.source=OwnFolders"],
        "file sources/own_folders: --data=sources/own_folders",
    ),
    "a method by its file's name": (
        ["--config=fedvpt_digits", "--model=fedvpt_deep"],
        "file methods/fedvptdeep: --config",
    ),
    "no such accelerator": (
        ["--config=fedvpt_digits", "--trainer.accelerator=tpu"],
        "trainer.accelerator=tpu: PyTorch finds none on this machine; give cpu, or auto",
    ),
    "options of which some are missing": (
        ["--data.source=DigitDomains", "--data.batch_size=3"],
        "error: data.partition, model: must be given, there is no default",
    ),
    "a data folder of nobody": (
        ["--config=fedvpt_digits", "--data.source=CIFAR10", f"--data.source.root={NOBODY}"],
        f"{NOBODY}: this machine has no user",
    ),
    "a data folder with a long name": (
        ["--config=fedvpt_digits", "--data.source=CIFAR10", f"--data.source.root={LONG}"],
        "no file can have so long a name",
    ),
    "a checkpoint of nobody": (
        ["--config=fedvpt_digits", f"--ckpt_path={NOBODY}"],
        f"{NOBODY}: this machine has no user",
    ),
    "a checkpoint with a long name": (
        ["--config=fedvpt_digits", f"--ckpt_path={LONG}"],
        "no file can have so long a name",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_first_mistakes_in_options_are_answered_with_what_to_do(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, words = LATER[case]
    assert words in refused(capsys, main, ["fit", *options, "--run_dir=run"])
    assert not Path("run").exists()


@pytest.mark.parametrize("path", [NOBODY, LONG], ids=["nobody", "long"])
@pytest.mark.parametrize(
    "command",
    [
        ["show", "PATH"],
        ["resume", "PATH"],
        ["predict", "PATH", "x.png"],
        ["predict", ".", "PATH"],
        ["predict", ".", "x.png", "--out", "PATH"],
        ["predict", ".", "x.png", "--new_client", "PATH"],
        ["export", "PATH", "out"],
        ["export", ".", "PATH"],
        ["keep", "PATH"],
        ["verify", "PATH"],
        ["report", "PATH"],
        ["report", "--results_dir", "PATH"],
        ["report", "--runs", "PATH"],
        ["reproduction", "--results_dir", "PATH"],
        ["partition", "PATH", "x.png"],
        ["partition", "fedvpt_digits", "PATH"],
        ["check", "methods.FedVPT", "--config", "PATH"],
        ["table", "table1", "--data_dir", "PATH"],
        ["tune", "table1", "--data_dir", "PATH"],
        ["figure", "pfedpt_fig4", "--data_dir", "PATH"],
        ["figure", "pfedpt_fig4", "--run_dir", "PATH"],
        ["verify", ".", "--data_dir", "PATH"],
    ],
    ids=" ".join,
)
def test_a_path_that_no_file_can_have_is_refused(
    command: list[str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, benchmark_main, [path if word == "PATH" else word for word in command])
    assert "this machine has no user of this name" in line or "no file can have so long a name" in line
    assert len(line) < 300


@pytest.mark.parametrize("command", ["table", "tune"])
def test_a_table_with_a_long_name_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (LONG, f"{LONG}.yaml"):
        assert "no file can have so long a name" in refused(capsys, benchmark_main, [command, name])


def test_a_path_with_a_nul_is_refused_and_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"a\\x00b: no file can have this name \(embedded null byte\)"):
        user_path("a\0b")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/data") == Path("/home/me/data")
    assert user_path("") == Path()
    assert user_path("no/such/file") == Path("no/such/file")


def test_weights_that_cannot_be_had_are_answered_with_others() -> None:
    with pytest.raises(
        ConfigurationError, match=r"use weights='hub' .downloaded., 'file' with its checkpoint_path, or 'ra"
    ):
        TimmViT("vit_base_patch16_224", weights="embedded")
    with pytest.raises(ConfigurationError, match=f"{NOBODY}: this machine has no user of this name"):
        TimmViT("micro_vit", weights="file", checkpoint_path=NOBODY)
    with pytest.raises(ConfigurationError, match="no file can have so long a name"):
        TimmViT("micro_vit", weights="file", checkpoint_path=LONG)


def test_full_memory_is_told_with_what_takes_less() -> None:
    told = of_device(
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8000000000 bytes"
        )
    )
    assert str(told).startswith(
        "the machine's memory is full, 8.0 GB more were asked for; take smaller images (--data."
    )
    assert of_device(MemoryError()) is not None
    assert of_device(RuntimeError("another")) is None


@pytest.mark.parametrize("command", [start.main, main, benchmark_main])
def test_a_present_folder_that_was_removed_is_told(
    command: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    arguments = ["table", "table1"] if command is benchmark_main else ["fit", "--config=fedvpt_digits"]
    try:
        line = refused(capsys, command, arguments)  # type: ignore[arg-type]
    finally:
        os.chdir(tmp_path)
    assert line.endswith("the present folder was removed; change to one that is there (cd) first")


# --- options and files in either order ---


def words(*arguments: str) -> list[str]:
    """A command line as it is read, with the configuration file as FILE."""
    return [word if len(word) < 60 else "FILE" for word in with_files_read(arguments)]


def test_options_win_over_files_that_stand_after_them() -> None:
    assert words("fit", "--trainer.max_epochs=2", "--config=fedvpt_digits", "--trainer.max_epochs", "3") == [
        *("fit", "FILE", "--trainer.max_epochs=2", "--trainer.max_epochs", "3")
    ]
    assert words("fit", "--run_dir", "x", "-c", "fedvpt_digits", "--config={model: {}}") == [
        *("fit", "FILE", "--config={model: {}}", "--run_dir", "x")
    ]


def test_an_option_that_names_a_class_sets_up_the_files_after_it_and_wins() -> None:
    assert words("fit", "--model=FedAvg", "--config=suites/digits") == [
        *("fit", "--model=FedAvg", "FILE", "--model=FedAvg"),
    ]
    appended = "--trainer.callbacks+=LearningRateMonitor"
    assert words("fit", appended, "--config=fedvpt_digits") == ["fit", "FILE", appended]


def test_options_after_the_files_stay_where_they_are() -> None:
    given = ["fit", "--config=fedvpt_digits", "--model=FedAvg", "--trainer.callbacks+=Timer", "--seed_everything=3"]
    assert words(*given)[2:] == given[2:]


# --- classes of one's own ---

CLASSES = """
import sys
from benchmark.backbones.vit import PromptedViT
from benchmark.server import ServerRule
from datamodules.partition import Partition
from methods import FedVPT
from methods.servers import FedAdam

class Untyped(FedAdam):
    def __init__(self, k, lr: float = 0.1):
        super().__init__(lr=lr)

class Outer(FedAdam):
    def __init__(self, inner: ServerRule | None = None):
        super().__init__()

class Default(FedAdam):
    def __init__(self, k=None):
        super().__init__()

class Exits(FedVPT):
    def __init__(self, num_classes: int, num_clients: int, backbone: PromptedViT):
        sys.exit(0)

class Broken(Partition):
    def split(self, pool, rng):
        return pool.nothing
    @property
    def description(self):
        return "nothing"
    def client_names(self, source):
        return ("a", "b")

class Nothing(Partition):
    def split(self, pool, rng):
        return []
    @property
    def description(self):
        return "nothing"
    def client_names(self, source):
        return ("a", "b")
"""


@pytest.fixture
def own() -> str:
    Path("own_classes.py").write_text(CLASSES)
    sys.modules.pop("own_classes", None)
    return "own_classes"


BASE = [f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'FedVPT.yaml'}", "--run_dir=run"]


def test_an_argument_without_a_type_is_not_given_by_options(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--server={own}.Untyped", "--server.k=x"]
    assert refused(capsys, main, ["fit", *BASE, *options]) == (
        "error: server: Untyped gives its argument k no type, so that nothing checks its value; write one there, such "
        "as k: float (every argument has an annotation)"
    )
    inner = [f"--server={own}.Outer", f"--server.inner={own}.Untyped", "--server.inner.k=x"]
    assert "error: server.init_args.inner: Untyped gives its argument k no type" in refused(
        capsys, main, ["fit", *BASE, *inner]
    )
    options = [f"--server={own}.Default", "--server.k=x"]
    assert "error: server.init_args.k: Default gives its argument k no type" in refused(
        capsys, main, ["fit", *BASE, *options]
    )


def test_an_argument_of_a_class_is_checked_in_python(own: str) -> None:
    import importlib

    classes = importlib.import_module(own)
    with pytest.raises(ConfigurationError, match="Outer: inner: expected an object of ServerRule or null, got 3"):
        classes.Outer(inner=3)
    assert classes.Outer(inner=classes.Outer())


def test_a_constructor_that_ends_the_program_is_told(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = r"a constructor of the run's classes calls sys.exit(0); raise an exception there instead"
    assert said in refused(capsys, main, ["fit", *BASE, f"--model={own}.Exits"])
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        check(f"{own}.Exits", [])


def test_a_partition_that_gives_no_splits_fails_its_check(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"Nothing.split gives \[\]; expected ClientSplits"):
        check(f"{own}.Nothing", [])
    assert not check(f"{own}.Broken", [])
    shown = capsys.readouterr().out
    assert re.search(r"FAILED  It can be made and checked: line \d+ of .*own_classes.py ends in AttributeError", shown)
