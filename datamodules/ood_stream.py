"""Out-of-distribution streams: images of another data set that clients' held-out images are held against."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from benchmark.errors import ConfigurationError, listed
from benchmark.ranges import PositiveInt, checked
from benchmark.seeds import numpy_generator
from datamodules.manifest import pixels_sha256
from datamodules.source import ImagePool, ImageSource, load_pool, require_names
from datamodules.splitting import known_among
from datamodules.transform import resized_pixels

log = logging.getLogger(__name__)

#: Splits of clients' own images; others hold images of several clients, or of all classes.
HELD_AGAINST = ("test", "val", "new")


@dataclass(frozen=True)
class ForeignImages:
    """The images of a stream, drawn and brought to the size of the federation's.

    Attributes:
        images: uint8 [n, 3, H, W].
        rows: per split the rows of ``images`` that its images are held against, int64.
        facts: what the split's manifest says of them: the source's name, and number and sha256 of split ``test``'s.
    """

    images: Tensor
    rows: Mapping[str, np.ndarray]
    facts: dict[str, str | int]

    @property
    def labels(self) -> Tensor:
        """Return zeros, int64 [n]: no image is of a class of the federation."""
        return torch.zeros(len(self.images), dtype=torch.int64)


@checked
@dataclass(frozen=True)
class OODStream:
    """Foreign images that every client's model scores beside the client's own held-out images.

    The images are drawn by a key of the source's size alone, so that they are the same for all clients, methods and
    seeds. They are brought to the size at which the federation's images are stored, and go the same way from there. No
    client trains on them: one with the pixels of an image of the federation is refused.

    Attributes:
        source: another data set, of classes that the federation does not have.
        images: how many are drawn of all that the source has. Split ``val``, where there is one, is held against
            others, as many again if there are so many, so that what is chosen on it has not seen those of the test.
        exclude: names of classes of the source that are left out, such as those that the federation has too.
    """

    source: ImageSource
    images: PositiveInt = 500
    exclude: list[str] = field(default_factory=list)

    def check_classes(self, own: ImageSource) -> None:
        """Refuse classes that are the federation's, too.

        Raises:
            ConfigurationError: names them, or names in ``exclude`` that the source does not have.
        """
        require_names(self.source)
        if unknown := [name for name in self.exclude if name not in self.source.class_names]:
            raise ConfigurationError(
                f"data.ood.exclude: {self.source.recorded_name} has no class {unknown[0]!r:.80}; its classes are "
                f"{listed(self.source.class_names)}"
            )
        known = {_plain(name) for name in own.class_names}
        kept = [name for name in self.source.class_names if name not in self.exclude]
        if both := [name for name in kept if _plain(name) in known]:
            raise ConfigurationError(
                f"data.ood: {self.source.recorded_name} has {len(both)} of the federation's classes ({listed(both)}), "
                "whose images are not out of distribution; take another data.ood.source, or leave the classes out by "
                f"data.ood.exclude=[{', '.join(both[:3])}{', ...' if len(both) > 3 else ''}]"
            )

    def read(self, pool: ImagePool, held_out: Collection[str]) -> ForeignImages:
        """Read the source, draw the images and bring them to the size of the federation's.

        Args:
            pool: of the federation.
            held_out: names of the splits that are evaluated.

        Raises:
            ConfigurationError: the source cannot be read, has too few images, or one of the federation's.
        """
        splits = [name for name in HELD_AGAINST if name in held_out]
        try:
            foreign = load_pool(self.source)
        except ConfigurationError as error:  # which names the options of a federation's own source
            raise ConfigurationError(str(error).replace("data.source.", "data.ood.source.")) from error
        left_out = [label for label, name in enumerate(self.source.class_names) if name in self.exclude]
        there = np.flatnonzero(~np.isin(foreign.labels.numpy(), left_out))
        name = self.source.recorded_name
        if len(there) < self.images:
            raise ConfigurationError(
                f"data.ood.images={self.images}, but {name} has {len(there)} images"
                + (f" without the {len(left_out)} excluded classes" if left_out else "")
                + (f"; give at most {len(there)}" if len(there) else "; give a data.ood.source with images")
            )
        order = there[numpy_generator("ood stream", len(foreign.labels)).permutation(len(there))]
        drawn = [np.sort(order[: self.images]), np.sort(order[self.images : 2 * self.images])]
        if "val" in splits and not len(drawn[1]):
            raise ConfigurationError(
                f"data.ood.images={self.images} are all images of {name}, and with data.val_fraction split val is held "
                f"against others; give at most {len(there) - 1}, for example data.ood.images={max(1, len(there) // 2)}"
            )
        used = drawn if "val" in splits else drawn[:1]
        images = resized_pixels(foreign.images[torch.from_numpy(np.concatenate(used))], pool.images.shape[-2:])
        known = known_among(images.numpy(), pool.images.numpy())
        if known.any():
            labels = foreign.labels[torch.from_numpy(np.concatenate(used)[known])].unique().tolist()
            raise ConfigurationError(
                f"data.ood: {int(known.sum())} of the {len(images)} drawn images of {name} have the pixels of an image "
                f"of the federation (their classes: {listed([self.source.class_names[label] for label in labels])}), "
                "and so are not out of distribution; take another data.ood.source, or leave these classes out by "
                "data.ood.exclude"
            )
        log.info(f"  out of distribution: {len(images):,} images of {name}")
        tested, held = np.arange(self.images), np.arange(self.images, len(images))
        return ForeignImages(
            images,
            {split: held if split == "val" else tested for split in splits},
            {"source": name, "images": self.images, "sha256": pixels_sha256(images[: self.images])},
        )


def _plain(name: str) -> str:
    """Return a class name as one hears it: ``Sea_Lion`` and ``sea lion`` are one."""
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())
