import csv
import hashlib
import io
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from finished_run import write_finished_run
from forked_here import ForkedHere, forked_here
from recorded_results import record_of
from rich.console import Console
from scipy import stats
from waiting import until

from benchmark.cells import this_machine
from benchmark.cells.display import RunsDisplay
from benchmark.cells.identity import Cell, cell_command
from benchmark.cells.job import run_as_job
from benchmark.cells.outcome import Outcome
from benchmark.cells.queue import run_cells
from benchmark.cells.slurm_jobs import Slurm
from benchmark.cells.this_machine import visible_gpus
from benchmark.cells.work import Work
from benchmark.config.given_options import given_options
from benchmark.errors import ConfigurationError
from benchmark.locks import FileLock
from benchmark.records.keeping import keep_record
from benchmark.records.metrics_table import COLUMNS
from benchmark.records.stored_run import stored_run
from benchmark.report.table_pages import table_page
from benchmark.tables.blocks import Block
from benchmark.tables.cells import make_cell, make_cells
from benchmark.tables.frame import over_seeds
from benchmark.tables.layout import PaperNumber, load_table, overrides_of
from benchmark.tables.lines import Number
from benchmark.tables.made_again import says_the_same
from benchmark.tables.paper import paper_value, read_paper
from benchmark.tables.render import Rendered, latex_block, render
from benchmark.tables.run_table import run_table

ROOT = Path(__file__).resolve().parents[3]

# A run that copies a finished one. Overrides steer it: `--wait=FILE` waits for the file, `--fail=TEXT` fails.
FAKE_RUN = """
import os, pathlib, shutil, sys, time
options = dict(entry.split("=", 1) for entry in sys.argv if entry.startswith("--") and "=" in entry)
run_dir = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
seed = sys.argv[sys.argv.index("--seed_everything") + 1]
with open("calls.txt", "a") as stream:
    stream.write(f"{os.getpid()} {run_dir.name} {'resumed' if '--ckpt_path' in sys.argv else 'fresh'}\\n")
(run_dir / "checkpoints").mkdir(exist_ok=True)
(run_dir / "checkpoints" / "last.ckpt").write_text("round 1")
print("training", flush=True)
if "--fail" in options:
    print("Traceback (most recent call last):\\n  ...")
    print("\\x1b[31mValueError: " + options["--fail"] + "\\x1b[0m", file=sys.stderr)
    sys.exit(1)
while "--wait" in options and not os.path.exists(options["--wait"]):
    time.sleep(0.02)
for name in ("config.yaml", "manifest.json", "metrics.parquet", "record.json"):
    shutil.copy(pathlib.Path("finished") / seed / name, run_dir / name)
"""

PAPER = """paper,table,dataset,setting,backbone,method,metric,value,std
P,1,Rooms,domain=A,ViT,Alpha,accuracy,50.5,
P,1,Rooms,avg over domains,ViT,Alpha,accuracy,60.25,
P,1,both,communication cost,ViT,Alpha,params per round,85800000,
P,1,Rooms,domain=A,ViT,Other,accuracy,1.0,
"""

TABLE = {
    "title": "Two methods",
    "paper": ["results/paper/p.csv"],
    "presets": {
        "demo": {"seeds": [0], "data": [{"name": "digits", "label": "Digits", "configs": ["configs/data.yaml"]}]},
        "paper": {
            "seeds": [0, 1],
            "data": [
                {
                    "name": "rooms",
                    "label": "Rooms",
                    "configs": ["configs/data.yaml"],
                    "overrides": ["--data.root={data_dir}"],
                    "columns": [
                        {"client": "a", "label": "A", "paper": {"dataset": "Rooms", "setting": "domain=A"}},
                        {
                            "statistic": "average",
                            "label": "Avg",
                            "paper": {"dataset": "Rooms", "setting": "avg over domains"},
                        },
                        {"statistic": "worst"},
                    ],
                    "cost": {"dataset": "both", "setting": "communication cost", "metric": "params per round"},
                }
            ],
        },
    },
    "rows": [
        {
            "label": "Alpha",
            "name": "alpha",
            "point": "local",
            "also": {"global": "server"},
            "configs": ["configs/alpha.yaml"],
        },
        {"label": "Beta", "name": "beta", "point": "server", "configs": ["configs/beta.yaml"]},
    ],
}


def finished_run(folder: Path, seed: int, accuracies: dict[str, list[float]], **fields: Any) -> None:
    """A run directory with a record: {point: accuracy of clients a and b} after rounds 1 and 2; further fields."""
    rows = [
        (number, client, point, "test", "accuracy", value if number == 2 else 0.0)
        for number in (1, 2)
        for point, values in accuracies.items()
        for client, value in enumerate(values)
    ]
    fields = {
        "method": "Alpha",
        "dataset": "Rooms",
        "environment": {
            "git": {"revision": "0123456789abcdef", "dirty": False},
            "hardware": {"cpu": "Test CPU", "cores": 2, "gpus": []},
        },
        "communication": {"up_bytes": 30720.0, "down_bytes": 30720.0, "up_floats": 7680.0, "down_floats": 7680.0},
        "seconds": {"total": 10.0 + seed, "training": 8.0, "evaluation": 2.0},
        "peak_memory_bytes": 1,
        **fields,
    }
    record = record_of("ab", seed, **fields)
    images = {} if record.images_sha256 is None else {"images_sha256": record.images_sha256}
    write_finished_run(folder, record, pd.DataFrame(rows, columns=list(COLUMNS)), **images)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    finished_run(folder / "finished" / "0", 0, {"local": [0.5, 0.7], "server": [0.1, 0.2]})
    finished_run(folder / "finished" / "1", 1, {"local": [0.6, 0.9], "server": [0.3, 0.4]})
    return folder


@pytest.fixture
def root(tmp_path: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository with two methods and one table, entered; runs that still wait for "go" at the end are let go."""
    shutil.copytree(prepared / "finished", tmp_path / "finished")
    for name in ("data", "alpha", "beta"):
        (tmp_path / "configs" / "tables").mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / f"{name}.yaml").write_text(f"name: {name}  # a comment\n")
    (tmp_path / "results" / "paper").mkdir(parents=True)
    (tmp_path / "results" / "paper" / "p.csv").write_text(PAPER)
    (tmp_path / "fake_run.py").write_text(FAKE_RUN)
    (tmp_path / "calls.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    save(TABLE)
    yield tmp_path
    (tmp_path / "go").touch()


def save(content: object) -> None:
    Path("configs/tables/two.yaml").write_text(yaml.safe_dump(content))


def changed(path: tuple[str | int, ...], value: object) -> dict[str, object]:
    """TABLE with one value replaced."""
    content = yaml.safe_load(yaml.safe_dump(TABLE))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


PROGRAM = (sys.executable, "fake_run.py")


def calls() -> list[list[str]]:
    """Per started run [process id, directory, fresh or resumed]."""
    return [line.split() for line in Path("calls.txt").read_text().splitlines()]


def runner(seeds: Sequence[int] = (0,), jobs: int = 1) -> AbstractContextManager[ForkedHere]:
    """Another process that makes the demo table; its exit status is the number of runs that failed."""
    return forked_here(lambda: len(run_table("two", jobs=jobs, seeds=seeds, program=PROGRAM).failed))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A child whose parent was killed is taken over and may stay a zombie for a moment.
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


# --- the table's YAML ---


def test_a_table_is_read_with_its_defaults(root: Path) -> None:
    table = load_table("two")
    assert [column.client for column in table.presets["demo"].data[0].columns] == ["*", None]
    assert table.presets["paper"].data[0].columns[0].paper == PaperNumber("Rooms", "domain=A", "accuracy")
    assert (table.metric, table.split, table.summary) == ("accuracy", "test", "last")
    assert load_table("configs/tables/two.yaml") == table


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("summary",), "first", "summary"),
        (("colour",), "red", "colour"),
        (("rows", 0, "point"), "middle", "middle"),
        (("rows", 0, "name"), "../up", "part of a directory's"),
        (("rows", 1, "label"), "Alpha", "same label"),
        (("presets", "demo", "seeds"), [], "at least one seed"),
        (("presets", "demo", "rows"), ["Alpha", "Nobody"], "names 'Nobody', which is no row's label"),
        (("rows", 0, "overrides"), {"demo": ["--run_dir=x"]}, "sets what the runner sets itself"),
        (("rows", 0, "overrides"), {"demo": ["model.lr=1"]}, "not of the form --key=value"),
        (("rows", 0, "overrides"), {"huge": ["--model.lr=1"]}, "huge, which is no preset"),
        (("rows", 0, "without"), ["model.lr"], "without 'model.lr', which no preset that runs it"),
        (
            ("presets", "demo", "data", 0, "columns"),
            [{"metric": "macro_f1"}, {}],
            "digits has two columns called 'Avg': give one an",
        ),
    ],
)
def test_bad_tables_are_refused_in_one_line(
    root: Path, path: tuple[str | int, ...], value: object, message: str
) -> None:
    save(changed(path, value))
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_table("two")
    assert "\n" not in str(caught.value)


def test_bad_input_is_refused_before_anything_runs(root: Path) -> None:
    for arguments, message in [
        ({"name": "three"}, "there is no table configs/tables/three.yaml; tables here: two"),
        ({"name": "two", "preset": "huge"}, "no preset 'huge'; it has demo, paper"),
        ({"name": "two", "preset": "paper"}, "give their folder with --data_dir or DATA_DIR"),
        ({"name": "two", "preset": "paper", "data_dir": "nowhere"}, "is not a folder"),
        ({"name": "two", "jobs": 0}, "jobs is 0"),
        ({"name": "two", "seeds": [1, 1]}, "different integers"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            run_table(**arguments, program=PROGRAM)
    Path("configs/alpha.yaml").unlink()
    with pytest.raises(ConfigurationError, match=r"configs/alpha\.yaml cannot be read"):
        run_table("two", program=PROGRAM)
    assert calls() == []


# --- cells ---


def test_a_row_is_not_given_what_it_is_to_be_without(root: Path) -> None:
    common = ["--model.init_args.training.lr=0.1", "--trainer.max_epochs=4", "--model.init_args.trainings=1"]
    content = changed(("presets", "demo", "overrides"), common)
    content["rows"][0] |= {"without": ["model.init_args.training"], "overrides": {"demo": ["--trainer.max_epochs=2"]}}
    save(content)
    table = load_table("two")
    demo = table.presets["demo"]
    alpha, beta = (overrides_of(row, "demo", demo, demo.data[0]) for row in table.rows)
    assert alpha == (*common[1:], *demo.data[0].overrides, "--trainer.max_epochs=2")
    assert beta == (*common, *demo.data[0].overrides)


def test_overrides_of_a_preset_win_over_the_files_of_its_groups(root: Path) -> None:
    """A preset's ``batch_size`` was lost where a group named a partition's file."""
    Path("configs/partitions").mkdir()
    Path("configs/partitions/whole.yaml").write_text("{batch_size: 64, drop_last: true, val_fraction: 0.5}")
    content = changed(("presets", "demo", "overrides"), ["--data.batch_size=8", "--data.drop_last=false"])
    content["rows"][0]["overrides"] = {"demo": ["--data.seed=3"]}
    for files in ({"data": ["partitions/whole"]}, {"overrides": ["--data=configs/partitions/whole.yaml"]}):
        group = {**content["presets"]["demo"]["data"][0], **files}
        group["overrides"] = ["--data.min_support=2", *files.get("overrides", [])]
        save({**content, "presets": {"demo": {**content["presets"]["demo"], "data": [group]}}})
        table = load_table("two")
        cell = make_cell(table.rows[0], "demo", table.presets["demo"], table.presets["demo"].data[0], 0)
        data = given_options(cell.configs, cell.overrides)["data"]
        assert data == {"batch_size": 8, "drop_last": False, "val_fraction": 0.5, "min_support": 2, "seed": 3}


def test_a_preset_may_run_some_of_the_rows(root: Path) -> None:
    save(changed(("presets", "demo", "rows"), ["Beta"]))
    table = load_table("two")
    cells = make_cells(table, "demo", table.presets["demo"])
    assert {label for _, label, _ in cells} == {"Beta"}
    shown = render("two", table, "demo", table.presets["demo"], cells, outcomes_of(cells)).markdown
    assert "Beta" in shown
    assert "Alpha" not in shown.split("# The paper's numbers")[0]


def test_a_cells_directory_follows_from_contents_alone(root: Path) -> None:
    def name(content: object = TABLE) -> str:
        save(content)
        table = load_table("two")
        return make_cells(table, "demo", table.presets["demo"])["digits", "Alpha", 0].name

    first = name()
    assert first.startswith("alpha-digits-s0-")
    assert name(changed(("title",), "Another title")) == first
    assert name(changed(("rows", 0, "overrides"), {"demo": ["--model.lr=1"]})) != first
    Path("configs/alpha.yaml").write_text("# another comment\nname:   alpha\n")
    assert name() == first
    Path("configs/inner.yaml").write_text("lr: 1\n")
    Path("configs/alpha.yaml").write_text("name: alpha\nmodel: inner.yaml\n")
    second = name()
    assert second != first
    Path("configs/inner.yaml").write_text("lr: 2\n")
    assert name() != second


def test_the_command_of_a_cell(root: Path) -> None:
    cell = Cell("c", ("a.yaml", "b.yaml"), ("--data.root={data_dir}", "--x=1"), 7)
    command = cell_command(cell, Path("runs/c"), Path("/data"), ("python", "-m", "benchmark.run.cli"))
    assert " ".join(command) == (
        "python -m benchmark.run.cli fit --config a.yaml --config b.yaml --run_dir runs/c --seed_everything 7 "
        "--data.root=/data --x=1"
    )
    checkpoint = Path("runs/c/checkpoints/last.ckpt")
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert cell_command(cell, Path("runs/c"), None)[-2:] == ["--ckpt_path", str(checkpoint)]


def test_finished_cells_are_not_run_again(root: Path) -> None:
    result = run_table("two", program=PROGRAM, jobs=1)
    assert result.failed == {}
    assert [name.split("-")[0] for _, name, _ in calls()] == ["alpha", "beta"]
    text = result.markdown.read_text()
    run_table("two", program=PROGRAM)
    assert len(calls()) == 2
    # The committed place counts as well, and gives the same table.
    for folder in list(Path("runs").iterdir()):
        keep_record(folder, "results/runs")
    shutil.rmtree("runs")
    assert run_table("two", kept=True, program=PROGRAM).markdown.read_text() == text
    assert len(calls()) == 2
    run_table("two", seeds=[1], program=PROGRAM)
    assert [name.split("-")[2] for _, name, _ in calls()[2:]] == ["s1", "s1"]


def rerun(**fields: Any) -> None:
    """Let the runs to come measure other seconds, memory, hardware and code, and differ in further fields."""
    shutil.rmtree("runs")
    record = stored_run(Path("finished/0")).record
    environment = {
        "git": {"revision": "f" * 40, "dirty": True},
        "hardware": {"cpu": "Another", "cores": 64, "threads": 1},
    }
    measured = {"seconds": {"total": 98765.0, "training": 1.0, "evaluation": 1.0}, "peak_memory_bytes": 7 * 10**9}
    changed = replace(record, environment=environment, **measured, **fields)
    write_finished_run(Path("finished/0"), changed, stored_run(Path("finished/0")).metrics)


def test_a_table_made_again_with_equal_numbers_leaves_its_files(root: Path) -> None:
    first = run_table("two", program=PROGRAM)
    assert not first.unchanged
    files = (first.markdown, first.csv, first.latex, first.picture)
    before = [path.read_bytes() for path in files if path]
    assert len(before) == 4
    rerun()
    again = run_table("two", program=PROGRAM)
    assert again.unchanged
    assert [path.read_bytes() for path in files if path] == before
    assert "98765" in again.text  # what is printed is of these runs
    assert "98765" not in before[0].decode()


def test_a_table_made_again_with_other_numbers_is_written(root: Path) -> None:
    first = run_table("two", program=PROGRAM)
    rerun(communication={"up_bytes": 1.0, "down_bytes": 1.0, "up_floats": 7680.0, "down_floats": 7680.0})
    again = run_table("two", program=PROGRAM)
    assert not again.unchanged
    assert "(Another, 64 cores, 1 thread a run)" in again.text
    for path in (again.markdown, again.csv, again.latex):
        assert "98765" in path.read_text()
    again.latex.write_text(again.latex.read_text().replace("Alpha", "Beta", 1))
    assert not run_table("two", program=PROGRAM).unchanged
    assert run_table("two", program=PROGRAM).unchanged
    first.csv.write_text("nothing\n")
    assert not run_table("two", program=PROGRAM).unchanged
    first.markdown.unlink()
    assert not run_table("two", program=PROGRAM).unchanged


def test_only_what_was_measured_is_not_compared(root: Path) -> None:
    result = run_table("two", program=PROGRAM)
    rendered = Rendered(*(path.read_text() for path in (result.markdown, result.csv, result.latex)), [], [], None)
    paths = {"md": result.markdown, "csv": result.csv, "tex": result.latex}
    cells = {suffix: re.findall(r"(?<=[|&] )\d+\.\d+(?= )", path.read_text()) for suffix, path in paths.items()}
    assert cells["md"]
    for suffix, path in paths.items():
        text = path.read_text()
        for cell in set(cells[suffix]):
            path.write_text(text.replace(f" {cell} ", f" {float(cell) + 0.01:.2f} ", 1))
            assert not says_the_same(rendered, paths)
        path.write_text(text)
    assert says_the_same(rendered, paths)


def test_the_place_gets_ready_for_missing_runs_before_readings_are_checked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr("benchmark.tables.run_table.check_readings", lambda *given: events.append("checked"))

    class Place(this_machine.ThisMachine):
        def get_ready(self, work: Work, jobs: int | None) -> None:
            events.append(f"ready for {jobs}")

    for _ in range(2):
        run_table("two", program=PROGRAM, jobs=2, place=Place())
    assert events == ["ready for 2", "checked", "checked"]


def made_by(source: str) -> None:
    """Replace the finished run by one of a custom method with this source code."""
    Path("my_method.py").write_text(source)
    shutil.rmtree("finished")
    code = {"my_method": hashlib.sha256(source.encode()).hexdigest()}
    finished_run(Path("finished/0"), 0, {"local": [0.5, 0.7], "server": [0.1, 0.2]}, code=code)


def test_cells_of_other_code_are_named_and_made_again_on_request(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_table("two", program=PROGRAM)
    run_table("two", program=PROGRAM)
    said = "2 of 2 cells do not know the code that made them: their records are older"
    assert said in capsys.readouterr().out.splitlines()
    shutil.rmtree("runs")
    made_by("rate = 0.1\n")
    run_table("two", program=PROGRAM)
    run_table("two", program=PROGRAM, rerun_changed=True)
    assert "cells" not in capsys.readouterr().out
    assert len(calls()) == 4
    made_by("rate = 1000\n")
    run_table("two", program=PROGRAM)
    said = "2 of 2 cells were made by other code (Alpha: my_method.py changed); make them again with --rerun-changed"
    assert said in capsys.readouterr().out.splitlines()
    assert len(calls()) == 4
    run_table("two", program=PROGRAM, rerun_changed=True)
    assert [how for _, _, how in calls()] == ["fresh"] * 6  # from the start, not from the old code's checkpoint
    assert len(list(Path("runs/.replaced").glob("*/record.json"))) == 2
    assert run_table("two", program=PROGRAM, rerun_changed=True).failed == {}
    assert len(calls()) == 6
    Path("my_method.py").unlink()
    capsys.readouterr()
    run_table("two", program=PROGRAM)
    assert "(Alpha: my_method.py changed)" in capsys.readouterr().out


def test_a_kill_while_a_run_is_put_aside_leaves_none_to_go_on_from(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_by("rate = 0.1\n")
    run_table("two", program=PROGRAM)
    made_by("rate = 1000\n")
    moved: list[str] = []

    def killed(path: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(path.name)
        os.rename(path, target)
        return target

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            run_table("two", program=PROGRAM, rerun_changed=True, jobs=1)
    assert len(moved) == 1
    assert run_table("two", program=PROGRAM, rerun_changed=True).failed == {}
    assert [how for _, _, how in calls()] == ["fresh"] * 4


def test_a_cell_that_other_code_has_begun_is_begun_anew_on_request(root: Path) -> None:
    made_by("rate = 0.1\n")
    run_table("two", program=PROGRAM)
    begun = {"callbacks": {"Recorder": {"code": stored_run(Path("finished/0")).record.code}}}

    def stop_inside() -> None:
        for folder in Path("runs").glob("*-s0-*"):
            (folder / "record.json").unlink()
            (folder / "checkpoints").mkdir(exist_ok=True)
            torch.save(begun, folder / "checkpoints" / "last.ckpt")

    stop_inside()
    run_table("two", program=PROGRAM, rerun_changed=True)
    made_by("rate = 1000\n")
    stop_inside()
    run_table("two", program=PROGRAM)
    stop_inside()
    run_table("two", program=PROGRAM, rerun_changed=True)
    assert [how for _, _, how in calls()[2:]] == ["resumed"] * 4 + ["fresh"] * 2


def test_a_row_whose_seeds_are_of_different_code_is_marked(root: Path) -> None:
    made_by("rate = 0.1\n")
    assert "codes" not in run_table("two", program=PROGRAM).markdown.read_text()
    made_by("rate = 1000\n")
    code = stored_run(Path("finished/0")).record.code
    finished_run(Path("finished/1"), 1, {"local": [0.5, 0.7], "server": [0.1, 0.2]}, code=code)
    result = run_table("two", seeds=[0, 1], program=PROGRAM)
    note = "whose mean is hence of no one method: Alpha; Alpha, global; Beta (seeds 0 / 1: my_method.py)"
    assert "| Alpha (seeds of 2 codes) " in result.markdown.read_text()
    for path in (result.markdown, result.csv, result.latex):
        assert note in path.read_text()
    result = run_table("two", seeds=[0, 1], program=PROGRAM, rerun_changed=True)
    assert "of 2 codes" not in result.markdown.read_text()
    assert "different code" not in result.csv.read_text()


def commit_runs(source: str) -> None:
    """Have the table's records of this method in the committed place alone."""
    made_by(source)
    run_table("two", program=PROGRAM)
    for folder in list(Path("runs").iterdir()):
        keep_record(folder, "results/runs")
    shutil.rmtree("runs")


def test_a_committed_cell_of_other_code_is_made_again_in_the_runs(root: Path) -> None:
    commit_runs("rate = 0.1\n")
    made_by("rate = 1000\n")
    assert run_table("two", program=PROGRAM, kept=True).failed == {}
    assert len(calls()) == 2
    assert run_table("two", program=PROGRAM, kept=True, rerun_changed=True).failed == {}
    assert len(calls()) == 4
    assert len(list(Path("runs").glob("*/record.json"))) == len(list(Path("results/runs").glob("*/record.json"))) == 2


def test_a_committed_cell_that_fails_when_it_is_made_again_failed(root: Path) -> None:
    commit_runs("rate = 0.1\n")
    Path("my_method.py").write_text("rate = 1000\n")
    Path("fake_run.py").write_text("import sys; sys.exit('no memory')")
    failed = run_table("two", program=PROGRAM, kept=True, rerun_changed=True).failed
    assert [outcome.error for outcome in failed.values()] == ["no memory"] * 2


def test_other_images_are_no_other_seed(root: Path) -> None:
    finished_run(Path("finished/2"), 2, {"local": [0.1, 0.1], "server": [0.1, 0.1]}, images_sha256="a" * 64)
    finished_run(Path("finished/3"), 3, {"local": [0.9, 0.9], "server": [0.9, 0.9]}, images_sha256="b" * 64)
    result = run_table("two", seeds=[0, 2, 3], program=PROGRAM)  # the first does not know its images
    assert len(result.problems) == 2
    for problem, name in zip(result.problems, ("alpha", "beta"), strict=True):
        assert problem.startswith(f"runs/{name}-digits-s3-")
        assert "was run on other images than runs/alpha-digits-s2-" in problem
        assert problem.endswith("(bbbbbbbb and aaaaaaaa); remove one")
    assert "| Alpha (2 of 3 seeds) " in result.markdown.read_text()


def test_another_server_and_an_early_last_round_are_noted(root: Path) -> None:
    shutil.rmtree("finished")
    servers = {"server": "my_rules.FedOpt", "default_server": "benchmark.server.ServerRule"}
    finished_run(Path("finished/0"), 0, {"local": [0.5, 0.7], "server": [0.1, 0.2]}, **servers)
    note = "Other servers than the methods' own: Alpha: my_rules.FedOpt in place of benchmark.server.ServerRule; Beta: "
    text = run_table("two", program=PROGRAM).markdown.read_text()
    assert note in text
    assert "which is not the run's last" not in text
    shutil.rmtree("runs")
    path = Path("finished/0")
    record = replace(stored_run(path).record, rounds=5, rounds_trained=5)
    write_finished_run(path, record, stored_run(path).metrics)
    text = run_table("two", program=PROGRAM).markdown.read_text()
    assert "The last round is the last evaluated one, which is not the run's last: Alpha: 2 of 5; " in text


def test_a_preset_without_the_baseline_has_no_comparison(root: Path) -> None:
    content = changed(("presets", "demo", "rows"), ["Beta"])
    save({**content, "baseline": "Alpha"})
    assert "paired" not in run_table("two", program=PROGRAM).markdown.read_text()
    with pytest.raises(ConfigurationError, match="the preset demo of table two does not run the baseline 'Alpha'"):
        run_table("two", baseline="Alpha", program=PROGRAM)
    save({**content, "baseline": "Alpha", "presets": {**content["presets"], "demo": TABLE["presets"]["demo"]}})
    assert "against Alpha, paired" in run_table("two", program=PROGRAM).markdown.read_text()


def test_a_preset_may_be_read_in_another_round(root: Path) -> None:
    assert "of the last round" in run_table("two", program=PROGRAM).markdown.read_text()
    save(changed(("presets", "demo", "summary"), "last10"))
    assert "of the mean of the last ten" in run_table("two", program=PROGRAM).markdown.read_text()
    assert len(calls()) == 2  # the same runs
    save(changed(("presets", "demo", "summary"), "first"))
    with pytest.raises(ConfigurationError, match="summary"):
        run_table("two", program=PROGRAM)


def test_a_preset_may_be_read_on_another_split(root: Path) -> None:
    run_table("two", program=PROGRAM)
    save(changed(("presets", "demo", "split"), "novel"))
    with pytest.raises(ConfigurationError, match="Alpha has no split 'novel'; it has test"):
        run_table("two", program=PROGRAM)  # of finished runs, which have one
    save(changed(("presets", "demo", "data", 0, "columns"), [{"statistic": "average", "split": "test"}]))
    run_table("two", program=PROGRAM)


def test_a_failed_cell_is_shown_and_stops_no_other(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(changed(("rows", 0, "overrides"), {"demo": ["--fail=no | memory"]}))
    result = run_table("two", program=PROGRAM, jobs=1)
    ((name, outcome),) = result.failed.items()
    assert name.startswith("alpha-digits-s0-")
    assert outcome == Outcome(None, "ValueError: no | memory", Path("runs") / name / "log.txt")
    text = result.markdown.read_text()
    assert f"- {name}: ValueError: no \\| memory\n" in text
    assert "| Alpha " in text
    assert "failed" in text
    rows = list(csv.DictReader(result.csv.open()))
    assert {(row["method"], row["error"]) for row in rows} == {("Alpha", "ValueError: no | memory"), ("Beta", "")}
    assert "FAILED: ValueError: no | memory" in capsys.readouterr().out
    run_table("two", program=PROGRAM)  # tries the failed one again, from its checkpoint
    assert [(called.split("-")[0], how) for _, called, how in calls()] == [
        ("alpha", "fresh"),
        ("beta", "fresh"),
        ("alpha", "resumed"),
    ]


def test_a_changed_record_is_no_result(root: Path) -> None:
    first = run_table("two", program=PROGRAM)
    run_dir = next(Path("runs").glob("alpha-*"))
    (run_dir / "metrics.parquet").write_bytes(b"PAR1")
    result = run_table("two", program=PROGRAM)
    assert list(result.failed) == [run_dir.name]
    assert "metrics.parquet was changed after the run" in result.failed[run_dir.name].error
    assert f"remove {run_dir} to run it again" in result.failed[run_dir.name].error
    assert len(calls()) == 2
    shutil.rmtree(run_dir)
    shutil.copytree("finished/1", run_dir)
    assert "was run with seed 1, expected 0" in run_table("two", program=PROGRAM).failed[run_dir.name].error
    assert first.failed == {}


def test_a_cell_that_cannot_begin_fails_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = FileLock.write, []

    def once_full(lock: FileLock, state: str, more: str = "") -> None:
        if state == "running" and not full:
            full.append(lock.path)
            raise ConfigurationError(f"{lock.path} cannot be written: No space left on device")
        write(lock, state, more)

    monkeypatch.setattr(FileLock, "write", once_full)
    result = run_table("two", program=PROGRAM)
    ((name, outcome),) = result.failed.items()
    assert outcome.error == f"it does not start: runs/{name}/lock cannot be written: No space left on device"
    assert len(calls()) == 1
    assert run_table("two", program=PROGRAM).failed == {}


def test_a_run_that_ends_without_a_record_failed(root: Path) -> None:
    cell = Cell("quiet-digits-s0-" + "0" * 8, (), (), 0)
    program = (sys.executable, "-c", "")
    # The name's hash does not fit configs and overrides: they changed since it was planned.
    (outcome,) = run_cells([cell], Work(Path("runs"), program=program)).values()
    assert outcome.error == "its configs changed while it waited; start the command again"
    table = load_table("two")
    cell = make_cells(table, "demo", table.presets["demo"])["digits", "Alpha", 0]
    (outcome,) = run_cells([cell], Work(Path("runs"), program=program)).values()
    assert outcome.error == "ended without writing a record"
    for number, name in ((9, "SIGKILL"), (40, signal.strsignal(40))):  # 40 is one of those without a name
        killed = (sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})")
        (outcome,) = run_cells([cell], Work(Path("runs"), program=killed)).values()
        assert outcome.error == f"killed by signal {number} ({name})"


# --- several runners, killed runners ---


def test_two_runners_do_each_cell_once(root: Path) -> None:
    save(changed(("presets", "demo", "overrides"), ["--wait=go"]))
    with runner((0, 1), jobs=2) as first, runner((0, 1), jobs=2) as second:
        until(lambda: len(calls()) == 4, 30)  # every cell is in somebody's hands
        Path("go").touch()
        assert (first.wait(60), second.wait(60)) == (0, 0)
        outputs = (first.stdout.read(), second.stdout.read())
    names = [name for _, name, _ in calls()]
    assert len(names) == len(set(names)) == 4
    assert sum(output.count(" started, log in ") for output in outputs) == 4
    assert sum(output.count("] alpha-") + output.count("] beta-") for output in outputs) == 8  # both report all
    rows = list(csv.DictReader(Path("results/tables/two_demo.csv").read_text().splitlines()))
    assert len([row for row in rows if row["kind"] == "column"]) == 3 * 3


def test_a_failure_in_the_other_runner_is_not_tried_again(root: Path) -> None:
    content = changed(("rows", 0, "overrides"), {"demo": ["--wait=go"]})
    Path("fake_run.py").write_text(FAKE_RUN.replace("for name in (", "sys.exit('broken')\nfor name in ("))
    content["rows"] = content["rows"][:1]  # type: ignore[index]
    save(content)
    with runner() as first:
        until(calls, 30)
        with runner() as second:
            assert "waiting for it" in second.stdout.readline()
            Path("go").touch()
            assert (first.wait(60), second.wait(60)) == (1, 1)
            assert "FAILED: broken" in second.stdout.read()
    assert len(calls()) == 1


def test_after_kill_9_of_the_runner_its_run_is_waited_for(root: Path) -> None:
    save(changed(("presets", "demo", "overrides"), ["--wait=go"]))
    with runner() as first:
        until(calls, 30)
        first.kill()
        first.wait()
        with runner() as second:
            until(lambda: len(calls()) == 2, 30)  # it takes the other cell meanwhile
            Path("go").touch()
            assert second.wait(60) == 0
    assert [how for _, _, how in calls()] == ["fresh", "fresh"]
    assert len({name for _, name, _ in calls()}) == 2


def test_after_kill_9_of_runner_and_run_the_run_continues(root: Path) -> None:
    save(changed(("presets", "demo", "overrides"), ["--wait=go"]))
    with runner() as first:
        until(calls, 30)
        run_dir = Path("runs") / calls()[0][1]
        until((run_dir / "checkpoints" / "last.ckpt").exists, 30)
        first.kill()
        first.wait()
        os.kill(int(calls()[0][0]), signal.SIGKILL)
    Path("go").touch()
    assert run_table("two", program=PROGRAM, jobs=1).failed == {}
    assert [(name.split("-")[0], how) for _, name, how in calls()] == [
        ("alpha", "fresh"),
        ("alpha", "resumed"),
        ("beta", "fresh"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_runner_ends_its_runs(root: Path, number: signal.Signals) -> None:
    save(changed(("presets", "demo", "overrides"), ["--wait=go"]))
    with runner(jobs=2) as process:
        until(lambda: len(calls()) == 2, 30)
        process.send_signal(number)
        assert process.wait(60) != 0
    until(lambda: not any(alive(int(pid)) for pid, _, _ in calls()), 5.0)
    assert not Path("results/tables/two_demo.md").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9_of_one_of_two_runners_loses_no_finished_run(root: Path, victim: int) -> None:
    # Six runs; those of seed 0 are let go at once, the rest when one runner is dead.
    content = changed(("presets", "demo", "seeds"), [0, 1, 2])
    finished_run(Path("finished/2"), 2, {"local": [0.5, 0.5], "server": [0.5, 0.5]})
    save(content)
    Path("fake_run.py").write_text(
        FAKE_RUN.replace('"--wait" in options and', 'seed != "0" and').replace('options["--wait"]', '"go"')
    )
    with runner((0, 1, 2), jobs=2) as first, runner((0, 1, 2), jobs=2) as second:
        until(lambda: len(list(Path("runs").glob("*-s0-*/record.json"))) == 2 and len(calls()) >= 4, 30)
        (first, second)[victim].kill()
        (first, second)[victim].wait()
        Path("go").touch()
        survivor = (second, first)[victim]
        assert survivor.wait(60) == 0
    names = [name for _, name, _ in calls()]
    assert len(names) == len(set(names)) == 6  # also those of the dead runner were waited for, not begun again
    assert all((Path("runs") / name / "record.json").exists() for name in names)


def test_what_failed_before_is_said_when_it_is_tried_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(changed(("rows", 0, "overrides"), {"demo": ["--fail=no memory"]}))
    run_table("two", program=PROGRAM)
    capsys.readouterr()
    run_table("two", program=PROGRAM)
    said = next(line for line in capsys.readouterr().out.splitlines() if " started, log in " in line)
    assert said.endswith("; continues from its last checkpoint; failed the last time: ValueError: no memory")


def test_every_run_gets_the_gpu_with_the_fewest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    save(changed(("presets", "demo", "overrides"), ["--wait=go"]))
    Path("fake_run.py").write_text(
        FAKE_RUN.replace(
            "import os,", "import os; open('gpus.txt', 'a').write(os.environ['CUDA_VISIBLE_DEVICES'])\nimport"
        )
    )
    with runner((0, 1), jobs=3):
        until(lambda: len(calls()) == 3, 30)
    assert sorted(Path("gpus.txt").read_text()) in (["3", "3", "5"], ["3", "5", "5"])
    assert visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(root))
    assert visible_gpus() == []  # no nvidia-smi
    (root / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    (root / "nvidia-smi").chmod(0o755)
    assert visible_gpus() == ["0", "1"]


def test_the_live_display_shows_rounds_and_failures(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("round 1/9  loss 2.0\nround 3/9  loss 1.5  accuracy after aggregation 61.00 %\nsaving\n")
    stream = io.StringIO()
    with RunsDisplay(4, Console(file=stream, force_terminal=True, width=160, markup=False)) as display:
        display.update(1, 1, {"alpha-digits-s0": log, "beta-digits-s0": tmp_path / "none"})
        display.live.refresh()  # type: ignore[union-attr]
        shown = stream.getvalue()
        display.update(3, 1, {f"run{number}": log for number in range(14)})
        display.live.refresh()  # type: ignore[union-attr]
    for text in (
        "1/4",
        "1 failed",
        "alpha-digits-s0",
        "3/9",
        "accuracy after aggregation 61.00 %",
        "beta-digits-s0",
        "starting",
    ):
        assert text in shown
    later = stream.getvalue()[len(shown) :]
    assert "14 at work, 2 of them not shown" in later
    assert "run11" in later
    assert "run12" not in later


# --- on Slurm ---


def test_cells_as_jobs_of_a_cluster(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("submitit")
    save(changed(("rows", 0, "overrides"), {"demo": ["--fail=no memory"]}))
    place = Slurm(kind="local", gpus=0, minutes=5)
    result = run_table("two", place=place, program=PROGRAM)
    assert [outcome.error for outcome in result.failed.values()] == ["ValueError: no memory"]
    assert sorted((name.split("-")[0], how) for _, name, how in calls()) == [("alpha", "fresh"), ("beta", "fresh")]
    assert "FAILED: ValueError: no memory" in capsys.readouterr().out
    run_table("two", place=place, program=PROGRAM)
    assert [(name.split("-")[0], how) for _, name, how in calls()[2:]] == [("alpha", "resumed")]
    assert "failed the last time: ValueError: no memory" in capsys.readouterr().out


def test_a_second_job_for_a_cell_ends_at_once(root: Path) -> None:
    pytest.importorskip("submitit")
    save(changed(("presets", "demo", "overrides"), ["--wait=go"]))
    table = load_table("two")
    cell = make_cells(table, "demo", table.presets["demo"])["digits", "Alpha", 0]
    work = Work(Path("runs"), program=PROGRAM)
    with runner() as other:
        until(calls, 30)
        assert run_as_job(cell, work) == "busy"
        Path("go").touch()
        assert other.wait(60) == 0
    assert run_as_job(cell, work) == ""  # finished by the other
    assert len(calls()) == 2
    Path("runs", cell.name, "record.json").unlink()
    jobs = run_cells([cell], work, place=Slurm(kind="debug", gpus=0))
    assert jobs[cell.name].run_dir == Path("runs") / cell.name


def test_a_cancelled_call_cancels_its_jobs(root: Path) -> None:
    pytest.importorskip("submitit")
    save(changed(("presets", "demo", "overrides"), ["--wait=go"]))
    with forked_here(lambda: run_table("two", place=Slurm(kind="local", gpus=0), program=PROGRAM)) as process:
        until(lambda: len(calls()) == 2, 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    until(lambda: not any(alive(int(pid)) for pid, _, _ in calls()), 20.0)


def test_without_slurm_a_cluster_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(ConfigurationError, match="no slurm here"):
        run_table("two", place=Slurm(), program=PROGRAM)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigurationError, match=r"needs submitit: pip install"):
        run_table("two", place=Slurm(), program=PROGRAM)
    assert calls() == []


# --- rendering ---


def outcomes_of(cells: dict[tuple[str, str, int], Cell]) -> dict[str, Outcome]:
    return {cell.name: Outcome(Path("finished") / str(cell.seed)) for cell in cells.values()}


def test_the_papers_numbers_stand_beside_ours(root: Path) -> None:
    table = load_table("two")
    preset = table.presets["paper"]
    cells = make_cells(table, "paper", preset)
    shown = render("two", table, "paper", preset, cells, outcomes_of(cells))
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in shown.markdown.splitlines() if "|" in line
    ]
    assert lines[0] == ["Method", "Source", "A", "Avg", "Worst", "Floats up", "MB up + down", "Rounds", "Seconds"]
    # Client a: 50 and 60 per cent; averages 60 and 75; worst 50 and 60.
    assert lines[2] == ["Alpha", "ours", "55.00 ± 7.07", "67.50 ± 10.61", "55.00 ± 7.07", "7.68e3", "0.061", "2", "10"]
    assert lines[3] == ["", "paper", "50.50", "60.25", "", "8.58e7", "", "", ""]
    assert lines[4] == ["", "difference", "+4.50", "+7.25", "", "", "", "", ""]
    assert lines[5][:5] == ["Alpha, global", "ours", "20.00 ± 14.14", "25.00 ± 14.14", "20.00 ± 14.14"]
    assert lines[6][0] == "Beta"  # not in the paper's table
    assert lines[7][:4] == ["Method", "Last", "Last ten", "Best (chosen on test data)"]
    assert shown.markdown.startswith("# Two methods\n")
    assert "not comparable" not in shown.markdown
    for note in (
        "Accuracy on the test split, in per cent, of the last round; mean ± standard deviation over seeds 0, 1.",
        "Read at the point 'local' (the client's state at the end of its local training, before aggregation): Alpha.",
        "Alpha, global; Beta.",
        "Hardware: cpu (Test CPU, 2 cores). 2 runs, 21 s in all.",
        "Code: 0123456789ab.",
    ):
        assert note in shown.markdown
    rows = [row for row in csv.DictReader(shown.csv.splitlines()) if row["kind"] == "column"]
    assert len(rows) == 9
    assert float(rows[0]["difference"]) == pytest.approx(4.5)
    assert (rows[0]["seeds"], rows[0]["rounds"], rows[5]["reading"], rows[5]["paper"]) == ("2", "2", "global", "")
    assert r"55.00 $\pm$ 7.07" in shown.latex
    assert "tabular" in shown.latex


def test_a_negative_difference_is_typeset_as_a_minus(root: Path) -> None:
    Path("results/paper/p.csv").write_text(PAPER.replace("50.5", "70"))
    table = load_table("two")
    cells = make_cells(table, "paper", table.presets["paper"])
    shown = render("two", table, "paper", table.presets["paper"], cells, outcomes_of(cells))
    assert "-15.00" in shown.markdown
    assert "$-$15.00" in shown.latex
    frame = pd.DataFrame({"gain": ["-0.31 (-0.40 to -0.10)"], "name": ["few-shot"]})
    typeset = latex_block(Block("Gains", frame))
    assert "$-$0.31 ($-$0.40 to $-$0.10) & few-shot" in typeset


def test_a_demo_shows_the_papers_numbers_apart_and_no_difference(root: Path) -> None:
    table = load_table("two")
    cells = make_cells(table, "demo", table.presets["demo"])
    shown = render("two", table, "demo", table.presets["demo"], cells, outcomes_of(cells)).markdown
    ours, apart = shown.split("# The paper's numbers, on other data with another backbone: not comparable")
    assert ours.startswith("# Demo: Two methods\n")
    assert "difference" not in shown
    assert "± " not in ours.split("\n- ")[0]
    assert "50.5" not in ours
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in ours.splitlines() if "|" in line]
    assert lines[0][:4] == ["Method", "a", "b", "Avg"]
    assert lines[2][:4] == ["Alpha", "50.00", "70.00", "60.00"]
    assert "## Rooms (paper)" in apart
    assert "8.58e7" in apart
    assert "Other" not in apart


def test_a_table_without_a_finished_run_shows_its_failures(root: Path) -> None:
    Path("fake_run.py").write_text("import sys; sys.exit('no memory')")
    save(changed(("presets", "demo", "data", 0, "columns"), [{"client": "*"}]))
    result = run_table("two", program=PROGRAM)
    assert [outcome.error for outcome in result.failed.values()] == ["no memory"] * 2


def test_a_row_without_a_finished_run_is_read_from_the_csv_as_it_was_shown(root: Path) -> None:
    save(changed(("rows", 0, "overrides"), {"demo": ["--fail=no memory"]}))
    result = run_table("two", program=PROGRAM)
    rows = [[cell.text for cell in row] for part in table_page(result.csv).parts for row in part.numbers.rows]
    assert sum(row[0] == "Alpha" and "failed" in row for row in rows) == 1


def test_a_curve_has_the_averages_of_the_records(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path("finished/0")
    at_local = [(1, 0, 0.2), (1, 1, 0.4), (2, 0, 0.8)]  # the second client did not train again
    rows = [(number, client, "local", "test", "accuracy", value) for number, client, value in at_local]
    rows += [(number, client, "server", "test", "accuracy", 0.1) for number in (1, 2) for client in (0, 1)]
    write_finished_run(run, stored_run(run).record, pd.DataFrame(rows, columns=list(COLUMNS)))
    drawn: list[Any] = []
    monkeypatch.setattr("benchmark.tables.curves.learning_curves", lambda panels, *rest: drawn.extend(panels))
    text = run_table("two", program=PROGRAM).markdown.read_text()
    ((_, (curve, *_)),) = drawn
    assert curve.seeds[0].tolist() == pytest.approx([30.0, 60.0])
    assert "60.00" in next(line for line in text.splitlines() if line.startswith("| Alpha "))


def test_groups_in_an_order_are_drawn_over_the_groups_and_shown_in_the_report(root: Path) -> None:
    save(changed(("presets", "demo", "axis"), "which digits"))
    result = run_table("two", program=PROGRAM)
    assert result.picture is not None
    (chart,) = table_page(result.csv).charts
    values = [(row["method"], row["group"], row["value"]) for row in chart.spec["data"]["values"]]
    assert values == [("Alpha", "Digits", 60.0), ("Alpha, global", "Digits", 15.0), ("Beta", "Digits", 15.0)]
    assert "which digits" not in result.markdown.read_text()


def test_runs_with_a_virtual_clock_are_drawn_over_its_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree("finished/0")
    finished_run(
        Path("finished/0"), 0, {"local": [0.5, 0.7], "server": [0.1, 0.2]}, facts={"clock": {"1": 4.5, "2": 1200.0}}
    )
    drawn: list[Any] = []
    monkeypatch.setattr("benchmark.tables.curves.learning_curves", lambda *given: drawn.extend(given))
    text = run_table("two", program=PROGRAM).markdown.read_text()
    panels, _, _, x_label = drawn
    assert [curve.places.tolist() for curve in panels[0][1]] == [[4.5, 1200.0]] * 3
    assert x_label == "seconds of the virtual clock"
    assert "- Seconds of the virtual clock when the last round closed: Alpha: 1,200; Alpha, global: 1,200; Beta" in text


def test_some_seeds_failed(root: Path) -> None:
    table = load_table("two")
    preset = table.presets["paper"]
    cells = make_cells(table, "paper", preset)
    outcomes = outcomes_of(cells)
    name = cells["rooms", "Alpha", 1].name
    outcomes[name] = Outcome(None, "out of memory", Path("log.txt"))
    shown = render("two", table, "paper", preset, cells, outcomes).markdown
    assert "Alpha (1 of 2 seeds)" in shown
    assert f"- {name}: out of memory" in shown


def test_a_column_that_no_run_has_is_said(root: Path) -> None:
    save(changed(("presets", "demo", "data", 0, "columns"), [{"client": "c"}]))
    table = load_table("two")
    cells = make_cells(table, "demo", table.presets["demo"])
    shown = render("two", table, "demo", table.presets["demo"], cells, outcomes_of(cells)).markdown
    assert "finished/0: no client 'c'; the run has a, b" in shown


def block(markdown: str, heading: str) -> list[list[str]]:
    """The rows of a block, the head first, without the line below it."""
    part = markdown.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in [rows[0], *rows[2:]]]


def rendered(content: object, preset: str = "paper") -> tuple[str, list[dict[str, str]]]:
    save(content)
    table = load_table("two")
    cells = make_cells(table, preset, table.presets[preset])
    shown = render("two", table, preset, table.presets[preset], cells, outcomes_of(cells))
    return shown.markdown, list(csv.DictReader(shown.csv.splitlines()))


def test_rounds_clients_and_costs_of_every_method(root: Path) -> None:
    markdown, rows = rendered(TABLE)
    lines = block(markdown, "Rooms: rounds, clients and costs")
    # Averages 60 and 75 in round 2, 0 in round 1; clients 50 and 70, 60 and 90.
    assert lines[1][:4] == ["Alpha", "67.50 ± 10.61", "33.75 ± 5.30", "67.50 ± 10.61"]
    assert lines[1][4:] == ["55.00 ± 7.07", "55.00 ± 7.07", "17.68 ± 5.00", "30.7", "30.7", "10", "0"]
    found = {(r["method"], r["reading"], r["summary"], r["column"]): r for r in rows if r["kind"] == "statistic"}
    assert float(found["Alpha", "", "best_on_test", "pooled"]["ours"]) == pytest.approx(67.5)
    assert float(found["Alpha", "global", "last10", "worst"]["ours"]) == pytest.approx(10.0)
    assert (found["Alpha", "", "last", "std"]["bytes_up"], found["Alpha", "", "last", "std"]["seeds"]) == (
        "30720.0",
        "2",
    )


def test_the_best_round_is_always_labelled(root: Path) -> None:
    markdown, _ = rendered(changed(("summary",), "best_on_test"))
    assert "## Rooms, best round, chosen on test data\n" in markdown
    assert "chosen on the test data itself (optimistic)" in markdown
    assert "Best (chosen on test data)" in rendered(TABLE)[0]


def test_a_baseline_is_compared_with_pair_by_pair(root: Path) -> None:
    content = changed(("rows", 1, "point"), "local")
    Path("configs/beta.yaml").write_text("name: other\n")
    content["baseline"] = "Beta"
    markdown, rows = rendered(content)
    lines = block(markdown, "Rooms: against Beta, paired")
    assert [line[0] for line in lines] == ["Method", "Alpha", "Alpha, global"]
    assert lines[1][1:] == ["+0.00", "", "4", "2", "nothing"]  # the same numbers: nothing varies
    # Global minus local: -40, -50 and -30, -50; client means -35, -50, seed means -45, -40.
    assert lines[2][1] == "-42.50"
    found = next(row for row in rows if row["kind"] == "paired" and row["reading"] == "global")
    reach = stats.t.ppf(0.975, 1) * (112.5 / 2 + 12.5 / 2) ** 0.5
    assert float(found["low"]) == pytest.approx(-42.5 - reach)
    assert (found["column"], float(found["pairs"])) == ("minus Beta", 4)
    assert "Paired: client by client and seed by seed" in markdown
    content["baseline"] = "Gamma"
    with pytest.raises(ConfigurationError, match="baseline 'Gamma' is no row; rows are Alpha, Beta"):
        rendered(content)
    save(TABLE)
    with pytest.raises(ConfigurationError, match="baseline 'Gamma' is no row"):
        run_table("two", baseline="Gamma", program=PROGRAM)


def test_gains_over_several_rows_stand_in_a_matrix_of_data_groups(root: Path) -> None:
    Path("configs/beta.yaml").write_text("name: other\n")
    markdown, rows = rendered({**changed(("rows", 1, "point"), "local"), "gains": ["Alpha", "Beta"]})
    matrix = block(markdown, "Rooms: gain over Beta, paired, with its 95 % interval")
    assert [line[0] for line in matrix] == ["Method", "Alpha", "Alpha, global"]
    assert matrix[0][1:] == ["Rooms"]
    assert matrix[1][1] == "+0.00"
    assert matrix[2][1].startswith("-42.50 (")
    assert [line[0] for line in block(markdown, "Rooms: gain over Alpha, paired, with its 95 % interval")][2] == "Beta"
    assert {row["column"] for row in rows if row["kind"] == "paired"} == {"minus Alpha", "minus Beta"}
    assert "Paired: client by client and seed by seed" in markdown
    with pytest.raises(ConfigurationError, match="baseline 'Gamma' is no row"):
        rendered({**TABLE, "gains": ["Beta", "Gamma"]})


def test_columns_of_other_metrics_and_harmonic_means(root: Path) -> None:
    columns = [
        {"client": "a", "label": "A"},
        {"client": "b", "label": "B"},
        {"harmonic": ["A", "B"]},
        {"statistic": "average", "label": "F1", "metric": "macro_f1"},
    ]
    markdown, _ = rendered(changed(("presets", "demo", "data", 0, "columns"), columns[:3]), "demo")
    assert block(markdown, "Digits")[1][:4] == ["Alpha", "50.00", "70.00", f"{2 / (1 / 50 + 1 / 70):.2f}"]
    markdown, _ = rendered(changed(("presets", "demo", "data", 0, "columns"), columns[3:]), "demo")
    assert "the run has no macro_f1 on test at the point 'local'" in markdown
    markdown, _ = rendered(changed(("presets", "demo", "data", 0, "columns"), [{"split": "moon"}]), "demo")
    assert "the run has no accuracy on moon at the point 'local'" in markdown
    for column, message in [
        ({"harmonic": ["C"]}, "no column 'C' stands left of the harmonic mean"),
        ({"metric": "speed"}, "there is no metric speed; metrics are accuracy"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            rendered(changed(("presets", "demo", "data", 0, "columns"), [column]))


def test_groups_of_one_panel_stand_side_by_side(root: Path) -> None:
    content = changed(("presets", "demo", "data", 0, "columns"), [{"statistic": "average"}])
    first = content["presets"]["demo"]["data"][0]  # type: ignore[index]
    first["panel"] = "All"
    content["presets"]["demo"]["data"].append({**first, "name": "more", "label": "More", "columns": [{"client": "*"}]})  # type: ignore[index]
    markdown, _ = rendered(content, "demo")
    lines = block(markdown, "All")
    assert lines[0] == ["Method", "Digits", "More: a", "More: b", "Floats up", "MB up + down", "Rounds", "Seconds"]
    assert lines[1] == ["Alpha", "60.00", "50.00", "70.00", "7.68e3", "0.061", "2", "10"]


def test_groups_of_two_panels_may_have_one_label(root: Path) -> None:
    content = changed(("presets", "demo", "data", 0, "panel"), "Small")
    first = content["presets"]["demo"]["data"][0]  # type: ignore[index]
    content["presets"]["demo"]["data"].append({**first, "name": "more", "panel": "Large"})  # type: ignore[index]
    markdown, rows = rendered(content, "demo")
    for panel in ("Small", "Large"):
        assert block(markdown, panel)[1][:4] == ["Alpha", "50.00", "70.00", "60.00"]
        assert block(markdown, f"{panel}, Digits: rounds, clients and costs")[1][1] == "60.00"
    assert {row["dataset"] for row in rows} == {"Small, Digits", "Large, Digits"}
    content["presets"]["demo"]["data"][1]["panel"] = "Small"  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="data groups of the preset demo have the same panel and label"):
        rendered(content, "demo")


def test_a_number_that_diverged_under_one_seed_has_no_mean() -> None:
    entries = [(seed, column, value) for column, value in (("a", 1.0), ("b", 3.0)) for seed in (0, 1)]
    numbers = pd.DataFrame([Number(0, seed, "column", "last", column, value) for seed, column, value in entries])
    numbers.loc[0, "value"] = float("nan")
    over = over_seeds(numbers).droplevel(["line", "kind", "summary"])
    assert over.loc["a"].isna().all()
    assert tuple(over.loc["b"]) == (3.0, 0.0)


def test_an_ambiguous_published_number_is_refused() -> None:
    paper = pd.DataFrame(
        [("D", "s", backbone, "M", "accuracy", value) for backbone, value in (("ViT", 1.0), ("CNN", 2.0))],
        columns=["dataset", "setting", "backbone", "method", "metric", "value"],
    )
    assert paper_value(paper, "M", PaperNumber("D", "s", backbone="CNN")) == 2.0
    assert paper_value(paper, "N", PaperNumber("D", "s")) is None
    with pytest.raises(ConfigurationError, match="name the backbone"):
        paper_value(paper, "M", PaperNumber("D", "s"))


# --- the committed tables ---


#: Without this project's own tables, which test_table_files lists.
OF_PAPERS = [
    path for path in sorted((ROOT / "configs" / "tables").glob("*.yaml")) if "\n  paper:\n" in path.read_text()
]


@pytest.mark.parametrize("path", OF_PAPERS, ids=lambda path: path.stem)
def test_committed_tables_fit_the_published_numbers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    table = load_table(path.stem)
    paper = read_paper(table.paper)
    assert {"demo", "paper"} <= set(table.presets)
    for row in table.rows:
        for group in table.presets["paper"].data:
            numbers = [column.paper for column in group.columns if column.paper]
            assert bool(numbers) == bool(table.paper)  # a figure of a paper has no numbers
            found = [paper_value(paper, row.label, number) is not None for number in numbers]
            # A row of the paper has all its numbers; an extra row of ours has none.
            assert all(found) or not any(found)


def test_table_1_has_the_papers_averages() -> None:
    table = load_table(str(ROOT / "configs/tables/table1.yaml"))
    paper = pd.read_csv(ROOT / "results/paper/pfedpg_table1.csv")
    columns = table.presets["paper"].data[0].columns
    published = [row.label for row in table.rows if row.label in set(paper["method"])]
    assert [row.label for row in table.rows if row.label not in published] == ["NearestClassMean", "FederatedRidge"]
    for label in published:
        values = [paper_value(paper, label, column.paper) for column in columns if column.paper]
        assert None not in values
        assert sum(values[:4]) / 4 == pytest.approx(values[4], abs=0.006)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpus", "cores", "jobs"), [([], 1, 1), ([], 2, 2), ([], 64, 4), (["0"], 64, 1), (["0", "1"], 2, 2)]
)
def test_by_default_a_cell_for_each_gpu_or_else_core(
    gpus: list[str], cores: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []

    class Processes(this_machine.Processes):
        def __init__(self, work: Work, at_a_time: int) -> None:
            chosen.append(at_a_time)
            super().__init__(work, at_a_time)

    monkeypatch.setattr(this_machine, "Processes", Processes)
    monkeypatch.setattr(this_machine, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(this_machine, "cores", lambda: cores)
    assert run_cells([], Work(Path("runs"))) == {}
    assert chosen == [jobs]
