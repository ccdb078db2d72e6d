"""Does a finished run's configuration still give the same run? By reading it again, and by running it again."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.config.overview import PROGRAM
from benchmark.config.yaml_files import read_mapping
from benchmark.errors import ConfigurationError
from benchmark.records.environment import other_versions
from benchmark.records.hashes import config_hash
from benchmark.records.record import RunRecord
from benchmark.records.record_file import is_finished, read_record
from benchmark.records.stored_run import read_metrics, stored_run, verify_record
from benchmark.run.command import resolved
from benchmark.run.data_folder import moved
from benchmark.run.differences import differences
from benchmark.run.resume import config_of

if TYPE_CHECKING:
    import pandas as pd


def resolved_differences(run_dir: str | Path) -> tuple[list[str], list[str]]:
    """Compare a run's ``config.yaml`` with the configuration that this version reads from it.

    A value that changed or is not accepted any more is a problem. An argument that was added since, with its default,
    is a remark. Nothing is trained or loaded.

    Returns:
        Problems and remarks, a line each.

    Raises:
        ConfigurationError: the file is not there, names a class that lies in the run directory, or a link in the
            directory leads elsewhere.
    """
    path = config_of(Path(run_dir))
    given = read_mapping(path)
    try:
        now = resolved(["--config", str(path)])
    except ConfigurationError as error:
        return [f"{path} is not accepted any more: {error}"], []
    if config_hash(now) == config_hash(given):
        return [], []
    changed = differences(_with_absent(given, now), now)
    new = [f"{key} (here {value!r})" for key, before, value in changed if before == ABSENT]
    problems = [f"{path}: {key} was {before!r}, is {value!r}" for key, before, value in changed if before != ABSENT]
    return problems, [f"{path}: new arguments since: {', '.join(new)}"] if new else []


ABSENT = "(absent)"


def _with_absent(before: Any, now: Any) -> Any:
    """The old configuration with :data:`ABSENT` where only the new one has a key, so that a new null is seen too."""
    if isinstance(before, dict) and isinstance(now, dict):
        old = {key: value for key, value in before.items() if key not in now}
        return old | {key: _with_absent(before[key], now[key]) if key in before else ABSENT for key in now}
    return before


def rerun(run_dir: str | Path, data_dir: str | Path | None = None, program: Sequence[str] = PROGRAM) -> list[str]:
    """Run a finished run's configuration again in a temporary folder; how the two differ, one sentence each.

    The same code on the same machine gives the same metrics bit for bit. Another processor, number of threads or
    library version may not; then the largest difference says how much that is.

    Args:
        run_dir: of the finished run; its ``config.yaml`` is what runs.
        data_dir: of the data sets, for a configuration that was run elsewhere.
        program: command in front of ``fit``.

    Raises:
        ConfigurationError: the run is not finished, its configuration names a class that lies in the run directory, or
            a link in the directory leads elsewhere.
    """
    folder = Path(run_dir)
    record = read_record(folder)
    config = config_of(folder)
    with tempfile.TemporaryDirectory(prefix="rerun-") as temporary:
        again = Path(temporary) / "run"
        command = [*program, "fit", "--config", str(config), "--run_dir", str(again)]
        command += ["--ckpt_path=null", "--trainer.logger=false"]
        elsewhere = moved(read_mapping(config), data_dir)
        command += [f"--{option}={value}" for option, value in elsewhere.items()]
        ended = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if ended.returncode or not is_finished(again):
            said = (ended.stderr.strip() or ended.stdout.strip() or "no output").splitlines()[-1]
            return [f"{folder} does not run any more: {said[:300]}"]
        return _other_run(folder, record, again)


def _other_run(folder: Path, record: RunRecord, again: Path) -> list[str]:
    found = read_record(again)
    if found.manifest_hash != record.manifest_hash:
        return [f"{folder}: run again, the partition is another one ({found.manifest_hash[:12]})"]
    if found.communication != record.communication:
        return [f"{folder}: run again, the clients send {found.communication}, before {record.communication}"]
    difference = _largest_difference(read_metrics(folder), read_metrics(again))
    return [] if difference is None else [f"{folder}: run again, {difference}"]


def _largest_difference(before: "pd.DataFrame", now: "pd.DataFrame") -> str | None:
    """The largest difference between two metrics tables in words; None where they are the same bit for bit.

    Numbers that only the new table has were not recorded at that time.
    """
    place = [name for name in before.columns if name != "value"]
    both = before.merge(now, on=place, how="left", suffixes=("_before", "_now"), indicator=True)
    missing = int((both["_merge"] != "both").sum())
    if missing:
        return f"{missing} of {len(both)} numbers are missing"
    gaps = (both["value_before"] - both["value_now"]).abs()
    same = both["value_before"] == both["value_now"]  # also infinite ones, whose gap is none
    gaps[same | (both["value_before"].isna() & both["value_now"].isna())] = 0.0
    if not (gaps != 0).any():
        return None
    row = both.iloc[int(gaps.fillna(float("inf")).to_numpy().argmax())]
    return (
        f"{int((gaps != 0).sum())} of {len(both)} numbers differ, most {row['metric']} of client {row['client']} on "
        f"{row['split']} ({row['point']}, round {row['round']}): {row['value_before']:.6g} then, "
        f"{row['value_now']:.6g} now"
    )


def check_run(
    run_dir: str | Path, resolve: bool = False, rerun_seconds: float | None = None, data_dir: str | Path | None = None
) -> tuple[list[str], list[str]]:
    """Problems and remarks of a run, one sentence each.

    Always: the record, its files, hashes and summary (problems), and other versions than the run's (a remark).

    Args:
        run_dir: of the finished run.
        resolve: whether its configuration is still accepted and the same.
        rerun_seconds: run it again if it took at most so long.
        data_dir: for the run again.
    """
    problems = verify_record(run_dir)
    if problems:
        return problems, []
    record = read_record(run_dir)
    versions = other_versions(record)
    remarks = [f"{run_dir}: other versions here: {'; '.join(versions)}"] if versions else []
    if untrained := stored_run(run_dir).untrained:
        remarks.append(
            f"{run_dir}: {len(untrained)} clients have never trained, and its averages at the point 'local' count "
            "their initial model; run it again for averages of local models alone"
        )
    try:
        if resolve:
            changed, new = resolved_differences(run_dir)
            problems += changed
            remarks += new
        if rerun_seconds is not None:
            if record.seconds["total"] > rerun_seconds:
                remarks.append(f"{run_dir}: not run again, it took {record.seconds['total']:.0f} s")
            else:
                found = rerun(run_dir, data_dir)
                problems += found
                remarks += [] if found else [f"{run_dir}: run again, the same metrics bit for bit"]
    except ConfigurationError as error:
        problems.append(str(error))
    return problems, remarks
