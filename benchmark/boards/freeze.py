"""Freeze one data group of a table's kept runs as a board."""

from pathlib import Path

from benchmark.boards.board import RUNS, Board, BoardRow, path_of, runs_of, setting_of, write_board
from benchmark.boards.ranking import check_values, ranking
from benchmark.errors import ConfigurationError, no_such
from benchmark.metrics import METRICS
from benchmark.records.record_file import is_finished
from benchmark.tables.cells import make_cells
from benchmark.tables.layout import load_table, preset_of, rows_of


def freeze(
    name: str,
    table_name: str,
    preset_name: str,
    group_name: str,
    floor: str,
    results_dir: Path,
    metric: str | None = None,
) -> Board:
    """Make a board of a table's rows on one of its data groups, of runs that are kept below ``results_dir``.

    Args:
        name: of the board, its version last.
        table_name: of the table.
        preset_name: of its preset.
        group_name: name of the preset's data group.
        floor: label of the row that needs no training.
        results_dir: folder of results, in which the board is written.
        metric: what rows are ranked by, by default what the table shows.

    Raises:
        ConfigurationError: the board is there already; there is no such table, preset, group, row or metric; a run is
            not kept, differs from the others, or has no finite value of a client for whom the floor has.
    """
    path = path_of(name, results_dir)
    if path.exists():
        raise ConfigurationError(f"{path} is frozen; a board that differs needs another name")
    table = load_table(table_name)
    preset = preset_of(table, table_name, preset_name)
    groups = {group.name: group for group in preset.data}
    if group_name not in groups:
        raise ConfigurationError(
            f"the preset {preset_name} of table {table_name} has no data {group_name!r}; it has {', '.join(groups)}"
        )
    rows = rows_of(table, preset)
    if floor not in [row.label for row in rows]:
        raise ConfigurationError(f"the floor {floor!r} is no row; rows are {', '.join(row.label for row in rows)}")
    ranked = metric or table.metric
    if ranked not in METRICS:
        raise ConfigurationError(no_such("metric", ranked, METRICS))
    cells = make_cells(table, preset_name, preset)
    made = []
    for row in rows:
        runs = {str(seed): cells[group_name, row.label, seed].name for seed in preset.seeds}
        if missing := [run for run in runs.values() if not is_finished(results_dir / RUNS / run)]:
            raise ConfigurationError(
                f"the row {row.label!r} has no run {missing[0]} in {results_dir / RUNS}; run the table, then "
                "`benchmark keep` its runs"
            )
        made.append(BoardRow(row.label, row.point, runs))
    runs_by_row = {row.label: runs_of(row, results_dir) for row in made}
    floor_row = next(each for each in made if each.label == floor)
    read = [run for by_seed in runs_by_row.values() for run in by_seed.values()]
    title = f"{table.title}: {groups[group_name].label}"
    board = Board(name, title, preset.note or "", ranked, floor, setting_of(read), made)
    for each in made:  # one may lack the metric, or clients
        check_values(ranked, runs_by_row[each.label], each.point, runs_by_row[floor], floor_row.point)
    ranking(board, results_dir)
    write_board(board, results_dir)
    return board
