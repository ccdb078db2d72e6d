"""The cells of a table, and whether they will have the numbers that it shows."""

from benchmark.cells.identity import Cell, cell_command, content_hash
from benchmark.cells.work import Work
from benchmark.config.given_options import given_options
from benchmark.config.overview import PROGRAM
from benchmark.errors import ConfigurationError
from benchmark.records.record_file import is_finished
from benchmark.records.stored_run import stored_run
from benchmark.tables.layout import DataGroup, Preset, Row, Table, overrides_of, rows_of
from benchmark.tables.readings import of_configuration, of_record


def make_cell(row: Row, preset_name: str, preset: Preset, group: DataGroup, seed: int) -> Cell:
    """The run of this row on this data with this seed.

    Raises:
        ConfigurationError: a config file is missing or is no YAML.
    """
    named = () if row.method is None else (f"configs/methods/{row.method}.yaml", f"configs/suites/{group.suite}.yaml")
    scale = () if preset.scale is None else (f"configs/scales/{preset.scale}.yaml",)
    configs = (*group.configs, *named, *scale, *row.configs)
    overrides = overrides_of(row, preset_name, preset, group)
    return Cell(f"{row.prefix}-{group.name}-s{seed}-{content_hash(configs, overrides)}", configs, overrides, seed)


def make_cells(table: Table, preset_name: str, preset: Preset) -> dict[tuple[str, str, int], Cell]:
    """Every run of a preset, by (data group's name, row's label, seed); two rows can share a run.

    Raises:
        ConfigurationError: as :func:`make_cell`.
    """
    return {
        (group.name, row.label, seed): make_cell(row, preset_name, preset, group, seed)
        for group in preset.data
        for row in rows_of(table, preset)
        for seed in preset.seeds
    }


def check_readings(table: Table, preset: Preset, cells: dict[tuple[str, str, int], Cell], work: Work) -> None:
    """Refuse a point, split, client or class that a run does not have, before anything runs.

    What a cell has is said by its record where there is one, else by its configuration: that of the first data group
    for every row that is read at the point "local" (of every group where a cell sets ``evaluate_local``), that of the
    first row for every group with clients or splits of its own.

    Raises:
        ConfigurationError: one line, for the first that is not there.
    """
    rows = rows_of(table, preset)
    of_one_seed = [cell for (_, _, seed), cell in cells.items() if seed == preset.seeds[0]]
    own_points = any("evaluate_local" in str(given_options(cell.configs, cell.overrides)) for cell in of_one_seed)
    for group in preset.data:
        columns = [column for column in group.columns if not column.harmonic]
        clients = [None, *(None if column.client == "*" else column.client for column in columns)]
        splits = [table.split, *(column.split or table.split for column in columns)]
        classes = [column.of_class for column in columns if column.of_class is not None]
        special = bool(any(clients) or classes or set(splits) - {"test"})
        for row in rows:
            cell = cells[group.name, row.label, preset.seeds[0]]
            points = list(dict.fromkeys([row.point, *row.also.values()]))
            asked = ("local" in points and (own_points or group is preset.data[0])) or (special and row is rows[0])
            found = next((folder / cell.name for folder in work.folders if is_finished(folder / cell.name)), None)
            if found is not None:
                try:
                    there = of_record(stored_run(found).record)
                except ConfigurationError:
                    continue  # a damaged record fails alone
            elif asked and work.program == PROGRAM:
                there = of_configuration(cell_command(cell, work.runs_dir / cell.name, work.data_dir, ())[1:])
                for named in classes:
                    there.check_class(named, f"row {row.label}, {group.label}")
            else:
                continue
            for client, split in zip(clients, splits, strict=True):
                for point in points:
                    there.check(point, split, client, f"row {row.label}, {group.label}")
