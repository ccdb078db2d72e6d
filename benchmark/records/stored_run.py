"""A finished run as it lies in its directory: each file read once, and what does not fit together."""

import functools
import gc
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from benchmark.config.yaml_files import parse_yaml
from benchmark.errors import ConfigurationError
from benchmark.files import parse_json, read_regular, refuse_link
from benchmark.metrics import EVALUATED, METRICS, POOLED_CLIENT, STATISTICS, Metric, with_support
from benchmark.records.classes import name_of
from benchmark.records.client_groups import THIRDS
from benchmark.records.hashes import canonical, config_hash, manifest_hash
from benchmark.records.kept_rounds import Keep, rounds_to_keep
from benchmark.records.metrics_table import NAMED, check_clients, parse_table, readable
from benchmark.records.predictions import CLASSES, PREDICTIONS, parse_classes, parse_predictions
from benchmark.records.record import POINTS
from benchmark.records.record_file import FILES, LARGEST, OPTIONAL_FILES, file_entry, read_record
from benchmark.records.subgroups import SUBGROUPS, parse_subgroups
from benchmark.records.summary import statistic_of, summarize

if TYPE_CHECKING:  # pandas loads slowly; `benchmark --help` must not wait for it
    import pandas as pd


KEPT_MANIFEST_BYTES = 150_000


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
        """One of :data:`FILES` or :data:`OPTIONAL_FILES`, with the hash that the record has of it."""
        if name not in self.record.files:
            why = "only a run with --data.metrics=clinical or --data.keep_predictions=last stores its predictions"
            if name == SUBGROUPS:
                why = "it was run without data.subgroups; run it again with for example --data.subgroups=[sex]"
            elif name in OPTIONAL_FILES and self.keep == "none":
                why = "it was run with data.keep_predictions=none; run it again with --data.keep_predictions=last"
            raise ConfigurationError(f"{self.folder} has no {name}: {why}")
        if name not in self._contents:
            path, content = self.folder / name, self._read(name)
            if file_entry(content) != self.record.files[name]:
                raise ConfigurationError(f"{path} was changed after the run (its hash does not fit the record)")
            self._contents[name] = content
        return self._contents[name]

    def _read(self, name: str) -> bytes:
        path = self.folder / name
        try:
            return read_regular(path, LARGEST[name])
        except FileNotFoundError:
            why = "; if this is a kept copy, name the folder of the run itself" if name == PREDICTIONS else ""
            raise ConfigurationError(f"{path} is missing{why}") from None
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error

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
        try:
            canonical(config)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{path} holds a value that is no configuration's ({error})") from error
        return config

    @functools.cached_property
    def metrics(self) -> "pd.DataFrame":
        """The long table (:data:`benchmark.records.metrics_table.COLUMNS`), of the clients that the record names."""
        summaries = sum(len(metrics) for splits in self.record.summary.values() for metrics in splits.values())
        rounds = 1 + max(self.record.rounds, self.record.rounds_trained)
        most = summaries * (1 + len(self.record.test_sizes)) * rounds  # one for the pooled value
        with readable(self.folder / "metrics.parquet"):
            table = parse_table(self.content("metrics.parquet"), most)
            check_clients(table, self.record.test_sizes, self.record.deployed is None)
        return table.astype(dict.fromkeys(NAMED, "str"))

    @functools.cached_property
    def predictions(self) -> "pd.DataFrame":
        """Scored images (:data:`benchmark.records.predictions.COLUMNS`) of the last evaluation that any are kept of."""
        with readable(self.folder / PREDICTIONS, "table of predictions"):
            table = parse_predictions(self.content(PREDICTIONS))
            last = len(self.record.client_names) - 1
            if not table["client"].between(0, last).all():
                raise ValueError(f"it has a client that is none of the run's, 0 to {last}")
            return table

    def scored(self, point: str, split: str) -> "pd.DataFrame":
        """Return the rows of :attr:`predictions` of one point and split; none where none are kept."""
        rows = self.predictions
        return rows[(rows["point"] == point) & (rows["split"] == split)]

    def points_scored(self, *splits: str) -> list[str]:
        """Return the points of a round at which images of all of these splits are kept."""
        return [point for point in POINTS if all(len(self.scored(point, split)) for split in splits)]

    def has(self, name: str) -> bool:
        """Return whether the run wrote a file and it is there."""
        return name in self.record.files and os.path.lexists(self.folder / name)

    @property
    def keep(self) -> Keep | None:
        """Return the evaluations whose images the run was asked to keep; None where it was not asked.

        Raises:
            ConfigurationError: the configuration names none that there are.
        """
        keep: Keep | None = _inner(self.config, "data").get("keep_predictions")
        if keep is not None and keep not in get_args(Keep):
            raise ConfigurationError(
                f"{self.folder / 'config.yaml'}: data.keep_predictions is one of {', '.join(get_args(Keep))}; got "
                f"{keep!r:.40}"
            )
        return keep

    @property
    def min_support(self) -> int:
        """Return how many images of a class, and beside it, the run's means over classes ask for.

        Raises:
            ConfigurationError: the configuration has no such number.
        """
        number = _inner(self.config, "data").get("min_support", 1)
        if type(number) is not int or number < 1:
            raise ConfigurationError(
                f"{self.folder / 'config.yaml'}: data.min_support is a whole number from 1 on; got {number!r:.40}"
            )
        return number

    def metric(self, name: str) -> Metric:
        """Return a metric that is known by name, as this run has it."""
        return with_support(METRICS[name], self.min_support)

    @functools.cached_property
    def classes(self) -> "pd.DataFrame":
        """Values by class (:func:`benchmark.records.predictions.by_class`) of the images in :attr:`predictions`."""
        with readable(self.folder / CLASSES, "table of classes"):
            table = parse_classes(self.content(CLASSES))
            last = len(self.record.client_names) - 1
            if len(wrong := table["client"][~table["client"].between(POOLED_CLIENT, last)]):
                raise ValueError(f"client {wrong.iloc[0]} has values, and the clients are {POOLED_CLIENT} to {last}")
        return table

    @functools.cached_property
    def subgroups(self) -> "pd.DataFrame":
        """Subgroups of the scored images (:data:`benchmark.records.subgroups.COLUMNS`)."""
        with readable(self.folder / SUBGROUPS, "table of subgroups"):
            return parse_subgroups(self.content(SUBGROUPS))

    @functools.cached_property
    def partition(self) -> dict[str, Any] | None:
        """``manifest.json``, or the class counts that are kept of a large one; None where neither was kept."""
        paths = [self.folder / name for name in ("manifest.json", "partition.json")]
        path = next((path for path in paths if os.path.lexists(path)), None)
        if path is None:
            return None
        content = self.content(path.name) if path.name in FILES else self._read(path.name)
        try:
            manifest = parse_json(content)
        except ValueError as error:
            raise ConfigurationError(f"{path} is no partition of clients: it is not JSON ({error})") from error
        clients = manifest.get("clients") if isinstance(manifest, dict) else None
        if not isinstance(clients, list) or not all(isinstance(client, dict) for client in clients):
            raise ConfigurationError(f"{path} is no partition of clients: it holds no list of them")
        return dict(manifest)

    @functools.cached_property
    def train_sizes(self) -> list[int] | None:
        """Training images per client, as the kept partition has them; None where it does not say.

        Raises:
            ConfigurationError: the partition is not one that a run wrote.
        """
        clients = (self.partition or {}).get("clients", [])
        counts = [client.get("train_classes", [client.get("train_size")]) for client in clients]
        if len(counts) != len(self.record.client_names):
            return None
        known = all(isinstance(each, list) and all(map(_is_number, each)) for each in counts)
        return [sum(each) for each in counts] if known else None

    def statistic(self, point: str, split: str, metric: str, which: str, name: str) -> float | None:
        """Compute a statistic over clients that not every record has: :func:`statistic_of`."""
        sizes = self.train_sizes if name in THIRDS else None
        return statistic_of(self.metrics, self.record, point, split, metric, which, name, sizes)

    def class_names(self, count: int, split: str = "test") -> list[str]:
        """Return the names of the labels 0 to ``count`` - 1; numbers where clients count the classes in their own ways.

        Args:
            count: of labels.
            split: of the images; of a split with a label space of its own, the labels are counted in it.

        Raises:
            ConfigurationError: the partition or the configuration is not the one that the run wrote.
        """
        names = (self.partition or {}).get("class_names")
        alike = _inner(self.config, "data").get("label_orders") in (None, 1)
        if isinstance(names, list) and alike:
            spaces = _inner(self.partition, "label_spaces")
            space = spaces.get("train" if split in ("val", "new") else split, range(len(names)))
            if (
                isinstance(space, list | range)
                and len(space) == count
                and all(label in range(len(names)) for label in space)
            ):
                return [str(names[label]) for label in space]
        return [f"label {label}" for label in range(count)]

    @functools.cached_property
    def problems(self) -> list[str]:
        """List what does not fit together, one sentence each; see :func:`verify_record`."""
        problems: list[str] = []
        missing = self.record.files["manifest.json"]["bytes"] > KEPT_MANIFEST_BYTES
        for name in self.record.files:
            optional = name in OPTIONAL_FILES or (name == "manifest.json" and missing)
            if optional and not os.path.lexists(self.folder / name):
                continue
            try:
                self.content(name)
            except ConfigurationError as error:
                problems.append(str(error))
        if problems:
            return problems
        for compare in (
            self._of_config,
            self._of_partition,
            self._of_metrics,
            self._of_predictions,
            self._of_subgroups,
        ):
            try:
                problems += [f"{self.folder / name} does not give the record's {what}" for name, what in compare()]
            except (ConfigurationError, ValueError) as error:
                problems.append(str(error))
            except (ArithmeticError, TypeError) as error:
                problems.append(f"{self.folder}: the record's numbers cannot be made of its files ({error})")
        return problems

    @functools.cached_property
    def untrained(self) -> list[int]:
        """Clients that have values at the point "local" though they never reported a loss of training, in a run whose
        others did.

        So wrote versions that scored, after every round, also the initial model of clients that had not yet trained.
        """
        later = self.metrics[self.metrics["round"] > 0]
        trained = set(later.loc[(later["split"] == "train") & (later["metric"] == "loss"), "client"])
        scored = set(later.loc[(later["split"] != "train") & (later["point"] == "local"), "client"]) - {POOLED_CLIENT}
        return sorted(scored - trained) if trained and self.record.corrected is None else []

    def _of_config(self) -> Iterator[tuple[str, str]]:
        """File and field of what the configuration says otherwise than the record."""
        if config_hash(self.config) != self.record.config_hash:
            yield "config.yaml", "config_hash"
        said = {
            "seed": self.config.get("seed_everything"),
            "method": _class_name(self.config, "model"),
            "dataset": self._data_set(),
            "rounds": _inner(self.config, "trainer").get("max_epochs"),
        }
        for name, value in said.items():
            if value is not None and value != getattr(self.record, name):
                yield "config.yaml", f"{name}: {value!r} there, {getattr(self.record, name)!r} in the record"

    def _data_set(self) -> str | None:
        """Name of the data set by the configuration: the recorded one also where the source is given it by name."""
        source = _inner(self.config, "data").get("source")
        if _inner(source, "init_args").get("name") == self.record.dataset:
            return None
        return name_of(source) or None

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
            counts = client.get("test_classes", [client.get("test_size")])  # only the sites of a deployment know more
            # A client that never trains has its images in another split than "test".
            if not isinstance(counts, list) or not all(map(_is_number, counts)) or size not in (0, sum(counts)):
                yield path, "test_sizes"
                return

    @property
    def _statistics(self) -> list[str]:
        """Name the statistics over clients that every record has, and those that this one has beside them."""
        entries = [entry for splits in self.record.summary.values() for of in splits.values() for entry in of.values()]
        there = {name for entry in entries for name in entry["last"]}
        return [name for name, statistic in STATISTICS.items() if statistic.always or name in there]

    def _of_metrics(self) -> Iterator[tuple[str, str]]:
        made = summarize(self.metrics, self.record.test_sizes, self._statistics, self.record.deployed is None)
        if not _same(made, self.record.summary):
            yield "metrics.parquet", "summary"
        if self.metrics["round"].max() > self.record.rounds_trained or self.record.rounds_trained > self.record.rounds:
            yield "metrics.parquet", "rounds_trained"

    def _of_predictions(self) -> Iterator[tuple[str, str]]:
        """Compare the accuracies of the scored images, where they are kept, with the metrics."""
        if PREDICTIONS not in self._contents:
            return
        import pandas as pd

        rows, place = self.predictions, ["round", "point", "split", "client"]
        columns = [*place, "label", "prediction"]
        last = rows["round"].max()
        if self.keep == "all":
            content = self._contents[PREDICTIONS]
            with readable(self.folder / PREDICTIONS, "table of predictions"):
                earlier = parse_predictions(content, every=True, columns=columns)
            rows = pd.concat([earlier[earlier["round"] < last], rows[columns]], ignore_index=True)
        kept = rounds_to_keep(self.keep or "last", self.metrics, self.record.test_sizes)
        right = (rows["prediction"] == rows["label"]).groupby([rows[name] for name in place]).mean()
        there = self.metrics["round"].isin(kept) & (self.metrics["metric"] == EVALUATED)
        stored = self.metrics[there].set_index(place)["value"]
        if {*rows["round"]} != kept or not _same(right.to_dict(), stored.to_dict()):
            yield PREDICTIONS, "accuracies"

    def _of_subgroups(self) -> Iterator[tuple[str, str]]:
        """Look in each column for the scored images, where they are kept."""
        if not {SUBGROUPS, PREDICTIONS} <= {*self._contents}:
            return
        scored = {*self.predictions["image"]}
        for _, rows in self.subgroups.groupby("column", observed=True):
            if not scored <= {*rows["image"]}:
                yield SUBGROUPS, "images"
                return


_STORED: dict[str, tuple[list[tuple[int, int, int] | None], StoredRun]] = {}


def stored_run(run_dir: str | Path) -> StoredRun:
    """Return the run in a directory; the same object as long as none of its files has changed.

    Raises:
        ConfigurationError: as :func:`read_record`.
    """
    folder = os.path.abspath(run_dir)
    state = [_state(f"{folder}/{name}") for name in ("record.json", *FILES, *OPTIONAL_FILES, "partition.json")]
    known = _STORED.get(folder)
    if known is None or known[0] != state or str(known[1].folder) != str(run_dir):
        known = _STORED[folder] = (state, StoredRun(run_dir))
    return known[1]


def stored_runs(folder: str | Path) -> "tuple[list[StoredRun], list[str]]":
    """All finished runs directly below a folder, in the order of names, and what cannot be read.

    Directories without a record (runs that go on or failed) are passed over. A link to a directory is not followed.
    """
    runs: list[StoredRun] = []
    problems: list[str] = []
    collecting = gc.isenabled()
    gc.disable()  # what is made here stays; looking through it again and again is half of the time
    try:
        for path in sorted(Path(folder).glob("*/record.json")):
            try:
                refuse_link(path.parent)
                runs.append(stored_run(path.parent))
            except ConfigurationError as error:
                problems.append(str(error))
    finally:
        if collecting:
            gc.enable()
    return runs, problems


def read_metrics(run_dir: str | Path) -> "pd.DataFrame":
    """The long table of a finished run, columns as in :data:`benchmark.records.metrics_table.COLUMNS`.

    Raises:
        ConfigurationError: the run is not finished, or the table is not the one that it wrote.
    """
    return stored_run(run_dir).metrics


def verify_record(run_dir: str | Path) -> list[str]:
    """Problems of a finished run, one sentence each; none when all that can be compared agrees.

    Compared are the record's own hash, the hashes of the files, and every field that follows from them: seed, method,
    data set and rounds from ``config.yaml``; partition, images, clients and their sizes from ``manifest.json``; summary
    and rounds from ``metrics.parquet``; accuracies of the rounds that it is to have from ``predictions.parquet``, all
    of whose images ``subgroups.parquet`` has. These two and ``classes.parquet`` may be missing, and a manifest above
    :data:`KEPT_MANIFEST_BYTES`: their hashes stay in the record.

    The hashes are no signature: they show that a file was damaged, or changed by somebody who did not mean to deceive.
    Whoever changes a file can make all of them anew. Nor can anything here tell whether seconds, memory, bytes sent,
    code and machine are what they were; running again can tell the numbers (:func:`benchmark.run.verification.rerun`).
    """
    try:
        return StoredRun(run_dir).problems
    except ConfigurationError as error:
        return [str(error)]


def _state(path: str) -> tuple[int, int, int] | None:
    """Return inode, modification time in nanoseconds and size of a file; None if it is missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _inner(config: Any, *keys: str) -> dict[str, Any]:
    """Return what stands under these keys; empty where that is no mapping."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _class_name(config: dict[str, Any], *keys: str) -> str | None:
    path = _inner(config, *keys).get("class_path")
    return path.rpartition(".")[2] if isinstance(path, str) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(left: Any, right: Any) -> bool:
    """Equal up to the last digits, which may differ between NumPy versions."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if _is_number(left) and _is_number(right):
        return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-12)
    return bool(left == right)
