"""Images in a data set of the Hugging Face library ``datasets``: from its Hub, saved to disk, or in Parquet files."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Bits, Seed, Size
from datamodules.decoded_cache import BESIDE, cache_folder, size_said
from datamodules.folders import DecodedImages, decode_images
from datamodules.names import check_names, in_order, text_of, whole
from datamodules.own_folders import Listed
from datamodules.own_images import OwnImages
from datamodules.pixels import Fit

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)


class HuggingFaceImages(OwnImages):
    """A data set of Hugging Face ``datasets`` (``pip install 'federated-prompt-benchmark[huggingface]'``).

    ``root`` is a folder that ``save_to_disk`` has written, or one of Parquet files or of images, as ``load_dataset``
    takes it; or, with ``hub``, the folder that keeps what is downloaded. No code that comes with a data set is run. Its
    splits ``train`` and ``test`` are kept; where there is only one split, or ``test`` is null, it is split 80/20. Other
    splits are passed over. Classes and domains come in the order of the column's ``ClassLabel``, else of their names.
    What the other arguments mean is said of :class:`OwnImages`.

    Args:
        name: of the data set, in records and reports.
        root: the data set's folder.
        hub: name of the data set on the Hub, such as ``ylecun/mnist``.
        configuration: of a data set that has several.
        revision: commit or tag on the Hub; without, the newest.
        image: column of the images.
        label: column of the classes.
        domain: column of the domains.
        train: split that trains.
        test: split that tests.
        size: height and width of the stored images in pixels.
        fit: ``squash`` or ``crop``.
        split_seed: seed of the split, where it is drawn.
        bits: of a 16-bit value that are in use; null: all.
        cache: folder of what the library makes of Parquet files or images, seen from ``root``; null: the library's own.
    """

    def __init__(
        self,
        name: str,
        root: str = "data",
        hub: str | None = None,
        configuration: str | None = None,
        revision: str | None = None,
        image: str = "image",
        label: str = "label",
        domain: str | None = None,
        train: str = "train",
        test: str | None = "test",
        size: Size = 224,
        fit: Fit = "squash",
        split_seed: Seed = 0,
        bits: Bits | None = None,
        cache: str | None = BESIDE,
    ) -> None:
        if hub == "":
            raise ConfigurationError(
                "data.source.init_args.hub is empty; name a data set of the Hub, such as ylecun/mnist, or leave it out"
            )
        if hub is not None:
            user_path(root).mkdir(parents=True, exist_ok=True)
        super().__init__(name, root, size, fit, split_seed, bits, cache)
        self.image = image
        self.what = hub or str(self.at)
        self.sides = self._sides(_opened(self.at, hub, configuration, revision, cache), train, test)
        self._check_columns(image, label, *([] if domain is None else [domain]))
        self.class_names, self.labels = self._codes(label)
        if len(self.class_names) < 2:
            raise ConfigurationError(f"{self.what}: expected at least two classes in the column {label}, got one")
        if domain is not None:
            self.domain_names, self.domains = self._codes(domain)
        else:
            self.domains = np.zeros_like(self.labels)
        check_names(self.class_names, "class", self.what)
        check_names(self.domain_names, "domain", self.what)

    def _sides(self, splits: "dict[str, Dataset]", train: str, test: str | None) -> "list[Dataset]":
        """The split that trains, and the one that tests if one does."""
        wanted = [train] if test is None or set(splits) == {train} else [train, test]
        for split in wanted:
            if split not in splits:
                raise ConfigurationError(
                    f"{self.what} has no split {split}, it has {', '.join(splits)}; name the splits as "
                    "data.source.init_args.train and test (null: a fifth of those that train is drawn)"
                )
        return [splits[split] for split in wanted]

    def _check_columns(self, image: str, *others: str) -> None:
        """Refuse columns that are not there, and images that are something else."""
        from datasets import ClassLabel, Image, Value

        for side in self.sides:
            for column in (image, *others):
                if column not in side.column_names:
                    raise ConfigurationError(
                        f"{self.what} has no column {column}, it has {', '.join(side.column_names)}; name them as "
                        "data.source.init_args.image, label and domain"
                    )
            if not isinstance(side.features[image], Image):
                raise ConfigurationError(
                    f"{self.what}: the column {image} holds {side.features[image]}, no images; cast it with "
                    "cast_column(..., datasets.Image()) and save the data set again"
                )
            for column in others:
                if not isinstance(side.features[column], ClassLabel | Value):
                    raise ConfigurationError(
                        f"{self.what}: the column {column} holds {side.features[column]}, expected one name or "
                        "number a row; an image has one label and one domain here"
                    )

    def _codes(self, column: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Names of a column, and the place of each row's among them, those that train first.

        Raises:
            ConfigurationError: a row has none, or the sides name them differently.
        """
        from datasets import ClassLabel

        with _told(f"the column {column} of {self.what} cannot be read"):
            values: list[Any] = [value for side in self.sides for value in side[column]]
        features = [side.features[column] for side in self.sides]
        if isinstance(features[0], ClassLabel):
            names: Sequence[str] = features[0].names
            found: Sequence[Any] = values
            known: dict[Any, int] = {number: number for number in range(len(names))}
            if any(getattr(feature, "names", None) != names for feature in features):
                raise ConfigurationError(f"{self.what}: its splits name the column {column} differently")
        else:
            found = self._texts(values, column)
            names = in_order(text for text in found if text)
            known = {text: number for number, text in enumerate(names)}
        without = next((row for row, value in enumerate(found) if value not in known), None)
        if without is not None:
            raise ConfigurationError(
                f"{self.what}: row {without} has {values[without]!r} as its {column}; leave out rows without one"
            )
        return tuple(names), np.array([known[value] for value in found], dtype=np.int64)

    def _texts(self, values: Sequence[Any], column: str) -> list[str]:
        texts = []
        for row, value in enumerate(values):
            try:
                texts.append(text_of(value))
            except TypeError as error:
                raise ConfigurationError(f"{self.what}: row {row} has in its column {column} {error}") from error
        return whole(texts)

    def listing(self) -> Listed:
        tested = [np.full(len(side), number == 1) for number, side in enumerate(self.sides)]
        rows = [f"row {row}" for row in range(len(self.labels))]
        return Listed(rows, self.labels, self.domains, np.concatenate(tested), np.full(len(rows), len(self.sides) == 2))

    def _decoded(self, images: Listed) -> DecodedImages:
        """Decode the images anew; the library maps them from its own files."""
        from datasets import Image

        encoded = [
            side.select_columns([self.image]).cast_column(self.image, Image(decode=False)) for side in self.sides
        ]

        def read(row: int) -> Path | tuple[str, bytes]:
            side = 0 if row < len(encoded[0]) else 1
            with _told(f"row {row} of {self.what} cannot be read"):
                image = encoded[side][row - side * len(encoded[0])][self.image]
            if image is None:
                raise ConfigurationError(f"{self.what}: row {row} has no image; leave out rows without one")
            if image["bytes"] is None:
                return self._own_file(image["path"], row)
            return f"of row {row} of {self.what}", image["bytes"]

        return decode_images(read, len(images.files), self.decoding, self.what)

    def _own_file(self, path: str | None, row: int) -> Path:
        """A file that a row names, if it is one of the data set's, or of what the library has downloaded."""
        from datasets import config

        real = os.path.realpath(path or "")
        folders = [os.path.realpath(folder) for folder in (self.at, config.HF_CACHE_HOME, config.HF_DATASETS_CACHE)]
        if not os.path.isfile(real) or not any(os.path.commonpath([folder, real]) == folder for folder in folders):
            raise ConfigurationError(
                f"{self.what}: row {row} names {path!r}, which is no file of the data set; put its images into the "
                f"table itself, or into {self.at}"
            )
        return Path(real)


@contextmanager
def _told(what: str, advice: str = "save the data set again") -> Iterator[None]:
    """Tell in a line what the library says, of whatever kind it is: of damaged files it raises nearly everything.

    Raises:
        ConfigurationError: an exception came from inside.
    """
    try:
        yield
    except (ConfigurationError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigurationError(f"{what} ({said}); {advice}") from error


def _opened(
    root: Path, hub: str | None, configuration: str | None, revision: str | None, cache: str | None
) -> "dict[str, Dataset]":
    """The splits of a data set by their names; no image is decoded.

    Raises:
        ConfigurationError: the library is not installed, or the data set cannot be had.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigurationError(
            "HuggingFaceImages needs datasets: pip install 'federated-prompt-benchmark[huggingface]'"
        ) from error
    if hub is not None:
        advice = (
            "put what save_to_disk writes of it elsewhere into a folder, and give that as data.source.init_args.root, "
            "without hub"
        )
        with _told(f"cannot have {hub} from the Hugging Face Hub", advice):
            found = datasets.load_dataset(hub, configuration, revision=revision, cache_dir=str(root / "huggingface"))
    else:
        saved = any((root / file).is_file() for file in ("dataset_dict.json", "state.json"))
        # What is made of Parquet files or images lies beside them, where that can be.
        kept = cache_folder(root, cache) if os.access(root, os.W_OK) else None
        advice = "put there what save_to_disk writes, or Parquet files or images that load_dataset takes"
        with _told(f"{root} is no data set of Hugging Face", advice):
            if saved:
                found = datasets.load_from_disk(str(root))
            else:
                found = datasets.load_dataset(str(root), configuration, cache_dir=kept and str(kept))
    splits = dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}
    _tell_what_is_kept(root, [Path(file["filename"]) for split in splits.values() for file in split.cache_files])
    return splits


def _tell_what_is_kept(root: Path, files: Sequence[Path]) -> None:
    """Say where the files are that the library maps, if it has made them."""
    made = [file for file in files if file.parent != root and file.parent.parent != root and file.is_file()]
    if made:
        size = size_said(sum(file.stat().st_size for file in made))
        log.info(f"  Hugging Face's library keeps a copy of the data set in {made[0].parent}: {size}")
