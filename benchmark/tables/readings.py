"""The points, splits and clients of which a run has numbers, from its configuration alone, before it was run."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.errors import ConfigurationError
from benchmark.metrics import keep_images
from benchmark.own_metrics import chosen_metrics
from benchmark.records.class_values import label_of
from benchmark.records.record import RunRecord
from benchmark.run.command import resolved


@dataclass(frozen=True)
class Readable:
    """The points, splits and clients of which a run has numbers.

    Attributes:
        method: name of the method's class.
        points: points of evaluation, such as ``"server"``.
        splits: splits of the images, such as ``"test"``.
        clients: names of the clients.
        classes: names of the classes of which the run has values of the last round, each by itself; None where it has
            none, or its record says so.
    """

    method: str
    points: tuple[str, ...]
    splits: tuple[str, ...]
    clients: tuple[str, ...]
    classes: tuple[str, ...] | None = None

    def check_class(self, named: str, where: str) -> None:
        """Refuse values of a class that the run does not have.

        Raises:
            ConfigurationError: no such class, or no values by class.
        """
        if self.classes is None:
            raise ConfigurationError(
                f"{where}: no values by class of the last round; give these runs --data.metrics=clinical"
            )
        label_of(named, self.classes, where)

    def check(self, point: str, split: str, client: str | None, where: str) -> None:
        """Refuse a number that the run does not have.

        Raises:
            ConfigurationError: no such point, split or client.
        """
        for what, asked, there in (("point", point, self.points), ("split", split, self.splits)):
            if asked not in there:
                raise ConfigurationError(f"{where}: {self.method} has no {what} {asked!r}; it has {', '.join(there)}")
        if client is not None and client not in self.clients:
            raise ConfigurationError(f"{where}: there is no client {client!r}; there are {', '.join(self.clients)}")


def of_record(record: RunRecord) -> Readable:
    """Return the points, splits and clients of which a finished run has numbers."""
    points = {point: [split for split in splits if split != "train"] for point, splits in record.summary.items()}
    splits = tuple(dict.fromkeys(split for found in points.values() for split in found))
    return Readable(record.method, tuple(p for p, found in points.items() if found), splits, record.client_names)


def of_configuration(arguments: Sequence[str]) -> Readable:
    """Return those of a run of ``lightning-cli fit`` with these arguments; no data are read.

    Raises:
        ConfigurationError: the arguments are no configuration of a run.
    """
    config = resolved(arguments)
    method, data = _class(config["model"]), config["data"]
    held_out = {"val": data["val_fraction"], "new": data["new_clients"]}
    partition, source = _made(data["partition"]), _made(data["source"])
    asked, kept = data["evaluate_local"], data["keep_predictions"]
    if kept is None and keep_images(chosen_metrics(data["metrics"])):
        kept = "last"
    local = method.evaluate_local if asked is None else asked
    return Readable(
        method.__name__,
        ("server", "local") if local else ("server",),
        ("test", *partition.further_splits, *(split for split, size in held_out.items() if size)),
        tuple(partition.named_clients(source)),
        tuple(source.class_names) if kept in ("last", "all") else None,
    )


def _made(given: Any) -> Any:
    """Make what a resolved configuration names, with all that is named inside of it."""
    if isinstance(given, list):
        return [_made(each) for each in given]
    if not isinstance(given, dict) or "class_path" not in given:
        return given
    return _class(given)(**{name: _made(value) for name, value in (given.get("init_args") or {}).items()})


def _class(given: dict[str, Any]) -> Any:
    module, _, name = given["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)
