import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from finished_run import write_finished_run
from recorded_results import record_of

import benchmark
from benchmark import commands
from benchmark.cells.outcome import Outcome
from benchmark.cells.ray_tasks import Ray
from benchmark.cells.slurm_jobs import Slurm
from benchmark.cells.this_machine import ThisMachine
from benchmark.commands import main
from benchmark.records.metrics_table import COLUMNS
from benchmark.records.record_file import read_record
from benchmark.run import cli, start
from benchmark.tables import run_table as tables
from benchmark.tables.run_table import TableResult


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "fedavg-digits-s0-00000000"
    rows = [(number, client, "server", "test", "accuracy", 0.25 * number) for number in (0, 1, 2) for client in (0, 1)]
    traffic = {"up_bytes": 40.0, "down_bytes": 80.0, "up_floats": 10.0, "down_floats": 20.0}
    record = record_of("ab", 0, setting="one [domain] per client", environment={}, communication=traffic)
    write_finished_run(folder, record, pd.DataFrame(rows, columns=list(COLUMNS)))
    return folder


def test_help_answers_without_loading_torch_or_pandas() -> None:
    code = (
        "import sys, benchmark.commands as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: print({'torch', 'pandas', 'rich', 'lightning'} & set(sys.modules))"
    )
    root = Path(commands.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert run.stdout.splitlines()[-1] == "set()"
    for name in ("table", "show", "verify", "keep", "report", "reproduction"):
        assert name in run.stdout


def test_show_prints_the_summary(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "FedAvg on Digits (one [domain] per client), seed 0, 2 clients" in shown
    assert "rounds 2 of 2, 3.0 s on cpu, 40 bytes up and 80 down" in shown
    lines = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if "│" in line}
    assert lines == {
        "test accuracy after aggregation, %": "",
        "before training": "0.00",
        "last round (2)": "50.00",
        "last ten rounds": "37.50",
        "best round (2), chosen on test data": "50.00",
    }


def test_show_has_other_metrics_of_the_last_round_and_one_by_rounds_on_request(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    auroc = [(2, 0, "server", "test", "auroc", 0.25)]
    metrics = pd.concat(
        [pd.read_parquet(run_dir / "metrics.parquet"), pd.DataFrame(auroc, columns=list(COLUMNS))], ignore_index=True
    )
    record = replace(read_record(run_dir), summary={})
    shutil.rmtree(run_dir)
    write_finished_run(run_dir, record, metrics)
    for options, found in (
        ((), ["test accuracy after aggregation, %", "test after aggregation, last round (2)", "auroc, 1 of 2 clients"]),
        (("--metric", "auroc"), ["test auroc after aggregation, 1 of 2 clients"]),
    ):
        assert main(["show", str(run_dir), *options]) == 0
        shown = capsys.readouterr().out
        labels = [line.split("│")[1].strip() for line in shown.splitlines() if "│" in line]
        assert [label for label in labels if label in found] == found
        assert labels.count("before training") == 1
        assert ("--metric auroc" in shown) == (not options)
    assert main(["show", str(run_dir), "--metric", "ap"]) == 2
    assert "the run has no metric 'ap'; it has accuracy, auroc" in capsys.readouterr().err


def test_show_names_clients_that_never_trained(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = pd.read_parquet(run_dir / "metrics.parquet")
    record = replace(read_record(run_dir), summary={})
    for trained, said in (((True, False), f"own is as at the start: {record.client_names[1]}"), ((True, None), "")):
        shutil.rmtree(run_dir)
        write_finished_run(run_dir, replace(record, trained=trained), metrics)
        assert main(["show", str(run_dir)]) == 0
        shown = capsys.readouterr().out
        assert said in shown
        assert ("never trained" in shown) == bool(said)


def test_verify_says_what_is_wrong(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run_dir)]) == 0
    first, remark = capsys.readouterr().out.splitlines()
    assert first == f"{run_dir}: ok"
    assert remark.startswith(f"{run_dir}: other versions here: ")
    (run_dir / "config.yaml").write_text("seed_everything: 1\n")
    assert main(["verify", str(run_dir)]) == 1
    assert "config.yaml was changed after the run" in capsys.readouterr().out


def test_keep_copies_to_the_committed_place(run_dir: Path, tmp_path: Path) -> None:
    assert main(["keep", str(run_dir)]) == 0
    kept = tmp_path / "results" / "runs" / run_dir.name
    assert (kept / "record.json").read_bytes() == (run_dir / "record.json").read_bytes()
    assert main(["verify", str(kept)]) == 0


@pytest.mark.parametrize(
    "arguments", [["show", "nowhere"], ["keep", "nowhere"], ["table", "nothing"], ["table", "nothing", "--jobs", "0"]]
)
def test_bad_input_is_one_line_and_status_2(
    run_dir: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmark: ")
    assert error.count("\n") == 1


def test_table_hands_its_options_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[object, ...]] = []
    failed: dict[str, Outcome] = {}

    def run_table(*arguments: object, **options: object) -> TableResult:
        asked.append((*arguments, *options.values()))
        files = (Path("t.md"), Path("t.csv"), Path("t.tex"))
        return TableResult(*files, failed, text="the table itself", picture=Path("t.png"), unchanged=len(asked) == 2)

    monkeypatch.setattr(tables, "run_table", run_table)
    monkeypatch.delenv("DATA_DIR", raising=False)
    assert main(["table", "table1"]) == 0
    monkeypatch.setenv("DATA_DIR", "/from/environment")
    assert main(["table", "table1", "--preset", "paper", "--jobs", "3", "--seeds", "4", "5"]) == 0
    failed["alpha-digits-s0-0"] = Outcome(None, "no memory", Path("runs/alpha/log.txt"))
    slurm = ["--engine", "slurm", "--partition", "gpu", "--time", "90", "--gpus", "2", "--cpus", "4", "--rerun-changed"]
    assert main(["table", "table1", "--data_dir", "/given", "--kept", "--baseline", "FedAvg", "--by_seed", *slurm]) == 1
    ray = ["--engine", "ray", "--address", "ray://head:10001", "--gpus", "0.5", "--cpus", "2", "--jobs", "4"]
    assert main(["table", "table1", *ray]) == 1
    assert asked == [
        ("table1", "demo", None, None, None, False, None, ThisMachine(), False, False),
        ("table1", "paper", "/from/environment", 3, [4, 5], False, None, ThisMachine(), False, False),
        ("table1", "demo", "/given", None, None, True, "FedAvg", Slurm("gpu", 90, 2, 4), True, True),
        ("table1", "demo", "/from/environment", 4, None, False, None, Ray("ray://head:10001", 0.5, 2), False, False),
    ]
    printed = capsys.readouterr()
    assert "failed: alpha-digits-s0-0: no memory (log: runs/alpha/log.txt)" in printed.err
    assert printed.out.count("the table itself") == 4
    assert printed.out.count("written: t.md, t.csv, t.tex, t.png\n") == 3
    assert printed.out.count("as before, and left as they are: t.md, t.csv, t.tex, t.png\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--gpus 1", "--gpus is an option of --engine slurm and ray, and does nothing with --engine local"),
        ("--engine local --address auto", "--address is an option of --engine ray, and does"),
        ("--engine slurm --address auto", "--address is an option of --engine ray, and does"),
        ("--engine ray --time 5", "--time is an option of --engine slurm, and does nothing with --engine ray"),
        ("--engine ray --partition gpu", "--partition is an option of --engine slurm, and does"),
        ("--engine slurm --gpus 0.5", "--gpus is 0.5, expected a whole number"),
        ("--engine ray --gpus 1.5", "--gpus is 1.5, expected a whole number, or with --engine ray one below 1"),
        ("--engine ray --gpus -1", "--gpus is -1, expected at least 0"),
        ("--engine ray --gpus nan", "--gpus is nan, expected at least 0"),
        ("--engine ray --cpus 0", "--cpus is 0, expected at least 1"),
        ("--engine slurm --time 0", "--time is 0, expected at least 1"),
    ],
)
@pytest.mark.parametrize("command", ["table", "tune"])
def test_an_option_of_another_engine_is_refused(
    command: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "table1", *given.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_an_interrupt_is_not_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_table(*arguments: object, **options: object) -> TableResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "run_table", run_table)
    assert main(["table", "table1"]) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_show_refuses_a_changed_record(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run_dir / "manifest.json", run_dir / "record.json")
    assert main(["show", str(run_dir)]) == 2
    assert "schema None, expected 1" in capsys.readouterr().err


def test_show_says_how_an_unfinished_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("seed_everything: 0\n")
    for folder, why in {
        tmp_path: f"the run is not finished; if nobody runs it, `benchmark resume {tmp_path}` goes on with it",
        Path("tests"): "it is not a run directory",
        tmp_path / "nowhere": "there is no such directory",
    }.items():
        assert main(["show", str(folder)]) == 2
        assert capsys.readouterr().err == f"benchmark: {folder} has no record.json: {why}\n"


def test_partition_draws_the_configuration_of_a_run(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    run = tmp_path / "run.yaml"
    run.write_text("data:\n  partition: {class_path: datamodules.partition.IID, init_args: {num_clients: 5}}\n")
    shipped = "configs/fedavg_digits.yaml"
    alone = tmp_path / "alone.yaml"
    alone.write_text("partition: {class_path: datamodules.partition.IID, init_args: {num_clients: 4}}\n")
    for given, clients in (([shipped], 6), ([shipped, str(run)], 5), ([shipped, str(alone)], 4)):
        assert main(["partition", *given, str(picture), "--set", "partition_seed=3"]) == 0
        manifest = json.loads(picture.with_suffix(".json").read_text())
        assert len(manifest["clients"]) == clients
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_partition_draws_a_data_configuration_and_the_manifest_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "data.yaml"
    config.write_text(
        "source: federation.TinyImages\n"
        "partition: {class_path: datamodules.partition.DirichletShared, init_args: {alpha: 1, num_clients: 3}}\n"
    )
    picture = tmp_path / "a.png"
    assert main(["partition", str(config), str(picture), "--set", "partition.alpha=0.5"]) == 0
    assert capsys.readouterr().out == f"written: {picture}, {picture.with_suffix('.json')}\n"
    manifest = json.loads(picture.with_suffix(".json").read_text())
    assert manifest["arguments"]["alpha"] == 0.5
    assert main(["partition", str(picture.with_suffix(".json")), str(tmp_path / "b.png"), "--split", "test"]) == 0
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in "ab")
    named = ["sources/digits", "configs/partitions/dirichlet_shared.yaml"]
    assert main(["partition", *named, str(picture), "--set", "partition.num_clients=4"]) == 0
    manifest = json.loads(picture.with_suffix(".json").read_text())
    assert (manifest["algorithm"], len(manifest["clients"])) == ("DirichletShared", 4)
    capsys.readouterr()
    assert main(["partition", named[1], str(picture)]) == 2
    assert "dirichlet_shared.yaml is no data configuration: " in capsys.readouterr().err
    assert main(["partition", str(tmp_path / "gone.yaml"), str(picture)]) == 2
    assert "no manifest or data configuration at" in capsys.readouterr().err
    assert main(["partition", str(config), str(picture), "--set", "partition.alpha=0"]) == 2
    said = capsys.readouterr().err
    assert "partition.init_args.alpha: expected a number above 0 and at most 1,000,000, got 0" in said


def test_no_manifest_is_written_over_another_file(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    (tmp_path / "notes.json").write_text("{}")
    for picture in (run_dir / "record.png", run_dir / "manifest.png", tmp_path / "notes.png"):
        assert main(["partition", "sources/digits", "partitions/iid", str(picture)]) == 2
        assert f"would be written to {picture.with_suffix('.json')}" in capsys.readouterr().err
    assert main(["partition", "sources/digits", "partitions/iid", str(tmp_path / "out.json")]) == 2
    assert "give a name that ends in .png" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
    assert (tmp_path / "notes.json").read_text() == "{}"


def test_seconds_of_verify_are_a_number(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("nan", "-1", "soon"):
        with pytest.raises(SystemExit):
            main(["verify", str(run_dir), "--rerun", text])
        assert f"--rerun: expected a number of seconds from 0 on, got '{text}'" in capsys.readouterr().err


def test_reproduction_from_elsewhere_knows_the_tables_that_came_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path("results").absolute()
    shutil.copytree(here, tmp_path / "results", ignore=shutil.ignore_patterns("figures", "speed", "runs"))
    expected = [line for line in (here / "REPRODUCTION.md").read_text().splitlines() if "benchmark table" in line]
    monkeypatch.chdir(tmp_path)
    assert main(["reproduction"]) == 0
    found = Path("results/REPRODUCTION.md").read_text().splitlines()
    assert [line for line in found if "benchmark table" in line] == expected


def test_a_runs_partition_is_drawn_only_as_the_run_wrote_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = next(path.parent for path in sorted(Path("results/runs").glob("*/manifest.json")))
    path, picture = shutil.copytree(kept, tmp_path / kept.name) / "manifest.json", tmp_path / "a.png"
    assert main(["partition", str(path), str(picture)]) == 0
    manifest = json.loads(path.read_text())
    counts = manifest["clients"][0]["train_classes"]
    counts[0], counts[-1] = counts[0] + 1, counts[-1] - 1  # the same sum
    path.write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main(["partition", str(path), str(picture)]) == 2
    assert "manifest.json was changed after the run" in capsys.readouterr().err


def test_configurations_are_listed_with_their_whole_first_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    words = "A long description that goes on, as in its Fig. 5 and after Smith et al. (2020), over more than a line"
    Path("configs/zz_mine.yaml").write_text(f"# {words[:59]}\n# {words[60:]}. A second sentence.\n\n# further\na: 1\n")
    Path("configs/zz_plain.yaml").write_text("a: 1\n")
    assert main(["configs", "zz_"]) == 0
    first, *more, last = capsys.readouterr().out.splitlines()
    assert first.startswith("zz_mine  ")
    assert max(len(line) for line in (first, *more)) <= 120
    assert " ".join(line[42:].strip() for line in (first, *more)).replace("  ", " ") == words
    assert last == "zz_plain"


def test_report_and_reproduction(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # no results here, but the user's runs; nor are there any when the page is there
        assert main(["report"]) == 0
        assert "written: results/report.html (0.9 MB, 1 runs, 0 tables)" in capsys.readouterr().out
    shutil.move("runs", "elsewhere")
    shutil.rmtree("results")
    assert main(["report"]) == 2
    assert "results is no folder" in capsys.readouterr().err
    shutil.move("elsewhere", "runs")
    assert main(["keep", str(run_dir)]) == 0
    assert main(["verify"]) == 0  # what is kept
    assert f"results/runs/{run_dir.name}: ok" in capsys.readouterr().out
    assert main(["report"]) == 0
    assert "written: results/report.html (0.9 MB, 1 runs, 0 tables)" in capsys.readouterr().out
    (tmp_path / "results" / "runs" / run_dir.name / "record.json").write_text("{}")
    assert main(["report", "page.html"]) == 1
    assert "left out: " in capsys.readouterr().err
    assert main(["reproduction"]) == 2
    assert "REPRODUCTION.template.md is missing" in capsys.readouterr().err


@pytest.mark.parametrize("program", [commands.main, cli.main])
def test_a_version_is_said(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split()[-1] == benchmark.__version__


@pytest.mark.parametrize(("program", "command"), [(commands.main, "    verify  "), (start.main, "    fit  ")])
def test_without_a_command_those_that_there_are_are_listed(
    program: Any, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = program([])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    said = capsys.readouterr().err
    assert command in said
    assert said.splitlines()[-1].endswith("no command is given; it is one of those above")


def test_show_knows_no_worst_client_of_what_a_method_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [("server", "test", "accuracy"), ("local", "train", "entropy"), ("server", "train", "cluster")]
    rows = [(1, client, *place, 0.25 + client / 2) for place in told for client in (0, 1)]
    record = record_of("ab", 0, manifest_hash="", rounds=1, rounds_trained=1)
    write_finished_run(tmp_path / "run", record, pd.DataFrame(rows, columns=list(COLUMNS)))
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert [shown.count(words) for words in ("in local training, last round", "at the server, last round")] == [1, 1]
    (entropy,) = (line for line in shown.splitlines() if "entropy" in line)
    assert [word for word in entropy.replace("│", " ").split() if word[0].isdigit()] == ["0.5000", "0.3536"]
