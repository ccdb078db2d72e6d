"""Finished runs, grouped over seeds and described in a reader's words."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError
from benchmark.records.classes import own
from benchmark.records.hashes import OF_ONE_SITTING, canonical, config_hash, is_result_free
from benchmark.records.record import RunRecord
from benchmark.records.stored_run import stored_run, stored_runs

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: its directory.
        record: what it left behind.
        config: its resolved configuration.
        images: what tells its images from others of the same name; empty where there are no others.
        images_sha256: their hash; for an older record that of the only images known of the same partition.
    """

    folder: Path
    record: RunRecord
    config: dict[str, Any]
    images: str = ""
    images_sha256: str | None = None

    @cached_property
    def metrics(self) -> "pd.DataFrame":
        """The long table."""
        return stored_run(self.folder).metrics

    def get(self, path: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted key."""
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return default if value is None else value

    @property
    def dataset(self) -> str:
        """Title of the data set, and what tells it from others of that name."""
        name = own(self.get("data.source"), "title") or self.record.dataset
        return f"{name} ({self.images})" if self.images else name

    @property
    def method(self) -> str:
        """Name of the method, and of its server where that is not the one it brings itself."""
        server = self.record.other_server
        short = re.sub(r"[\w.]+\.", "", server or "")
        return f"{self.record.method} with {short}" if short else self.record.method

    @property
    def demo(self) -> bool:
        """Return whether data or backbone are embedded ones, whose numbers are not to be compared with a paper's."""
        return bool(own(self.get("data.source"), "embedded")) or "micro" in self.backbone

    @property
    def partition(self) -> tuple[str, dict[str, Any]]:
        """Class of the partition and its arguments, as configured."""
        given = self.get("data.partition", {})
        path = given if isinstance(given, str) else given.get("class_path", "")
        return path.rpartition(".")[2], (given.get("init_args") or {}) if isinstance(given, dict) else {}

    @property
    def clients(self) -> str:
        """Describe the clients: the partition and its numbers."""
        name, arguments = self.partition
        count = len(self.record.client_names)
        clients = f"{count} clients" if count != 1 else "1 client"
        title = own(self.get("data.partition"), "title")
        if title is not None:
            words = title.format(clients=clients, **arguments)
        else:
            given = ", ".join(
                f"{key.replace('_', ' ')} {value}"
                for key, value in arguments.items()
                if value is not None and key not in ("num_clients", "max_retries")
            )
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) + (f" ({given})" if given else "") + f", {clients}"
        if (orders := self.get("data.label_orders", 1)) > 1:
            words += f", labels in {orders} orders"
        if flipped := self.get("data.label_flipping"):
            words += f", labels of {100 * flipped:g} % of the training clients flipped"
        if held_out := self.get("data.val_fraction", 0.0):
            words += f", {100 * held_out:g} % of the training images held out"
        if new := self.get("data.new_clients", 0.0):
            words += f", {100 * new:g} % of the clients never train"
        return words

    @property
    def setting(self) -> str:
        """Describe the clients, and how many of them take part in a round."""
        chosen, share = self.get("data.clients_per_round"), self.get("data.participation", 1.0)
        if chosen is not None and chosen < len(self.record.client_names):
            return f"{self.clients}, {chosen} a round"
        return self.clients if share == 1.0 else f"{self.clients}, {100 * share:g} % a round"

    @property
    def participants(self) -> int:
        """Count the clients that train in a round."""
        testers = (stored_run(self.folder).partition or {}).get("testers", 0)
        count = len(self.record.client_names) - (testers if type(testers) is int else 0)
        available = count - min(round(self.held_out[1] * count), count - 1)
        chosen = self.get("data.clients_per_round")
        return int(chosen) if chosen is not None else max(1, round(self.get("data.participation", 1.0) * available))

    @property
    def held_out(self) -> tuple[float, float]:
        """Return the shares of the training images and of the clients that are held out."""
        return self.get("data.val_fraction", 0.0), self.get("data.new_clients", 0.0)

    @property
    def backbone_config(self) -> Any:
        """Return the configuration of the backbone or CLIP, a class's path or a mapping; empty without any."""
        return self.get("model.init_args.backbone") or self.get("model.init_args.clip", {})

    @property
    def backbone(self) -> str:
        """Name of the model and the side of the images it sees, where the configuration says so."""
        given = self.backbone_config
        arguments = (given.get("init_args") or {}) if isinstance(given, dict) else {}
        path = given if isinstance(given, str) else given.get("class_path", "")
        name = arguments.get("name") or path.rpartition(".")[2] or "no backbone"
        size = arguments.get("image_size") or self.get("data.transform.init_args.size")
        return f"{name}, {size} px" if size else str(name)

    @property
    def local_work(self) -> str:
        """Describe a client's training in a round, where the configuration has it in one place; else empty.

        Phases that a method has beside its plain training are its own.
        """
        training = self.get("model.init_args.training", {})
        given = training.get("init_args", training) if isinstance(training, dict) else {}
        epochs, steps = given.get("epochs"), given.get("steps")
        if not epochs:
            return ""
        capped = f" of at most {steps} steps" if steps else ""
        return f"{epochs} local epoch{'s' * (epochs != 1)}{capped}, batches of {self.get('data.batch_size', '?')}"


@dataclass(frozen=True)
class Experiment:
    """Runs that differ in nothing but the seed: of one configuration, on the same images, divided alike.

    Attributes:
        runs: at least one, in the order of their seeds.
        name: of the method, with what tells it from other experiments of the method in the same place.
    """

    runs: tuple[Run, ...]
    name: str

    @property
    def first(self) -> Run:
        """One of the runs, for what they share."""
        return self.runs[0]

    @property
    def place(self) -> tuple[str, str, str]:
        """Data set, setting and backbone: what experiments that are compared have in common."""
        return self.first.dataset, self.first.setting, self.first.backbone


def read_run(folder: Path) -> Run:
    """A finished run, if all of its files are as its record knows them.

    Raises:
        ConfigurationError: one is missing, damaged, changed or not of its form.
    """
    stored = stored_run(folder)
    run = Run(stored.folder, stored.record, stored.config, images_sha256=stored.record.images_sha256)
    try:  # all is read here, where a run with something damaged can be left out
        _ = stored.metrics, run.dataset, run.setting, run.backbone, run.local_work, _source(run)
        _ = run.config.get("data", {}).get("partition_seed"), {**run.config.get("trainer", {})}
        if os.path.lexists(folder / "manifest.json"):  # what is kept of a large one is bound to nothing
            _ = stored.partition
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{folder / 'config.yaml'} is no configuration of a run ({error})") from error
    return run


def read_runs(folders: Iterable[Path]) -> tuple[list[Run], list[str], list[str]]:
    """All finished runs below these folders, each once.

    A directory name counts once, and so does a seed of one experiment: a run done again is no second seed. Of several
    the first folder's is taken.

    Returns:
        The runs; which are damaged and left out, with the reason; and which have been done again and are left out, with
        the one that is taken.
    """
    runs: dict[str, Run] = {}
    problems: list[str] = []
    again: list[str] = []
    for folder in folders:
        found, bad = stored_runs(folder)
        problems += bad
        for stored in found:
            name = stored.folder.name
            try:
                kept = runs.setdefault(name, read_run(stored.folder))
            except ConfigurationError as error:
                problems.append(str(error))
                continue
            if kept.record.files["metrics.parquet"]["sha256"] != stored.record.files["metrics.parquet"]["sha256"]:
                again.append(f"{stored.folder}: has other numbers than {kept.folder}, which is shown")
    first: dict[tuple[object, ...], Run] = {}
    for run in _with_images(list(runs.values())):
        kept = first.setdefault((*_alike(run), run.record.seed), run)
        if kept is not run:
            again.append(f"{run.folder}: the same seed of the same experiment as {kept.folder}, which is shown")
    return _told_apart(list(first.values())), problems, again


def _with_images(runs: Sequence[Run]) -> list[Run]:
    """Return the runs; those of records too old to name their images get the only images known of their partition."""
    known: dict[str, set[str]] = {}
    for run in runs:
        if run.images_sha256 is not None:
            known.setdefault(run.record.manifest_hash, set()).add(run.images_sha256)
    only = {partition: images.pop() for partition, images in known.items() if len(images) == 1}
    return [replace(run, images_sha256=run.images_sha256 or only.get(run.record.manifest_hash)) for run in runs]


def _told_apart(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with a word about their images where several sets of images have one name.

    The word is the folder that the images were read from if the folders all differ, else the first eight digits of
    their hash. Runs whose records are too old to name their images get no word.
    """
    folders: dict[bytes, dict[str, str]] = {}  # source -> hash of the images -> the folder they were read from
    for run in runs:
        if run.images_sha256 is not None:
            root = Path(str(run.get("data.source.init_args.root", ""))).name
            folders.setdefault(_source(run), {}).setdefault(run.images_sha256, root)
    named = []
    for run in runs:
        rivals, digest = folders.get(_source(run), {}), run.images_sha256
        if digest is not None and len(rivals) > 1:
            clear = all(rivals.values()) and len(set(rivals.values())) == len(rivals)
            run = replace(run, images=rivals[digest] if clear else digest[:8])
        named.append(run)
    return named


def _source(run: Run) -> bytes:
    """The data set and how it is read, but for the folder."""
    given = run.get("data.source.init_args", {})
    return canonical([run.record.dataset, {key: value for key, value in given.items() if key != "root"}])


def group(runs: Sequence[Run]) -> list[Experiment]:
    """Experiments in the order of data set, setting, backbone and method."""
    alike: dict[tuple[str | None, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault(_alike(run), []).append(run)
    together = [tuple(sorted(part, key=lambda run: run.record.seed)) for part in alike.values()]
    unnamed = [Experiment(part, part[0].method) for part in together]
    unnamed.sort(key=lambda each: (each.first.demo, *each.place, each.name, str(each.first.folder)))
    places: dict[tuple[str, ...], list[Experiment]] = {}
    for each in unnamed:
        places.setdefault(each.place, []).append(each)
    return [named for place in places.values() for named in tell_apart(place)]


def _alike(run: Run) -> tuple[str | None, ...]:
    """Return a key that the runs of one experiment share."""
    config = {key: value for key, value in run.config.items() if key != "seed_everything"}
    config["trainer"] = {**config.get("trainer", {}), **OF_ONE_SITTING}
    # With a partition seed of null every seed has a partition of its own; else one that differs is other data.
    drawn_anew = run.partition[0] != "FromManifest" and run.config.get("data", {}).get("partition_seed", 0) is None
    split = None if drawn_anew else run.record.manifest_hash
    study = (run.record.tuning or {}).get("study")  # a search may end where it began
    return config_hash(config), run.images_sha256, split, study


def tell_apart(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The experiments, named by their methods and, where several are of one method, by what they differ in."""
    methods: dict[str, list[Experiment]] = {}
    for each in experiments:
        methods.setdefault(each.first.method, []).append(each)
    names = [each.first.method + _distinction(each, methods[each.first.method]) for each in experiments]
    return [
        # What a configuration does not show, such as another version of it, is told by the folder.
        Experiment(each.runs, name if names.count(name) == 1 else f"{name}, {each.first.folder.name}")
        for each, name in zip(experiments, names, strict=True)
    ]


def _distinction(experiment: Experiment, rivals: Sequence[Experiment]) -> str:
    """In brackets, the first three settings that tell experiments of its method apart, and more if three do not."""
    if len(rivals) == 1:
        return ""
    others = [flat(rival.first.config) for rival in rivals]
    own = others.pop(list(rivals).index(experiment))
    keys = [key for key in own if key.startswith(("model", "server", "data", "trainer.max_epochs"))]
    # A setting that others' configurations do not have is one that came later.
    differing = [
        key for key in keys if not is_result_free(key) and any(each.get(key, own[key]) != own[key] for each in others)
    ]
    count = next((n for n in range(3, len(differing)) if not _same(own, others, differing[:n])), len(differing))
    named = [(key.rpartition(".")[2].replace("_", " "), own[key]) for key in differing[:count]]
    shown = [f"{name} {value}" for name, value in named if value is not None]
    return f" ({', '.join(shown)})" if shown else f" ({experiment.first.folder.name})"


def _same(own: dict[str, Any], others: Sequence[dict[str, Any]], keys: Sequence[str]) -> bool:
    """Return whether one of the other configurations has the same value as ``own`` for each of these keys."""
    return any(all(other.get(key) == own[key] for key in keys) for other in others)


def flat(config: Any, key: str = "") -> dict[str, Any]:
    """The values of a configuration by their dotted keys."""
    if not isinstance(config, dict):
        return {key: config}
    return {k: v for name, part in config.items() for k, v in flat(part, f"{key}.{name}".lstrip(".")).items()}
