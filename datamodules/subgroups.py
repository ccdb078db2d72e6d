"""Subgroups of images, by columns of their index such as a patient's sex."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError, no_such
from benchmark.records.subgroups import MOST_COLUMNS, MOST_SUBGROUPS, NOT_GIVEN
from datamodules.names import check_names, in_order
from datamodules.source import ImageSource

#: Columns of an index that name no subgroup.
OTHERS = ("path", "label", "split", "group")


def check_columns(names: Sequence[str], source: ImageSource) -> None:
    """Refuse columns that name no subgroups, before an image is read.

    Args:
        names: of the columns, as ``data.subgroups`` has them.
        source: of the images.

    Raises:
        ConfigurationError: there are none of them, too many, one twice, or one that the images do not have.
    """
    if not 0 < len(names) <= MOST_COLUMNS or len({*names}) < len(names):
        raise ConfigurationError(
            f"data.subgroups is a list of columns of an index, such as [sex, age_band], from one to {MOST_COLUMNS} and "
            f"each once; got {str(names)[:80]}"
        )
    if used := [name for name in names if name in OTHERS]:
        raise ConfigurationError(
            f"data.subgroups: the column {used[0]} of an index says where an image is, of which class, or on which "
            "side of a split, and no subgroup; name columns such as sex, whose values are to be compared"
        )
    known = source.image_columns
    if not known:
        raise ConfigurationError(
            f"data.subgroups: the images of {source.recorded_name} come without columns; list them in an index with a "
            f"column {names[0]!r:.80}, and read it with datamodules.own_images.ImageIndex"
        )
    if unknown := [name for name in names if name not in known]:
        raise ConfigurationError(f"data.subgroups: {source.recorded_name}: {no_such('column', unknown[0], known)}")


def subgroups_of(source: ImageSource, column: str, rows: NDArray[np.int64]) -> dict[str, list[int]]:
    """Divide images by a column.

    Args:
        source: of the images, which has read them.
        column: its name.
        rows: of the pool.

    Returns:
        By value the rows that have it. Values come in their order, 2 before 10, and
        :data:`benchmark.records.subgroups.NOT_GIVEN` last.

    Raises:
        ConfigurationError: the column is empty for all of these images, or has one value, too many, or
            values that cannot be printed or read alike: there are fewer than
            :data:`benchmark.records.subgroups.MOST_SUBGROUPS`, of two images each on average.
    """
    values = source.image_column(column)
    texts = [values[row] for row in rows]
    named = in_order(text for text in texts if text)
    check_names(named, "subgroup", f"data.subgroups, column {column}")
    count = len(rows)
    if not named:
        raise ConfigurationError(
            f"data.subgroups: the column {column} is empty for all {count} held-out images; fill it in, or leave it out"
        )
    if len({*texts}) == 1:
        raise ConfigurationError(
            f"data.subgroups: the column {column} has the one value {named[0]!r:.80} for all {count} held-out images: "
            "there is nothing to compare; leave it out"
        )
    if len(named) > (most := min(MOST_SUBGROUPS - 1, count // 2)):
        raise ConfigurationError(
            f"data.subgroups: the column {column} has {len(named)} values in {count} held-out images, and at most "
            f"{most} are compared there; give a column of fewer, such as bands of ages in place of ages"
        )
    found: dict[str, list[int]] = {text or NOT_GIVEN: [] for text in [*named, ""]}
    for row, text in zip(rows.tolist(), texts, strict=True):
        found[text or NOT_GIVEN].append(row)
    return {value: images for value, images in found.items() if images}
