"""Options and configuration files that no run can have: one line, before any data are read."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from federation import CONF
from refusal import refused

from benchmark import commands
from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from benchmark.run import cli as command_line
from benchmark.run.cli import FederatedCLI, main

ROOT = Path(__file__).parents[2]
TRAINING = "model.init_args.training"
PARTITION = "data.partition"


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def files(conf: str) -> list[str]:
    return ["--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml")]


def answer(capsys: pytest.CaptureFixture[str], conf: str, *options: str) -> str:
    """The line that ``fit`` of a method of ``tests/conf`` answers; nothing is left behind."""
    line = refused(capsys, main, ["fit", *files(conf), "--run_dir=run", *options])
    assert not Path("run").exists()
    return line


WHOLE = "expected a whole number from"
NUMBERS = [
    ("FedVPT", f"{TRAINING}.lr=-0.1", "expected a number from 0 on, got -0.1"),
    ("FedVPT", f"{TRAINING}.lr=.nan", "expected a number from 0 on, got .nan"),
    ("FedVPT", f"{TRAINING}.lr=nan", "expected a number from 0 on, got nan"),
    ("FedVPT", f"{TRAINING}.lr=inf", "expected a number from 0 on, got inf"),
    ("FedVPT", f"{TRAINING}.lr=1e999", "expected a number from 0 on, got 1e999"),
    ("FedVPT", f"{TRAINING}.lr=true", "expected a number from 0 on, got true"),
    ("FedVPT", f"{TRAINING}.lr=null", "expected a number from 0 on, got null"),
    ("FedVPT", f"{TRAINING}.momentum=-0.5", "expected a number from 0 on and below 1, got -0.5"),
    ("FedVPT", f"{TRAINING}.momentum=1.5", "expected a number from 0 on and below 1, got 1.5"),
    ("FedVPT", f"{TRAINING}.momentum=.nan", "expected a number from 0 on and below 1, got .nan"),
    ("FedVPT", f"{TRAINING}.weight_decay=-1", "expected a number from 0 on, got -1"),
    ("FedVPT", f"{TRAINING}.clip=0", "expected a number above 0 or null, got 0"),
    ("FedVPT", f"{TRAINING}.clip=-1", "expected a number above 0 or null, got -1"),
    ("FedVPT", f"{TRAINING}.clip=.nan", "expected a number above 0 or null, got nan"),
    ("FedVPT", f"{TRAINING}.epochs=-1", f"{WHOLE} 0 to 1,000,000,000, got -1"),
    ("FedVPT", f"{TRAINING}.epochs=1.5", f"{WHOLE} 0 to 1,000,000,000, got 1.5"),
    ("FedVPT", f"{TRAINING}.steps=0", f"{WHOLE} 1 to 1,000,000,000 or null, got 0"),
    ("FedVPT", f"{TRAINING}.optimizer=lion", "expected sgd or adam, got lion"),
    ("FedVPT", "model.init_args.num_prompts=1000000", f"{WHOLE} 0 to 1,000, got 1000000"),
    ("PFedPG", "model.init_args.num_prompts=0", f"{WHOLE} 1 to 1,000, got 0"),
    ("PFedPG", "model.init_args.server_lr=.nan", "expected a number from 0 on, got .nan"),
    ("PFedPG", "model.init_args.server_lr=-1", "expected a number from 0 on, got -1"),
    ("PFedPG", "model.init_args.descriptor_tokens=0", f"{WHOLE} 1 to 1,000, got 0"),
    ("PFedBayesPT", "model.init_args.encoder_lr=-1", "expected a number from 0 on, got -1"),
    ("PFedBayesPT", "model.init_args.kl_weight=-1", "expected a number from 0 on or 1/D, got -1"),
    ("FedPGP", "model.init_args.mu=.nan", "expected a number from 0 on, got .nan"),
    ("FedProx", "model.init_args.mu=-1", "expected a number from 0 on, got -1"),
    ("MOON", "model.init_args.temperature=0", "expected a number above 0, got 0"),
    ("FedBABU", "model.init_args.finetuning.lr=inf", "expected a number from 0 on, got inf"),
    ("FedVPT", "data.num_workers=-1", f"{WHOLE} 0 to 1,000, got -1"),
    ("FedVPT", "data.batch_size=1000000000000000", f"{WHOLE} 1 to 1,000,000,000, got 1000000000000000"),
    ("FedVPT", "data.participation=1.5", "expected a number above 0 and at most 1, got 1.5"),
    ("FedVPT", "seed_everything=-1", f"{WHOLE} 0 to 4,294,967,295, got -1"),
    ("FedVPT", "seed_everything=4294967296", f"{WHOLE} 0 to 4,294,967,295, got 4294967296"),
    ("FedVPT", "seed_everything=1180591620717411303424", f"{WHOLE} 0 to 4,294,967,295, got 1180591620717411303424"),
    ("FedVPT", "seed_everything=true", f"{WHOLE} 0 to 4,294,967,295, got true"),
]


@pytest.mark.parametrize(("conf", "option", "words"), NUMBERS, ids=lambda value: value)
def test_a_number_out_of_range_is_named_with_the_range(
    conf: str, option: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, conf, f"--{option}") == f"error: {option.partition('=')[0]}: {words}"


OPTIONS = {
    "no such delivery": (
        ["--delivery=Dropout"],
        "there is no 'Dropout' (did you mean Dropouts?); expected one of Byzantine, Dropouts, InjectedFaults, ",
    ),
    "compile_steps": (
        ["--data.compile_steps=default"],
        "data.compile_steps='default' is gone: compiled steps were not",
    ),
    "num_classes": (["--model.init_args.num_classes=3"], "model.init_args.num_classes comes from the data"),
    "num_clients": (["--model.num_clients=3"], "model.init_args.num_clients comes from the data and is not given"),
    "word": (["--data.corruptions=defalt"], "there is no 'defalt'; expected default, or the dotted path of a class"),
    "optimizer": (["--optimizer=torch.optim.Adam"], "there is no option 'optimizer'; expected one of "),
    "optimizer.lr": (["--optimizer.lr=0.1"], "there is no option 'optimizer'; expected one of "),
    "lr_scheduler": (["--lr_scheduler=StepLR"], "there is no option 'lr_scheduler'; expected one of "),
    "data.seed": (["--data.seed=3"], 'Linked "data.seed" must be given via "seed_everything"'),
    "alpha too large": (
        [f"--{PARTITION}=DirichletMerged", f"--{PARTITION}.num_clients=2", f"--{PARTITION}.alpha=1e308"],
        f"{PARTITION}.init_args.alpha: expected a number above 0 and at most 1,000,000, got 1e308",
    ),
    "a billion clients": (
        [f"--{PARTITION}=IID", f"--{PARTITION}.num_clients=1000000000"],
        f"{PARTITION}.init_args.num_clients: {WHOLE} 1 to 1,000,000, got 1000000000",
    ),
    "clients without images": (
        [f"--{PARTITION}=IID", f"--{PARTITION}.num_clients=1000000", "--data.clients_per_round=1"],
        "num_clients=1000000 is more than the 176 images of the data set",
    ),
    "an option of another partition": (
        [f"--{PARTITION}=IID", f"--{PARTITION}.alpha=1"],
        f"there is no option '{PARTITION}.init_args.alpha'; expected one of {PARTITION}.init_args.num_clients",
    ),
    "an option inside of an argument": (
        ["--model.training.lrr=1"],
        "there is no option 'model.init_args.training.lrr'; did you mean model.init_args.training.lr or ",
    ),
    "an option of a class that nothing takes": (
        ["--data.partition=IID", '--data.partition.images={"class_path": "X", "init_args": {"name": 1}}'],
        "there is no option 'data.partition.init_args.images'; expected one of data.partition.init_args.num_clients",
    ),
    "an option of a partition that has none": (
        [f"--{PARTITION}=DomainPerClient", f"--{PARTITION}.alpha=1"],
        f"there is no option '{PARTITION}.init_args.alpha'; {PARTITION} takes no options",
    ),
    "what has no default": (
        [f"--{PARTITION}=DirichletShared"],
        f"{PARTITION}.init_args.alpha, {PARTITION}.init_args.num_clients: must be given, there is no default",
    ),
    "a base": (
        ["--model=benchmark.method.FederatedMethod", "--model.backbone.name=vit"],
        "model: benchmark.method.FederatedMethod is a base of others; expected one of ATPFL, ",
    ),
    "a base that takes its options": (
        [f"--{PARTITION}=datamodules.Partition"],
        f"{PARTITION}: datamodules.Partition is a base of others; expected one of AtMostClasses, ",
    ),
    "a base below another": (["--data.source=datamodules.coop_layout.CoOpSource"], "CoOpSource is a base of others"),
    "a number for a class": (["--model={class_path: 5}"], "model: expected the name of a class"),
    "no such backbone": (["--model.backbone=Nonsense"], "model.init_args.backbone: there is no 'Nonsense'"),
    "no such module": (["--data.source=pacs.PACS"], "No module named 'pacs'; put the folder of your module on PYTHON"),
    "a key twice": (["--model.training={lr: 1, lr: 2}"], "the key 'lr' stands there twice"),
    "nobody left to train": (["--data.val_fraction=0.9999"], "data.val_fraction=0.9999 leaves client"),
    "a folder for the data": (["--data=."], ". cannot be read: it is a folder; expected a YAML file"),
    "no file for the data": (["--data", "gone.yaml"], "gone.yaml cannot be read: there is no such file, seen from "),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_that_cannot_be_given_is_answered_with_what_can(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words = OPTIONS[case]
    options = [*options, "--data.clients_per_round=null"] if case == "nobody left to train" else options
    assert words in answer(capsys, "FedVPT", *options)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
NO_MAPPING = "expected configuration keys, each with its value (key: value)"
FILES = {
    "empty": ("", f"holds nothing; {NO_MAPPING}"),
    "a comment": ("# nothing\n", f"holds nothing; {NO_MAPPING}"),
    "a list": ("- 1\n- 2\n", f"holds a list; {NO_MAPPING}"),
    "a scalar": ("hello\n", f"holds a single value; {NO_MAPPING}"),
    "a tab": ("data:\n\tbatch_size: 1\n", "line 2, column 1 cannot be read as YAML"),
    "an open bracket": ("data: {batch_size: [1\n", "cannot be read as YAML"),
    "broken init_args": ("model:\n  init_args:\n    lr: 1\n    - clip\n", "cannot be read as YAML"),
    "a list of init_args": (
        "model:\n  class_path: FedVPT\n  init_args: [1]\n",
        "model: expected the name of a class, or its class_path with a mapping of init_args",
    ),
    "binary": (b"data: 1\n\x80\x81", "it is no text in UTF-8 (byte 8)"),
    "UTF-16": ("data: {}".encode("utf-16"), "it is no text in UTF-8 (byte 0)"),
    "Latin-1": ("# für\ndata: {}".encode("latin-1"), "it is no text in UTF-8 (byte 3)"),
    "a picture": (b"\x89PNG\r\n\x1a\n", "it is no text in UTF-8 (byte 0)"),
    "a key twice": ("run_dir: a\nrun_dir: b\n", "line 2: the key 'run_dir' stands there twice"),
    "an inner key twice": ("data:\n  batch_size: 1\n  batch_size: 2\n", "line 3: the key 'batch_size' stands there"),
    "a tag of Python": ("run_dir: !!python/object/apply:os.system [touch made]\n", "line 1, column 10 cannot be read"),
    "deep": ("a: " + "[" * 2000, "more than 40 mappings and lists inside each other"),
    "a bomb": (BOMB, "aliases stand for more than 10,000 values"),
    "a cycle": ("data: &d\n  transform: *d\n", "line 2: the alias *d lies in what it stands for"),
    "a number for a class": ("model:\n  class_path: 5\n", "model.class_path: expected the name of a class, got 5"),
    "a seed in the data": ("data: {seed: 4}\n", "data.seed comes from seed_everything"),
    "a folder for the data": ("data: folder\n", "folder cannot be read: it is a folder; expected a YAML file"),
    "no file for the data": ("data: gone.yaml\n", "gone.yaml cannot be read: there is no such file"),
    "itself": ("data: mine.yaml\n", "mine.yaml contains itself"),
    "broken data": ("data: broken.yaml\n", "broken.yaml, line 2: the key 'batch_size' stands there twice"),
    "an optimizer": ("optimizer: Adam\n", "there is no option 'optimizer'"),
    "num_classes": ("model: {init_args: {num_classes: 3}}\n", "model.init_args.num_classes comes from the data"),
    "NaN": ("model: {init_args: {training: {lr: .nan}}}\n", f"{TRAINING}.lr: expected a number from 0 on, got nan"),
    "a negative rate": ("model: {init_args: {training: {lr: -1}}}\n", f"{TRAINING}.lr: expected a number from 0 on"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_configuration_is_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = FILES[case]
    Path("mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    Path("folder").mkdir()
    Path("broken.yaml").write_text("batch_size: 1\nbatch_size: 2\n")
    line = answer(capsys, "FedVPT", "--config", "mine.yaml")
    assert words in line
    assert "mine.yaml" in line or "option" in words or "init_args" in words or "broken.yaml" in words or "data" in case
    assert not Path("made").exists()


def test_a_suite_alone_asks_for_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    suite = ROOT / "configs" / "suites" / "digits.yaml"
    line = refused(capsys, main, ["fit", f"--config={suite}", "--run_dir=run"])
    assert line == (
        f"error: {suite} gives options of a method, and no file says which; "
        "add --config configs/methods/<name>.yaml, or give --model"
    )


def test_class_names_are_not_given_to_a_method_that_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    line = answer(capsys, "PromptFL", "--model.class_names=[a, b]")
    assert line == "error: model.init_args.class_names comes from the data and is not given; leave it out"


@pytest.mark.parametrize("name", ["Bare", "HandsOn"])
def test_an_argument_without_type_and_default_is_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bare.py").write_text(
        "from methods import FedVPT\n\n\nclass Bare(FedVPT):\n"
        "    def __init__(self, num_classes: int, num_clients: int, backbone, tau):\n"
        "        super().__init__(num_classes, num_clients, backbone)\n\n\nclass HandsOn(Bare):\n"
        "    def __init__(self, *arguments, mu: float = 0.1, **settings):\n"
        "        super().__init__(*arguments, **settings)\n"
    )
    backbone = "--model.init_args.backbone={class_path: benchmark.backbones.vit.TimmViT, init_args: {name: micro_vit}}"
    line = answer(capsys, "FedVPT", f"--model=bare.{name}", backbone)
    assert line == "error: model.init_args.tau: must be given, there is no default"


ACCEPTED = {
    "--model.init_args.training.lr=0": ("training", "lr", 0.0),
    "--model.init_args.training.lr=1": ("training", "lr", 1.0),
    "--model.init_args.training.lr=1e-3": ("training", "lr", 0.001),
    "--model.init_args.training.momentum=0": ("training", "momentum", 0.0),
    "--model.init_args.training.clip=null": ("training", "clip", None),
    "--model.init_args.training.clip=1": ("training", "clip", 1.0),
    "--model.init_args.training.steps=null": ("training", "steps", None),
    "--model.init_args.training={lr: 0.5, clip: null}": ("training", "clip", None),
    "--model.init_args.num_prompts=0": ("num_prompts", 0),
}


@pytest.mark.parametrize("option", ACCEPTED)
def test_what_is_in_range_is_taken_as_a_plain_number(option: str) -> None:
    cli = FederatedCLI([*files("FedVPT"), option], run=False)
    *keys, value = ACCEPTED[option]
    found = cli.config.model.init_args
    for key in keys:
        found = found[key]
    assert found == value
    assert type(found) is type(value)


def test_seeds_of_all_sizes_are_taken() -> None:
    for seed in (0, 2**32 - 1):
        assert FederatedCLI([*files("FedVPT"), f"--seed_everything={seed}"], run=False).datamodule.seed == seed


def test_the_same_is_refused_in_python() -> None:
    with pytest.raises(ConfigurationError, match=r"LocalTraining: lr: expected a number from 0 on, got -0\.1"):
        LocalTraining(lr=-0.1)
    assert LocalTraining(lr=1) == LocalTraining(lr=1.0)


@pytest.mark.slow
def test_every_configuration_is_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    configs = ROOT / "configs"
    runs = [[path] for path in sorted([*configs.glob("*.yaml"), *configs.glob("real/*.yaml")])]
    for suite in sorted(configs.glob("suites/*.yaml")):
        named = {name for entry in yaml.safe_load(suite.read_text())["per_method"] for name in entry["methods"]}
        runs += [[configs / "methods" / f"{name}.yaml", suite] for name in sorted(named)]
    for paths in runs:
        with pytest.raises(SystemExit) as ended:
            main(["fit", *(f"--config={path}" for path in paths), "--print_config"])
        assert ended.value.code in (0, None), capsys.readouterr().err


@pytest.mark.slow
def test_the_configuration_of_an_earlier_run_is_read_as_it_was() -> None:
    run = sorted((ROOT / "results" / "runs").iterdir())[0]
    command = [sys.executable, "-m", "benchmark.run.cli", "fit", "--config", str(run / "config.yaml"), "--print_config"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    then, now = yaml.safe_load((run / "config.yaml").read_text()), yaml.safe_load(ended.stdout)
    assert then["model"]["init_args"].items() <= now["model"]["init_args"].items()


@pytest.mark.parametrize("given", ["config", "options", "class", "resume"])
def test_a_configuration_names_no_function_and_so_imports_no_module(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["fit", *files("HeadTune"), "--run_dir=new"]
    Path("evil.py").write_text("raise SystemExit('a stranger runs')\n")
    callback = "{class_path: lightning.pytorch.callbacks.LambdaCallback, init_args: {on_fit_start: evil.run}}"
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/checkpoints/last.ckpt").touch()
    Path("evil.yaml").write_text(f"trainer: {{callbacks: [{callback}]}}\n")
    whole = [yaml.safe_load((CONF / f"{name}.yaml").read_text()) for name in ("base", "HeadTune")]
    whole[0]["trainer"]["callbacks"] = [yaml.safe_load(callback)]
    Path("run/config.yaml").write_text(yaml.safe_dump(whole[0] | whole[1]))
    lambdas = "--trainer.callbacks=LambdaCallback"
    line = {
        "config": lambda: refused(capsys, main, [*base, "--config=evil.yaml"]),
        "options": lambda: refused(capsys, main, [*base, lambdas, "--trainer.callbacks.on_fit_start=evil.run"]),
        "class": lambda: refused(capsys, main, [*base, lambdas, "--trainer.callbacks.on_fit_end.class_path=evil.Run"]),
        "resume": lambda: refused(capsys, commands.main, ["resume", "run"]),
    }[given]()
    assert "a function cannot be named in a configuration; derive a class of your own that has it" in line
    assert "evil" not in sys.modules


def test_a_command_makes_no_other_commands_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[None] = []
    add = FederatedCLI.add_arguments_to_parser
    monkeypatch.setattr(FederatedCLI, "add_arguments_to_parser", lambda cli, parser: made.append(add(cli, parser)))
    monkeypatch.setattr(command_line, "_MADE", {})  # as in a new process
    for given, count in (["fit", *files("HeadTune")], 1), ([*files("HeadTune"), "fit"], 3):
        made.clear()
        refused(capsys, main, [*given, "--no_such_option=1"])
        assert len(made) == count
