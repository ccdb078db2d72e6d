"""Tables on the page, from their CSVs."""

import math
from html import escape
from pathlib import Path
from typing import Any

from benchmark.errors import ConfigurationError
from benchmark.report.html import NOTHING, heading, number, number_cell, scroll, signed, with_spread
from benchmark.report.leaderboard import BEST, SUMMARIES

STATISTICS = {"worst": "Worst client", "worst_decile": "Worst decile", "std": "Spread over clients"}
DIGITS = {"loss": 4}


def table_page(path: Path) -> tuple[str, str]:
    """Title and content of a table's CSV, as :mod:`benchmark.tables.frame` makes it.

    Raises:
        ConfigurationError: it is no such CSV.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
        frame = frame.fillna({"reading": "", "error": "", "rounds": "", "title": ""})
        title = str(frame["title"].iloc[0])
        notes = [f"Preset {frame['preset'].iloc[0]}.", *frame.loc[frame["kind"] == "note", "column"].astype(str)]
        parts = [_table_group(str(name), part, " ".join(notes)) for name, part in frame.groupby("dataset", sort=False)]
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise ConfigurationError(
            f"{path} is not a table's CSV of this version ({type(error).__name__}: {error}); make it again with "
            "`benchmark table`"
        ) from error
    errors = [f"<li>{escape(str(text))}</li>" for text in dict.fromkeys(frame["error"]) if text]
    failed = f'<h3>Failed</h3><ul class="failed">{"".join(errors)}</ul>' if errors else ""
    files = ", ".join(f"<code>{escape(path.with_suffix(suffix).name)}</code>" for suffix in (".md", ".csv", ".tex"))
    return title, "".join(parts) + failed + f'<p class="note">In results/tables: {files}.</p>'


def _table_group(name: str, frame: Any, note: str) -> str:
    """One data group of a table; what stands beside the paper's numbers says at which size it was run."""
    of_table = frame[frame["kind"] == "column"]
    which = SUMMARIES[str(of_table["summary"].iloc[0])]
    columns = list(dict.fromkeys(of_table["column"].astype(str)))
    has_paper = bool(of_table["paper"].notna().any())
    heads = '<th scope="col">Method</th>' + "".join(f'<th scope="col">{escape(c)}</th>' for c in columns)
    rows = []
    for (method, reading), part in of_table.groupby(["method", "reading"], sort=False):
        label = f"{method}, {reading}" if reading else str(method)
        values = part.set_index(part["column"].astype(str))
        cells = "".join(
            f"<td>{with_spread(values.at[c, 'ours'], values.at[c, 'std'], DIGITS.get(values.at[c, 'metric'], 2))}</td>"
            for c in columns
        )
        with_paper = bool(values["paper"].notna().any())
        rows.append(f'<tr{" class=with-paper" if with_paper else ""}><th scope="row">{escape(label)}</th>{cells}</tr>')
        if with_paper:
            theirs = "".join(f"<td>{number(values.at[c, 'paper'])}</td>" for c in columns)
            gap = "".join(f"<td>{signed(values.at[c, 'difference'])}</td>" for c in columns)
            rows.append(f'<tr class="of-paper"><th scope="row">paper</th>{theirs}</tr>')
            rows.append(f'<tr class="of-difference"><th scope="row">difference</th>{gap}</tr>')
    main = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    compared = "" if has_paper else " Nothing here can be compared with the paper's numbers."
    note = f'<p class="note">{escape(note)} Of the {which}.{compared}</p>'
    body = f"<h3>{escape(name)}</h3>{note}{scroll(main, name)}"
    return body + _table_statistics(name, frame) + _table_paired(name, frame)


def _table_statistics(name: str, frame: Any) -> str:
    part = frame[frame["kind"] == "statistic"]
    if not len(part):
        return ""
    own = str(frame.loc[frame["kind"] == "column", "summary"].iloc[0])
    order = [*((which, "average") for which in SUMMARIES), *((own, name) for name in ("worst", "worst_decile", "std"))]
    labels = ["Last round", "Last ten", BEST, *(STATISTICS[name] for _, name in order[3:])]
    heads = heading("Method", False) + "".join(heading(label, True) for label in labels)
    costs = {"bytes_up": ("kB up", 1e-3, 1), "bytes_down": ("kB down", 1e-3, 1), "seconds": ("Seconds", 1.0, 0)}
    costs["peak_memory_bytes"] = ("Peak MB", 1e-6, 0)
    heads += "".join(heading(label, True) for label, _, _ in costs.values())
    rows = []
    for (method, reading), lines in part.groupby(["method", "reading"], sort=False):
        found = {(line.summary, line.column): (line.ours, line.std) for line in lines.itertuples()}
        cells = []
        for pair in order:
            mean, std = found.get(pair, (math.nan, math.nan))
            exact = "" if math.isnan(mean) else f"{mean:.10g}"
            cells.append(f'<td data-value="{exact}">{with_spread(mean, std)}</td>')
        cells += [number_cell([lines[c].iloc[0] * factor], digits) for c, (_, factor, digits) in costs.items()]
        label = f"{method}, {reading}" if reading else str(method)
        rows.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(cells)}</tr>')
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    note = f"Averages over clients; worst client, worst decile and spread are of the {SUMMARIES[own]}."
    label = f"{name}: rounds, clients and costs"
    return f'<h4>Rounds, clients and costs</h4><p class="note">{note}</p>{scroll(table, label)}'


def _table_paired(name: str, frame: Any) -> str:
    part = frame[frame["kind"] == "paired"]
    if not len(part):
        return ""
    rows = []
    for line in part.itertuples():
        label = f"{line.method}, {line.reading}" if line.reading else str(line.method)
        interval = NOTHING if math.isnan(line.low) else f"{signed(line.low)} to {signed(line.high)}"
        rows.append(
            f'<tr><th scope="row">{escape(label)}</th><td data-value="{line.ours:.10g}">{signed(line.ours)}</td>'
            f'<td class="text">{interval}</td><td data-value="{line.pairs}">{line.pairs:.0f}</td>'
            f'<td data-value="{line.seeds}">{line.seeds:.0f}</td></tr>'
        )
    heads = heading("Method", False) + heading("Difference", True) + '<th scope="col" class="text">95 % interval</th>'
    heads += heading("Pairs", True) + heading("Seeds", True)
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    baseline = str(part["column"].iloc[0]).removeprefix("minus ")
    note = (
        "Same seed, same client: method minus baseline. A t-interval over clients and, with several seeds, over seeds."
    )
    return (
        f'<h4>Against {escape(baseline)}, paired</h4><p class="note">{note}</p>'
        f"{scroll(table, f'{name}: against {baseline}')}"
    )
