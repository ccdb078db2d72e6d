"""Tables that describe images: which file shows what."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.errors import ConfigurationError, listed
from datamodules.names import text_of

#: What to do about a published table that lacks a column.
OFFICIAL = "take the file of the official release, as some copies leave columns out, or add it to a table of your own"


def read_table(
    path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = (), mend: str = OFFICIAL
) -> list[dict[str, str]]:
    """Rows of a Parquet file, or of a text with a header.

    Args:
        path: as the other arguments, those of :func:`read_numbered`.
        columns: that must be there.
        optional: that are read as well if they are there.
        mend: what to do if a column is absent.

    Raises:
        ConfigurationError: as :func:`read_numbered` raises it.
    """
    return [row for _, row in read_numbered(path, columns, optional, mend)]


def read_numbered(
    path: Path, columns: tuple[str, ...], optional: tuple[str, ...] = (), mend: str = OFFICIAL
) -> list[tuple[int, dict[str, str]]]:
    """Rows of a Parquet file, or of a text with a header, separated by commas, semicolons or tabs, with their numbers.

    What is null is an empty text. A row's number is that of the line in which it ends, which counts lines without
    anything; of a Parquet file its place, from 1.

    Args:
        path: of the table.
        columns: that must be there.
        optional: that are read as well if they are there.
        mend: what to do if a column is absent.

    Raises:
        ConfigurationError: the file cannot be read, has no such columns or one of them twice, a line has more or fewer
            cells than the header, or a cell of these columns is no text and no number, or has several lines.
    """
    parquet = path.suffix == ".parquet"
    rows, header, lines = _parquet_rows(path, columns + optional) if parquet else _separated_rows(path)
    absent = [name for name in columns if name not in header]
    if absent:
        raise ConfigurationError(
            f"{path} has no column {', '.join(absent)}; {mend}; its columns are {listed(header) or 'none'}"
        )
    for name in columns + optional:
        if header.count(name) > 1:
            raise ConfigurationError(f"{path} has {header.count(name)} columns {name}; leave one")
    for line, row in zip(lines, rows, strict=False):
        _check_row(f"{path}: line {line}", row, columns + optional)
    return [*zip(lines or range(1, len(rows) + 1), rows, strict=True)]


def columns_of(path: Path) -> list[str]:
    """Return the names of a table's columns.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    return (_parquet_rows(path, ()) if path.suffix == ".parquet" else _separated_rows(path))[1]


def _check_row(at: str, row: Mapping[Any, Any], used: Sequence[str]) -> None:
    """Refuse a row of a text whose cells are not one for each column, or whose lines may be several rows."""
    if None in row:
        raise ConfigurationError(
            f"{at} has more cells than the header has columns (surplus: {listed(row[None])}); put quotes around a cell "
            "that holds the separator"
        )
    if None in row.values():
        raise ConfigurationError(f"{at} is too short; give it a cell for each column, or get the file again")
    if broken := [name for name in used if any(end in row.get(name, "") for end in "\r\n")]:
        raise ConfigurationError(
            f"{at} ends a row whose {broken[0]} has several lines, as a quote without its second one makes it; remove "
            "that quote, or the line breaks"
        )


def _separated_rows(path: Path) -> tuple[list[dict[str, str]], list[str], list[int]]:
    """Rows, header, and the line in which each row ends."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            if "\0" in first:
                raise ConfigurationError(_not_utf8(path, "it has NULs, as UTF-16 has"))
            delimiter = "\t" if "\t" in first else max(",;", key=first.count)
            file.seek(0)
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            try:
                lined = [(row, reader.line_num) for row in reader]
            except csv.Error as error:
                raise ConfigurationError(
                    f"cannot read the table {path}: from line {reader.line_num + 1} on: {error}; is a quote there "
                    "without its second one? Mend the line, or get the file again"
                ) from error
            return [row for row, _ in lined], list(reader.fieldnames or ()), [line for _, line in lined]
    except UnicodeDecodeError as error:
        raise ConfigurationError(_not_utf8(path, error.reason)) from error
    except OSError as error:
        raise ConfigurationError(f"cannot read the table {path} ({error}); get it again") from error


def _not_utf8(path: Path, reason: str) -> str:
    return (
        f"cannot read the table {path}: it is no text in UTF-8 ({reason}); save it as UTF-8 (of a spreadsheet: CSV "
        "UTF-8), or get it again"
    )


def _parquet_rows(path: Path, columns: tuple[str, ...]) -> tuple[list[dict[str, str]], list[str], list[int]]:
    """Rows of these columns, the names of all, and no lines: a row has a cell for each column."""
    import pandas as pd  # slow to import, and not needed for the data sets that come in folders

    try:
        frame = pd.read_parquet(path)
        header = [str(name) for name in frame.columns]
        used = frame.loc[:, [name in columns for name in header]]
        cells = used.astype(object).where(used.notna(), None).to_numpy().tolist()
    except Exception as error:  # of a damaged file, whatever Arrow and pandas say
        raise ConfigurationError(f"cannot read the table {path} ({str(error)[:200]!r}); write it again") from error
    names = [name for name in header if name in columns]
    rows = []
    for number, row in enumerate(cells, start=1):
        try:
            rows.append({name: text_of(cell) for name, cell in zip(names, row, strict=True)})
        except TypeError as error:
            raise ConfigurationError(f"{path}: row {number} has {error} in {', '.join(names)}") from error
    return rows, header, []
