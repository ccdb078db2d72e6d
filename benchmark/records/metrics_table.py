"""The long table of a run's metrics: client x round x point x split x metric."""

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from benchmark.errors import ConfigurationError
from benchmark.files import open_regular, write_bytes
from benchmark.metrics import EVALUATED, METRICS, POOLED_CLIENT
from benchmark.records.hashes import canonical
from benchmark.records.record import POINTS

if TYPE_CHECKING:  # pandas loads slowly; `benchmark --help` must not wait for it
    import pandas as pd
    import pyarrow as pa


NAMED = ("point", "split", "metric")
COLUMNS = ("round", "client", *NAMED, "value")
"""Columns of ``metrics.parquet``: round int32 (0 is before any training), client int32 (index; -1, for metrics that are
pooled from counts alone, stands for all clients' images together), point ("server": what the server holds after the
round plus the client's own state; "local": the client's state at the end of its local training, before aggregation; in
round 0 as it begins, later of clients that have trained alone), split ("test": the client's own test images; "val";
"new": of clients that never train; the further splits of the partition; "train": what local training reported), metric
(those of :data:`benchmark.metrics.METRICS`, and for "train" what the method names), value float64 (accuracies are
fractions, 0 to 1). A client that was not evaluated in a round has no rows there; rows of a client whose accuracy is NaN
are dropped as such. A metric that is not defined for a client has no row there either."""
MOST_ROWS = 10_000_000
"""Rows that a small file can have; they take 1.5 GB. A larger file has a byte and more for each of its values."""
PARTS = "metrics"
"""Folder of the tables of a run that goes on, one for each evaluated round; where ``metrics.parquet`` is, it is the
whole table and they count for nothing."""


def write_parquet(path: Path, metrics: "pd.DataFrame") -> None:
    """Write a metrics table atomically. The same rows give the same bytes, in whatever order they come.

    Raises:
        ValueError: not the columns, points, splits or metrics of :data:`COLUMNS`, or a row stands there twice.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = _in_order(metrics)
    arrays = [
        pa.array(table["round"].to_numpy(), pa.int32()),
        pa.array(table["client"].to_numpy(), pa.int32()),
        *(_categories(table[column]) for column in NAMED),
        pa.array(table["value"].to_numpy(), pa.float64(), from_pandas=False),
    ]
    # No pandas metadata: it holds the pandas version.
    schema = pa.schema([(name, array.type) for name, array in zip(COLUMNS, arrays, strict=True)])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    write_bytes(path, sink.getvalue().to_pybytes())


def _categories(column: "pd.Series[Any]") -> "pa.DictionaryArray":
    """Return a column of names; the type of its indices is part of a file's bytes, and so larger only where needed."""
    import pyarrow as pa

    names = list(column.cat.categories)
    kind = pa.int8() if len(names) <= 128 else pa.int32()
    return pa.DictionaryArray.from_arrays(pa.array(column.cat.codes.to_numpy(), kind), pa.array(names, pa.string()))


def read_table(path: Path) -> "pd.DataFrame":
    """A metrics table, columns as in :data:`COLUMNS`.

    Args:
        path: of a file, or of a folder of one for each round.

    Raises:
        ConfigurationError: the file is missing or is no metrics table.
    """
    import pyarrow as pa

    tables = []
    for file in [each for _, each in rounds_in(path)] if path.is_dir() else [path]:
        with readable(file), open_regular(file) as stream:
            tables.append(_arrow(stream, os.fstat(stream.fileno()).st_size))
    with readable(path):
        return checked(pa.concat_tables(tables).to_pandas()).astype(dict.fromkeys(NAMED, "str"))


def round_file(folder: Path, round: int) -> Path:
    """Return the path of a round's table in the folder of such tables."""
    return folder / f"round-{round:06d}.parquet"


def rounds_in(folder: Path) -> list[tuple[int, Path]]:
    """Rounds and tables of a folder, in the order of rounds; what has another name is none."""
    named = ((re.fullmatch(r"round-(\d{6,})\.parquet", path.name), path) for path in folder.glob("*"))
    return sorted((int(found[1]), path) for found, path in named if found)


def parse_table(content: bytes, most: int) -> "pd.DataFrame":
    """The metrics table that a file of this content holds, with names as categories (:func:`checked`).

    Args:
        content: of the file.
        most: rows that it can have.

    Raises:
        OSError: it is no Parquet file.
        ValueError: it is no metrics table, or has more rows.
    """
    return checked(_arrow(io.BytesIO(content), len(content), most).to_pandas())


def _arrow(stream: BinaryIO, size: int, most: int | None = None) -> "pa.Table":
    """The table of a file of so many bytes, which is not read where it would fill the memory.

    Raises:
        ValueError: it has other columns, more than ``most`` rows, or more than :data:`MOST_ROWS` and than a row a byte.
    """
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream, read_dictionary=list(NAMED))  # names stay as short as they are stored
    if sorted(file.schema_arrow.names) != sorted(COLUMNS):
        raise ValueError(f"a metrics table has the columns {', '.join(COLUMNS)}, got {_few(file.schema_arrow.names)}")
    bound = max(MOST_ROWS, size)
    bound = bound if most is None else min(bound, most)
    if file.metadata.num_rows > bound:
        raise ValueError(f"it has {file.metadata.num_rows:,} rows, and at most {bound:,} could be the run's")
    return file.read(use_pandas_metadata=False)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def as_read(metrics: "pd.DataFrame") -> "pd.DataFrame":
    """A metrics table as it would be read from its file.

    Raises:
        ValueError: as :func:`write_parquet`.
    """
    return _in_order(metrics).astype(dict.fromkeys(NAMED, "str"))


def rows_sha256(metrics: "pd.DataFrame") -> str:
    """sha256 of a metrics table's rows, in whatever order they come and whichever library wrote them.

    Raises:
        ValueError: as :func:`write_parquet`.
    """
    table = _in_order(metrics)
    digest = hashlib.sha256()
    for name in COLUMNS:
        column = table[name]
        if name in NAMED:
            digest.update(canonical(list(column.cat.categories)))
            column = column.cat.codes
        digest.update(column.to_numpy().tobytes())
    return digest.hexdigest()


def _in_order(metrics: "pd.DataFrame") -> "pd.DataFrame":
    """The checked rows in the order of a file, and of the categories those that occur."""
    table = checked(metrics).sort_values(list(COLUMNS[:-1]), ignore_index=True)
    for name in NAMED:
        table[name] = table[name].cat.remove_unused_categories()
    return table


def checked(metrics: "pd.DataFrame") -> "pd.DataFrame":
    """The table with plain columns, names as categories in alphabetical order; what is refused: :func:`write_parquet`.

    A table can have millions of rows, so nothing here looks at them one by one.
    """
    import numpy as np
    import pandas as pd

    if sorted(metrics.columns) != sorted(COLUMNS):
        raise ValueError(f"a metrics table has the columns {', '.join(COLUMNS)}, got {', '.join(metrics.columns)}")
    table = metrics[list(COLUMNS)].astype({"round": "int64", "client": "int64", "value": "float64"})
    if len(table) and (table[["round", "client"]] >= 2**31).any(axis=None):
        raise ValueError("a round or a client has a number of 2^31 or more")
    table = table.astype({"round": "int32", "client": "int32"})
    for column in NAMED:
        if isinstance(table[column].dtype, pd.CategoricalDtype) and table[column].notna().all():
            named = table[column].cat.rename_categories(str).cat.remove_unused_categories()
            table[column] = named.cat.reorder_categories(sorted(named.cat.categories), ordered=False)
        else:
            table[column] = pd.Categorical(table[column].astype("str"))
    of_training = table["split"] == "train"
    for column, names in (("point", POINTS), ("metric", METRICS)):
        named = table[column][~of_training] if column == "metric" else table[column]
        unknown = sorted({str(name) for name in named.unique()} - set(names))
        if unknown:
            raise ValueError(f"{column} is one of {', '.join(names)}, got {', '.join(unknown)}")
    if len(table) and ((table[["round", "client"]] < 0).any(axis=1) & ~_is_pooled(table)).any():
        raise ValueError("rounds and clients are counted from 0, got a negative one")
    # Where a row belongs, as one number: a table has fewer than 2^63 places.
    place = table["round"].to_numpy("int64")
    for column in ("client", "point", "split"):
        codes = (table[column].cat.codes if column in NAMED else table[column]).to_numpy("int64")
        codes = codes - codes.min(initial=0)  # a pooled value's client is negative
        place = place * (codes.max(initial=0) + 1) + codes
    unknown_accuracy = (table["metric"] == EVALUATED) & table["value"].isna()
    if unknown_accuracy.any():
        # An accuracy of 0 / 0: this client was not evaluated there, so it has no other score either.
        known = ~np.isin(place, place[unknown_accuracy])
        table, place = table[known].reset_index(drop=True), place[known]
    metric = table["metric"].cat.codes.to_numpy("int64")
    twice = pd.Series(place * (metric.max(initial=0) + 1) + metric).duplicated().to_numpy()
    if twice.any():
        row = table[twice].iloc[0]
        raise ValueError(f"there twice: {', '.join(f'{name} {row[name]}' for name in COLUMNS[:-1])}")
    return table


def _is_pooled(table: "pd.DataFrame") -> "pd.Series[bool]":
    """Return which rows hold the value of all clients' images together, of a metric and split that have one."""
    metrics = [metric.name for metric in METRICS.values() if metric.pooled == "counts"]
    of_all = (table["client"] == POOLED_CLIENT) & (table["round"] >= 0) & (table["split"] != "train")
    return of_all & table["metric"].isin(metrics)


def check_clients(table: "pd.DataFrame", sizes: Sequence[int], complete: bool = True) -> None:
    """Refuse a table with values of clients that are not there, or without those of some at the point "server".

    A metric that is not always defined may lack clients.

    Args:
        table: of metrics.
        sizes: test images per client.
        complete: no client may be missing, as in a simulation; a site of a deployment may be away.

    Raises:
        ValueError: as it says.
    """
    if len(table) and table["client"].max() >= len(sizes):
        raise ValueError(f"client {table['client'].max()} has values, but there are {len(sizes)} test sizes")
    if not complete:
        return
    sometimes = [metric.name for metric in METRICS.values() if not metric.always_defined]
    evaluated = (table["point"] == "server") & (table["split"] != "train") & ~table["metric"].isin(sometimes)
    evaluated &= table["client"] != POOLED_CLIENT
    everywhere = table[evaluated].groupby(["split", "metric"], observed=True)
    for (split, _), part in everywhere:
        clients = set(part["client"])
        expected = {client for client, size in enumerate(sizes) if size} if split == "test" else clients
        if expected - clients or len(part) != part["round"].nunique() * len(clients):
            raise ValueError(f"at the point 'server' every client's {split} images are evaluated, some are missing")


@contextlib.contextmanager
def readable(path: Path, what: str = "metrics table") -> Iterator[None]:
    """Name the file that cannot be read as a table of metrics, or of what else it should be."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:  # as pyarrow and pandas refuse types and metadata
        raise ConfigurationError(f"{path} is not a readable {what}: {' '.join(str(error).split())}") from error
