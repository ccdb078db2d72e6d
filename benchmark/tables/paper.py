"""Published numbers."""

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from benchmark.errors import ConfigurationError
from benchmark.files import read_regular
from benchmark.shipped import shipped
from benchmark.tables.layout import PaperNumber

if TYPE_CHECKING:  # slow to import
    import pandas as pd

MOST_BYTES = 2**24


def read_paper(paths: Sequence[str]) -> "pd.DataFrame":
    """Published numbers, columns as ``results/paper/README.md`` explains them.

    Raises:
        ConfigurationError: a file is missing or has other columns.
    """
    import pandas as pd

    columns = ["paper", "table", "dataset", "setting", "backbone", "method", "metric", "value", "std"]
    tables = []
    for path in paths:
        try:
            content = BytesIO(read_regular(shipped(path), MOST_BYTES, links=True))
            types = dict.fromkeys(columns[:-2], "str")
            table = pd.read_csv(content, dtype=types, keep_default_na=False, na_values=[""])
            table = table[columns].astype({"value": "float64", "std": "float64"})
        except (OSError, KeyError, ValueError) as error:
            raise ConfigurationError(f"{path} is not a CSV with the columns {', '.join(columns)}: {error}") from error
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def table_title(paper: str, table: str) -> str:
    """A published table's name, such as "pFedPG Table 1"; where it has no number, "TRIP, PACS (README)"."""
    return f"{paper} Table {table}" if table[:1].isdigit() else f"{paper}, {table}"


def paper_value(paper: "pd.DataFrame", method: str, number: PaperNumber) -> float | None:
    """The published number of a method, in the paper's unit (per cent for accuracies); None where there is none.

    Raises:
        ConfigurationError: several numbers fit (name the backbone).
    """
    fits = (paper["method"] == method) & (paper["dataset"] == number.dataset) & (paper["setting"] == number.setting)
    fits &= paper["metric"] == number.metric
    if number.backbone is not None:
        fits &= paper["backbone"] == number.backbone
    found = paper.loc[fits, "value"]
    if len(found) > 1:
        raise ConfigurationError(
            f"{len(found)} published numbers fit {method}, {number.dataset}, {number.setting}, {number.metric}; "
            "name the backbone in the column's `paper`"
        )
    return float(found.iloc[0]) if len(found) else None
