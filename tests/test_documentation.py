"""The commands and code of the README and of the pages of ``docs/``, tried out."""

import hashlib
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from federation import CONF, build, fit, learned, terms
from refusal import refused

import datamodules
import methods
from benchmark import commands
from benchmark.cells.places import chosen_place
from benchmark.checks.command import FewDigits
from benchmark.config.yaml_files import read_mapping
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from benchmark.figures.pfedpt import make
from benchmark.own_metrics import check_own_metrics, chosen_metrics
from benchmark.records.environment import commit_days
from benchmark.records.record_file import read_record
from benchmark.records.source_code import changed_files
from benchmark.run.checkpoint import read_checkpoint
from benchmark.run.cli import main
from benchmark.run.command import resolved
from benchmark.server import ServerRule
from benchmark.speed.__main__ import CASES
from benchmark.tables.print_cell import cell_configuration
from datamodules import ImageSource, Partition, SeveralDataSets, Sites

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README = PAGES["README.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: The files that pages have one write: a block whose paragraph ends in its name.
FILES = {
    name: text
    for page in PAGES.values()
    for name, text in re.findall(r"`(\w+\.(?:py|yaml))`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
}


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, of all pages."""
    return [text for page in PAGES.values() for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)]


def given_commands() -> list[str]:
    """Every command of every page, once, without its comment."""
    lines = [line for text in blocks("bash") for line in text.splitlines()]
    return sorted({shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))})


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository, with the files that the pages have a reader write."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    for name in ("Makefile", "configs", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_blocks_are_commands_or_code_that_is_run_here() -> None:
    languages = set(re.findall(r"^```(\S+)", "\n".join(PAGES.values()), re.MULTILINE))
    assert languages == {"bash", "python", "yaml"}
    elsewhere = {block("python", "class ProximalHead"), block("python", "from fedprompt")}  # test_packaging.py runs it
    assert set(blocks("python")) - set(FILES.values()) == elsewhere
    assert set(blocks("yaml")) - set(FILES.values()) == {block("yaml", "WandbLogger")}


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize("command", given_commands())
def test_every_command_is_one_that_its_program_takes(command: str) -> None:
    check(shlex.split(command))


def test_the_files_of_the_fast_tests_are_there() -> None:
    shown = subprocess.run(
        ["make", "-n", "-o", ".venv/.installed", "test-fast"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = re.findall(r"tests/\S+\.py", shown.stdout)
    assert "tests/methods/test_contract.py" in files
    assert [file for file in files if not (ROOT / file).is_file()] == []


def check(words: list[str]) -> None:
    """Hand a command to the real parser: its options are known, its files, tables and presets are there."""
    kept = sorted(Path("results/runs").glob("fedvpt-digits-*"))[0]
    words = [re.sub("RUN_DIR|runs/one", str(kept), word) for word in words if word != "PYTHONPATH=."]
    program, arguments = Path(words[0]).name, words[1:]
    match program:
        case "make":
            shown = subprocess.run(  # -o: nothing is installed; -n: what is shown is not run
                ["make", "-n", "-o", ".venv/.installed", *arguments], capture_output=True, text=True, check=True
            )
            lines = [shlex.split(line, comments=True) for line in shown.stdout.splitlines()]
            for recipe in (line for line in lines if line and line[0].startswith(".venv/bin/")):
                check(recipe)
        case "lightning-cli" if arguments[0] == "fit":
            assert resolved(arguments[1:])
        case "lightning-cli":
            with pytest.raises(SystemExit, match=r"^0$"):
                main([*arguments, "--print_config"])
        case "benchmark":
            given = commands.parser().parse_args(arguments)
            if given.run in (commands.table, commands.tune):
                assert chosen_place(given)
                own = given.name.endswith(".yaml")
                table = read_mapping(given.name if own else f"configs/tables/{given.name}.yaml")
                assert given.preset in table["presets"]
                baseline = getattr(given, "baseline", None)  # of `benchmark table` alone
                assert baseline is None or baseline in [row["label"] for row in table["rows"]]
            elif given.run is commands.figure:
                assert set(given.names) <= set(make.FIGURES)
                assert given.preset in read_mapping(make.CONFIG)["presets"]
            elif given.run is commands.partition:
                assert all(Path(name).is_file() for name in given.what)
        case "python":
            assert arguments[1] in ("pytest", "benchmark.speed")
            if arguments[1] == "benchmark.speed":
                assert set(arguments[2:]) <= {*CASES, "--minutes", "8", "--against", "HEAD~20"}
        case "wandb":
            assert arguments[0] == "sweep"
            assert Path(arguments[1]).is_file()
        case "pip":
            what = re.fullmatch(r"\.(?:\[(.*)\])?", arguments[1])
            assert arguments[0] == "install"
            assert what
            assert set(filter(None, (what[1] or "").split(","))) <= set(PROJECT["optional-dependencies"])
        case "uv" if arguments[0] == "run":
            check(arguments[1:])
        case "uv":
            assert arguments[:2] == ["sync", "--locked"]
            assert (ROOT / "uv.lock").is_file()
            assert {*arguments[2:]} <= {
                "--all-extras",
                *(f"--extra={name}" for name in PROJECT["optional-dependencies"]),
            }
        case "torchrun" | "srun":
            assert arguments.index("lightning-cli") > 0
            check(arguments[arguments.index("lightning-cli") :])
        case "ray":
            from ray.scripts.scripts import cli as ray_program  # takes seconds, for one command of the pages

            program = ray_program.commands[arguments[0]]
            assert program.make_context(arguments[0], arguments[1:])
        case "source":
            assert arguments == [".venv/bin/activate"]
            assert "VENV := .venv\n" in Path("Makefile").read_text()
        case "flwr" | "flower-superlink" | "flower-supernode":
            pytest.importorskip("flwr", reason="the extra flower is not installed")
            of = arguments[:1] if program == "flwr" else []
            asked = [str(Path(sys.executable).parent / program), *of, "--help"]
            options = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stdout
            assert all(each in options for each in arguments if each.startswith("--"))
        case _:
            assert program in ("ruff", "mypy", "mkdocs")


def block(language: str, containing: str) -> str:
    return next(text for text in blocks(language) if containing in text)


def test_the_method_of_the_readme_stays_nearer_to_what_it_received(workplace: Path) -> None:
    (workplace / "readme_method.py").write_text(block("python", "class ProximalHead"))
    backbone = "benchmark.backbones.vit.TimmViT"
    shape = ["name=test_vit", "weights=random", "image_size=32"]

    def moved(mu: float) -> float:
        settings = ["mu=" + str(mu), f"backbone={backbone}", *(f"backbone.init_args.{part}" for part in shape)]
        method = ["--model=readme_method.ProximalHead", *(f"--model.init_args.{setting}" for setting in settings)]
        run = ["--data.clients_per_round=2", "--trainer.max_epochs=1", f"--run_dir=mu{mu}"]
        main(["fit", f"--config={CONF / 'base.yaml'}", *method, *run])
        record = read_record(f"mu{mu}")
        assert record.communication["up_floats"] == 8 * 64 + 8
        return float(read_checkpoint(f"mu{mu}/checkpoints/last.ckpt")["state_dict"]["head.weight"].norm())

    assert moved(5.0) < moved(0.0)


def test_the_added_method_runs_and_learns(workplace: Path) -> None:
    main(["fit", "--config", "smooth.yaml", "--run_dir=run", "--trainer.enable_progress_bar=false"])
    record = read_record("run")
    accuracy = record.summary["server"]["test"]["accuracy"]
    assert accuracy["last"]["average"] > 0.5 > accuracy["round0"]["average"]
    assert record.communication["up_floats"] == 96 * 10 + 10
    assert record.code is not None
    assert record.code["my_method"] == hashlib.sha256(Path("my_method.py").read_bytes()).hexdigest()
    named = {"benchmark.method", "benchmark.server", "benchmark.backbones.vit", "datamodules.digits"}
    assert named | {"benchmark.seeds", "benchmark.engine.plan.round_plan"} < set(record.code)
    assert (record.server, record.other_server) == ("benchmark.server.ServerRule", None)
    assert record.images_sha256 == json.loads(Path("run/manifest.json").read_text())["images_sha256"]
    assert changed_files(record.code) == []
    (workplace / "my_method.py").write_text("")
    assert changed_files(record.code) == ["my_method.py"]


@pytest.mark.usefixtures("workplace")
def test_the_added_rule_runs_is_named_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    conf = [f"--config={CONF / name}.yaml" for name in ("base", "HeadTune")]

    def run(rounds: int, folder: str, *arguments: str) -> dict[str, dict[str, torch.Tensor]]:
        own = ["--config=rule.yaml", f"--trainer.max_epochs={rounds}", f"--run_dir={folder}"]
        main(["fit", *conf, *own, *arguments])
        held = read_checkpoint(f"{folder}/checkpoints/last.ckpt")
        return {"shared": held["state_dict"], "velocity": held["callbacks"]["server"]["rule"]}

    one, two = run(1, "one"), run(2, "two")
    for name in ("head.weight", "head.bias"):
        moved = two["shared"][name] - one["shared"][name]
        torch.testing.assert_close(two["velocity"][name.replace(".", "_")], moved, rtol=0, atol=1e-6)
    Path("one/record.json").unlink()
    again = run(2, "one", "--ckpt_path=last")
    for part, values in two.items():
        assert values.keys() == again[part].keys()
        assert all(torch.equal(value, again[part][name]) for name, value in values.items())
    record = read_record("two")
    assert (record.server, record.default_server) == ("my_rules.MyMomentum", "benchmark.server.ServerRule")
    assert record.other_server == "my_rules.MyMomentum"
    assert record.code is not None
    assert record.code["my_rules"] == hashlib.sha256(Path("my_rules.py").read_bytes()).hexdigest()
    assert {"benchmark.server", "benchmark.engine.rounds", "methods.headtune"} < set(record.code)
    kind = sys.modules["my_rules"].MyMomentum
    rule, w = kind(beta=0.5), {"w.x": torch.tensor([1.0])}
    rule.start(w, terms(2))
    for number, expected in ((1, 3.0), (2, 6.0)):  # v = 2; v = 0.5 * 2 + 2
        uploads = Uploads((0, 1), {"w.x": torch.stack([w["w.x"] + 1, w["w.x"] + 3])}, torch.ones(2).double())
        w = rule.aggregate(Round(number, (0, 1), 0), w, uploads)
        assert w["w.x"].tolist() == [expected]
    Path("rule.yaml").write_text(Path("rule.yaml").read_text().replace("beta: 0.5", "beta: 1.5"))
    line = refused(capsys, main, ["fit", *conf, "--config=rule.yaml", "--trainer.max_epochs=1", "--run_dir=no"])
    assert "beta" in line
    assert "1.5" in line


@pytest.mark.usefixtures("workplace")
def test_the_rule_around_any_other_clips_whole_updates() -> None:
    norms = []

    class Measures(ServerRule):
        def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
            norms.extend(uploads.matrix(uploads.received).norm(dim=1).tolist())
            return super().aggregate(round, shared, uploads)

    method, data = build("FedVPT")
    fit(method, data, 1, [Server(importlib.import_module("my_clipping").Clipped(Measures(), norm=0.01))])
    assert len(norms) == 7
    assert max(norms) == pytest.approx(0.01, rel=1e-3)


def test_a_rule_is_no_part_of_a_method() -> None:
    method, _ = build("PFedPG")
    with pytest.raises(ConfigurationError, match=r"PFedPG keeps a ServerRule as 'rule', .* make it in make_server"):
        method.rule = ServerRule()
    rules = [method.make_server(), method.make_server()]
    assert rules[0] is not rules[1]
    assert not any(isinstance(module, ServerRule) for module in method.modules())


@pytest.mark.usefixtures("workplace")
def test_the_added_data_set_is_read_and_learned() -> None:
    main(["fit", "--config=shapes.yaml", "--run_dir=run", "--trainer.enable_progress_bar=false"])
    record = read_record("run")
    assert record.client_names == ("red", "green", "blue")
    accuracy = record.summary["server"]["test"]["accuracy"]
    assert accuracy["last"]["average"] > 0.6 > accuracy["round0"]["average"]


@pytest.mark.usefixtures("workplace")
def test_the_added_partition_deals_all_images_and_is_drawn() -> None:
    assert commands.main(["partition", "sources/digits", "unequal.yaml", "unequal.png"]) == 0
    assert Path("unequal.png").stat().st_size > 0
    clients = json.loads(Path("unequal.json").read_text())["clients"]
    train = [sum(client["train_classes"]) for client in clients]
    assert len(clients) == 8
    assert sum(train) == 1438
    assert all(abs(next - 0.7 * size) < 2 for size, next in pairwise(train))


@pytest.mark.usefixtures("workplace")
def test_every_run_of_the_added_table_is_one_that_the_command_line_takes() -> None:
    for row in ("HeadTune", "pFedPG", "Smooth"):
        text = cell_configuration("smoothing.yaml", "demo", row, "digits_domains")
        Path("cell.yaml").write_text(text)
        config = resolved(["--config=cell.yaml"])
        assert config["trainer"]["max_epochs"] == 5
        training = config["model"]["init_args"]["training"]
    assert (config["model"]["class_path"], training["lr"]) == ("my_method.SmoothHeadTune", 0.01)


@pytest.mark.usefixtures("workplace")
def test_the_pythons_of_the_pages_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(datamodules, "DigitDomains", FewDigits)
    monkeypatch.setattr("datamodules.digits.DigitDomains", FewDigits)
    shown = {}
    for name in ("ten_lines", "one_client", "from_files", "restored"):
        importlib.import_module(name)
        shown[name] = capsys.readouterr().out
    server = re.findall(r"accuracy after aggregation ([\d.]+) %", shown["ten_lines"])
    values = [float(value) for value in re.findall(r"accuracy +(\d\.\d+)", shown["ten_lines"])]
    assert sum(values) / len(values) == pytest.approx(float(server[-1]) / 100, abs=1e-4)
    assert f"client 3: tensor({values[3]:.4f})" in shown["one_client"]
    assert read_record("runs/headtune").config_hash in shown["from_files"]


@pytest.mark.usefixtures("workplace")
def test_a_gradient_of_its_own_trains_as_the_pages_say() -> None:
    settings = [f"--model.init_args.training.{name}" for name in ("momentum=0", "weight_decay=0", "steps=1")]
    plain, data = build("FedVPT", *settings, "--model.init_args.training.lr=0.1")
    fit(plain, data, 1)
    halved, data = build("FedVPT", *settings, "--model.init_args.training.lr=0.2")
    halved.__class__ = importlib.import_module("own_gradient").Halved
    fit(halved, data, 1)
    torch.testing.assert_close(learned(halved), learned(plain), equal_nan=True)


def test_the_logger_of_the_pages_is_taken(workplace: Path) -> None:
    (workplace / "logger.yaml").write_text(block("yaml", "WandbLogger"))
    config = resolved(["--config=configs/fedvpt_digits.yaml", "--config=logger.yaml"])
    assert config["trainer"]["logger"]["init_args"]["offline"] is True


@pytest.mark.usefixtures("workplace")
def test_the_added_metrics_give_numbers() -> None:
    metrics = chosen_metrics(read_mapping(Path("my_metrics.yaml"))["data"]["metrics"])
    assert [metric.name for metric in metrics[-3:]] == ["multiclass_jaccard_index", "top_two", "my_kappa"]
    check_own_metrics(metrics, classes=8)


def test_everything_that_pages_name_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page, text in PAGES.items():
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for path in set(re.findall(r"configs/[\w./]+\.yaml|results/[\w./]+\.md", prose)):
            assert (ROOT / path).is_file(), path
        for words in set(re.findall(r"`make ([\w-]+)", prose)):
            table = ROOT / "configs/tables" / f"{words.replace('-', '_')}.yaml"
            assert f"\n{words}:" in makefile or table.is_file(), words
        for link in set(re.findall(r"\]\(([^)#]+)\)", prose)):
            assert (ROOT / ("" if page == "README.md" else "docs") / link).exists(), f"{page}: {link}"
        for name in set(re.findall(r"`((?:benchmark|methods|datamodules|tests)/[\w/]+(?:\.py)?/?)`", prose)):
            assert (ROOT / name).exists(), f"{page}: {name}"


def test_the_commits_that_records_name_are_there_or_named() -> None:
    shallow = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("there is no history of commits here")
    named = {}
    for path in (ROOT / "results/runs").glob("*/record.json"):
        named[json.loads(path.read_text())["environment"]["git"]["revision"]] = path.parent.name
    gone = set(filter(None, named)) - set(commit_days(filter(None, named)))
    assert {revision[:8] for revision in gone} <= set(re.findall(r"\b[0-9a-f]{8}\b", PAGES["results.md"]))


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 100


def test_the_readme_names_all_there_is() -> None:
    families = README[README.index("## What is in it") : README.index("## How far")]
    named = [name for name in re.findall(r"\w+", families) if name in methods.__all__]
    assert sorted(named) == sorted(methods.__all__)
    classes = [getattr(datamodules, name) for name in datamodules.__all__]
    kinds = [kind for kind in classes if isinstance(kind, type)]
    sources = [
        kind for kind in kinds if issubclass(kind, ImageSource) and kind not in (ImageSource, SeveralDataSets, Sites)
    ]
    partitions = [kind for kind in kinds if issubclass(kind, Partition) and kind is not Partition]
    readers = {"DomainFolders", "HuggingFaceImages", "ImageFolders", "ImageIndex"} & {kind.__name__ for kind in sources}
    count = (
        f"{len(sources) - len(readers)} data sets, {len(readers)} readers of own images, {len(partitions)} partitions"
    )
    assert count in families
    for kind in (*sources, *partitions):
        assert f"`{kind.__name__}`" in PAGES["data.md"], kind.__name__


def test_the_tree_of_the_readme_is_true() -> None:
    tree = next(text for text in re.findall(r"\n\n```\n(.*?)```", README, re.DOTALL) if "methods/" in text)
    top = ROOT
    for line in tree.splitlines():
        inside = line.startswith(" ")
        folders = [(top if inside else ROOT) / name for name in re.findall(r"(?:^|  )(\w+)/", line)]
        assert folders, line
        assert all(folder.is_dir() for folder in folders), line
        assert all((folders[0] / file).is_file() for file in re.findall(r"\w+\.py", line)), line
        top = top if inside else folders[0]


def test_the_readmes_table_is_the_committed_one() -> None:
    def rows(text: str) -> list[list[str]]:
        lines = [line for line in text.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    shown = rows(README)
    committed = rows((ROOT / "results/tables/table1_demo.md").read_text().split("\n## ")[1])
    columns = [committed[0].index(name) for name in shown[0]]
    assert shown[2:] == [[row[column] for column in columns] for row in committed[2:]]


def test_the_page_of_methods_has_them_all_once() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGES["methods.md"], re.MULTILINE)) == sorted(methods.__all__)


@pytest.mark.slow
def test_the_pages_build_without_warnings(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "reference/index.html").is_file()


def test_every_configuration_of_the_readmes_table_exists() -> None:
    for name in ("local", "fedavg", "fedprox", "fedvpt", "fedvptdeep", "pfedpg"):
        for data in ("digits", "office_caltech10"):
            assert (ROOT / "configs" / f"{name}_{data}.yaml").is_file()


def test_the_page_on_the_engine_names_what_there_is() -> None:
    page = (ROOT / "docs" / "engine.md").read_text()
    code = "\n".join(path.read_text() for path in (ROOT / "benchmark").rglob("*.py"))
    known = set(re.findall(r"\w+", code))
    named = {name for quoted in re.findall(r"`([^`\n]+)`", page) for name in re.findall(r"[A-Za-z_]\w+", quoted)}
    drawn = set(re.findall(r"\b(?:[A-Z]\w+\.\w+|\w+\.[a-z]\w+|[a-z]+_\w+)\b", page.split("```")[1]))
    named |= {part for name in drawn for part in name.split(".")}
    known |= {path.stem for path in (ROOT / "tests").rglob("*.py")}
    assert named - known == set()
