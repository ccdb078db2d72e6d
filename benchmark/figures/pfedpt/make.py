"""The figures of the pFedPT paper (Li et al., arXiv:2303.08678), from finished runs: picture, numbers and caption.

They are drawn from the cells of tables, ``configs/figures/pfedpt.yaml`` where they have no table of their own: done
once, found again by their names (:mod:`benchmark.cells.queue`).
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.cells.identity import Cell, cell_command
from benchmark.cells.queue import run_cells
from benchmark.cells.work import Work
from benchmark.config.overview import PROGRAM
from benchmark.drawing import save_figure
from benchmark.errors import ConfigurationError
from benchmark.figures.grad_cam import INSTALL
from benchmark.figures.pfedpt import check_figure
from benchmark.figures.pfedpt.attention import attention_figure
from benchmark.figures.pfedpt.labels import labels_figure
from benchmark.figures.pfedpt.movement import movement_figure
from benchmark.figures.pfedpt.newcomers import newcomers_figure
from benchmark.figures.pfedpt.partitions import partitions_figure
from benchmark.figures.pfedpt.sizes import sizes_figure
from benchmark.figures.pfedpt.sources import Drawing, Sources
from benchmark.figures.pfedpt.tsne import tsne_figure
from benchmark.files import write_text
from benchmark.paths import user_path
from benchmark.records.grouped_runs import read_run
from benchmark.tables.cells import make_cell
from benchmark.tables.layout import Preset, Table, load_table, preset_of, rows_of
from benchmark.tables.run_table import run_table

CONFIG = "configs/figures/pfedpt.yaml"
CNN, VIT = "pFedPT, CNN", "pFedPT, ViT"
PARTITION = "Dirichlet(0.3), published form (sets merged)"
"""Label of the data group of :data:`CONFIG` on which the runs of its figures are."""


@dataclass(frozen=True)
class FigureSpec:
    """The recipe of a figure.

    Attributes:
        draw: function that draws it.
        rows: labels of the table's rows whose runs it is drawn from; None for those of all rows.
        table: name or file of the table.
        of_numbers: whether it is drawn from the numbers of the whole table.
        needs: further packages, each with the way to install it.
    """

    draw: Callable[[Sources], Drawing]
    rows: tuple[str, ...] | None = ()
    table: str = CONFIG
    of_numbers: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)


FIGURES = {
    "pfedpt_fig4": FigureSpec(attention_figure, (CNN, VIT), needs={"captum": INSTALL}),
    "pfedpt_fig5": FigureSpec(tsne_figure, (CNN,)),
    "pfedpt_fig6": FigureSpec(sizes_figure, table="pfedpt_fig6", of_numbers=True),
    "pfedpt_fig8": FigureSpec(partitions_figure),
    "pfedpt_fig9": FigureSpec(labels_figure, (CNN,)),
    "pfedpt_fig10": FigureSpec(movement_figure, (CNN,)),
    "pfedpt_fig11": FigureSpec(newcomers_figure, None, table="pfedpt_fig11"),
}


@dataclass(frozen=True)
class FigureFiles:
    """The written files of a figure: the picture, its numbers, its caption."""

    png: Path
    csv: Path
    txt: Path


def make_figure(
    name: str,
    preset_name: str = "demo",
    data_dir: str | Path | None = None,
    run_dirs: Sequence[str | Path] = (),
    jobs: int | None = None,
    results_dir: str | Path = "results",
    runs_dir: str | Path = "runs",
    program: Sequence[str] = PROGRAM,
    rerun_changed: bool = False,
) -> FigureFiles:
    """Do the runs that are missing, then write ``results_dir/figures/<name>_<preset>.{png,csv,txt}``.

    Args:
        name: of :data:`FIGURES`.
        preset_name: of the figure's table.
        data_dir: folder of the data sets.
        run_dirs: finished runs to draw from instead of the preset's, in the order of the figure's; then the files are
            named after the first of them instead of the preset.
        jobs: runs at a time; by default as ``run_cells`` chooses.
        results_dir: where ``figures`` is.
        runs_dir: where runs are made and looked for.
        program: command in front of ``fit``.
        rerun_changed: do finished runs again that other code made than the present one.

    Raises:
        ConfigurationError: an unknown figure or preset, a package or ``data_dir`` that is missing, a run that failed or
            is not what the figure needs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the children were ended.
    """
    check_figure(name)
    spec = FIGURES[name]
    for package, advice in spec.needs.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(advice)
    given = load_table(spec.table)
    preset = preset_of(given, spec.table, preset_name)
    if run_dirs and spec.rows is not None and len(run_dirs) != len(spec.rows):
        wanted = f"{len(spec.rows)} ({'; '.join(spec.rows)})" if spec.rows else "none"
        raise ConfigurationError(f"{name} is drawn from {wanted} runs, got {len(run_dirs)} with --run_dir")
    folder = None if data_dir is None else user_path(data_dir).absolute()
    cells, partitions = _cells(spec, given, preset_name, preset), _partitions(given, preset_name, preset)
    needed = cells or partitions.values()
    if folder is None and not run_dirs and any("{data_dir}" in entry for cell in needed for entry in cell.overrides):
        raise ConfigurationError(
            f"the preset {preset_name} of {name} reads data sets: give their folder with --data_dir or DATA_DIR"
        )
    numbers = None
    if spec.of_numbers:
        made = run_table(
            spec.table, preset_name, data_dir, jobs, results_dir, runs_dir, program=program, rerun_changed=rerun_changed
        )
        if made.failed:
            failed, outcome = next(iter(made.failed.items()))
            raise ConfigurationError(f"{len(made.failed)} runs of the table failed, first {failed}: {outcome.error}")
        numbers = made.csv
    work = Work(Path(runs_dir), None, folder, tuple(program), rerun_changed)
    runs = [Path(run) for run in run_dirs] or _finished_runs(cells, work, jobs)
    fits = {label: cell_command(cell, work.runs_dir / cell.name, folder, ()) for label, cell in partitions.items()}
    sources = Sources(runs, folder, {label: command[1:] for label, command in fits.items()}, numbers)
    drawing = spec.draw(sources)
    stem = f"{name}_{runs[0].name if run_dirs else preset_name}"
    target = Path(results_dir) / "figures"
    files = FigureFiles(*(target / f"{stem}.{suffix}" for suffix in ("png", "csv", "txt")))
    note = f"{preset.note} " if preset.note and not run_dirs else ""
    save_figure(drawing.figure, files.png)
    write_text(files.csv, drawing.numbers.to_csv(index=False, float_format="%.6g"))
    write_text(files.txt, f"{note}{drawing.caption}{_origin(runs) if runs else ''}\n")
    return files


def _cells(spec: FigureSpec, table: Table, preset_name: str, preset: Preset) -> list[Cell]:
    """The runs that a figure is drawn from, in its order."""
    rows = {row.label: row for row in rows_of(table, preset)}
    labels = rows if spec.rows is None else spec.rows
    group = next((group for group in preset.data if group.label == PARTITION), preset.data[0])
    return [make_cell(rows[label], preset_name, preset, group, preset.seeds[0]) for label in labels]


def _partitions(table: Table, preset_name: str, preset: Preset) -> dict[str, Cell]:
    """By a data group's label, a run on it."""
    row, seed = rows_of(table, preset)[0], preset.seeds[0]
    return {group.label: make_cell(row, preset_name, preset, group, seed) for group in preset.data}


def _finished_runs(cells: Sequence[Cell], work: Work, jobs: int | None) -> list[Path]:
    if not cells:
        return []
    outcomes = run_cells(cells, work, jobs)
    finished = []
    for cell in cells:
        outcome = outcomes[cell.name]
        if outcome.run_dir is None:
            log = f" (log: {outcome.log})" if outcome.log else ""
            raise ConfigurationError(f"the run {cell.name} failed: {outcome.error}{log}")
        finished.append(outcome.run_dir)
    return finished


def _origin(runs: Sequence[Path]) -> str:
    """The last sentences of a caption: data and clients in a reader's words, and the runs' names."""
    first = read_run(runs[0])
    return f" {first.dataset}, {first.setting}. Run{'s' * (len(runs) > 1)}: {', '.join(run.name for run in runs)}."
