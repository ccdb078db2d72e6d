"""A cell of a table as one configuration file."""

from pathlib import Path

import yaml

from benchmark.cells.identity import cell_command
from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.run.command import resolved
from benchmark.tables.cells import make_cell
from benchmark.tables.layout import load_table, preset_of, rows_of


def cell_configuration(
    name: str, preset: str, row: str, data: str, data_dir: str | Path | None = None, seed: int | None = None
) -> str:
    """Resolve the run of a row on a data group, as a file for ``lightning-cli``.

    Args:
        name: of the table, as for :func:`load_table`.
        preset: of the table.
        row: its label, or the name that its run directories have.
        data: label or name of the data group.
        data_dir: folder of the data sets; without, paths in it keep ``{data_dir}``.
        seed: of the run; by default the preset's first.

    Raises:
        ConfigurationError: a bad table, or no such preset, row or data group.
    """
    table = load_table(name)
    chosen = preset_of(table, name, preset)
    where = f"the preset {preset} of table {name}"
    rows = {key: entry for entry in rows_of(table, chosen) for key in (entry.prefix, entry.label)}
    groups = {entry.label: entry for entry in chosen.data} | {entry.name: entry for entry in chosen.data}
    if row not in rows:
        labels = ", ".join(entry.label for entry in rows_of(table, chosen))
        raise ConfigurationError(f"{where} has no row {row!r}; it has {labels}")
    if data not in groups:
        names = ", ".join(entry.name for entry in chosen.data)
        raise ConfigurationError(f"{where} has no data group {data!r}; it has {names}")
    if len(alike := [entry.name for entry in chosen.data if entry.label == data]) > 1 and data not in alike:
        raise ConfigurationError(f"{where} has several data groups {data!r}; say which: {', '.join(alike)}")
    cell = make_cell(rows[row], preset, chosen, groups[data], chosen.seeds[0] if seed is None else seed)
    folder = None if data_dir is None else user_path(data_dir)
    arguments = cell_command(cell, Path("runs") / cell.name, folder or Path("{data_dir}"), ())[1:]
    options = {key: value for key, value in resolved(arguments).items() if key not in ("run_dir", "ckpt_path")}
    heading = f"# {table.title}: {rows[row].label} on {groups[data].label}, preset {preset}.\n"
    return heading + yaml.safe_dump(options, sort_keys=False, width=120)
