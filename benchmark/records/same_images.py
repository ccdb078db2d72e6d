"""Kept images of two runs, paired: the same images in the same order, or what is not the same."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from benchmark.errors import ConfigurationError
from benchmark.records.record import POINTS
from benchmark.records.stored_run import StoredRun
from benchmark.records.words import POINT_WORDS

if TYPE_CHECKING:  # slow to import
    import pandas as pd

#: Columns that say which image a row is of, and those that must be equal in both runs.
KEY, KNOWN = ["client", "image"], ("label", "group")


def paired_images(
    first: StoredRun, second: StoredRun, points: tuple[str, str], split: str
) -> "tuple[pd.DataFrame, pd.DataFrame]":
    """Return the rows of two runs' kept images, those of one image at the same place of both.

    Two runs have the same images where they are on one data set, each client, by its name, has images of the same
    numbers, labels and groups, and the numbers count the same images: the partitions are the same, or all images are,
    by their hash. Images of one partition may have other pixels in each run, of another size, say: :func:`same_pixels`.

    Args:
        first: a run that kept its images.
        second: another one, or the same.
        points: of a round, that the first and the second run were scored at.
        split: of the images.

    Raises:
        ConfigurationError: a run kept none of these images, or they are not the ones that it wrote; or the images,
            classes or clients of both are not the same.
    """
    runs = first, second
    one, other = (_rows(run, point, split) for run, point in zip(runs, points, strict=True))
    why = _unlike_data(runs) or _unlike_classes(runs, (one, other)) or _unlike_clients(runs)
    why = why or _unlike_images(runs, one, other)
    if not why and not (same_partition(first, second) or _same_pool(first, second)):
        why = "their partitions differ, and no hash shows that the images are the same"
    if why:
        raise ConfigurationError(
            f"{first.folder} and {second.folder} have no images to be paired on {split}: {why}; run both with the same "
            "data, partition and seed of the partition"
        )
    return one, other


def same_partition(first: StoredRun, second: StoredRun) -> bool:
    """Return whether two runs share out the same images in the same way, training images too."""
    return first.record.manifest_hash == second.record.manifest_hash


def same_pixels(first: StoredRun, second: StoredRun) -> bool:
    """Return whether no hash shows that the pixels of two runs' images differ."""
    hashes = {first.record.images_sha256, second.record.images_sha256} - {None}
    return len(hashes) < 2


def _same_pool(first: StoredRun, second: StoredRun) -> bool:
    digest = first.record.images_sha256
    return digest is not None and digest == second.record.images_sha256


def _rows(run: StoredRun, point: str, split: str) -> "pd.DataFrame":
    rows = run.scored(point, split)
    if len(rows):
        return rows.sort_values(KEY, ignore_index=True)
    splits = sorted({*run.predictions["split"]})
    there = [f"{each} {POINT_WORDS[at]}" for at in POINTS for each in splits if len(run.scored(at, each))]
    raise ConfigurationError(
        f"{run.folder} stored no predictions of the split {split!r:.80} {POINT_WORDS[point]}; "
        f"it stored those of {', '.join(there)}"
    )


def _unlike_data(runs: "Sequence[StoredRun]") -> str:
    first, second = (run.record.dataset for run in runs)
    return f"they are on {first!r:.80} and on {second!r:.80}" if first != second else ""


def _unlike_classes(runs: "Sequence[StoredRun]", rows: "Sequence[pd.DataFrame]") -> str:
    first, second = (len(each["logits"].iloc[0]) for each in rows)
    if first != second:
        return f"the first run has {first} classes, the second one {second}"
    one, other = ((run.partition or {}).get("class_names") for run in runs)
    return _first_unlike("class", one, other) if isinstance(one, list) and isinstance(other, list) else ""


def _unlike_clients(runs: "Sequence[StoredRun]") -> str:
    return _first_unlike("client", *(run.record.client_names for run in runs))


def _first_unlike(what: str, left: Sequence[str], right: Sequence[str]) -> str:
    """Say which entry of two lists is the first to differ; nothing where none does."""
    for number, both in enumerate(zip_longest(left, right)):
        if both[0] != both[1]:
            one, other = ("missing" if each is None else repr(each)[:80] for each in both)
            return f"{what} {number} is {one} in the first run and {other} in the second one"
    return ""


def _unlike_images(runs: "Sequence[StoredRun]", one: "pd.DataFrame", other: "pd.DataFrame") -> str:
    """Say which image is the first that the runs do not share; nothing where they share all."""
    columns = [*KEY, *KNOWN]
    if one[columns].equals(other[columns]):
        return ""
    names = runs[0].record.client_names
    both = one[columns].merge(
        other[columns], how="outer", on=KEY, suffixes=("", "_other"), indicator="there", sort=True
    )
    for row in both[both["there"] != "both"].to_dict("records"):
        which = "first" if row["there"] == "left_only" else "second"
        return f"client {names[row['client']]!r:.80} has image {row['image']} in the {which} run alone"
    for column in KNOWN:
        for row in both[both[column] != both[f"{column}_other"]].to_dict("records"):
            said = f"the {column}s {row[column]} and {row[f'{column}_other']}"
            return f"image {row['image']} of client {names[row['client']]!r:.80} has {said}"
    return "an image is there twice"
