"""The base class of partitions."""

import inspect
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked
from datamodules.partition.client_rows import ClientRows, Indices
from datamodules.partition.splits import ClientSplits, check_splits
from datamodules.source import ImagePool, ImageSource

#: Splits that every federation may have.
RESERVED = ("train", "test", "val", "new")
#: What helps clients without images, by the argument that a partition takes.
REMEDIES = {
    "num_clients": "use fewer clients",
    "clients_per_domain": "use fewer clients per domain",
    "classes": "use more classes per client",
    "classes_per_client": "use more classes per client",
    "alpha": "raise alpha",
}


class Partition(Checked):
    """A rule that divides a pool of images over clients. Subclasses take their arguments and define ``assign``.

    Attributes:
        num_clients: N; None where the data decide it (one client per domain, one per group of classes).
        further_splits: names of the test sets that it makes beside the clients' own, those of ``ClientSplits.others``.
        title: its name for readers, with arguments in braces and ``{clients}`` for the number of clients, such as
            ``Dirichlet({alpha}), {clients}``; None: the class's name and its arguments.
        paper_setting: its name in papers' tables (``setting`` in ``results/paper``), with arguments in braces, and
            ``*`` for any further text; None: papers have no such setting.
        later_arguments: arguments that older manifests do not have; a manifest leaves them out at their defaults.
    """

    num_clients: int | None = None
    further_splits: tuple[str, ...] = ()
    title: ClassVar[str | None] = None
    paper_setting: ClassVar[str | None] = None
    later_arguments: ClassVar[tuple[str, ...]] = ()

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Indices of every client, in any order. Called by ``split``, which checks them."""
        raise NotImplementedError

    def split(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Divide the pool. The result depends on the pool and the generator's state alone.

        Raises:
            ConfigurationError: the arguments do not fit the data, or the outcome breaks a rule of
                ``check_splits``.
        """
        images = len(pool.labels)
        if self.num_clients is not None and self.num_clients > images:
            raise ConfigurationError(f"num_clients={self.num_clients} is more than the {images} images of the data set")
        splits = self.assign(pool, rng)
        if not isinstance(splits, ClientSplits):
            raise ConfigurationError(
                f"{type(self).__name__}.assign must return ClientSplits(train, test), got {type(splits).__name__}"
            )
        unnamed = [name for name in splits.others if name not in self.further_splits or name in RESERVED]
        if unnamed:
            raise ConfigurationError(
                f"{type(self).__name__} makes the split {unnamed[0]!r}; its further_splits must name it, and the names "
                f"{', '.join(RESERVED)} are taken"
            )
        if not isinstance(splits.testers, int):
            raise ConfigurationError(
                f"{type(self).__name__}.assign gives testers={splits.testers!r:.80}; expected how many there are"
            )
        splits = ClientSplits(
            self._rows("train", splits.train),
            self._rows("test", splits.test),
            {name: self._rows(name, held) for name, held in splits.others.items()},
            splits.label_spaces,
            splits.testers,
        )
        check_splits(splits, pool, self._remedy)
        return splits

    def client_names(self, source: ImageSource) -> list[str]:
        """Names of the clients, in order; known before any image is read.

        Raises:
            ConfigurationError: the arguments do not fit the data set's classes.
        """
        if self.num_clients is None:
            return list(source.domain_names)
        return [f"client {client}" for client in range(self.num_clients)]

    def named_clients(self, source: ImageSource) -> list[str]:
        """Return what ``client_names`` gives.

        Raises:
            ConfigurationError: it is no function any more, or gives something else than a text for each client.
        """
        title, function = type(self).__name__, "write def client_names(self, source) that returns a list of texts"
        asked: object = self.client_names
        if not callable(asked):
            raise ConfigurationError(f"{title}.client_names is a {type(asked).__name__}, not a function; {function}")
        names = asked(source)
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(
                f"{title}.client_names must return a list of texts, one for each client; it returns {names!r:.80}"
            )
        return [*names]

    def _rows(self, side: str, held: Sequence[Indices]) -> ClientRows:
        """Return the images of all clients together, sorted; refuse what is no row of indices."""
        try:
            together = ClientRows.of(held)
        except (TypeError, ValueError):
            together = None
        if together is not None and together.rows.ndim == 1 and together.rows.dtype.kind in "iu":
            return together.ascending()
        for client, rows in enumerate(held):  # only now, since there may be a million
            array = np.asarray(rows)
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise ConfigurationError(
                    f"{type(self).__name__}.assign gives client {client} {side} images as {array.dtype} of shape "
                    f"{array.shape}; expected int64 [n], numbers of images: np.flatnonzero gives them of a mask"
                )
        return ClientRows.of(held).ascending()

    def testers(self, source: ImageSource) -> int:
        """Count the testers, the last ones of ``client_names``: see ``ClientSplits.testers``; none by default."""
        return 0

    @property
    def _remedy(self) -> str:
        """The advice to its user or its author about clients without images."""
        arguments = inspect.signature(type(self)).parameters
        remedies = [remedy for name, remedy in REMEDIES.items() if name in arguments]
        if type(self).__module__.partition(".")[0] != __name__.partition(".")[0]:
            remedies.append(f"let {type(self).__name__}.assign give every client images of both sides")
        return ", or ".join(remedies) or "give each domain train and test images, or leave the domain out"

    @property
    def description(self) -> str:
        """Name and arguments, for records."""
        given = ", ".join(f"{name}={value}" for name, value in self.arguments().items())
        return f"{type(self).__name__}({given})"

    def arguments(self) -> dict[str, int | float | str | None]:
        """The constructor's arguments by name, for the manifest."""
        parameters = inspect.signature(type(self)).parameters
        names = [*parameters]
        if missing := [name for name in names if not hasattr(self, name)]:
            raise ConfigurationError(
                f"{type(self).__name__} must keep its argument {missing[0]} as self.{missing[0]}: the record and the "
                "manifest say it"
            )
        given = {name: getattr(self, name) for name in names}
        usual = {name: parameters[name].default for name in self.later_arguments}
        return {name: value for name, value in given.items() if name not in usual or value != usual[name]}
