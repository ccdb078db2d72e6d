"""The figures of the pFedPT paper (Li et al., arXiv:2303.08678), from finished runs: picture, numbers and caption.

``configs/figures/pfedpt.yaml`` says for each preset which runs they are drawn from. Runs are cells as those of tables:
done once, found again by the hash of their configs (:mod:`benchmark.cells.queue`).
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.cells.identity import Cell, content_hash
from benchmark.cells.queue import run_cells
from benchmark.cells.work import Work
from benchmark.drawing import save_figure
from benchmark.errors import ConfigurationError
from benchmark.figures.grad_cam import INSTALL
from benchmark.figures.pfedpt.attention import attention_figure
from benchmark.figures.pfedpt.labels import labels_figure
from benchmark.figures.pfedpt.movement import movement_figure
from benchmark.figures.pfedpt.newcomers import newcomers_figure
from benchmark.figures.pfedpt.partitions import partitions_figure
from benchmark.figures.pfedpt.sizes import sizes_figure
from benchmark.figures.pfedpt.sources import Drawing, Preset, Sources, load_preset
from benchmark.figures.pfedpt.tsne import tsne_figure
from benchmark.files import write_text
from benchmark.records.grouped_runs import read_run
from benchmark.run.command import PROGRAM
from benchmark.tables.run_table import run_table

TABLE_OF_FIG6 = "pfedpt_fig6"


@dataclass(frozen=True)
class FigureSpec:
    """How a figure is made: from which of a preset's runs, by which function, with which further package."""

    draw: Callable[[Sources], Drawing]
    runs: tuple[str, ...] = ()
    of_table: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)


FIGURES = {
    "pfedpt_fig4": FigureSpec(attention_figure, ("pfedpt_cnn", "pfedpt_vit"), needs={"captum": INSTALL}),
    "pfedpt_fig5": FigureSpec(tsne_figure, ("pfedpt_cnn",)),
    "pfedpt_fig6": FigureSpec(sizes_figure, of_table=True),
    "pfedpt_fig8": FigureSpec(partitions_figure),
    "pfedpt_fig9": FigureSpec(labels_figure, ("pfedpt_cnn",)),
    "pfedpt_fig10": FigureSpec(movement_figure, ("pfedpt_cnn",)),
    "pfedpt_fig11": FigureSpec(newcomers_figure, ("newcomers_pfedpt", "newcomers_fedavg")),
}


@dataclass(frozen=True)
class FigureFiles:
    """What was written: the picture, its numbers, its caption."""

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
) -> FigureFiles:
    """Do the runs that are missing, then write ``results_dir/figures/<name>_<preset>.{png,csv,txt}``.

    Args:
        name: of :data:`FIGURES`.
        preset_name: of ``configs/figures/pfedpt.yaml``.
        data_dir: folder of the data sets.
        run_dirs: finished runs to draw from in place of the preset's, in the order of the figure's; then the files are
            named after the first of them instead of the preset.
        jobs: runs at a time; by default as ``run_cells`` chooses.
        results_dir: where ``figures`` is.
        runs_dir: where runs are made and looked for.
        program: command in front of ``fit``.

    Raises:
        ConfigurationError: an unknown figure or preset, a package or ``data_dir`` that is missing, a run that failed or
            is not what the figure needs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the children were ended.
    """
    if name not in FIGURES:
        raise ConfigurationError(f"there is no figure {name!r}; figures are {', '.join(FIGURES)}")
    spec = FIGURES[name]
    for package, advice in spec.needs.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(advice)
    preset = load_preset(preset_name)
    folder = None if data_dir is None else Path(data_dir).expanduser().absolute()
    if run_dirs and len(run_dirs) != len(spec.runs):
        wanted = f"{len(spec.runs)} ({', '.join(spec.runs)})" if spec.runs else "none"
        raise ConfigurationError(f"{name} is drawn from {wanted} runs, got {len(run_dirs)} with --run_dir")
    needed = [
        *(e for run in spec.runs for e in preset.runs[run].overrides),
        *(e for p in preset.partitions for e in p.overrides),
    ]
    if folder is None and not run_dirs and any("{data_dir}" in entry for entry in needed):
        raise ConfigurationError(
            f"the preset {preset_name} of {name} reads data sets: give their folder with --data_dir or DATA_DIR"
        )
    table = None
    if spec.of_table:
        made = run_table(TABLE_OF_FIG6, preset_name, data_dir, jobs, results_dir, runs_dir, program=program)
        if made.failed:
            failed, outcome = next(iter(made.failed.items()))
            raise ConfigurationError(f"{len(made.failed)} runs of the table failed, first {failed}: {outcome.error}")
        table = made.csv
    runs = [Path(run) for run in run_dirs] or _finished_runs(spec, preset, folder, jobs, Path(runs_dir), program)
    sources = Sources(runs, folder, preset, table)
    drawing = spec.draw(sources)
    stem = f"{name}_{runs[0].name if run_dirs else preset_name}"
    target = Path(results_dir) / "figures"
    files = FigureFiles(*(target / f"{stem}.{suffix}" for suffix in ("png", "csv", "txt")))
    note = f"{preset.note} " if preset.note and not run_dirs else ""
    save_figure(drawing.figure, files.png)
    write_text(files.csv, drawing.numbers.to_csv(index=False, float_format="%.6g"))
    write_text(files.txt, f"{note}{drawing.caption}{_origin(runs) if runs else ''}\n")
    return files


def _finished_runs(
    spec: FigureSpec, preset: Preset, data_dir: Path | None, jobs: int | None, runs_dir: Path, program: Sequence[str]
) -> list[Path]:
    cells = []
    for run in (preset.runs[name] for name in spec.runs):
        configs, overrides = tuple(run.configs), tuple(run.overrides)
        name = f"{run.name}-s{preset.seed}-{content_hash(configs, overrides)}"
        cells.append(Cell(name, configs, overrides, preset.seed))
    if not cells:
        return []
    outcomes = run_cells(cells, Work(runs_dir, None, data_dir, tuple(program)), jobs)
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
