"""``record.json``: written last, so that a run is finished exactly when it is there, and read with its hash checked."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.config.yaml_files import MOST_BYTES, read_mapping
from benchmark.errors import ConfigurationError
from benchmark.files import json_bytes, parse_json, read_regular, reason, write_bytes
from benchmark.records.hashes import canonical, config_hash
from benchmark.records.metrics_table import readable, write_parquet
from benchmark.records.predictions import CLASSES, PREDICTIONS, by_class, classes_parquet_of, parse_predictions
from benchmark.records.record import RunRecord, parse_record
from benchmark.records.subgroups import SUBGROUPS
from benchmark.records.summary import summarize

if TYPE_CHECKING:  # pandas loads slowly; `benchmark --help` must not wait for it
    import pandas as pd


SCHEMA = 1
FILES = ("config.yaml", "manifest.json", "metrics.parquet")
MORE_FILES = (PREDICTIONS, CLASSES)
"""Files of runs that keep images."""
OPTIONAL_FILES = (*MORE_FILES, SUBGROUPS)
"""Files that some runs have; a copy of a run may lack them."""

#: Bytes that are read at most of each file of a run.
LARGEST = {
    "config.yaml": MOST_BYTES,
    "manifest.json": 2**28,
    "metrics.parquet": 2**30,
    "partition.json": 2**26,
    PREDICTIONS: 2**32,
    CLASSES: 2**28,
    SUBGROUPS: 2**28,
    "record.json": 2**26,
}


def is_finished(run_dir: str | Path) -> bool:
    """Return whether the run wrote its record; a run that was killed, failed or is still running has none."""
    return (Path(run_dir) / "record.json").is_file()


def write_record(
    run_dir: str | Path, record: RunRecord, metrics: "pd.DataFrame", predictions: bool = False
) -> RunRecord:
    """Finish a run: write ``metrics.parquet``, then ``record.json`` with summary and hashes; return what was written.

    ``config.yaml`` and ``manifest.json`` must be in the directory already; ``config_hash``, ``summary`` and ``files``
    of the given record are computed here.

    Args:
        run_dir: where.
        record: what is known of the run.
        metrics: the long table.
        predictions: the run keeps its images: ``predictions.parquet``, where any was scored, belongs to it, and
            ``classes.parquet`` is made of it; so does ``subgroups.parquet``, where it is there.

    Raises:
        ConfigurationError: one of the two files is missing or unreadable, or the record would be none that can be read.
        ValueError: a malformed metrics table, or names, sizes and clients that do not fit each other.
    """
    folder = Path(run_dir)
    if len(record.client_names) != len(record.test_sizes):
        raise ValueError(f"{len(record.client_names)} client names, {len(record.test_sizes)} test sizes")
    for name in ("config.yaml", "manifest.json"):
        if not (folder / name).is_file():
            raise ConfigurationError(
                f"{folder / name} is missing: a run directory holds it before its record is written"
            )
    configuration = config_hash(read_mapping(folder / "config.yaml"))
    summary = summarize(metrics, record.test_sizes, complete=record.deployed is None)
    write_parquet(folder / "metrics.parquet", metrics)
    files: tuple[str, ...] = FILES
    if predictions and (folder / PREDICTIONS).is_file():
        with readable(folder / PREDICTIONS, "table of predictions"):
            kept = parse_predictions(read_regular(folder / PREDICTIONS, LARGEST[PREDICTIONS]))
        write_bytes(folder / CLASSES, classes_parquet_of(by_class(kept)))
        files += tuple(name for name in OPTIONAL_FILES if (folder / name).is_file())
    full = dataclasses.replace(
        record,
        config_hash=configuration,
        summary=summary,
        files={name: file_entry((folder / name).read_bytes()) for name in files},
    )
    # Through JSON, so that the hash is of what a reader will see (tuples become lists).
    content = dataclasses.asdict(full)
    for name in ("own_metrics", "deployed", "trained"):  # which older records have not
        if content[name] is None:
            del content[name]
    try:
        payload = json.loads(json.dumps({"schema": SCHEMA, **content}, allow_nan=False))
        checked = parse_record(canonical(payload))
    except ValueError as error:  # before a file of this name makes the run a finished one
        then = f", then `benchmark resume {folder}` ends the run" if record.deployed is None else ""
        raise ConfigurationError(
            f"{folder}: no record is written, as it could not be read again ({error}); mend what gives this value{then}"
        ) from error
    payload["record_sha256"] = hashlib.sha256(canonical(payload)).hexdigest()
    write_bytes(folder / "record.json", json_bytes(payload))
    return checked


def read_record(run_dir: str | Path) -> RunRecord:
    """Read and check ``record.json``: its form and its own hash.

    The files beside it are not looked at (:func:`benchmark.records.stored_run.verify_record`).

    Raises:
        ConfigurationError: no record (the run is not finished), half-written, changed by hand, or of another form.
    """
    path = Path(run_dir) / "record.json"
    try:
        payload = parse_json(read_regular(path, LARGEST["record.json"]))
        expected = payload.pop("record_sha256", None) if isinstance(payload, dict) else None
        content = canonical(payload)
    except (FileNotFoundError, NotADirectoryError):
        if path.with_name("config.yaml").is_file():
            why = f"the run is not finished; if nobody runs it, `benchmark resume {run_dir}` goes on with it"
        else:
            why = "it is not a run directory" if path.parent.is_dir() else "there is no such directory"
        raise ConfigurationError(f"{run_dir} has no record.json: {why}") from None
    except (OSError, ValueError, RecursionError) as error:
        said = f"{path} is not a readable record ({reason(error)}); remove it and run again"
        raise ConfigurationError(said) from error
    if not isinstance(payload, dict) or payload.get("schema") != SCHEMA:
        found = payload.get("schema") if isinstance(payload, dict) else None
        raise ConfigurationError(f"{path} has schema {found!r}, expected {SCHEMA}; run again with this version")
    if expected != hashlib.sha256(content).hexdigest():
        raise ConfigurationError(f"{path} was changed after it was written (its hash does not fit); run again")
    try:
        return parse_record(content)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}; run again") from error


def file_entry(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
