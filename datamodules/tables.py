"""Tables that describe images: which file shows what."""

import csv
from pathlib import Path

from benchmark.errors import ConfigurationError


def read_table(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows of a Parquet file, or of a comma- or tab-separated one with a header; what is null is an empty text.

    Raises:
        ConfigurationError: the file cannot be read, has no such columns, or a line is too short.
    """
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
        header = list(rows[0]) if rows else []
    else:
        rows, header = _separated_rows(path)
    absent = [name for name in columns if name not in header]
    if absent:
        raise ConfigurationError(
            f"{path} has no column {', '.join(absent)}; take the file of the official release, as some copies leave "
            "columns out, or add it to a table of your own"
        )
    for number, row in enumerate(rows, start=2):
        if any(row[name] is None for name in columns):
            raise ConfigurationError(f"{path}: line {number} is too short; get the file again")
    return rows


def _separated_rows(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Rows and header."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            delimiter = "\t" if "\t" in file.readline() else ","
            file.seek(0)
            reader = csv.DictReader(file, delimiter=delimiter)
            return list(reader), list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"cannot read the table {path} ({error}); get it again") from error


def _parquet_rows(path: Path) -> list[dict[str, str]]:
    import pandas as pd  # slow to import, and not needed for the data sets that come in folders

    try:
        frame = pd.read_parquet(path)
        texts = frame.astype(object).where(frame.notna(), "").astype(str)
    except Exception as error:  # of a damaged file, whatever Arrow and pandas say
        raise ConfigurationError(f"cannot read the table {path} ({str(error)[:200]!r}); write it again") from error
    return [{str(name): value for name, value in row.items()} for row in texts.to_dict("records")]
