"""Office-Caltech10 (Gong et al., "Geodesic Flow Kernel for Unsupervised Domain Adaptation", CVPR 2012)."""

import warnings

import numpy as np
import torch

from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.folders import Fit, list_class_folders, read_images
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import draw_test

FOLDER_ALIASES = {"back_pack": "backpack", "laptop_computer": "laptop", "caltech": "caltech10"}


class OfficeCaltech10(ImageSource):
    """2,533 images of ten classes in four domains, in FedBN's order of classes and domains.

    Read from ``<root>/office_caltech10/{amazon,caltech,dslr,webcam}/<class>/``. FedBN's split is not published with the
    data set: each domain is split 80/20, stratified by class, with FedBN's counts (train 766/898/125/236, test
    192/225/32/59). Images with a byte-identical copy train.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.
        split_seed: seed of the split into train and test.
        fit: ``squash`` resizes to a square, ``crop`` resizes the short side and cuts out the centre (CLIP's way).
    """

    title = "Office-Caltech10"
    class_names = (
        "back_pack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
        "projector",
    )
    domain_names = ("amazon", "caltech", "dslr", "webcam")

    def __init__(self, root: str = "data", size: Size = 224, split_seed: Seed = 0, fit: Fit = "squash") -> None:
        self.root = user_path(root)
        self.size = size
        self.split_seed = split_seed
        self.fit: Fit = fit

    @property
    def decoding(self) -> Decoding:
        """How a file becomes stored pixels."""
        return Decoding(self.size, self.fit)

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them."""
        at = self.root / "office_caltech10"
        if not at.is_dir():
            raise self.missing(
                f"Office-Caltech10 is not in {self.root}: download its images (the ten classes that Office-31 and "
                f"Caltech-256 share, https://faculty.cc.gatech.edu/~judy/domainadapt/) and put them there as "
                f"{at}/<domain>/<class>/*.jpg, with domains {', '.join(self.domain_names)}"
            )
        folders = [self._spellings(name) for name in self.class_names]
        files: list[str] = []
        labels, domains = [], []
        for number, domain in enumerate(self.domain_names):
            below = next((name for name in self._spellings(domain) if (at / name).is_dir()), domain)
            listed, listed_labels = list_class_folders(at, below, folders)
            files += listed
            labels.append(listed_labels)
            domains.append(np.full(len(listed), number, dtype=np.int64))
        if (counts := tuple(map(len, labels))) != (958, 1123, 157, 295):
            warnings.warn(
                f"Office-Caltech10 has 958, 1123, 157 and 295 images in its domains, {at} has {counts}: results "
                "compare with no published number",
                stacklevel=2,
            )
        decoded = read_images(at, files, self.decoding.size, self.decoding.fit)
        copies = np.isin(decoded.group, decoded.group[decoded.group != np.arange(len(files))])
        all_labels, all_domains = np.concatenate(labels), np.concatenate(domains)
        test = np.zeros(len(files), dtype=bool)
        for number, domain in enumerate(self.domain_names):
            rows = np.flatnonzero(all_domains == number)
            rng = numpy_generator(self.split_seed, "office_caltech10", domain)
            test[rows] = draw_test(all_labels[rows], ~copies[rows], rng)
        return ImagePool(
            images=torch.from_numpy(decoded.images),
            labels=torch.from_numpy(all_labels),
            test=torch.from_numpy(test),
            domains=torch.from_numpy(all_domains),
            group=torch.from_numpy(decoded.group),
        )

    @staticmethod
    def _spellings(name: str) -> list[str]:
        return [name, FOLDER_ALIASES[name]] if name in FOLDER_ALIASES else [name]
