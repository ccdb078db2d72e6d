"""Camelyon17 in the form of WILDS (Koh et al., "WILDS: A Benchmark of in-the-Wild Distribution Shifts", ICML 2021)."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from datamodules.folders import read_images, without_copies
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import draw_units, united, warn_of_leaks
from datamodules.tables import read_table

HOME = "https://wilds.stanford.edu/get_started (camelyon17_v1.0)"
#: patches of each hospital
SIZES = (59436, 34904, 85054, 129838, 146722)
#: columns of whole numbers, of which a patch's file is named by the first four
NUMBERS = ("patient", "node", "x_coord", "y_coord", "tumor", "center", "split")


class Camelyon17(ImageSource):
    """455,954 patches of lymph nodes from five hospitals, with tumor in the middle or without; one domain a hospital.

    Read from ``<root>/camelyon17_v1.0``: ``metadata.csv`` and ``patches/patient_<p>_node_<n>/*.png``. Patches come by
    hospital, class and file. WILDS trains on hospitals 0, 3 and 4, validates on 1 and tests on 2: the partition
    ``LeaveOneDomainOut`` leaves a hospital out, while a client for each hospital needs a split inside of it.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels; the patches have 96.
        split: ``patient``: each hospital is split about 80/20 by patients, so that no patient is on two sides.
            ``patch``: of the metadata's column ``split`` 0 trains and 1 tests, a tenth; **this leaks**, as patches of a
            slide are on both sides, which is said each time.
        split_seed: seed of the split by patient.
    """

    title = "Camelyon17"
    class_names = ("normal", "tumor")
    domain_names = ("hospital 0", "hospital 1", "hospital 2", "hospital 3", "hospital 4")

    def __init__(
        self,
        root: str = "data",
        size: Size = 96,
        split: Literal["patient", "patch"] = "patient",
        split_seed: Seed = 0,
    ) -> None:
        self.at = user_path(root) / "camelyon17_v1.0"
        self.size = size
        self.split = split
        self.split_seed = split_seed

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, "squash")

    def load(self) -> ImagePool:
        """Read all patches; the first time from their files, then from a cache beside them.

        Raises:
            ConfigurationError: table or patches are not there, are damaged, or are not of this form.
        """
        path = self.at / "metadata.csv"
        if not path.is_file():
            raise self.missing(
                f"Camelyon17 is not in {self.at}: download it from {HOME} and unpack it there as metadata.csv and "
                "patches/patient_<patient>_node_<node>/*.png"
            )
        rows = sorted(self._rows(path))
        hospitals, labels, patients, sides = np.array([(*row[:2], *row[3:]) for row in rows], dtype=np.int64).T
        if (counts := tuple(np.bincount(hospitals, minlength=len(SIZES)).tolist())) != SIZES:
            warnings.warn(
                f"Camelyon17 has {', '.join(map(str, SIZES))} patches of its hospitals, {self.at} has "
                f"{', '.join(map(str, counts))}: results compare with no published number",
                stacklevel=2,
            )
        decoded = read_images(self.at, [row[2] for row in rows], self.decoding.size, self.decoding.fit)
        if self.split == "patient":
            decoded = replace(decoded, group=united(patients, decoded.group))
            test = draw_units(hospitals, decoded.group, self.split_seed, "camelyon17")
        else:
            test = sides == 1
            warn_of_leaks(self.title, "patient", patients, hospitals, test, self.domain_names)
        return without_copies(decoded, labels, test, hospitals)

    def _rows(self, path: Path) -> list[tuple[int, int, str, int, int]]:
        """Hospital, label, file, patient and side of each patch."""
        rows = []
        homes: dict[int, int] = {}
        for number, row in enumerate(read_table(path, NUMBERS), start=2):
            wrong = next((name for name in NUMBERS if not re.fullmatch(r"\d{1,9}", row[name], re.ASCII)), None)
            if wrong:
                raise ConfigurationError(
                    f"{path}: line {number} has {row[wrong][:40]!r} in the column {wrong}, expected a whole number; "
                    f"get it from {HOME}"
                )
            patient, node, x, y = (row[name] for name in NUMBERS[:4])
            tumor, hospital, side = (int(row[name]) for name in NUMBERS[4:])
            if tumor > 1 or hospital >= len(self.domain_names) or side > 1:
                raise ConfigurationError(
                    f"{path}: line {number} has tumor {tumor}, center {hospital} and split {side}, expected 0 or 1, 0 "
                    f"to 4, and 0 or 1; get it from {HOME}"
                )
            if homes.setdefault(int(patient), hospital) != hospital:
                raise ConfigurationError(
                    f"{path}: line {number} has patient {patient} in center {hospital}, an earlier one in center "
                    f"{homes[int(patient)]}; get it from {HOME}"
                )
            folder = f"patient_{patient}_node_{node}"
            file = f"patches/{folder}/patch_{folder}_x_{x}_y_{y}.png"
            rows.append((hospital, tumor, file, int(patient), side))
        if not rows:
            raise ConfigurationError(f"{path} lists no patch; get it from {HOME}")
        return rows
