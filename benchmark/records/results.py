"""Run records: what one finished run leaves behind, and what is read from it.

A run directory holds

* ``config.yaml``: the resolved configuration,
* ``manifest.json``: the partition of the data over the clients,
* ``metrics.parquet``: the long table client x round x metric (see :data:`COLUMNS`); while the run goes on, a table of
  the same columns for each evaluated round in the folder ``metrics``,
* ``checkpoints/last.ckpt``: for resuming only,
* ``record.json``: everything else. It is written last and atomically, so that a run is finished exactly when this
  file is there.

The summaries live in ``record.json``, so that many runs can be compared without opening their tables.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import io
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from benchmark.errors import ConfigurationError
from benchmark.records.record import METRICS, POINTS, SPLITS, Environment, Git, RunRecord, parse_record
from benchmark.yaml_files import parse_yaml, read_mapping

if TYPE_CHECKING:  # pandas and NumPy load slowly; `benchmark --help` must not wait for them
    import numpy as np
    import pandas as pd

SCHEMA = 1
LOWER_IS_BETTER = ("loss",)
NAMED = {"point": POINTS, "split": SPLITS, "metric": METRICS}
COLUMNS = ("round", "client", *NAMED, "value")
"""Columns of ``metrics.parquet``: round int32 (0 is before any training), client int32 (index), point ("server": what
the server holds after the round plus the client's own state; "local": the client's state at the end of its local
training, before aggregation), split ("test": the client's own test images; "val"; "new": of clients that never train;
the further splits of base-to-novel partitions; "train": what local training reported), metric (those of
:data:`METRICS`, and for "train" what the method names), value float64 (accuracies are fractions, 0 to 1). A client
that was not evaluated in a round has no rows there; rows whose accuracy is NaN are dropped as such."""
FILES = ("config.yaml", "manifest.json", "metrics.parquet")
PARTS = "metrics"
"""Folder of the tables of a run that goes on, one for each evaluated round; where ``metrics.parquet`` is, it is the
whole table and they count for nothing."""
KEPT_MANIFEST_BYTES = 150_000

# A key of one of these names, at any depth of the configuration, cannot change a result.
RESULT_FREE_KEYS = frozenset(
    {
        "run_dir",
        "config",
        "ckpt_path",
        "logger",
        "default_root_dir",
        "enable_progress_bar",
        "enable_model_summary",
        "log_every_n_steps",
        "num_workers",
        "cohort_width",
        "data_dir",
        "root",
    }
)


# --- atomic writers -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file, so that it is there whole or not at all, also after a power cut.

    Raises:
        ConfigurationError: the file cannot be written: no space, no permission, its folder was removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    with replacing(path) as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically (temporary file in the same folder, fsync, ``os.replace``)."""
    _replace(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, keys sorted. NaN and infinity are refused: they are not JSON.

    Raises:
        ValueError: a number is not finite.
    """
    _replace(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def write_parquet(path: Path, metrics: "pd.DataFrame") -> None:
    """Write a metrics table atomically. The same rows give the same bytes, in whatever order they come.

    Raises:
        ValueError: not the columns, points, splits or metrics of :data:`COLUMNS`, or a row stands there twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _in_order(metrics)
    category = pa.dictionary(pa.int8(), pa.string())
    arrays = [
        pa.array(table["round"].to_numpy(), pa.int32()),
        pa.array(table["client"].to_numpy(), pa.int32()),
        *(
            pa.DictionaryArray.from_arrays(
                pa.array(table[column].cat.codes.to_numpy(), pa.int8()),
                pa.array(list(table[column].cat.categories), pa.string()),
            )
            for column in NAMED
        ),
        pa.array(table["value"].to_numpy(), pa.float64(), from_pandas=False),
    ]
    # No pandas metadata: it holds the pandas version.
    schema = pa.schema(list(zip(COLUMNS, (pa.int32(), pa.int32(), *[category] * 3, pa.float64()), strict=True)))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    _replace(path, sink.getvalue().to_pybytes())


def rows_sha256(metrics: "pd.DataFrame") -> str:
    """sha256 of a metrics table's rows, in whatever order they come and whichever library wrote them.

    Raises:
        ValueError: as :func:`write_parquet`.
    """
    table = _in_order(metrics)
    digest = hashlib.sha256()
    for name in COLUMNS:
        column = table[name]
        if name in NAMED:
            digest.update(canonical(list(column.cat.categories)))
            column = column.cat.codes
        digest.update(column.to_numpy().tobytes())
    return digest.hexdigest()


def _in_order(metrics: "pd.DataFrame") -> "pd.DataFrame":
    """The checked rows in the order of a file, and of the categories those that occur."""
    table = _checked(metrics).sort_values(list(COLUMNS[:-1]), ignore_index=True)
    for name in NAMED:
        table[name] = table[name].cat.remove_unused_categories()
    return table


def _checked(metrics: "pd.DataFrame") -> "pd.DataFrame":
    """The table with plain columns, names as categories in alphabetical order; what is refused: :func:`write_parquet`.

    A table can have millions of rows, so nothing here looks at them one by one.
    """
    import numpy as np
    import pandas as pd

    if sorted(metrics.columns) != sorted(COLUMNS):
        raise ValueError(f"a metrics table has the columns {', '.join(COLUMNS)}, got {', '.join(metrics.columns)}")
    table = metrics[list(COLUMNS)].astype({"round": "int32", "client": "int32", "value": "float64"})
    for column in NAMED:
        table[column] = pd.Categorical(table[column].astype("str"))
    of_training = table["split"] == "train"
    for column, names in NAMED.items():
        named = table[column][~of_training] if column == "metric" else table[column]
        unknown = sorted({str(name) for name in named.unique()} - set(names))
        if unknown:
            raise ValueError(f"{column} is one of {', '.join(names)}, got {', '.join(unknown)}")
    if len(table) and (table[["round", "client"]] < 0).any(axis=None):
        raise ValueError("rounds and clients are counted from 0, got a negative one")
    # Where a row belongs, as one number: a table has fewer than 2^63 places.
    place = table["round"].to_numpy("int64")
    for column in ("client", "point", "split"):
        codes = (table[column].cat.codes if column in NAMED else table[column]).to_numpy("int64")
        place = place * (codes.max(initial=0) + 1) + codes
    unknown_accuracy = (table["metric"] == "accuracy") & table["value"].isna()
    if unknown_accuracy.any():
        # An accuracy of 0 / 0: this client was not evaluated there, so it has no other score either.
        known = ~np.isin(place, place[unknown_accuracy])
        table, place = table[known].reset_index(drop=True), place[known]
    metric = table["metric"].cat.codes.to_numpy("int64")
    twice = pd.Series(place * (metric.max(initial=0) + 1) + metric).duplicated().to_numpy()
    if twice.any():
        row = table[twice].iloc[0]
        raise ValueError(f"there twice: {', '.join(f'{name} {row[name]}' for name in COLUMNS[:-1])}")
    return table


def _check_clients(table: "pd.DataFrame", sizes: Sequence[int]) -> None:
    """Refuse a table that speaks of clients that are not there, or leaves some out at the point "server".

    Raises:
        ValueError: as it says.
    """
    if len(table) and table["client"].max() >= len(sizes):
        raise ValueError(f"client {table['client'].max()} has values, but there are {len(sizes)} test sizes")
    everywhere = table[table["point"] == "server"].groupby(["split", "metric"], observed=True)
    for (split, _), part in everywhere:
        clients = set(part["client"])
        expected = {client for client, size in enumerate(sizes) if size} if split == "test" else clients
        if expected - clients or len(part) != part["round"].nunique() * len(clients):
            raise ValueError(f"at the point 'server' every client's {split} images are evaluated, some are missing")


# --- summaries ------------------------------------------------------------------------------------------------------


def _by_round(part: "pd.DataFrame", sizes: Sequence[int]) -> "tuple[np.ndarray, np.ma.MaskedArray]":
    """Rounds [R] and masked values [R, clients] of one point, split and metric.

    At the point "local" a client's value stands until it trains again; before its first time it is masked (and not
    NaN, which a measured loss can be). A client without images of the split is masked throughout.
    """
    import numpy as np

    rows = part.reset_index(drop=True)
    point = rows["point"].iloc[0]
    place = rows.assign(row=rows.index).pivot(index="round", columns="client", values="row").sort_index()
    if point == "local":
        place = place.ffill()
    where = place.reindex(columns=range(len(sizes))).to_numpy(dtype="float64")
    known = ~np.isnan(where)
    values = np.ma.masked_all(where.shape, dtype="float64")
    values[known] = rows["value"].to_numpy()[where[known].astype("int64")]
    return place.index.to_numpy(), values


def _statistics(values: "np.ma.MaskedArray", metric: str, sizes: "np.ndarray | None") -> "dict[str, np.ndarray]":
    """Per round [R] the statistics over clients of values [R, clients]; the largest is worst where less is better."""
    import numpy as np

    series: dict[str, list[float]] = {name: [] for name in ("average", "worst", "worst_decile", "std")}
    if sizes is not None:
        series["pooled"] = []
    for row in values:
        known = ~np.ma.getmaskarray(row)
        present = row.data[known]
        ordered = np.sort(present)[::-1] if metric in LOWER_IS_BETTER else np.sort(present)
        if np.isnan(present).any():  # a NaN says something: it is passed on, never sorted away
            ordered = np.full_like(ordered, math.nan)
        with np.errstate(invalid="ignore"):  # a loss can be infinite
            series["average"].append(float(present.mean()))
            series["worst"].append(float(ordered[0]))
            series["worst_decile"].append(float(ordered[: max(1, len(ordered) // 10)].mean()))
            series["std"].append(float(present.std(ddof=1)) if len(present) > 1 else math.nan)
        if sizes is not None:
            series["pooled"].append(float(np.average(present, weights=sizes[known])))
    return {name: np.asarray(column) for name, column in series.items()}


def _json_number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _at(series: "dict[str, np.ndarray]", index: int) -> dict[str, float | None]:
    return {name: _json_number(column[index]) for name, column in series.items()}


def _best(column: "np.ndarray", eligible: "np.ndarray", metric: str) -> int:
    """Index of the best round among the eligible ones, the first of equals; NaN is worst."""
    import numpy as np

    values = -column[eligible] if metric in LOWER_IS_BETTER else column[eligible]
    return int(eligible[np.argmax(np.where(np.isnan(values), -np.inf, values))])


def summarize(metrics: "pd.DataFrame", test_sizes: Sequence[int]) -> dict[str, Any]:
    """Summaries of a metrics table: ``summary[point][split][metric][which][statistic]``.

    Which:

    * ``last``: the last evaluated round (its number is ``round``);
    * ``last10``: the mean over the last ten evaluated rounds after training began (``rounds`` says how many there
      were); every statistic is taken per round and then averaged;
    * ``best_on_test``: the round with the best average over clients, after training began, chosen on the very test
      data it is reported on, hence optimistic; only for the split "test";
    * ``round0``: before any training, where it was evaluated.

    Statistics over clients: ``average`` (unweighted), ``worst`` client, ``worst_decile`` (mean of the worst tenth of
    the clients, rounded down, at least one), ``std`` (n - 1 in the denominator; None for one client) and, for test
    accuracy, ``pooled`` (total correct by total test images). In ``best_on_test``, ``pooled`` is its own best, of the
    round ``pooled_round``. A value that is not finite is None.

    Beside them stands ``clients``, how many clients the last round speaks of: at the point "local" a client's value
    stands until it trains again, and a client that never trained is left out.

    Source: protocols of pFedPT (pooled, best), pFedPG (average, last) and pFedBayesPT (average, worst, last ten).

    Raises:
        ValueError: a malformed table (see :func:`write_parquet`), or clients are missing at the point "server".
    """
    import numpy as np

    table = _checked(metrics)
    _check_clients(table, test_sizes)
    summary: dict[str, Any] = {}
    for (point, split, metric), part in table.groupby(list(NAMED), sort=True, observed=True):
        pool = split == "test" and metric == "accuracy"
        rounds, values = _by_round(part, test_sizes)
        series = _statistics(values, str(metric), np.asarray(test_sizes) if pool else None)
        known = (~np.ma.getmaskarray(values)).sum(axis=1)
        trained = np.flatnonzero(rounds > 0)
        trained = trained if len(trained) else np.arange(len(rounds))
        tail = trained[-10:]
        entry: dict[str, Any] = {
            "clients": int(known[-1]),
            "last": {"round": int(rounds[-1]), **_at(series, -1)},
            "last10": {
                "rounds": len(tail),
                **{name: _json_number(column[tail].mean()) for name, column in series.items()},
            },
        }
        if split == "test":
            # An early round that speaks of fewer clients is not compared with later ones.
            eligible = trained[known[trained] == known[-1]]
            index = _best(series["average"], eligible, str(metric))
            entry["best_on_test"] = {"round": int(rounds[index]), **_at(series, index)}
            if pool:
                index = _best(series["pooled"], eligible, str(metric))
                entry["best_on_test"] |= {
                    "pooled": _json_number(series["pooled"][index]),
                    "pooled_round": int(rounds[index]),
                }
        if rounds[0] == 0:
            entry["round0"] = _at(series, 0)
        summary.setdefault(str(point), {}).setdefault(str(split), {})[str(metric)] = entry
    return summary


def client_values(
    metrics: "pd.DataFrame", record: RunRecord, point: str, split: str, metric: str, which: str
) -> list[float]:
    """One value per client, [clients], that belongs to ``record.summary[point][split][metric][which]``.

    ``which`` is ``"last"``, ``"last10"`` or ``"best_on_test"`` (the round that is best for the average). NaN where a
    client has no value.

    Raises:
        ConfigurationError: the run was not evaluated at this point, on this split, or with this metric.
    """
    import numpy as np

    table = _checked(metrics)
    part = table[(table["point"] == point) & (table["split"] == split) & (table["metric"] == metric)]
    if not len(part):
        raise ConfigurationError(f"the run has no {metric} on {split} at the point '{point}'")
    rounds, values = _by_round(part, record.test_sizes)
    filled = np.ma.filled(values, np.nan)
    if which == "last":
        return [float(value) for value in filled[-1]]
    if which == "best_on_test":
        chosen = record.summary[point][split][metric][which]["round"]
        return [float(value) for value in filled[list(rounds).index(chosen)]]
    count = record.summary[point][split][metric]["last10"]["rounds"]
    return [float(value) for value in filled[-count:].mean(axis=0)]


def average_by_round(
    metrics: "pd.DataFrame", test_sizes: Sequence[int], point: str, split: str, metric: str
) -> "tuple[np.ndarray, dict[str, np.ndarray]]":
    """Evaluated rounds [R] and for each the statistics over clients of :func:`summarize`; empty if never evaluated."""
    import numpy as np

    table = _checked(metrics)
    part = table[(table["point"] == point) & (table["split"] == split) & (table["metric"] == metric)]
    if not len(part):
        return np.zeros(0, dtype=int), {}
    rounds, values = _by_round(part, test_sizes)
    return rounds, _statistics(values, metric, None)


# --- hashes and environment -----------------------------------------------------------------------------------------


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value that hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def manifest_hash(manifest: dict[str, Any]) -> str:
    """sha256 of a partition's manifest in a canonical spelling (hexadecimal); equal for equal partitions.

    ``images_sha256`` is left out: one split may be run on images of several sizes, and manifests of before have none.
    """
    return hashlib.sha256(canonical({name: v for name, v in manifest.items() if name != "images_sha256"})).hexdigest()


def config_hash(config: dict[str, Any]) -> str:
    """sha256 of a resolved configuration, without the keys that cannot change a result (:data:`RESULT_FREE_KEYS`).

    The rounds, the seed, the device and the precision stay in.
    """

    def kept(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): kept(entry) for key, entry in value.items() if key not in RESULT_FREE_KEYS}
        if isinstance(value, list | tuple):
            return [kept(entry) for entry in value]
        return value

    return hashlib.sha256(canonical(kept(config))).hexdigest()


def _git() -> Git:
    """Revision of the checkout this package runs from; both values None where it is not a checkout."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy inside someone else's checkout is not one
        revision = git("rev-parse", "HEAD")
        # Records and tables are written while runs go on; they do not make the code another one.
        dirty = bool(git("status", "--porcelain", "--", ":(top)", ":(top,exclude)results"))
    except (OSError, subprocess.SubprocessError):
        return {"revision": None, "dirty": None}
    return {"revision": revision, "dirty": dirty}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or (
        platform.processor() or platform.machine()
    )


def environment() -> Environment:
    """Where a run took place: ``git``, ``python``, ``versions``, ``platform`` and ``hardware``.

    ``git`` holds ``revision`` and ``dirty`` (changes outside ``results/``), both None outside a checkout; ``hardware``
    holds ``cpu``, ``cores`` (those this process may use) and ``gpus`` (names; empty before torch is imported).
    """
    torch = sys.modules.get("torch")
    gpus = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch is not None and torch.cuda.is_available()
        else []
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "git": _git(),
        "python": platform.python_version(),
        "versions": _versions(),
        "platform": platform.platform(),
        "hardware": {"cpu": _cpu_model(), "cores": cores, "gpus": gpus},
    }


def _versions() -> dict[str, str]:
    """Versions of the packages that can change a result."""
    versions: dict[str, str] = {}
    for package in (
        "federated-prompt-benchmark",
        "torch",
        "torchvision",
        "lightning",
        "timm",
        "open_clip_torch",
        "torchmetrics",
        "jsonargparse",
        "numpy",
        "pandas",
        "scikit-learn",
    ):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def other_versions(record: RunRecord) -> list[str]:
    """Where this machine's Python and packages differ from the run's: ``"torch 2.14.0, now 2.15.0"``."""
    then = {"python": record.environment.get("python"), **record.environment.get("versions", {})}
    now = {"python": platform.python_version(), **_versions()}
    return [
        f"{name} {then.get(name) or 'absent'}, now {now.get(name) or 'absent'}"
        for name in sorted(set(then) | set(now))
        if then.get(name) != now.get(name)
    ]


# --- records --------------------------------------------------------------------------------------------------------


def _file_entry(content: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


def is_finished(run_dir: str | Path) -> bool:
    """Whether the run wrote its record; a run that was killed, failed or still goes on has none."""
    return (Path(run_dir) / "record.json").is_file()


def write_record(run_dir: str | Path, record: RunRecord, metrics: "pd.DataFrame") -> RunRecord:
    """Finish a run: write ``metrics.parquet``, then ``record.json`` with summary and hashes; return what was written.

    ``config.yaml`` and ``manifest.json`` must be in the directory already; ``config_hash``, ``summary`` and ``files``
    of the given record are computed here.

    Raises:
        ConfigurationError: one of the two files is missing or unreadable.
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
    summary = summarize(metrics, record.test_sizes)
    write_parquet(folder / "metrics.parquet", metrics)
    full = dataclasses.replace(
        record,
        config_hash=configuration,
        summary=summary,
        files={name: _file_entry((folder / name).read_bytes()) for name in FILES},
    )
    # Through JSON, so that the hash is of what a reader will see (tuples become lists).
    payload = json.loads(json.dumps({"schema": SCHEMA, **dataclasses.asdict(full)}, allow_nan=False))
    payload["record_sha256"] = hashlib.sha256(canonical(payload)).hexdigest()
    write_json(folder / "record.json", payload)
    return read_record(folder)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _parse_json(content: bytes) -> Any:
    """A JSON value.

    Raises:
        ValueError: it is none, holds NaN or infinity, or is nested too deeply.
    """
    try:
        return json.loads(content, parse_constant=_not_json)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_record(run_dir: str | Path) -> RunRecord:
    """Read and check ``record.json`` (its form and its own hash, not the files beside it: :func:`verify_record`).

    Raises:
        ConfigurationError: no record (the run is not finished), half-written, changed by hand, or of another form.
    """
    path = Path(run_dir) / "record.json"
    try:
        payload = _parse_json(path.read_bytes())
        expected = payload.pop("record_sha256", None) if isinstance(payload, dict) else None
        content = canonical(payload)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigurationError(
            f"{run_dir} has no record.json: not a run directory, or the run is not finished"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a readable record ({error}); remove it and run again") from error
    if not isinstance(payload, dict) or payload.get("schema") != SCHEMA:
        found = payload.get("schema") if isinstance(payload, dict) else None
        raise ConfigurationError(f"{path} has schema {found!r}, expected {SCHEMA}; run again with this version")
    if expected != hashlib.sha256(content).hexdigest():
        raise ConfigurationError(f"{path} was changed after it was written (its hash does not fit); run again")
    try:
        return parse_record(content)
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}; run again") from error


class StoredRun:
    """A finished run as it lies in its directory. Each file is read once, and only as the record knows it.

    Args:
        run_dir: with ``record.json``.

    Raises:
        ConfigurationError: as :func:`read_record`; and where a file is asked for that is missing, is not the one that
            the run wrote (its hash does not fit the record), or is not of its form.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir)
        self.record = read_record(run_dir)
        self._contents: dict[str, bytes] = {}

    def content(self, name: str) -> bytes:
        """One of :data:`FILES`, with the hash that the record has of it."""
        if name not in self._contents:
            path = self.folder / name
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                raise ConfigurationError(f"{path} is missing") from None
            except OSError as error:
                raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
            if _file_entry(content) != self.record.files[name]:
                raise ConfigurationError(f"{path} was changed after the run (its hash does not fit the record)")
            self._contents[name] = content
        return self._contents[name]

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        path = self.folder / "config.yaml"
        try:
            config = parse_yaml(self.content("config.yaml").decode(), str(path))
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} is no text in UTF-8 (byte {error.start})") from error
        if not isinstance(config, dict):
            raise ConfigurationError(f"{path} is not a mapping of configuration keys")
        return config

    @functools.cached_property
    def metrics(self) -> "pd.DataFrame":
        """The long table, columns as in :data:`COLUMNS`; of every client that the record names, and of no other."""
        import pandas as pd

        with _readable(self.folder / "metrics.parquet"):
            table = _checked(pd.read_parquet(io.BytesIO(self.content("metrics.parquet"))))
            _check_clients(table, self.record.test_sizes)
        return table.astype(dict.fromkeys(NAMED, "str"))

    @functools.cached_property
    def partition(self) -> dict[str, Any] | None:
        """``manifest.json``, or the class counts that are kept of a large one; None where neither was kept."""
        paths = [self.folder / name for name in ("manifest.json", "partition.json")]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        try:
            manifest = _parse_json(self.content(path.name) if path.name in FILES else path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} is no partition of clients: it is not JSON ({error})") from error
        clients = manifest.get("clients") if isinstance(manifest, dict) else None
        if not isinstance(clients, list) or not all(isinstance(client, dict) for client in clients):
            raise ConfigurationError(f"{path} is no partition of clients: it holds no list of them")
        return dict(manifest)

    @functools.cached_property
    def problems(self) -> list[str]:
        """What does not fit together, one sentence each; see :func:`verify_record`."""
        problems: list[str] = []
        missing = self.record.files["manifest.json"]["bytes"] > KEPT_MANIFEST_BYTES
        for name in FILES:
            if name == "manifest.json" and missing and not (self.folder / name).is_file():
                continue
            try:
                self.content(name)
            except ConfigurationError as error:
                problems.append(str(error))
        if problems:
            return problems
        for compare in (self._of_config, self._of_partition, self._of_metrics):
            try:
                problems += [f"{self.folder / name} does not give the record's {what}" for name, what in compare()]
            except (ConfigurationError, ValueError) as error:
                problems.append(str(error))
        return problems

    def _of_config(self) -> Iterator[tuple[str, str]]:
        """File and field of what the configuration says otherwise than the record."""
        if config_hash(self.config) != self.record.config_hash:
            yield "config.yaml", "config_hash"
        said = {
            "seed": self.config.get("seed_everything"),
            "method": _class_name(self.config, "model"),
            "dataset": _class_name(self.config, "data", "source"),
            "rounds": _inner(self.config, "trainer").get("max_epochs"),
        }
        for name, value in said.items():
            if value is not None and value != getattr(self.record, name):
                yield "config.yaml", f"{name}: {value!r} there, {getattr(self.record, name)!r} in the record"

    def _of_partition(self) -> Iterator[tuple[str, str]]:
        partition = self.partition
        if partition is None:
            return
        if "manifest.json" in self._contents:
            path = "manifest.json"
            if manifest_hash(partition) != self.record.manifest_hash:
                yield path, "manifest_hash"
            if self.record.images_sha256 not in (None, partition.get("images_sha256")):
                yield path, "images_sha256"
        else:
            path = "partition.json"
            if partition.get("manifest_sha256") != self.record.files["manifest.json"]["sha256"]:
                yield path, "files (it is of another manifest)"
        clients = partition["clients"]
        if tuple(client.get("name") for client in clients) != self.record.client_names:
            yield path, "client_names"
            return
        for size, client in zip(self.record.test_sizes, clients, strict=True):
            counts = client.get("test_classes")
            # A client that never trains has its images in another split than "test".
            if not isinstance(counts, list) or not all(map(_is_number, counts)) or size not in (0, sum(counts)):
                yield path, "test_sizes"
                return

    def _of_metrics(self) -> Iterator[tuple[str, str]]:
        if not _same(summarize(self.metrics, self.record.test_sizes), self.record.summary):
            yield "metrics.parquet", "summary"
        if self.metrics["round"].max() > self.record.rounds_trained or self.record.rounds_trained > self.record.rounds:
            yield "metrics.parquet", "rounds_trained"


def _inner(config: Any, *keys: str) -> dict[str, Any]:
    """What stands under these keys; empty where that is no mapping."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _class_name(config: dict[str, Any], *keys: str) -> str | None:
    path = _inner(config, *keys).get("class_path")
    return path.rpartition(".")[2] if isinstance(path, str) else None


_STORED: dict[str, tuple[list[tuple[int, int, int] | None], StoredRun]] = {}


def _state(path: str) -> tuple[int, int, int] | None:
    """What changes when a file is written anew; None where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def stored_run(run_dir: str | Path) -> StoredRun:
    """The run in a directory; the same object as long as no file of it was written anew.

    Raises:
        ConfigurationError: as :func:`read_record`.
    """
    folder = os.path.abspath(run_dir)
    state = [_state(f"{folder}/{name}") for name in ("record.json", *FILES, "partition.json")]
    known = _STORED.get(folder)
    if known is None or known[0] != state or str(known[1].folder) != str(run_dir):
        known = _STORED[folder] = (state, StoredRun(run_dir))
    return known[1]


def stored_runs(folder: str | Path) -> "tuple[list[StoredRun], list[str]]":
    """All finished runs directly below a folder, in the order of names, and what cannot be read.

    Directories without a record (runs that go on or failed) are passed over.
    """
    runs: list[StoredRun] = []
    problems: list[str] = []
    collecting = gc.isenabled()
    gc.disable()  # what is made here stays; looking through it again and again is half of the time
    try:
        for path in sorted(Path(folder).glob("*/record.json")):
            try:
                runs.append(stored_run(path.parent))
            except ConfigurationError as error:
                problems.append(str(error))
    finally:
        if collecting:
            gc.enable()
    return runs, problems


def read_metrics(run_dir: str | Path) -> "pd.DataFrame":
    """The long table of a finished run, columns as in :data:`COLUMNS`.

    Raises:
        ConfigurationError: the run is not finished, or the table is not the one that it wrote.
    """
    return stored_run(run_dir).metrics


def read_table(path: Path) -> "pd.DataFrame":
    """A metrics table, columns as in :data:`COLUMNS`.

    Args:
        path: of a file, or of a folder of such files.

    Raises:
        ConfigurationError: the file is missing or is no metrics table.
    """
    import pandas as pd

    with _readable(path):
        return _checked(pd.read_parquet(path)).astype(dict.fromkeys(NAMED, "str"))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the metrics table that is not one."""
    try:
        yield
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise ConfigurationError(f"{path} is not a readable metrics table: {' '.join(str(error).split())}") from error


def _same(left: Any, right: Any) -> bool:
    """Equal up to the last digits, which may differ between NumPy versions."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if _is_number(left) and _is_number(right):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    return bool(left == right)


def verify_record(run_dir: str | Path) -> list[str]:
    """Problems of a finished run, one sentence each; none when all that can be compared agrees.

    Compared are the record's own hash, the hashes of the files, and every field that follows from them: seed, method,
    data set and rounds from ``config.yaml``; partition, images, clients and their sizes from ``manifest.json``; summary
    and rounds from ``metrics.parquet``. A manifest above :data:`KEPT_MANIFEST_BYTES` may be missing: its hash stays in
    the record.

    The hashes are no signature: they show that a file was damaged, or changed by somebody who did not mean to deceive.
    Whoever changes a file can make all of them anew. Nor can anything here tell whether seconds, memory, bytes sent,
    code and machine are what they were; running again can tell the numbers (:func:`benchmark.run.verification.rerun`).
    """
    try:
        return StoredRun(run_dir).problems
    except ConfigurationError as error:
        return [str(error)]


def _class_counts(manifest: bytes) -> bytes:
    """A manifest without its indices: who holds how many images of which class, and the whole manifest's sha256."""
    whole = _parse_json(manifest)
    kept = {name: whole.get(name) for name in ("algorithm", "arguments", "seed", "class_names", "domain_names")}
    kept["clients"] = [
        {name: client.get(name) for name in ("name", "train_classes", "test_classes")}
        for client in whole.get("clients", [])
    ]
    kept["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    return canonical(kept) + b"\n"


def keep_record(run_dir: str | Path, destination: str | Path) -> Path:
    """Copy a finished run's small files to ``destination/<name of run_dir>``, to be committed; return that folder.

    Copied: ``config.yaml``, ``metrics.parquet``, ``manifest.json`` up to :data:`KEPT_MANIFEST_BYTES` (of a larger one
    ``partition.json`` keeps the images per client and class), and ``record.json`` last. Checkpoints and logs stay
    behind.

    Raises:
        ConfigurationError: the run is not finished or does not verify, or another record is kept under this name.
    """
    source = Path(run_dir).resolve()
    problems = verify_record(source)
    if problems:
        raise ConfigurationError(f"{run_dir} is not kept: {problems[0]}")
    target = Path(destination) / source.name
    content = {
        name: (source / name).read_bytes()
        for name in (*FILES, "partition.json", "record.json")
        if (source / name).is_file()
    }
    if len(content.get("manifest.json", b"")) > KEPT_MANIFEST_BYTES:
        content["partition.json"] = _class_counts(content.pop("manifest.json"))
    if is_finished(target) and (target / "record.json").read_bytes() != content["record.json"]:
        raise ConfigurationError(f"{target} holds another record of the same name; remove it first to replace it")
    target.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        _replace(target / name, data)
    return target
