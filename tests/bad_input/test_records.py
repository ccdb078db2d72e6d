"""Records, and the files beside them: damaged, edited, edited with all hashes made anew."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from finished_run import write_finished_run
from recorded_results import record_of
from refusal import refused, within

from benchmark.commands import main
from benchmark.records.hashes import canonical
from benchmark.records.metrics_table import COLUMNS

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, of seeds 0 and 1."""
    folder = tmp_path_factory.mktemp("records")
    for seed, name in ((0, "a"), (1, "b")):
        rows = [(r, c, "server", "test", "accuracy", 0.2 * r + 0.1 * c + 0.1 * seed) for r in (0, 1, 2) for c in (0, 1)]
        record = record_of(
            ("left", "right"),
            seed,
            dataset="DigitDomains",
            test_sizes=(10, 20),
            manifest_hash="",
            environment={"python": "3.11.7", "versions": {"torch": "2.15.0"}},
            images_sha256="1234",
        )
        metrics = pd.DataFrame(rows, columns=list(COLUMNS))
        write_finished_run(folder / "results" / "runs" / name, record, metrics, images_sha256="1234")
    (folder / "results" / "tables").mkdir()
    return folder


@pytest.fixture
def run(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first of the two, in a copy of the folder that is entered."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("results/runs/a")


def rewritten(run: Path, **changes: Any) -> None:
    """Change fields of the record and make its own hash anew, as a deceiver would."""
    path = run / "record.json"
    payload = json.loads(path.read_text()) | changes
    del payload["record_sha256"]
    payload["record_sha256"] = hashlib.sha256(canonical(payload)).hexdigest()
    path.write_text(json.dumps(payload))


def rehashed(run: Path, name: str, content: bytes) -> None:
    """Change a file and make its hash in the record anew."""
    (run / name).write_bytes(content)
    files = json.loads((run / "record.json").read_text())["files"]
    files[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    rewritten(run, files=files)


def deep(run: Path) -> None:
    (run / "record.json").write_text("[" * 100_000 + "]" * 100_000)


def statistics(average: float) -> dict[str, Any]:
    return {"clients": 2, "last": {"average": average, "round": 2}, "last10": {"average": average, "rounds": 2}}


UNREADABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "deep JSON": (deep, "record.json is not a readable record (nested too deeply)"),
    "no JSON": (lambda run: (run / "record.json").write_text("{") and None, "not a readable record"),
    "summary of wrong kinds": (lambda run: rewritten(run, summary={"server": 3}), "summary.server ("),
    "summary deeper of wrong kinds": (
        lambda run: rewritten(run, summary={"server": {"test": {"accuracy": 3}}}),
        "summary.server.test.accuracy (",
    ),
    "summary emptied": (lambda run: rewritten(run, summary={}), "summary ("),
    "environment a text": (lambda run: rewritten(run, environment="my machine"), "environment ("),
    "versions a list": (lambda run: rewritten(run, environment={"versions": ["torch"]}), "environment.versions ("),
    "test_sizes shorter": (lambda run: rewritten(run, test_sizes=[10]), "test_sizes (1 of them) and client_names (2)"),
    "trained of others": (lambda run: rewritten(run, trained=[True]), "trained (1 of them) and client_names (2)"),
    "trained a number": (lambda run: rewritten(run, trained=[1, 0]), "trained.0 ("),
    "test_sizes negative": (lambda run: rewritten(run, test_sizes=[10, -1]), "test_sizes.1 ("),
    "seconds negative": (
        lambda run: rewritten(run, seconds={"total": -1.0, "training": 1.0, "evaluation": 1.0}),
        "seconds.total (",
    ),
    "NaN in seconds": (
        lambda run: rewritten(run, seconds={"total": float("nan"), "training": 1.0, "evaluation": 1.0}),
        "NaN is no number of JSON",
    ),
    "seed a text": (lambda run: rewritten(run, seed="0"), "seed ("),
    "an average beyond everything": (
        lambda run: rewritten(run, summary={"server": {"test": {"accuracy": statistics(1e307)}}}),
        "summary.server.test.accuracy.last.average (",
    ),
    "bytes beyond everything": (
        lambda run: rewritten(
            run, communication=dict.fromkeys(("up_bytes", "down_bytes", "up_floats", "down_floats"), 1e308)
        ),
        "communication.down_bytes (",
    ),
    "memory beyond everything": (lambda run: rewritten(run, peak_memory_bytes=10**400), "peak_memory_bytes ("),
    "method empty": (lambda run: rewritten(run, method=""), "method ("),
    "unknown field": (lambda run: rewritten(run, colour="red"), "colour ("),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_record_of_another_form_is_refused_in_one_line(run: Path, case: str, capsys: Capsys) -> None:
    spoil, words = UNREADABLE[case]
    spoil(run)
    for command in ("show", "keep"):
        line = refused(capsys, main, [command, str(run)])
        assert words in line
        assert "record.json" in line
    with within(10):
        assert main(["verify", str(run)]) == 1
    printed = capsys.readouterr().out
    assert words in printed
    assert printed.count("\n") == 1
    assert words in left_out_of_the_report(capsys)


def left_out_of_the_report(capsys: Capsys) -> str:
    """Make the report and return its line on the one damaged run; check that the other run is on the page."""
    capsys.readouterr()
    with within(10):
        assert main(["report", "page.html"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("left out: results/runs/a")
    page = Path("page.html").read_text()
    assert "Damaged, and left out of this page:" in page
    assert "<p>1 run, 1 method" in page
    return said


# What does not follow from the other files can be edited by whoever makes the hash anew: a hash is no signature.
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "FedPer"}, "config.yaml does not give the record's method: 'FedAvg' there, 'FedPer' in the record"),
        ({"dataset": "CIFAR10"}, "config.yaml does not give the record's dataset: 'DigitDomains' there"),
        ({"seed": 7}, "config.yaml does not give the record's seed: 0 there, 7 in the record"),
        ({"rounds": 9}, "config.yaml does not give the record's rounds: 2 there, 9 in the record"),
        ({"rounds_trained": 1}, "metrics.parquet does not give the record's rounds_trained"),
        ({"client_names": ["left", "middle"]}, "manifest.json does not give the record's client_names"),
        ({"test_sizes": [10, 30]}, "manifest.json does not give the record's test_sizes"),
        ({"manifest_hash": "abc"}, "manifest.json does not give the record's manifest_hash"),
        ({"images_sha256": "abc"}, "manifest.json does not give the record's images_sha256"),
        ({"config_hash": "abc"}, "config.yaml does not give the record's config_hash"),
        ({"seconds": {"total": 1.0, "training": 0.5, "evaluation": 0.5}}, None),
        ({"communication": {"up_bytes": 1.0, "down_bytes": 1.0, "up_floats": 1.0, "down_floats": 1.0}}, None),
        (
            {
                "communication": dict.fromkeys(
                    ("down_bytes", "down_floats", "end_bytes", "end_floats", "up_bytes", "up_floats"), 1.0
                )
            },
            None,
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_verify_compares_every_field_that_follows_from_the_files(
    run: Path, changes: dict[str, Any], words: str | None, capsys: Capsys
) -> None:
    rewritten(run, **changes)
    assert main(["verify", str(run)]) == (1 if words else 0)
    assert (words or f"{run}: ok") in capsys.readouterr().out


def bomb() -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines).encode()


def without_rows(run: Path) -> bytes:
    table = pd.read_parquet(run / "metrics.parquet")
    table[table["client"] == 0].to_parquet(run / "fewer.parquet")
    return (run / "fewer.parquet").read_bytes()


def of_dates(run: Path) -> bytes:
    table = pd.read_parquet(run / "metrics.parquet")
    table.assign(value=pd.Timestamp("2026-11-26")).to_parquet(run / "other.parquet")
    return (run / "other.parquet").read_bytes()


def of_late_rounds(run: Path) -> bytes:
    table = pd.read_parquet(run / "metrics.parquet")
    table.assign(round=table["round"].astype("int64") + 2**32).to_parquet(run / "other.parquet")
    return (run / "other.parquet").read_bytes()


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "metrics edited": (
        lambda run: (run / "metrics.parquet").write_bytes(without_rows(run)),
        "metrics.parquet was changed after the run",
    ),
    "metrics truncated": (lambda run: (run / "metrics.parquet").write_bytes(b"PAR1"), "was changed after the run"),
    "metrics missing": (lambda run: (run / "metrics.parquet").unlink(), "metrics.parquet is missing"),
    "metrics a folder": (
        lambda run: ((run / "metrics.parquet").unlink(), (run / "metrics.parquet").mkdir()),
        "metrics.parquet cannot be read: Is a directory",
    ),
    "metrics text, hash made anew": (
        lambda run: rehashed(run, "metrics.parquet", b"text!"),
        "metrics.parquet is not a readable metrics table",
    ),
    "rows dropped, hash made anew": (
        lambda run: rehashed(run, "metrics.parquet", without_rows(run)),
        "every client's test images are evaluated, some are missing",
    ),
    "config edited": (
        lambda run: (run / "config.yaml").write_text("seed_everything: 5\n"),
        "was changed after the run",
    ),
    "config an alias bomb, hash made anew": (
        lambda run: rehashed(run, "config.yaml", bomb()),
        "aliases stand for more",
    ),
    "config a list, hash made anew": (lambda run: rehashed(run, "config.yaml", b"- 1\n"), "not a mapping"),
    "config of wrong kinds, hash made anew": (
        lambda run: rehashed(run, "config.yaml", b"data: {partition: [1], source: 3}\n"),
        "is no configuration of a run",
    ),
    "config with a date, hash made anew": (
        lambda run: rehashed(run, "config.yaml", b"seed_everything: 2026-11-26\n"),
        "holds a value that is no configuration's",
    ),
    "config whose trainer is a number, hash made anew": (
        lambda run: rehashed(run, "config.yaml", b"trainer: 5\n"),
        "is no configuration of a run",
    ),
    "metrics of other kinds, hash made anew": (
        lambda run: rehashed(run, "metrics.parquet", of_dates(run)),
        "metrics.parquet is not a readable metrics table",
    ),
    "metrics of rounds beyond everything, hash made anew": (
        lambda run: rehashed(run, "metrics.parquet", of_late_rounds(run)),
        "a round or a client has a number of 2^31 or more",
    ),
    "config not UTF-8, hash made anew": (lambda run: rehashed(run, "config.yaml", b"\xff\xfe"), "is no text in UTF-8"),
    "manifest edited": (
        lambda run: (run / "manifest.json").write_text("{}"),
        "manifest.json was changed after the run",
    ),
    "manifest deep, hash made anew": (
        lambda run: rehashed(run, "manifest.json", b"[" * 100_000 + b"]" * 100_000),
        "manifest.json is no partition of clients",
    ),
    "manifest a list, hash made anew": (lambda run: rehashed(run, "manifest.json", b"[]"), "no partition of clients"),
    "record of another run": (
        lambda run: shutil.copy("results/runs/b/record.json", run / "record.json"),
        "was changed after the run",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_run_is_left_out_of_the_report_and_does_not_verify(run: Path, case: str, capsys: Capsys) -> None:
    spoil, words = DAMAGED[case]
    spoil(run)
    assert words in left_out_of_the_report(capsys)
    with within(10):
        assert main(["verify", str(run)]) == 1
    assert "does not give" in (said := capsys.readouterr().out) or words in said
    refused(capsys, main, ["keep", str(run)])


def test_a_record_whose_numbers_cannot_be_made_again_does_not_verify(run: Path, capsys: Capsys) -> None:
    rewritten(run, test_sizes=[0, 0])
    assert main(["verify", str(run)]) == 1
    assert "results/runs/a: the record's numbers cannot be made of its files" in capsys.readouterr().out


def test_a_summary_without_its_round_is_shown(run: Path, capsys: Capsys) -> None:
    short = {"clients": 2, "last": {"average": 0.5}, "last10": {"average": 0.5}}
    rewritten(run, summary={"server": {"test": {"accuracy": short}}})
    assert main(["show", str(run)]) == 0
    assert "50.00" in capsys.readouterr().out


def test_names_do_not_steer_the_terminal(run: Path, capsys: Capsys) -> None:
    rewritten(run, device="cpu\x1b[2J", setting="rooms\x07")
    assert main(["show", str(run)]) == 0
    main(["verify", str(run)])
    shown = capsys.readouterr().out
    assert "on cpu\N{REPLACEMENT CHARACTER}[2J" in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown


@pytest.mark.parametrize("kind", ["folder", "dangling", "caption"])
def test_a_figure_that_cannot_be_read_is_left_out(run: Path, kind: str, capsys: Capsys) -> None:
    figures = Path("results/figures")
    figures.mkdir()
    if kind == "folder":
        (figures / "x.png").mkdir()
    elif kind == "dangling":
        (figures / "x.png").symlink_to("gone.png")
    else:
        (figures / "x.png").write_bytes(b"png")
        (figures / "x.txt").write_bytes(b"\xff\xfe")
    assert main(["report", "page.html"]) == 1
    assert capsys.readouterr().err.startswith("left out: results/figures/x.png and its caption cannot be read")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/proc/x/page.html", "cannot be written to"),
        ("results", "cannot be written to"),
        ("results/runs/a/record.json/page.html", "cannot be written to"),
        ("a\0b", "no file can have this name (embedded null byte)"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    run: Path, place: str, said: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmark.report.page.read_runs", lambda folders: pytest.fail("work was begun"))
    assert said in refused(capsys, main, ["report", place])


def test_verify_without_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, main, ["verify"])
    assert "there are no runs in results/runs" in line
    assert "as in `benchmark verify runs/*`" in line
