"""Scored images of a run's evaluations, one a row, and what is made of them by class."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from benchmark.files import read_regular
from benchmark.metrics import POOLED_CLIENT
from benchmark.records.metrics_table import MOST_ROWS, readable
from benchmark.records.record import POINTS

if TYPE_CHECKING:  # slow to import
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    from benchmark.counts import ScoredBatch

#: Files that a run with kept images has beside :data:`benchmark.records.record_file.FILES`.
PREDICTIONS, CLASSES = "predictions.parquet", "classes.parquet"
NAMES = ("point", "split")
#: What is read of such a file, in bytes, when it is no longer compressed.
MOST_BYTES = 2**31
COLUMNS = (*NAMES, "round", "client", "image", "group", "label", "prediction", "logits")
"""Columns of ``predictions.parquet``: point and split as in ``metrics.parquet``, round int32, client int32, image int64
(row of the image pool, as the manifest counts), group int64 (images with an equal value show the same thing), label and
prediction int32 (within the label space of the split; a prediction of -1: the logits have no largest one), logits
float32 [C]. Rows are sorted by point, split, round, client and image; most runs keep the images of one round."""
BY_CLASS = ("sensitivity", "specificity", "ppv", "npv", "auroc", "ap")
"""Columns of ``classes.parquet`` that may be undefined (null), behind point, split, client (-1: all clients' images
together), class, support (images of the class), predicted (images that were predicted to be of it) and tp (both)."""


def parquet_of(predictions: "pd.DataFrame") -> bytes:
    """Return the content of ``predictions.parquet``. The same rows give the same bytes."""
    return bytes_of(_table(predictions))


def merged(parts: "Sequence[Path]", stream: BinaryIO) -> None:
    """Write ``predictions.parquet`` of files of one round each, of which one at a time is in memory.

    Args:
        parts: the files, in the order of rounds; at least one.
        stream: is written to.

    Raises:
        ConfigurationError: one of them cannot be read.
    """
    import pyarrow.parquet as pq

    places: dict[tuple[str, ...], list[Path]] = {}  # which files have images there; not every round scores all
    for path in parts:
        for place in _part(path, NAMES).drop_duplicates().itertuples(index=False, name=None):
            places.setdefault(place, []).append(path)
    writer = None
    for place, there in sorted(places.items()):
        for path in there:
            rows = _part(path)
            table = _table(rows[(rows["point"] == place[0]) & (rows["split"] == place[1])])
            writer = writer or pq.ParquetWriter(stream, table.schema, compression="zstd")
            writer.write_table(table)
    assert writer is not None
    writer.close()


def _part(path: Path, columns: Sequence[str] = COLUMNS) -> "pd.DataFrame":
    with readable(path, "table of predictions"):
        return parse_predictions(read_regular(path, MOST_BYTES), columns=columns)


def _table(predictions: "pd.DataFrame") -> "pa.Table":
    import numpy as np
    import pyarrow as pa

    logits = [np.asarray(row, dtype="float32") for row in predictions["logits"]]
    ends = np.cumsum([0, *map(len, logits)])
    # Splits may have label spaces of different sizes.
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.concatenate(logits), pa.float32()))
    kinds = {"round": pa.int32(), "client": pa.int32(), "label": pa.int32(), "prediction": pa.int32()}
    arrays = [
        categories(predictions[name])
        if name in NAMES
        else lists
        if name == "logits"
        else pa.array(predictions[name].to_numpy("int64"), kinds.get(name, pa.int64()))
        for name in COLUMNS
    ]
    return pa.Table.from_arrays(arrays, names=list(COLUMNS))


def parse_predictions(content: bytes, every: bool = False, columns: Sequence[str] = COLUMNS) -> "pd.DataFrame":
    """Return rows of ``predictions.parquet``.

    Args:
        content: of the file.
        every: those of all rounds that it has, in place of those of the last one alone.
        columns: names of those that are wanted.

    Raises:
        OSError: it is no Parquet file.
        ValueError: it has other columns, values of other types or none, or more rows than a run's could have.
    """
    import pyarrow.compute as pc

    file = opened(content, COLUMNS)
    groups = list(range(file.metadata.num_row_groups))
    rounds = [file.read_row_group(number, columns=["round"])["round"] for number in groups]
    last = max((pc.max(each).as_py() for each in rounds if len(each)), default=0)
    if not every:
        groups = [number for number, each in zip(groups, rounds, strict=True) if pc.any(pc.equal(each, last)).as_py()]
    table = file.read_row_groups(groups, columns=[*{*columns, *NAMES, "round"}], use_pandas_metadata=False)
    if not every:
        table = table.filter(pc.equal(table["round"], last))
    return _frame(table)[list(columns)]


def opened(content: bytes, columns: tuple[str, ...], texts: Sequence[str] = NAMES) -> "pq.ParquetFile":
    """Open a Parquet file of a run that is of this form and not too large.

    Args:
        content: of the file.
        columns: that it must have, in this order; numbers, but for ``logits`` and for texts.
        texts: those that hold texts.

    Raises:
        OSError: it is no Parquet file.
        ValueError: it has other columns or values of other types, or is too large.
    """
    import pyarrow.parquet as pq

    file = pq.ParquetFile(io.BytesIO(content))
    if tuple(file.schema_arrow.names) != columns:
        raise ValueError(f"it has the columns {', '.join(file.schema_arrow.names)[:200]}, not {', '.join(columns)}")
    for field in file.schema_arrow:
        if not _is_of_its_type(field.name, field.type, texts):
            raise ValueError(f"its column {field.name} is of type {field.type!s:.40}")
    bound = max(MOST_ROWS, len(content))
    if file.metadata.num_rows > bound:
        raise ValueError(f"it has {file.metadata.num_rows:,} rows; at most {bound:,} are read")
    size = sum(file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups))
    if size > MOST_BYTES:
        raise ValueError(f"it holds {size:,} bytes; at most {MOST_BYTES:,} are read")
    # Texts stay as short as they are stored.
    return pq.ParquetFile(io.BytesIO(content), read_dictionary=[name for name in columns if name in texts])


def _is_of_its_type(name: str, kind: "pa.DataType", texts: Sequence[str]) -> bool:
    """Return whether a column of this name can have values of a type."""
    import pyarrow.types as types

    if name in texts:
        return types.is_string(kind.value_type if types.is_dictionary(kind) else kind)
    if name == "logits":
        return types.is_list(kind) and types.is_floating(kind.value_type)
    return types.is_floating(kind) if name in BY_CLASS else types.is_integer(kind)


def _frame(arrow: "pa.Table") -> "pd.DataFrame":
    import pyarrow.compute as pc

    if lacking := [name for name in arrow.column_names if name not in BY_CLASS and arrow[name].null_count]:
        raise ValueError(f"a row has no {lacking[0]}")
    table = arrow.to_pandas()
    points = sorted(set(table["point"]) - set(POINTS))
    if points:
        raise ValueError(f"point is one of {', '.join(POINTS)}, got {points[0]!r:.40}")
    for name, low in (("label", 0), ("prediction", -1)):
        if {name, "logits"} <= {*arrow.column_names}:
            column, classes = arrow[name], pc.list_value_length(arrow["logits"])
            if pc.all(pc.and_(pc.greater_equal(column, low), pc.less(column, classes))).as_py() is False:
                raise ValueError(f"it has a {name} that is none of the classes of its logits")
    return table.astype(dict.fromkeys(NAMES, "str"))


def categories(column: "pd.Series") -> "pa.Array":
    """Return a column of texts of which each is stored once, in the order in which they come."""
    import pyarrow as pa

    return pa.array(column.to_numpy("object"), pa.string()).dictionary_encode()


def bytes_of(table: "pa.Table") -> bytes:
    """Return the content of a Parquet file. The same rows give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    content: bytes = sink.getvalue().to_pybytes()
    return content


def images_of(predictions: "pd.DataFrame") -> "ScoredBatch":
    """Return logits [n, C] and labels [n] of rows of one split."""
    import numpy as np
    import torch

    from benchmark.counts import ScoredBatch

    logits = np.stack(list(predictions["logits"])).astype("float32")
    return ScoredBatch(torch.from_numpy(logits), torch.from_numpy(predictions["label"].to_numpy("int64").copy()))


def confusion(predictions: "pd.DataFrame") -> "np.ndarray":
    """Count images by true and predicted class.

    Args:
        predictions: rows of one point and split, of one client or of several.

    Returns:
        int64 [C, C + 1]; the last column is of images without a prediction.

    Raises:
        ValueError: no rows, or rows of splits with other classes.
    """
    import numpy as np

    sizes = {len(row) for row in predictions["logits"]}
    if len(sizes) != 1:
        raise ValueError(f"a confusion matrix is of images of one split, got {len(predictions)} of {len(sizes)} sizes")
    (classes,) = sizes
    made = np.zeros((classes, classes + 1), dtype="int64")
    np.add.at(made, (predictions["label"], predictions["prediction"].where(predictions["prediction"] >= 0, classes)), 1)
    return made


def by_class(predictions: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row for each point, split, client and class, and of all clients' images together (client -1).

    AUROC and average precision are of the class against the rest; they are undefined where an image has no prediction.
    """
    import pandas as pd

    parts = []
    for place, rows in predictions.groupby(list(NAMES), sort=True):
        for client, own in [(POOLED_CLIENT, rows), *rows.groupby("client", sort=True)]:
            parts.append(_classes(own).assign(**dict(zip(NAMES, map(str, place), strict=True)), client=client))
    table = pd.concat(parts, ignore_index=True)
    return table[[*NAMES, "client", "class", "support", "predicted", "tp", *BY_CLASS]]


def _classes(rows: "pd.DataFrame") -> "pd.DataFrame":
    """Return a row for each class; NaN where a value is not defined."""
    import numpy as np
    import pandas as pd
    import torch

    from benchmark.formulas import ranked_classes

    matrix = confusion(rows)
    support, predicted, hits = matrix.sum(1), matrix[:, :-1].sum(0), matrix.diagonal()
    images = matrix.sum()
    rest = images - support - predicted + hits
    with np.errstate(invalid="ignore"):  # 0 / 0: not defined
        made = {
            "class": np.arange(len(matrix)),
            "support": support,
            "predicted": predicted,
            "tp": hits,
            "sensitivity": hits / support,
            "specificity": rest / (images - support),
            "ppv": hits / predicted,
            "npv": rest / (images - predicted),
        }
    made["auroc"] = made["ap"] = np.full(len(matrix), np.nan)
    if (rows["prediction"] >= 0).all():
        ranked = ranked_classes(images_of(rows), torch.ones(1, len(rows)))
        made["auroc"], made["ap"] = ranked.auroc[0].numpy(), ranked.ap[0].numpy()
    return pd.DataFrame(made)


def classes_parquet_of(table: "pd.DataFrame") -> bytes:
    """Return the content of ``classes.parquet``, of what :func:`by_class` returns."""
    import pyarrow as pa

    whole = {
        "client": pa.int32(),
        "class": pa.int32(),
        "support": pa.int64(),
        "predicted": pa.int64(),
        "tp": pa.int64(),
    }
    arrays = [
        categories(table[name])
        if name in NAMES
        else pa.array(table[name].to_numpy(), whole.get(name, pa.float64()), from_pandas=True)
        for name in table.columns
    ]
    return bytes_of(pa.Table.from_arrays(arrays, names=list(table.columns)))


def parse_classes(content: bytes) -> "pd.DataFrame":
    """Return the rows of ``classes.parquet``; NaN where a value is not defined.

    Raises:
        OSError: it is no Parquet file.
        ValueError: it has other columns, or values of other types.
    """
    file = opened(content, (*NAMES, "client", "class", "support", "predicted", "tp", *BY_CLASS))
    return _frame(file.read(use_pandas_metadata=False))
