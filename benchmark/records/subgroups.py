"""``subgroups.parquet``: the subgroups that a run's scored images are in, by columns of their index such as ``sex``."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmark.records.predictions import bytes_of, categories, opened

if TYPE_CHECKING:  # slow to import
    import pandas as pd

SUBGROUPS = "subgroups.parquet"
COLUMNS = ("column", "image", "value")
"""Columns of ``subgroups.parquet``: the index's column, image int64 (row of the image pool, as in
``predictions.parquet``) and its value there. The values of a column stand in their order, and of each its images."""
#: Value of images of which the index says nothing.
NOT_GIVEN = "not given"
#: Columns of a run at most, and subgroups of each: every subgroup has a row in tables, and enough images of its own.
MOST_COLUMNS, MOST_SUBGROUPS = 20, 50


def subgroups_parquet_of(columns: Mapping[str, Mapping[str, Sequence[int]]]) -> bytes:
    """Return the content of ``subgroups.parquet``. The same subgroups in the same order give the same bytes.

    Args:
        columns: by column and value, in their order, the images.
    """
    import pandas as pd
    import pyarrow as pa

    rows = [
        (column, image, value)
        for column, subgroups in columns.items()
        for value, images in subgroups.items()
        for image in images
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    arrays = [categories(table["column"]), pa.array(table["image"].to_numpy(), pa.int64()), categories(table["value"])]
    return bytes_of(pa.Table.from_arrays(arrays, names=list(COLUMNS)))


def parse_subgroups(content: bytes) -> "pd.DataFrame":
    """Return the rows of ``subgroups.parquet``, the texts as categories.

    Raises:
        OSError: it is no Parquet file.
        ValueError: it has other columns, values of other types or none, an image twice in a column, more columns or
            subgroups than a run's can have, or more rows.
    """
    table = opened(content, COLUMNS, texts=("column", "value")).read(use_pandas_metadata=False)
    if lacking := [name for name in COLUMNS if table[name].null_count]:
        raise ValueError(f"a row has no {lacking[0]}")
    rows: pd.DataFrame = table.to_pandas()
    if (count := rows["column"].nunique()) > MOST_COLUMNS:
        raise ValueError(f"it has {count:,} columns of an index; at most {MOST_COLUMNS} are read")
    if (count := rows.groupby("column", observed=True)["value"].nunique().max()) > MOST_SUBGROUPS:
        raise ValueError(f"a column has {count:,} values; at most {MOST_SUBGROUPS} are read")
    if rows.duplicated(["column", "image"]).any():
        raise ValueError("it has an image twice in a column")
    return rows
