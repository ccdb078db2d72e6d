"""Tables that cannot be made as they are asked for, and commands that have nothing to show for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from refusal import refused

import benchmark.run.cli  # noqa: F401  (slow: not part of the time within which bad input is answered)
from benchmark.cells import this_machine
from benchmark.commands import main
from benchmark.errors import ConfigurationError
from benchmark.tables import run_table as tables
from benchmark.tables.readings import Readable

ROOT = Path(__file__).resolve().parents[2]
Capsys = pytest.CaptureFixture[str]


def table(**changes: Any) -> dict[str, Any]:
    group = {"name": "digits", "label": "Digits", "columns": [{"statistic": "average"}]}
    row = {"label": "A", "name": "a", "point": "server", "configs": ["a.yaml"]}
    preset = {"seeds": [0], "data": [group | changes.pop("group", {})]} | changes.pop("preset", {})
    return {"title": "T", "rows": [row | changes.pop("row", {})], "presets": {"demo": preset}} | changes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("name: a\n")

    def no_runs(*_: Any) -> None:
        pytest.fail("something ran")

    monkeypatch.setattr(tables, "run_cells", no_runs)
    monkeypatch.setattr(this_machine, "start_imports", lambda _: None)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (table(rows=[]), "a table needs at least one row"),
        (table(presets={}), "a table needs at least one row and one preset"),
        (table(preset={"seeds": []}), "at least one seed"),
        (table(preset={"seeds": [0, 0]}), "different integers from 0 to 4294967295, got [0, 0]"),
        (table(preset={"seeds": [-1]}), "different integers from 0 to 4294967295, got [-1]"),
        (table(preset={"seeds": [2**32]}), "different integers from 0 to 4294967295, got [4294967296]"),
        (table(preset={"data": []}), "at least one data group"),
        (
            table(group={"columns": [{"split": "new"}]}, row={"point": "local"}),
            "preset demo, Digits: clients that never train are scored at the point server alone, and the row A is read "
            "at local, too",
        ),
        (
            table(preset={"split": "new"}, row={"also": {"trained": "local"}}),
            "and the row A is read at local, too",
        ),
        (
            table(preset={"split": "val"}, summary="best_on_test"),
            "preset demo, Digits: the best round is one on test images, and the split val is read",
        ),
        (
            table(group={"columns": [{"statistic": "pooled", "split": "novel"}]}),
            "preset demo, Digits: accuracy on test images alone is pooled, and sensitivity,",
        ),
        (
            table(group={"columns": [{"statistic": "pooled", "metric": "macro_f1"}]}),
            "preset demo, Digits: accuracy on test images alone is pooled, and sensitivity,",
        ),
        (table(group={"data": ["sources/mars"]}), "digits names 'sources/mars'; there is no configs/sources/mars.yaml"),
    ],
)
def test_a_table_without_sense_is_refused(folder: Path, content: Any, words: str, capsys: Capsys) -> None:
    Path("t.yaml").write_text(yaml.safe_dump(content))
    line = refused(capsys, main, ["table", "t.yaml"])
    assert words in line
    assert "t.yaml" in line


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "include: a.yaml\n", "a.yaml includes a.yaml, in which it lies itself"),
        ("a.yaml", "model: &m {lr: 1, deeper: *m}\n", "the alias *m lies in what it stands for"),
        ("a.yaml", "lr: 1\nlr: 5\n", "the key 'lr' stands there twice"),
        ("a.yaml", "x: " + "[" * 60 + "]" * 60, "more than 40 mappings and lists inside each other"),
        ("t.yaml", "title: T\ntitle: U\n", "the key 'title' stands there twice"),
        ("t.yaml", "", "t.yaml holds nothing"),
    ],
)
def test_a_config_without_end_or_with_two_meanings_is_refused(
    folder: Path, name: str, text: str, words: str, capsys: Capsys
) -> None:
    Path("t.yaml").write_text(yaml.safe_dump(table()))
    Path(name).write_text(text)
    assert words in refused(capsys, main, ["table", "t.yaml"])


@pytest.mark.parametrize("seeds", [["0", "0"], ["-1"], ["4294967296"]])
def test_seeds_on_the_command_line_are_checked_alike(folder: Path, seeds: list[str], capsys: Capsys) -> None:
    Path("t.yaml").write_text(yaml.safe_dump(table()))
    assert "different integers from 0 to 4294967295" in refused(capsys, main, ["table", "t.yaml", "--seeds", *seeds])


HEADTUNE = {"configs": [str(ROOT / "configs" / "headtune_digits.yaml")], "label": "Head-Tune"}


@pytest.mark.parametrize(
    ("row", "group", "words"),
    [
        ({"point": "local"}, {}, "row Head-Tune, Digits: HeadTune has no point 'local'; it has server"),
        (
            {"point": "server"},
            {"columns": [{"statistic": "average", "split": "val"}]},
            "row Head-Tune, Digits: HeadTune has no split 'val'; it has test",
        ),
        (
            {"point": "server"},
            {"columns": [{"statistic": "average", "split": "moon"}]},
            "row Head-Tune, Digits: HeadTune has no split 'moon'; it has test",
        ),
        (
            {"point": "server"},
            {"columns": [{"client": "moon"}]},
            "row Head-Tune, Digits: there is no client 'moon'; there are ",
        ),
    ],
    ids=["point", "val", "split", "client"],
)
def test_what_a_method_does_not_have_is_refused_before_anything_runs(
    folder: Path,
    row: dict[str, Any],
    group: dict[str, Any],
    words: str,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)  # the configuration names others beside it
    path = folder / "t.yaml"
    path.write_text(yaml.safe_dump(table(row=HEADTUNE | row, group=group)))
    assert words in refused(capsys, main, ["table", str(path)])


def test_each_group_of_data_must_ask_for_the_point_that_is_read(
    folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    first = table()["presets"]["demo"]["data"][0] | {"overrides": ["--data.evaluate_local=true"]}
    second = {**first, "name": "others", "label": "Others", "overrides": []}
    path = folder / "t.yaml"
    path.write_text(yaml.safe_dump(table(row=HEADTUNE | {"point": "local"}, preset={"data": [first, second]})))
    line = refused(capsys, main, ["table", str(path)])
    assert "row Head-Tune, Others: HeadTune has no point 'local'; it has server" in line


def test_what_a_finished_run_does_not_have_is_refused_by_name() -> None:
    there = Readable("FedVPT", ("server",), ("test", "novel"), ("amazon", "dslr"))
    there.check("server", "novel", "dslr", "row A")
    there.check("server", "test", None, "row A")
    for asked, missing in (
        (("local", "test", None), "no point 'local'"),
        (("server", "val", None), "no split 'val'"),
        (("server", "test", "caltech"), "no client 'caltech'"),
    ):
        with pytest.raises(ConfigurationError, match=f"^row A: .*{missing}"):
            there.check(*asked, "row A")


@pytest.mark.parametrize("command", [["show", "RUN"], ["verify", "RUN"], ["report", "page.html"], ["--help"]])
def test_commands_work_where_output_is_ascii(tmp_path: Path, command: list[str]) -> None:
    run = next((ROOT / "results" / "runs").glob("*-digits-s0-*"))
    (tmp_path / "results" / "runs").mkdir(parents=True)
    shutil.copytree(run, tmp_path / "results" / "runs" / run.name)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    given = [str(run) if word == "RUN" else word for word in command]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmark.commands", *given], cwd=tmp_path, env=environment, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr.decode()
    ended.stdout.decode("ascii")
