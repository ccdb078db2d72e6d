"""Dermoscopic-FL (Chen et al., "Personalized Retrogress-Resilient Framework for Real-World Medical Federated Learning",
MICCAI 2021; PRR-FL).
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.folders import list_class_folders, list_images, read_images, without_copies
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import united, warn_of_leaks
from datamodules.tables import read_table

SIDES = ("train", "valid", "test")
DIAGNOSES = ("nv", "bkl", "mel")
HAM_SITES = {"vidir_modern": 0, "vidir_molemax": 1, "rosendahl": 2}
ISIC_SITE = 3
SITE_SIZES = (2987, 3868, 1635, 2000)

HAM_METADATA = ("HAM10000_metadata.csv", "HAM10000_metadata.tab", "HAM10000_metadata")
HAM_IMAGES = ("HAM10000_images_part_1", "HAM10000_images_part_2")
ISIC_LABELS = "ISIC-2017_Training_Part3_GroundTruth.csv"
ISIC_IMAGES = "ISIC-2017_Training_Data"
HAM_HOME = "https://doi.org/10.7910/DVN/DBW86T"
ISIC_HOME = "https://challenge.isic-archive.com/data/#2017"


@dataclass(frozen=True)
class Record:
    """One image.

    Attributes:
        name: its ISIC id.
        file: path relative to the data set's folder.
        site: 0 to 3.
        label: 0 to 2.
        side: published side, index into ``SIDES``; None where no list says it.
    """

    name: str
    file: str
    site: int
    label: int
    side: int | None


class DermoscopicFL(ImageSource):
    """10,490 skin lesion images of three classes at four sites, one domain a site.

    A, B and C are HAM10000's ``vidir_modern``, ``vidir_molemax`` and ``rosendahl``; D (MSK) is ISIC-2017's training
    set. Site B is 96 % nevi. Read from ``<root>/dermoscopic_fl``, in one of two layouts:

    - plain folders ``client{A,B,C,D}/{train,valid,test}/{nv,bkl,mel}/<ISIC id>.jpg`` with the published split;
    - the two releases: ``HAM10000_metadata`` (.csv or .tab, with its ``dataset`` column), ``HAM10000_images_part_1``,
      ``HAM10000_images_part_2``, ``ISIC-2017_Training_Part3_GroundTruth.csv`` and ``ISIC-2017_Training_Data``.

    PRR-FL's lists ``{train,valid,test}_client{A,B,C,D}.csv`` may lie in ``splits_prrfl``: they give the releases
    their published split. Images come by site, class and name in both layouts.

    **The published split leaks**: it is by image, and in A and C more than half of the test images show a lesion that
    also trains. It is the default, as published numbers are on it, and says how many each time it is read. Its
    ``ImagePool.group`` marks byte-identical files only. With ``split="lesion"`` it marks lesions, and no lesion is on
    two sides.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels (pFedPG 224, PRR-FL 128).
        split: ``image``: the published split, or where no list says it one drawn 70/10/20 by image with the published
            counts per site and class. ``lesion``: drawn 70/10/20 by lesion. Lesion ids come from the lists or from
            HAM10000's metadata; D has none, so that each of its images counts as a lesion.
        use_valid: what becomes of the validation images: ``none`` leaves them out, ``train`` trains on them.
        split_seed: seed of every split that is drawn.
    """

    title = "Dermoscopic-FL"
    class_names = ("nevus", "benign_keratosis", "melanoma")
    domain_names = ("A", "B", "C", "D")

    def __init__(
        self,
        root: str = "data",
        size: Size = 224,
        split: Literal["image", "lesion"] = "image",
        use_valid: Literal["none", "train"] = "none",
        split_seed: Seed = 0,
    ) -> None:
        self.at = user_path(root) / "dermoscopic_fl"
        self.size = size
        self.split = split
        self.use_valid = use_valid
        self.split_seed = split_seed

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, "squash")

    def load(self) -> ImagePool:
        """Read the images in use; the first time from their files, then from a cache beside them."""
        records = self._folders() if (self.at / "clientA").is_dir() else self._releases()
        records.sort(key=lambda record: (record.site, record.label, record.name))
        labels = np.array([record.label for record in records], dtype=np.int64)
        sites = np.array([record.site for record in records], dtype=np.int64)
        if (sizes := tuple(np.bincount(sites, minlength=len(SITE_SIZES)).tolist())) != SITE_SIZES:
            warnings.warn(
                f"Dermoscopic-FL has {', '.join(map(str, SITE_SIZES))} images at its sites, {self.at} has "
                f"{', '.join(map(str, sizes))}: results compare with no published number",
                stacklevel=2,
            )
        lesions = self._lesions(records)
        if self.split == "lesion":
            sides = self._drawn(sites, labels, lesions)
        elif any(record.side is None for record in records):
            sides = self._drawn(sites, labels, np.arange(len(records)))
        else:
            sides = np.array([record.side for record in records], dtype=np.int64)
        used = np.flatnonzero(np.ones(len(sides), dtype=bool) if self.use_valid == "train" else sides != 1)
        test = sides[used] == 2
        decoded = read_images(self.at, [records[row].file for row in used], self.decoding.size, self.decoding.fit)
        if self.split == "lesion":
            decoded = replace(decoded, group=united(lesions[used], decoded.group))
        else:
            warn_of_leaks(self.title, "lesion", lesions[used], sites[used], test, self.domain_names)
        return without_copies(decoded, labels[used], test, sites[used])

    def _folders(self) -> list[Record]:
        """Images of the plain folders."""
        records = []
        for site, letter in enumerate(self.domain_names):
            for side, name in enumerate(SIDES):
                below = f"client{letter}/{name}"
                files, labels = list_class_folders(self.at, below, [[diagnosis] for diagnosis in DIAGNOSES])
                records += [
                    Record(PurePosixPath(file).stem, file, site, int(label), side)
                    for file, label in zip(files, labels, strict=True)
                ]
        names = [record.name for record in records]
        if len(set(names)) != len(names):
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise ConfigurationError(f"{self.at} holds the image {twice} more than once; unpack the data set again")
        return records

    def _releases(self) -> list[Record]:
        """Images of HAM10000 and ISIC-2017 that belong to a site."""
        metadata = self._metadata()
        missing = [f"{HAM_METADATA[0]} ({HAM_HOME})"] if metadata is None else []
        missing += [f"{folder}/*.jpg ({HAM_HOME})" for folder in HAM_IMAGES if not (self.at / folder).is_dir()]
        missing += [f"{ISIC_LABELS} ({ISIC_HOME})"] if not (self.at / ISIC_LABELS).is_file() else []
        missing += [f"{ISIC_IMAGES}/*.jpg ({ISIC_HOME})"] if not (self.at / ISIC_IMAGES).is_dir() else []
        if metadata is None or missing:
            raise self.missing(
                f"Dermoscopic-FL is not complete in {self.at}: download and unpack there {', '.join(missing)}, or put "
                "plain folders there as client{A,B,C,D}/{train,valid,test}/{nv,bkl,mel}/<ISIC id>.jpg"
            )
        files = {
            PurePosixPath(file).stem: file
            for folder in (*HAM_IMAGES, ISIC_IMAGES)
            for file in list_images(self.at, folder)
        }
        found: list[tuple[str, int, int]] = []
        for row in read_table(metadata, ("image_id", "dx", "dataset", "lesion_id")):
            if row["dataset"] in HAM_SITES and row["dx"] in DIAGNOSES:
                found.append((row["image_id"], HAM_SITES[row["dataset"]], DIAGNOSES.index(row["dx"])))
        for row in read_table(self.at / ISIC_LABELS, ("image_id", "melanoma", "seborrheic_keratosis")):
            try:
                melanoma, keratosis = float(row["melanoma"]) == 1, float(row["seborrheic_keratosis"]) == 1
            except ValueError as error:
                raise ConfigurationError(f"{self.at / ISIC_LABELS}: labels must be 0 or 1 ({error})") from error
            found.append((row["image_id"], ISIC_SITE, 2 if melanoma else int(keratosis)))
        sides = self._published_sides()
        for name, site, _ in found:
            if name not in files:
                raise ConfigurationError(
                    f"{self.at}: the image {name} of site {self.domain_names[site]} is in none of "
                    f"{', '.join((*HAM_IMAGES, ISIC_IMAGES))}; unpack the release again"
                )
            if sides and name not in sides:
                raise ConfigurationError(
                    f"{self.at / 'splits_prrfl'}: no list names the image {name} of site {self.domain_names[site]}; "
                    "give all twelve lists, or remove the folder for a split that is drawn"
                )
        return [Record(name, files[name], site, label, sides.get(name)) for name, site, label in found]

    def _metadata(self) -> Path | None:
        return next((self.at / name for name in HAM_METADATA if (self.at / name).is_file()), None)

    def _lists(self) -> Iterable[tuple[int, int, Path]]:
        """Site, side and path of each of PRR-FL's lists that is there."""
        for site, letter in enumerate(self.domain_names):
            for side, name in enumerate(SIDES):
                path = self.at / "splits_prrfl" / f"{name}_client{letter}.csv"
                if path.is_file():
                    yield site, side, path

    def _published_sides(self) -> dict[str, int]:
        """Side of each image that a list names."""
        sides: dict[str, int] = {}
        for _, side, path in self._lists():
            for row in read_table(path, ("image_id",)):
                if sides.setdefault(row["image_id"], side) != side:
                    raise ConfigurationError(f"{path}: the image {row['image_id']} is in another list too")
        return sides

    def _lesions(self, records: list[Record]) -> NDArray[np.int64]:
        """A number for each image's lesion, [n]; an image without a lesion id is alone in its own."""
        metadata = self._metadata()
        # What site D's lists have in that column are no lesions.
        tables = [path for site, _, path in self._lists() if site != ISIC_SITE] + ([metadata] if metadata else [])
        known: dict[str, str] = {}
        for path in tables:
            known |= {row["image_id"]: row["lesion_id"] for row in read_table(path, ("image_id", "lesion_id"))}
        without = [record for record in records if record.name not in known and record.site != ISIC_SITE]
        if self.split == "lesion" and without:
            raise ConfigurationError(
                f"split=lesion needs lesion ids, and {len(without)} images have none, first {without[0].name} of site "
                f"{self.domain_names[without[0].site]}: put PRR-FL's lists into {self.at / 'splits_prrfl'} or "
                f"{HAM_METADATA[0]} ({HAM_HOME}) into {self.at}, or take split=image"
            )
        names = [known.get(record.name, f"image {record.name}") for record in records]
        return np.unique(names, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def _drawn(
        self, sites: NDArray[np.int64], labels: NDArray[np.int64], units: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Sides of a split in which all images of a unit are on one side."""
        return draw_sides(sites * len(self.class_names) + labels, units, self.split_seed, self.split)


def draw_sides(strata: NDArray[np.int64], units: NDArray[np.int64], seed: int, name: str) -> NDArray[np.int64]:
    """Split 70/10/20 by whole units, each stratum by itself.

    Of a stratum of n images 0.7 n rounded half up train and 0.1 n rounded down validate, fewer where a whole unit
    does not fit; the rest test. These are PRR-FL's counts where each image is a unit.

    Args:
        strata: [n], site and class of each image; a unit counts to that of its first image.
        units: [n], images of equal value stay together.
        seed: seed of the draw.
        name: what is drawn, part of the key.

    Returns:
        [n], index into ``SIDES``.
    """
    _, first, inverse, sizes = np.unique(units, return_index=True, return_inverse=True, return_counts=True)
    side = np.zeros(len(first), dtype=np.int64)
    for stratum in np.unique(strata[first]):
        rng = numpy_generator(seed, "dermoscopic_fl", name, int(stratum))
        mine = rng.permutation(np.flatnonzero(strata[first] == stratum))
        n = int(sizes[mine].sum())
        ends = [(7 * n + 5) // 10, (7 * n + 5) // 10 + n // 10]
        side[mine] = np.searchsorted(ends, np.cumsum(sizes[mine]), side="left")
    return side[inverse.reshape(-1)]
