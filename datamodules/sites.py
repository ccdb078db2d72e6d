"""Sites whose images nobody else has: what a federation must agree on before it is deployed."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

from benchmark.errors import ConfigurationError
from benchmark.ranges import Bits, PositiveInt, Size
from datamodules.names import check_names
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource

_declared: ContextVar[bool] = ContextVar("_declared", default=False)


class Sites(ImageSource):
    """A data set that is to be deployed on, of which no image is here: each site reads a folder of its own.

    ``benchmark deploy app`` makes a federation's terms of it. A simulation has nothing to train on, and is refused. It
    takes the partition ``DomainPerClient``, whose clients are the sites.

    Args:
        sites: names of the clients.
        classes: names of the classes, by label; each site has a folder of images for each class that it has.
        most: training images of the largest site, at least; part of every client's draws, and so of a run's numbers.
        size: side in pixels of the stored images.
        fit: as of other sources: ``squash`` or ``crop``.
        bits: of a 16-bit value that are in use; null: all.

    Raises:
        ConfigurationError: fewer than two classes, or a name twice.
    """

    def __init__(
        self,
        sites: list[str],
        classes: list[str],
        most: PositiveInt,
        size: Size = 224,
        fit: Literal["squash", "crop"] = "squash",
        bits: Bits | None = None,
    ) -> None:
        check_names(sites, "client", "sites")
        check_names(classes, "class", "classes")
        if len(classes) < 2 or not sites:
            raise ConfigurationError(
                f"Sites: expected names of at least one site and two classes, got {sites} and {classes}"
            )
        self.domain_names, self.class_names = tuple(sites), tuple(classes)
        self.most, self.size, self.fit, self.bits = most, size, fit, bits

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels, at every site: as a viewer shows it."""
        return Decoding(self.size, self.fit, as_seen=True, bits=self.bits)

    def load(self) -> ImagePool:
        """Return as many rows as the sites may have, all of one blank image, to make terms of.

        Raises:
            ConfigurationError: something else than terms is to be made.
        """
        if not _declared.get():
            raise ConfigurationError(
                "the images of Sites are at the sites: `benchmark deploy app` makes an app for them, and a site names "
                "its own folder (--data); a simulation needs a data set that is here"
            )
        # of each site `most` images to train on, and one to be scored on
        rows = torch.arange((self.most + 1) * len(self.domain_names))
        place = rows % (self.most + 1)
        blank = torch.zeros(1, 3, self.size, self.size, dtype=torch.uint8).expand(len(rows), -1, -1, -1)
        return ImagePool(blank, place % len(self.class_names), place == self.most, rows // (self.most + 1), rows)


@contextmanager
def declared_alone() -> Iterator[None]:
    """Let ``Sites`` stand for images that nobody looks at: only terms are made."""
    token = _declared.set(True)
    try:
        yield
    finally:
        _declared.reset(token)
