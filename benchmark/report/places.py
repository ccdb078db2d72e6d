"""Everything about one data set, setting and backbone."""

import math
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.errors import ConfigurationError
from benchmark.records.grouped_runs import Experiment
from benchmark.records.stored_run import stored_run
from benchmark.report.html import figure, heading, known_mean_std, picture, row, scroll, table
from benchmark.report.readings import POINTS, last_by_client, learning_curve, points_of, statistic_of, traffic_of
from benchmark.report.svg import heat_map, key, line_chart, scatter_chart, strip_chart
from datamodules.heatmap import partition_heatmap

WORST_SHOWN = 5
LARGEST_VECTOR_MAP = 3000


def place_page(experiments: Sequence[Experiment]) -> str:
    """Everything about one data set, setting and backbone."""
    styles = {each.name: position for position, each in enumerate(experiments)}
    legend = "".join(f"<li>{key(style)}{escape(name)}</li>" for name, style in styles.items())
    body = [
        f'<ul class="legend" aria-label="Legend of all charts here">{legend}</ul>',
        '<h3>Learning curves</h3><div class="figures">',
    ]
    for point, words in POINTS.items():
        curves = [learning_curve(each, styles[each.name], point) for each in experiments if point in points_of(each)]
        curves = [curve for curve in curves if any(math.isfinite(y) for y in curve.y)]
        if curves:
            last = ", ".join(f"{curve.name} {curve.y[-1]:.1f}" for curve in curves)
            label = f"Average test accuracy by round, {words}; in the last round: {last}"
            seeds = " Bands span the seeds." if any(len(curve.low) for curve in curves) else ""
            drawing = line_chart(curves, "round", "average test accuracy, %", label)
            body.append(figure(words.capitalize(), drawing, f"Round 0 is before any training.{seeds}"))
    body.append('</div><h3>Clients</h3><div class="figures">')
    for point, words in POINTS.items():
        strips = [
            (each.name, styles[each.name], last_by_client(each, point))
            for each in experiments
            if point in points_of(each)
        ]
        strips = [strip for strip in strips if strip[2]]
        if strips:
            label = f"Test accuracy of every client in the last round, {words}; " + ", ".join(
                f"{name} from {min(v for _, v in clients):.1f} to {max(v for _, v in clients):.1f}"
                for name, _, clients in strips
            )
            caption = "One mark a client; the upright line is their mean."
            drawing = strip_chart(strips, "test accuracy, %", label)
            body.append(figure(f"Every client, {words}", drawing, caption))
    body.append("</div>" + _worst(experiments))
    body.append('<h3>Communication and accuracy</h3><div class="figures">')
    for point, words in POINTS.items():
        dots = []
        for each in experiments:
            traffic, _ = known_mean_std(traffic_of(each))
            accuracy, _ = known_mean_std(statistic_of(each, point, "last", "average"))
            if math.isfinite(accuracy):
                dots.append((each.name, styles[each.name], traffic / 1e3, accuracy))
        if dots:
            label = f"Accuracy against kilobytes, {words}: " + ", ".join(
                f"{n} {x:,.1f} kB {y:.1f}" for n, _, x, y in dots
            )
            drawing = scatter_chart(dots, "kB up and down, per client and round", "average test accuracy, %", label)
            body.append(figure(words.capitalize(), drawing, "Further left sends less, further up is better."))
    body.append("</div><h3>Partition</h3>" + _partition(experiments))
    return "".join(body)


def _worst(experiments: Sequence[Experiment]) -> str:
    """The clients that fare worst under each method, at the first point where it is evaluated."""
    rows = []
    for each in experiments:
        point = points_of(each)[0]
        worst = sorted(last_by_client(each, point), key=lambda entry: entry[1])[:WORST_SHOWN]
        cells = [f'<td data-value="{value:.10g}">{escape(client)} {value:.2f}</td>' for client, value in worst]
        cells += ['<td data-value=""></td>'] * (WORST_SHOWN - len(worst))
        rows.append(row(escape(each.name), [f'<td class="text">{POINTS[point]}</td>', *cells]))
    places = ["Worst", "Second", "Third", "Fourth", "Fifth"]
    heads = [heading("Method", False), heading("Read", False), *(heading(place, True) for place in places)]
    note = "Test accuracy of the last round, in per cent; of several seeds, the mean."
    return f'<h3>Worst clients</h3><p class="note">{note}</p>{scroll(table(heads, rows), "Worst clients")}'


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
            drawing = picture(Path(folder) / "map.png", label)
    return f'<div class="figures">{figure("Images a client trains on", drawing, f"{label} (seed {seed}).")}</div>'
