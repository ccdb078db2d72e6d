"""Several data sets in one federation, whose clients tell the classes of one of them apart."""

import warnings
from collections.abc import Mapping
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError, listed
from benchmark.paths import user_path
from benchmark.records.classes import name_of
from datamodules.folders import no_copies
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource, load_pool, require_names
from datamodules.splitting import equal_across, united


class SeveralDataSets(ImageSource):
    """Several data sets as one: their classes one after the other, and each data set a domain.

    Two data sets may have a class of one name; a partition gives clients label spaces of their own, in which they are
    never told apart. Images are held in memory together. Where two data sets have an image with the same pixels (at the
    stored size), it trains in none of them if one tests it, with a warning, and else is one group of both.

    Args:
        sources: the data sets, in order; all store their images at one size.
        root: folder of all data sets, instead of the ``root`` of each.

    Raises:
        ConfigurationError: fewer than two, or one of them twice; a ``root`` beside a data set that looks into its own
            when it is made.
    """

    def __init__(self, sources: list[ImageSource], root: str | None = None) -> None:
        self.sources, self.root = sources, root
        if root is not None:
            for source in sources:
                self._move(source, user_path(root))
        names = [source.recorded_name for source in sources]
        if len(names) < 2:
            raise ConfigurationError(f"SeveralDataSets: sources has {len(names)} data sets; give two or more")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigurationError(
                f"SeveralDataSets: sources has {twice[0]} twice; give each data set once, or another name where it "
                "takes one"
            )
        for source in sources:
            require_names(source)
        self.class_names = tuple(name for source in sources for name in source.class_names)
        self.domain_names = tuple(names)
        self.embedded = all(source.embedded for source in sources)  # type: ignore[misc]
        self.test_only = all(source.test_only for source in sources)  # type: ignore[misc]
        #: of each image of the data sets, once they are read, whether the pool has it
        self._in_pool: NDArray[np.bool_] | None = None

    @staticmethod
    def _move(source: ImageSource, root: Path) -> None:
        """Have a data set read from another folder; one that reads none stays as it is."""
        if hasattr(source, "root"):
            source.root = root
        elif any("root" in signature(kind).parameters for kind in type(source).__mro__[:-1]):
            raise ConfigurationError(
                f"SeveralDataSets: root does not reach {type(source).__name__}, which looks into its folder when it is "
                "made; leave root out, and give each data set its own as init_args.root"
            )

    @property
    def recorded_name(self) -> str:
        """Return the names of all of them."""
        return "+".join(self.domain_names)

    @classmethod
    def name_by(cls, arguments: Mapping[str, Any]) -> str:
        """Return the names of all of them."""
        return "+".join(name_of(source) for source in arguments.get("sources", ()))

    @property
    def class_templates(self) -> list[str]:
        """Return the template of each class, which is its data set's."""
        return [template for source in self.sources for template in source.class_templates]

    @property
    def data_sets(self) -> dict[str, tuple[int, ...]]:
        """Return the labels of each data set's classes by its name."""
        found, start = {}, 0
        for name, source in zip(self.domain_names, self.sources, strict=True):
            found[name] = tuple(range(start, start + len(source.class_names)))
            start += len(source.class_names)
        return found

    def may_train(self, pool: ImagePool) -> torch.Tensor:
        """Return which images of the pool clients may train on, bool [n]: not those of data sets that only test."""
        return torch.tensor([not source.test_only for source in self.sources])[pool.domains]

    @property
    def decoding(self) -> Decoding | None:
        """Return how an image's file becomes stored pixels, where all data sets do it alike."""
        every = [source.decoding for source in self.sources]
        return every[0] if all(each == every[0] for each in every) else None

    @property
    def image_columns(self) -> tuple[str, ...]:
        """Return the names of the columns that all of them have, in the first one's order."""
        first, *others = ([*source.image_columns] for source in self.sources)
        return tuple(name for name in first if all(name in each for each in others))

    def image_column(self, name: str) -> list[str]:
        """Return the values of such a column, of one data set after the other."""
        values = [value for source in self.sources for value in source.image_column(name)]
        if self._in_pool is None:
            return values
        return [value for value, stays in zip(values, self._in_pool, strict=True) if stays]

    def load(self) -> ImagePool:
        """Read all of them.

        Raises:
            ConfigurationError: as the data sets raise it; two store their images at different sizes; or all training
                images of a class are copies of test images.
        """
        pools = [load_pool(source) for source in self.sources]
        first = tuple(pools[0].images.shape[2:])
        for name, pool in zip(self.domain_names, pools, strict=True):
            if (size := tuple(pool.images.shape[2:])) != first:
                raise ConfigurationError(
                    f"SeveralDataSets: {self.domain_names[0]} stores images of {first} pixels and {name} of {size}; "
                    "give all of them one size, as init_args.size where a data set takes it"
                )
        columns: dict[str, list[torch.Tensor]] = {field.name: [] for field in fields(ImagePool)}
        groups = 0
        for number, (pool, classes) in enumerate(zip(pools, self.data_sets.values(), strict=True)):
            columns["images"].append(pool.images)
            columns["labels"].append(pool.labels + classes[0])
            columns["test"].append(pool.test)
            columns["domains"].append(torch.full_like(pool.domains, number))
            columns["group"].append(pool.group - int(pool.group.min()) + groups)
            groups += int(pool.group.max() - pool.group.min()) + 1
        return self._without_copies(ImagePool(**{name: torch.cat(parts) for name, parts in columns.items()}))

    def _without_copies(self, pool: ImagePool) -> ImagePool:
        """The pool less training images that another data set tests; it is as it was where no two data sets share one.

        Raises:
            ConfigurationError: a class keeps no training image.
        """
        copies, test = equal_across(pool.images.numpy(), pool.domains.numpy()), pool.test.numpy()
        self._in_pool = None
        if (copies == np.arange(len(copies))).all():
            return pool
        stays = self._in_pool = no_copies(copies, test)
        count, labels = len(self.class_names), pool.labels.numpy()
        before, after = (np.bincount(labels[train], minlength=count) for train in (~test, stays & ~test))
        if lost := [self.class_names[label] for label in np.flatnonzero((before > 0) & (after == 0))]:
            raise ConfigurationError(
                f"SeveralDataSets: all training images of {listed(lost)} have the pixels of a test image of another "
                "data set; leave one of the two data sets out"
            )
        if not stays.all():
            warnings.warn(
                f"{self.recorded_name}: {int((~stays).sum())} training images are copies of test images of another "
                "data set and do not train",
                stacklevel=3,
            )
        group = united(pool.group.numpy()[stays], copies[stays])
        kept = torch.from_numpy(stays)
        rest = {field.name: getattr(pool, field.name)[kept] for field in fields(ImagePool)}
        return ImagePool(**{**rest, "group": torch.from_numpy(group)})
