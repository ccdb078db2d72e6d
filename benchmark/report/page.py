"""One HTML page of everything recorded: it opens from disk, needs no network, and works without scripts."""

import base64
import contextlib
import errno
import math
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.drawing import partition_heatmap
from benchmark.errors import ConfigurationError
from benchmark.records.grouped_runs import Experiment, Run, group, read_runs
from benchmark.records.results import average_by_round, client_values, stored_run, write_text
from benchmark.report.svg import Series, heat_map, key, line_chart, scatter_chart, strip_chart

POINTS = {"server": "after aggregation", "local": "after local training"}
BEST = "Best round, chosen on test data"
STATISTICS = {"worst": "Worst client", "worst_decile": "Worst decile", "std": "Spread over clients"}
SUMMARIES = {"last": "last round", "last10": "last ten", "best_on_test": "best, chosen on test data"}
DIGITS = {"loss": 4}
WORST_SHOWN = 5
NOTHING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
LARGEST_VECTOR_MAP = 3000


@dataclass(frozen=True)
class Page:
    """What was written.

    Attributes:
        path: of the page.
        runs: how many it shows.
        tables: how many it shows.
        problems: what could not be read, one sentence each.
    """

    path: Path
    runs: int
    tables: int
    problems: list[str]


@dataclass(frozen=True)
class _Section:
    anchor: str
    heading: str
    body: str
    nav: str  # the anchor in the navigation that it belongs to


# --- small pieces of HTML -------------------------------------------------------------------------------------------


def _anchor(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def _tag(demo: bool) -> str:
    return '<span class="tag">demo</span>' if demo else ""


def _scroll(table: str, label: str) -> str:
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">{table}</div>'


def _number(value: float | None, digits: int = 2) -> str:
    return NOTHING if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _mean_std(values: Sequence[float | None]) -> tuple[float, float]:
    known = [value for value in values if value is not None and math.isfinite(value)]
    mean = float(np.mean(known)) if known else math.nan
    return mean, float(np.std(known, ddof=1)) if len(known) > 1 else math.nan


def _with_spread(mean: float, std: float, digits: int = 2) -> str:
    spread = "" if math.isnan(std) else f' <span class="spread">± {std:.{digits}f}</span>'
    return _number(mean, digits) + spread


def _number_cell(values: Sequence[float | None], digits: int = 2) -> str:
    mean, std = _mean_std(values)
    exact = "" if math.isnan(mean) else f"{mean:.10g}"
    return f'<td data-value="{exact}">{_with_spread(mean, std, digits)}</td>'


def _head(label: str, numeric: bool) -> str:
    kind, classes = ("number", "") if numeric else ("text", ' class="text"')
    return f'<th scope="col" data-kind="{kind}"{classes}><button type="button">{escape(label)}</button></th>'


def _figure(heading: str, drawing: str, caption: str) -> str:
    caption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h4>{escape(heading)}</h4>{drawing}{caption}</figure>"


def _picture(path: Path, text: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img class="picture" alt="{escape(text)}" src="data:image/png;base64,{content}">'


# --- what is read of an experiment ----------------------------------------------------------------------------------


def _accuracy(run: Run, point: str) -> dict[str, Any]:
    """The record's summary of test accuracy at a point; empty if it was not evaluated there."""
    entry = run.record.summary.get(point, {}).get("test", {}).get("accuracy", {})
    return dict(entry)


def _statistic(experiment: Experiment, point: str, which: str, statistic: str) -> list[float | None]:
    values = [_accuracy(run, point).get(which, {}).get(statistic) for run in experiment.runs]
    return [None if value is None else 100 * value for value in values]


def _points(experiment: Experiment) -> list[str]:
    return [point for point in POINTS if all(_accuracy(run, point) for run in experiment.runs)]


def _curve(experiment: Experiment, style: int, point: str) -> Series:
    """Average over clients by round, the mean over seeds with a band from the lowest to the highest seed."""
    curves = []
    for run in experiment.runs:
        rounds, statistics = average_by_round(run.metrics, run.record.test_sizes, point, "test", "accuracy")
        curves.append({int(r): 100 * float(v) for r, v in zip(rounds, statistics["average"], strict=True)})
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[r] for r in shared] for curve in curves])
    band = (values.min(axis=0), values.max(axis=0)) if len(curves) > 1 else ((), ())
    return Series(experiment.name, style, shared, list(values.mean(axis=0)), list(band[0]), list(band[1]))


def _by_client(experiment: Experiment, point: str) -> list[tuple[str, float]]:
    """Name and last test accuracy of every client, the mean over seeds; clients without a value are left out."""
    runs = [run for run in experiment.runs if run.record.client_names == experiment.first.record.client_names]
    values = [client_values(run.metrics, run.record, point, "test", "accuracy", "last") for run in runs]
    means = 100 * np.array(values).mean(axis=0)
    names = experiment.first.record.client_names
    return [(name, float(value)) for name, value in zip(names, means, strict=True) if math.isfinite(value)]


def _traffic(experiment: Experiment) -> list[float | None]:
    """Bytes up and down of a participating client in a round."""
    return [run.record.communication["up_bytes"] + run.record.communication["down_bytes"] for run in experiment.runs]


# --- sections -------------------------------------------------------------------------------------------------------


def _leaderboard(experiments: Sequence[Experiment]) -> str:
    numbers = ["Last ten", BEST, "Worst client", "Worst decile", "Spread over clients"]
    numbers += ["Rounds", "Seeds", "kB a round", "Seconds", "Peak MB"]
    rows = []
    for each in experiments:
        run, place = each.first, _anchor("data", *each.place)
        for point in _points(each):
            last, *others = (_number_cell(_statistic(each, point, which, "average")) for which in SUMMARIES)
            cells = [
                f'<th scope="row"><a href="#{place}">{escape(each.name)}</a></th>',
                last,
                f'<td class="text"><div class="data">{escape(run.dataset)}{_tag(run.demo)}'
                f'<div class="note">{escape(run.setting)}; {escape(run.backbone)}</div></div></td>',
                f'<td class="text">{POINTS[point]}</td>',
                *others,
                *(_number_cell(_statistic(each, point, "last", name)) for name in ("worst", "worst_decile", "std")),
                _number_cell([max(r.record.rounds_trained for r in each.runs)], 0),
                _number_cell([len(each.runs)], 0),
                _number_cell([value / 1e3 for value in _traffic(each) if value is not None], 1),
                _number_cell([r.record.seconds["total"] for r in each.runs], 0),
                _number_cell([_scaled(r.record.peak_memory_bytes, 1e-6) for r in each.runs], 0),
            ]
            given = {"method": run.method, "data": run.dataset, "reading": POINTS[point]}
            data = " ".join(f'data-{name}="{escape(value)}"' for name, value in given.items())
            rows.append(f"<tr {data}>{''.join(cells)}</tr>")
    heads = [_head("Method", False), _head("Last round", True), _head("Data", False), _head("Read", False)]
    heads += [_head(label, True) for label in numbers]
    options = {
        "method": sorted({each.first.method for each in experiments}),
        "data": sorted({each.first.dataset for each in experiments}),
        "reading": list(POINTS.values()),
    }
    labels = {"method": "Method", "data": "Data", "reading": "Read"}
    selects = "".join(
        f'<label>{labels[name]}<select name="{name}"><option value="">all</option>'
        f"{''.join(f'<option>{escape(value)}</option>' for value in values)}</select></label>"
        for name, values in options.items()
    )
    head, body = f"<thead><tr>{''.join(heads)}</tr></thead>", f"<tbody>{''.join(rows)}</tbody>"
    table = f'<table id="board" class="sortable">{head}{body}</table>'
    return (
        "<p>Test accuracy in per cent, averaged over clients; ± is the standard deviation over seeds. A heading sorts. "
        "The best round is chosen on test data, so it flatters. Worst client, worst decile and spread are of the last "
        "round; kB are up and down, per participating client and round.</p>"
        f'<form id="filters"><label>Search<input type="search" name="words" autocomplete="off"></label>{selects}'
        '<button type="reset">Show all</button></form>'
        '<p class="note" id="shown" role="status"></p>'
        f"{_scroll(table, 'Leaderboard')}"
    )


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _place(experiments: Sequence[Experiment]) -> str:
    """Everything about one data set, setting and backbone."""
    styles = {each.name: position for position, each in enumerate(experiments)}
    legend = "".join(f"<li>{key(style)}{escape(name)}</li>" for name, style in styles.items())
    body = [
        f'<ul class="legend" aria-label="Legend of all charts here">{legend}</ul>',
        '<h3>Learning curves</h3><div class="figures">',
    ]
    for point, words in POINTS.items():
        curves = [_curve(each, styles[each.name], point) for each in experiments if point in _points(each)]
        curves = [curve for curve in curves if any(math.isfinite(y) for y in curve.y)]
        if curves:
            last = ", ".join(f"{curve.name} {curve.y[-1]:.1f}" for curve in curves)
            label = f"Average test accuracy by round, {words}; in the last round: {last}"
            seeds = " Bands span the seeds." if any(len(curve.low) for curve in curves) else ""
            drawing = line_chart(curves, "round", "average test accuracy, %", label)
            body.append(_figure(words.capitalize(), drawing, f"Round 0 is before any training.{seeds}"))
    body.append('</div><h3>Clients</h3><div class="figures">')
    for point, words in POINTS.items():
        strips = [
            (each.name, styles[each.name], _by_client(each, point)) for each in experiments if point in _points(each)
        ]
        strips = [strip for strip in strips if strip[2]]
        if strips:
            label = f"Test accuracy of every client in the last round, {words}; " + ", ".join(
                f"{name} from {min(v for _, v in clients):.1f} to {max(v for _, v in clients):.1f}"
                for name, _, clients in strips
            )
            caption = "One mark a client; the upright line is their mean."
            drawing = strip_chart(strips, "test accuracy, %", label)
            body.append(_figure(f"Every client, {words}", drawing, caption))
    body.append("</div>" + _worst(experiments))
    body.append('<h3>Communication and accuracy</h3><div class="figures">')
    for point, words in POINTS.items():
        dots = []
        for each in experiments:
            traffic, accuracy = _mean_std(_traffic(each))[0], _mean_std(_statistic(each, point, "last", "average"))[0]
            if math.isfinite(accuracy):
                dots.append((each.name, styles[each.name], traffic / 1e3, accuracy))
        if dots:
            label = f"Accuracy against kilobytes, {words}: " + ", ".join(
                f"{n} {x:,.1f} kB {y:.1f}" for n, _, x, y in dots
            )
            drawing = scatter_chart(dots, "kB up and down, per client and round", "average test accuracy, %", label)
            body.append(_figure(words.capitalize(), drawing, "Further left sends less, further up is better."))
    body.append("</div><h3>Partition</h3>" + _partition(experiments))
    return "".join(body)


def _worst(experiments: Sequence[Experiment]) -> str:
    """The clients that fare worst under each method, at the first point where it is evaluated."""
    rows = []
    for each in experiments:
        point = _points(each)[0]
        worst = sorted(_by_client(each, point), key=lambda entry: entry[1])[:WORST_SHOWN]
        cells = [f'<td data-value="{value:.10g}">{escape(client)} {value:.2f}</td>' for client, value in worst]
        cells += ['<td data-value=""></td>'] * (WORST_SHOWN - len(worst))
        rows.append(
            f'<tr><th scope="row">{escape(each.name)}</th><td class="text">{POINTS[point]}</td>{"".join(cells)}</tr>'
        )
    places = ["Worst", "Second", "Third", "Fourth", "Fifth"]
    heads = [_head("Method", False), _head("Read", False), *(_head(place, True) for place in places)]
    table = f'<table class="sortable"><thead><tr>{"".join(heads)}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    note = "Test accuracy of the last round, in per cent; of several seeds, the mean."
    return f'<h3>Worst clients</h3><p class="note">{note}</p>{_scroll(table, "Worst clients")}'


def _partition(experiments: Sequence[Experiment]) -> str:
    """The partition of the first run that kept it; several seeds can have several."""
    for run in (run for each in experiments for run in each.runs):
        try:
            partition = stored_run(run.folder).partition or {"clients": [], "class_names": []}
            counts = np.array([client["train_classes"] for client in partition["clients"]], dtype=np.int64)
            classes = [str(entry) for entry in partition["class_names"]]
            clients = [str(client["name"]) for client in partition["clients"]]
        except (ConfigurationError, ValueError, KeyError, TypeError):
            continue
        if counts.ndim == 2 and counts.shape == (len(clients), len(classes)) and counts.size:
            return _map(counts, classes, clients, run.record.seed)
    return '<p class="note">These runs kept no partition; their records hold its hash.</p>'


def _map(counts: Any, classes: Sequence[str], clients: Sequence[str], seed: int) -> str:
    totals, held = counts.sum(axis=1), (counts > 0).sum(axis=1)
    fewest, most = held.min(), held.max()
    label = (
        f"Training images of {len(classes)} classes at {len(clients)} clients: {totals.min():,} to {totals.max():,} "
        f"images and {most if fewest == most else f'{fewest} to {most}'} classes a client"
    )
    if counts.size <= LARGEST_VECTOR_MAP:
        drawing = heat_map(counts, classes, clients, label)
    else:
        with tempfile.TemporaryDirectory() as folder:
            partition_heatmap(counts, classes, Path(folder) / "map.png", f"training images, seed {seed}")
            drawing = _picture(Path(folder) / "map.png", label)
    return f'<div class="figures">{_figure("Images a client trains on", drawing, f"{label} (seed {seed}).")}</div>'


# --- tables ---------------------------------------------------------------------------------------------------------


def _table_page(path: Path) -> tuple[str, str]:
    """Title and content of a table's CSV, as :mod:`benchmark.tables.run_table` writes it.

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
            f"<td>{_with_spread(values.at[c, 'ours'], values.at[c, 'std'], DIGITS.get(values.at[c, 'metric'], 2))}</td>"
            for c in columns
        )
        with_paper = bool(values["paper"].notna().any())
        rows.append(f'<tr{" class=with-paper" if with_paper else ""}><th scope="row">{escape(label)}</th>{cells}</tr>')
        if with_paper:
            theirs = "".join(f"<td>{_number(values.at[c, 'paper'])}</td>" for c in columns)
            gap = "".join(f"<td>{_signed(values.at[c, 'difference'])}</td>" for c in columns)
            rows.append(f'<tr class="of-paper"><th scope="row">paper</th>{theirs}</tr>')
            rows.append(f'<tr class="of-difference"><th scope="row">difference</th>{gap}</tr>')
    main = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    compared = "" if has_paper else " Nothing here can be compared with the paper's numbers."
    note = f'<p class="note">{escape(note)} Of the {which}.{compared}</p>'
    body = f"<h3>{escape(name)}</h3>{note}{_scroll(main, name)}"
    return body + _table_statistics(name, frame) + _table_paired(name, frame)


def _signed(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:+.2f}".replace("-", MINUS)


def _table_statistics(name: str, frame: Any) -> str:
    part = frame[frame["kind"] == "statistic"]
    if not len(part):
        return ""
    own = str(frame.loc[frame["kind"] == "column", "summary"].iloc[0])
    order = [*((which, "average") for which in SUMMARIES), *((own, name) for name in ("worst", "worst_decile", "std"))]
    labels = ["Last round", "Last ten", BEST, *(STATISTICS[name] for _, name in order[3:])]
    heads = _head("Method", False) + "".join(_head(label, True) for label in labels)
    costs = {"bytes_up": ("kB up", 1e-3, 1), "bytes_down": ("kB down", 1e-3, 1), "seconds": ("Seconds", 1.0, 0)}
    costs["peak_memory_bytes"] = ("Peak MB", 1e-6, 0)
    heads += "".join(_head(label, True) for label, _, _ in costs.values())
    rows = []
    for (method, reading), lines in part.groupby(["method", "reading"], sort=False):
        found = {(line.summary, line.column): (line.ours, line.std) for line in lines.itertuples()}
        cells = []
        for pair in order:
            mean, std = found.get(pair, (math.nan, math.nan))
            exact = "" if math.isnan(mean) else f"{mean:.10g}"
            cells.append(f'<td data-value="{exact}">{_with_spread(mean, std)}</td>')
        cells += [_number_cell([lines[c].iloc[0] * factor], digits) for c, (_, factor, digits) in costs.items()]
        label = f"{method}, {reading}" if reading else str(method)
        rows.append(f'<tr><th scope="row">{escape(label)}</th>{"".join(cells)}</tr>')
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    note = f"Averages over clients; worst client, worst decile and spread are of the {SUMMARIES[own]}."
    label = f"{name}: rounds, clients and costs"
    return f'<h4>Rounds, clients and costs</h4><p class="note">{note}</p>{_scroll(table, label)}'


def _table_paired(name: str, frame: Any) -> str:
    part = frame[frame["kind"] == "paired"]
    if not len(part):
        return ""
    rows = []
    for line in part.itertuples():
        label = f"{line.method}, {line.reading}" if line.reading else str(line.method)
        interval = NOTHING if math.isnan(line.low) else f"{_signed(line.low)} to {_signed(line.high)}"
        rows.append(
            f'<tr><th scope="row">{escape(label)}</th><td data-value="{line.ours:.10g}">{_signed(line.ours)}</td>'
            f'<td class="text">{interval}</td><td data-value="{line.pairs}">{line.pairs:.0f}</td>'
            f'<td data-value="{line.seeds}">{line.seeds:.0f}</td></tr>'
        )
    heads = _head("Method", False) + _head("Difference", True) + '<th scope="col" class="text">95 % interval</th>'
    heads += _head("Pairs", True) + _head("Seeds", True)
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    baseline = str(part["column"].iloc[0]).removeprefix("minus ")
    note = (
        "Same seed, same client: method minus baseline. A t-interval over clients and, with several seeds, over seeds."
    )
    return (
        f'<h4>Against {escape(baseline)}, paired</h4><p class="note">{note}</p>'
        f"{_scroll(table, f'{name}: against {baseline}')}"
    )


def _figures(folder: Path) -> str:
    """The PNGs of a folder; a text file of the same name is the caption."""
    shown = []
    for path in sorted(folder.glob("*.png")):
        words = path.stem.replace("_", " ")
        text = path.with_suffix(".txt")
        caption = text.read_text().strip() if text.is_file() else ""
        shown.append(_figure(words[:1].upper() + words[1:], _picture(path, caption or words), caption))
    return (
        f'<div class="figures">{"".join(shown)}</div>'
        if shown
        else '<p class="note">No figures have been drawn yet.</p>'
    )


# --- the page -------------------------------------------------------------------------------------------------------


def _sections(results: Path, runs: Sequence[Run], problems: list[str]) -> list[_Section]:
    experiments = group(runs)
    empty = '<p class="note">There are no finished runs yet.</p>'
    sections = [
        _Section("leaderboard", "Leaderboard", _leaderboard(experiments) if experiments else empty, "leaderboard")
    ]
    places: dict[tuple[str, str, str], list[Experiment]] = {}
    for each in experiments:
        if _points(each):
            places.setdefault(each.place, []).append(each)
    links = []
    for place, part in places.items():
        anchor, demo = _anchor("data", *place), part[0].first.demo
        links.append(f'<li><a href="#{anchor}">{escape(", ".join(place))}</a>{_tag(demo)} ({len(part)} methods)</li>')
    listed = f'<ul class="list">{"".join(links)}</ul>' if links else empty
    sections.append(_Section("data", "Data and settings", f"<p>One page for each.</p>{listed}", "data"))
    for place, part in places.items():
        lead = f"<p>{escape(place[1])}; backbone {escape(place[2])}.{_tag(part[0].first.demo)}</p>"
        sections.append(_Section(_anchor("data", *place), place[0], lead + _place(part), "data"))
    pages = []
    for path in sorted((results / "tables").glob("*.csv")):
        try:
            title, body = _table_page(path)
        except ConfigurationError as error:
            problems.append(str(error))
            continue
        pages.append(_Section(_anchor("table", path.stem), title, body, "tables"))
    listed = "".join(f'<li><a href="#{page.anchor}">{escape(page.heading)}</a></li>' for page in pages)
    listed = f'<ul class="list">{listed}</ul>' if pages else '<p class="note">No table has been made yet.</p>'
    sections.append(_Section("tables", "Tables", f"<p>After the papers' tables.</p>{listed}", "tables"))
    sections += pages
    sections.append(_Section("figures", "Figures", _figures(results / "figures"), "figures"))
    return sections


def write_report(path: Path, results_dir: Path = Path("results"), runs_dir: Path | None = None) -> Page:
    """Write the page from ``results_dir/runs``, ``tables`` and ``figures``, and a further folder of runs.

    The same files give the same page.

    Runs and tables that are damaged are left out, listed on the page and in the answer.

    Raises:
        ConfigurationError: ``results_dir`` or ``runs_dir`` is no folder, or the page cannot be written where it should.
    """
    for folder in (results_dir, *([runs_dir] if runs_dir else [])):
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is no folder; start the command in the repository's root")
    _check_writable(path)
    runs, problems = read_runs([results_dir / "runs", *([runs_dir] if runs_dir else [])])
    sections = _sections(results_dir, runs, problems)
    named = {"leaderboard": "Leaderboard", "data": "Data", "tables": "Tables", "figures": "Figures"}
    nav = "".join(f'<li><a href="#{anchor}">{label}</a></li>' for anchor, label in named.items())
    body = "\n".join(
        f'<section id="{s.anchor}" data-nav="{s.nav}"><h2>{escape(s.heading)}</h2>{s.body}</section>' for s in sections
    )
    template = resources.files("benchmark.report") / "template"
    page = (template / "page.html").read_text()
    lead = _lead(runs, sum(s.nav == "tables" for s in sections) - 1) + _left_out(problems)
    for mark, content in [
        ("/*STYLE*/", (template / "style.css").read_text()),
        ("/*SCRIPT*/", (template / "script.js").read_text()),
        ("<!--LEAD-->", lead),
        ("<!--NAV-->", nav),
        ("<!--SECTIONS-->", body),
    ]:
        page = page.replace(mark, content, 1)
    write_text(path, page)
    return Page(path, len(runs), sum(s.nav == "tables" for s in sections) - 1, problems)


def _left_out(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    entries = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<p>Damaged, and left out of this page:</p><ul class="failed">{entries}</ul>'


def _check_writable(path: Path) -> None:
    """Make the folder of a file, and refuse a place where it cannot be written, before there is work to lose.

    Raises:
        ConfigurationError: as it says.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent), contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(path).st_mode):
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"the page cannot be written to {path}: {reason}; give a file in a folder that can be written to"
        ) from error


def _lead(runs: Sequence[Run], tables: int) -> str:
    def count(number: int, one: str, many: str) -> str:
        return f"{number} {one if number == 1 else many}"

    parts: list[tuple[Callable[[Run], str], str, str]] = [
        (lambda run: run.record.method, "method", "methods"),
        (lambda run: run.dataset, "data set", "data sets"),
    ]
    said = [count(len({of(run) for run in runs}), one, many) for of, one, many in parts]
    demo = sum(run.demo for run in runs)
    embedded = (
        f" {count(demo, 'run', 'runs')} marked demo used the embedded digits or micro models, "
        "which stand for no paper's numbers."
        if demo
        else ""
    )
    return f"<p>{count(len(runs), 'run', 'runs')}, {', '.join(said)}, {count(tables, 'table', 'tables')}.{embedded}</p>"
