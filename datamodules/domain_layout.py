"""Image sets in a folder a domain and class, whose domains and classes are known by name."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.folders import DecodedImages, Fit, list_class_folders, pool_of, read_images
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import draw_test


class DomainSource(ImageSource):
    """An image set of several domains, a folder each. Subclasses say what it is called and where its folders are.

    Each domain is split 80/20, stratified by class; images with a byte-identical copy train. Images come by domain,
    class and name.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.
        split_seed: seed of the split into train and test, where it is drawn.
        fit: ``squash`` resizes to a square, ``crop`` resizes the short side and cuts out the centre (CLIP's way).
    """

    title: ClassVar[str]
    #: how the images are got
    home: ClassVar[str]
    #: names of the data set's folder below ``root``, the usual one first
    folders: ClassVar[tuple[str, ...]]
    #: where the images are in it, for messages
    layout: ClassVar[str] = "<domain>/<class>/*.jpg"
    #: names that folders of domains and classes may have, the usual one first, where they are not the names here
    spellings: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: images in each domain
    sizes: ClassVar[tuple[int, ...]]
    #: first part of the key of every draw
    key: ClassVar[str]

    def __init__(self, root: str = "data", size: Size = 224, split_seed: Seed = 0, fit: Fit = "squash") -> None:
        self.root = user_path(root)
        self.size = size
        self.split_seed = split_seed
        self.fit: Fit = fit

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, self.fit)

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: the images are not there, not in these folders, or damaged.
        """
        at = self.find()
        files: list[str] = []
        labels, domains, sides = [], [], []
        for number, domain in enumerate(self.domain_names):
            spelled = self.spelled(domain)
            below = next((name for name in spelled if (at / name).is_dir()), spelled[0])
            mine, mine_labels, mine_test = self.list_domain(at, below)
            files += mine
            labels.append(mine_labels)
            sides.append(mine_test)
            domains.append(np.full(len(mine), number, dtype=np.int64))
        all_labels, all_domains = np.concatenate(labels), np.concatenate(domains)
        if (counts := tuple(map(len, labels))) != self.sizes:
            expected = f"{', '.join(map(str, self.sizes[:-1]))} and {self.sizes[-1]}"
            warnings.warn(
                f"{self.title} has {expected} images in its domains, {at} has {counts}: results compare with no "
                "published number",
                stacklevel=2,
            )
        decoded = read_images(at, files, self.decoding.size, self.decoding.fit)
        test = self._sides(sides, decoded, all_labels, all_domains)
        keep = test | ~np.isin(decoded.group, decoded.group[test])
        return pool_of(decoded, all_labels, test, all_domains, keep)

    def list_domain(self, at: Path, below: str) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_] | None]:
        """A domain's images.

        Args:
            at: the data set's folder.
            below: the domain's folder in it.

        Returns:
            Paths relative to ``at``, labels [n], and whether they test, bool [n]; None where that is drawn.

        Raises:
            ConfigurationError: a class folder is missing, empty or unknown.
        """
        files, labels = list_class_folders(at, below, [self.spelled(name) for name in self.class_names])
        return files, labels, None

    def find(self) -> Path:
        """The data set's folder: of those that are there the first that holds a domain.

        Raises:
            ConfigurationError: there is none.
        """
        usual = ", ".join(self.spelled(domain)[0] for domain in self.domain_names)
        there = [self.root / name for name in self.folders if (self.root / name).is_dir()]
        if not there:
            raise self.missing(
                f"{self.title} is not in {self.root}: download {self.home} and put its images there as "
                f"{self.folders[0]}/{self.layout}, with domains {usual}"
            )
        domains = [name for domain in self.domain_names for name in self.spelled(domain)]
        return next((at for at in there if any((at / name).is_dir() for name in domains)), there[0])

    @classmethod
    def spelled(cls, name: str) -> tuple[str, ...]:
        """The names that the folder of a domain or class may have, the usual one first."""
        return cls.spellings.get(name, (name,))

    def _sides(
        self,
        given: Sequence[NDArray[np.bool_] | None],
        decoded: DecodedImages,
        labels: NDArray[np.int64],
        domains: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Test flags of all images, drawn in the domains where they are not given."""
        copies = np.isin(decoded.group, decoded.group[decoded.group != np.arange(len(labels))])
        test = np.zeros(len(labels), dtype=bool)
        for number, (domain, side) in enumerate(zip(self.domain_names, given, strict=True)):
            rows = np.flatnonzero(domains == number)
            rng = numpy_generator(self.split_seed, self.key, domain)
            test[rows] = draw_test(labels[rows], ~copies[rows], rng) if side is None else side
        return test
