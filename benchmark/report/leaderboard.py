"""The leaderboard: every experiment in one table that sorts."""

from collections.abc import Sequence
from html import escape

from benchmark.records.grouped_runs import Experiment
from benchmark.report.html import anchor_of, heading, number_cell, row, scroll, table, tag
from benchmark.report.readings import POINTS, ROUNDS, points_of, statistic_of, traffic_of


def leaderboard(experiments: Sequence[Experiment]) -> str:
    numbers = ["Last ten", "Best round, chosen on test data", "Worst client", "Worst decile", "Spread over clients"]
    numbers += ["Rounds", "Seeds", "kB a round", "Seconds", "Peak MB"]
    rows = []
    for each in experiments:
        run, place = each.first, anchor_of("data", *each.place)
        for point in points_of(each):
            last, *others = (number_cell(statistic_of(each, point, which, "average")) for which in ROUNDS)
            cells = [
                last,
                f'<td class="text"><div class="data">{escape(run.dataset)}{tag(run.demo)}'
                f'<div class="note">{escape(run.setting)}; {escape(run.backbone)}</div></div></td>',
                f'<td class="text">{POINTS[point]}</td>',
                *others,
                *(number_cell(statistic_of(each, point, "last", name)) for name in ("worst", "worst_decile", "std")),
                number_cell([max(r.record.rounds_trained for r in each.runs)], 0),
                number_cell([len(each.runs)], 0),
                number_cell([value / 1e3 for value in traffic_of(each)], 1),
                number_cell([r.record.seconds["total"] for r in each.runs], 0),
                number_cell([b / 1e6 for r in each.runs if (b := r.record.peak_memory_bytes) is not None], 0),
            ]
            given = {"method": run.method, "data": run.dataset, "reading": POINTS[point]}
            data = " ".join(f'data-{name}="{escape(value)}"' for name, value in given.items())
            rows.append(row(f'<a href="#{place}">{escape(each.name)}</a>', cells, f" {data}"))
    heads = [heading("Method", False), heading("Last round", True), heading("Data", False), heading("Read", False)]
    heads += [heading(label, True) for label in numbers]
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
    board = table(heads, rows, ' id="board" class="sortable"')
    return (
        "<p>Test accuracy in per cent, averaged over clients; ± is the standard deviation over seeds. A heading sorts. "
        "The best round is chosen on test data, so it flatters. Worst client, worst decile and spread are of the last "
        "round; kB are up and down, per participating client and round.</p>"
        f'<form id="filters"><label>Search<input type="search" name="words" autocomplete="off"></label>{selects}'
        '<button type="reset">Show all</button></form>'
        '<p class="note" id="shown" role="status"></p>'
        f"{scroll(board, 'Leaderboard')}"
    )
