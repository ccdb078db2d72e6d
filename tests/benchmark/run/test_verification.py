import math
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from federation import CONF
from finished_run import write_finished_run
from recorded_results import record_of

from benchmark.errors import ConfigurationError
from benchmark.records.metrics_table import COLUMNS
from benchmark.run.cli import main
from benchmark.run.verification import check_run, rerun, resolved_differences

# A "run" that writes the record of another accuracy.
AGAIN = """
import pathlib, shutil, sys
run_dir = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
assert "--ckpt_path=null" in sys.argv and "--trainer.logger=false" in sys.argv
if pathlib.Path("again").exists():
    shutil.copytree("again", run_dir)
else:
    sys.exit("error: no data under there")
"""


def write_run(
    folder: Path, accuracy: float = 0.5, manifest: str = "abc", up: float = 40.0, extra: bool = False, local: int = 0
) -> Path:
    rows = [(1, client, "server", "test", "accuracy", accuracy - 0.25 * client) for client in (0, 1)]
    rows += [(1, client, "server", "test", "loss", math.inf) for client in (0, 1)]  # as of a run that diverged
    rows += [(1, 0, "local", "train", "loss", 1.0)] if extra else []
    rows += [(1, client, "local", "test", "accuracy", 0.5) for client in range(local)]
    record = record_of(
        "ab",
        0,
        manifest_hash="",
        environment={"python": "3.9.1", "versions": {"torch": "0.1"}},
        rounds=1,
        rounds_trained=1,
        communication={"up_bytes": up, "down_bytes": 80.0, "up_floats": 10.0, "down_floats": 20.0},
        seconds={"total": 30.0, "training": 2.0, "evaluation": 1.0},
    )
    write_finished_run(folder, record, pd.DataFrame(rows, columns=list(COLUMNS)), algorithm=manifest)
    return folder


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [sys.executable, "-c", AGAIN]


def test_a_record_that_counts_initial_models_among_local_ones_is_named(tmp_path: Path) -> None:
    """Earlier versions did so; of a record without reports of training nobody can tell."""
    remarks = {local: check_run(write_run(tmp_path / str(local), extra=True, local=local))[1] for local in (1, 2)}
    said = [remark for remark in remarks[2] if "point 'local'" in remark]
    assert said == [
        f"{tmp_path / '2'}: 1 clients have never trained, and its averages at the point 'local' count their initial "
        "model; run it again for averages of local models alone"
    ]
    silent = [*remarks[1], *check_run(write_run(tmp_path / "unknown", local=2))[1]]
    assert not [remark for remark in silent if "point 'local'" in remark]


def test_run_again_the_same_or_not(tmp_path: Path, program: list[str]) -> None:
    first = write_run(tmp_path / "first")
    assert rerun(first, program=program) == [f"{first} does not run any more: error: no data under there"]
    again = write_run(tmp_path / "again", extra=True)  # a number that was not recorded then is no difference
    assert rerun(first, program=program) == []
    for change, message in [
        (
            {"accuracy": 0.75},
            "2 of 4 numbers differ, most accuracy of client 0 on test (server, round 1): 0.5 then, 0.75",
        ),
        ({"manifest": "abd"}, "the partition is another one"),
        ({"up": 41.0}, "the clients send"),
    ]:
        for entry in again.iterdir():
            entry.unlink()
        again.rmdir()
        write_run(again, **change)  # type: ignore[arg-type]
        (said,) = rerun(first, program=program)
        assert message in said
    (again / "metrics.parquet").write_bytes((first / "metrics.parquet").read_bytes())
    with pytest.raises(ConfigurationError, match=r"none has no record\.json: there is no such directory"):
        rerun(tmp_path / "none", program=program)


def test_versions_are_remarks_and_long_runs_are_not_repeated(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first")
    problems, remarks = check_run(first, rerun_seconds=29.0)
    assert problems == []
    assert "python 3.9.1, now 3." in remarks[0]
    assert "torch 0.1, now " in remarks[0]
    assert remarks[1] == f"{first}: not run again, it took 30 s"
    (first / "config.yaml").write_text("seed_everything: 1\n")
    problems, remarks = check_run(first, resolve=True, rerun_seconds=100.0)
    assert [remarks, len(problems)] == [[], 1]
    assert "config.yaml was changed after the run" in problems[0]


@pytest.fixture
def real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(CONF.parents[1])
    monkeypatch.setenv("PYTHONPATH", f"{CONF.parents[1]}:{CONF.parent}")
    configs = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "FedVPT.yaml")]
    options = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    main(["fit", *configs, *options, "--run_dir", str(tmp_path / "run")])
    return tmp_path / "run"


@pytest.mark.slow
def test_a_real_run_repeats_itself(real_run: Path) -> None:
    assert check_run(real_run, rerun_seconds=1000.0) == ([], [f"{real_run}: run again, the same metrics bit for bit"])


def test_a_configuration_that_resolves_to_itself_or_not(real_run: Path) -> None:
    assert check_run(real_run, resolve=True) == ([], [])
    config = yaml.safe_load((real_run / "config.yaml").read_text())
    del config["model"]["init_args"]["num_prompts"]
    (real_run / "config.yaml").write_text(yaml.safe_dump(config))
    problems, remarks = resolved_differences(real_run)
    assert problems == []
    assert "new arguments since: model.init_args.num_prompts (here " in remarks[0]
    config["model"]["init_args"]["colour"] = "red"
    (real_run / "config.yaml").write_text(yaml.safe_dump(config))
    ((problem,), _) = resolved_differences(real_run)
    assert "is not accepted any more" in problem
    assert "colour" in problem
