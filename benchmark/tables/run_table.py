"""Runs a table's missing cells and writes it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.cells.queue import check_jobs, run_cells
from benchmark.cells.this_machine import THIS_MACHINE
from benchmark.cells.work import Place, Work
from benchmark.config.overview import PROGRAM
from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, write_text
from benchmark.paths import user_path
from benchmark.tables.across import draw_across
from benchmark.tables.by_seed import by_seed
from benchmark.tables.cells import check_readings, make_cells
from benchmark.tables.curves import draw_curves
from benchmark.tables.layout import Preset, Table, check_baseline, check_seeds, load_table, preset_of, rows_of
from benchmark.tables.made_again import says_the_same
from benchmark.tables.paper import read_paper
from benchmark.tables.render import Rendered, markdown_block, render


@dataclass(frozen=True)
class TableResult:
    """A table and its files.

    Attributes:
        markdown: of the files.
        csv: the long form, a row for each number.
        latex: the third.
        failed: the cells that failed, by name.
        problems: what could not be read.
        text: the table of these runs, in Markdown.
        picture: the metric over the rounds or the data groups, where there is one.
        by_seed: its rows minus the baseline, seed by seed, in Markdown; empty unless asked for.
        unchanged: the text files say the same already, apart from what runs measure anew, and were left as they are.
    """

    markdown: Path
    csv: Path
    latex: Path
    failed: dict[str, Outcome]
    problems: list[str] = field(default_factory=list)
    text: str = ""
    picture: Path | None = None
    unchanged: bool = False
    by_seed: str = ""


def run_table(
    name: str,
    preset: str = "demo",
    data_dir: str | Path | None = None,
    jobs: int | None = None,
    results_dir: str | Path = "results",
    runs_dir: str | Path = "runs",
    seeds: Sequence[int] | None = None,
    kept: bool = False,
    baseline: str | None = None,
    place: Place = THIS_MACHINE,
    program: Sequence[str] = PROGRAM,
    rerun_changed: bool = False,
    seed_by_seed: bool = False,
) -> TableResult:
    """Run a table's missing cells, ``jobs`` at a time, then write ``results_dir/tables/<name>_<preset>.{md,csv,tex}``
    and, with the metric over the rounds or over the data groups, ``.png``.

    A cell counts as finished with a record in ``runs_dir``, and with ``kept`` also with a committed one in
    ``results_dir/runs``. ``seeds`` and ``baseline`` replace the table's own; ``place`` says where the cells run.
    One line says how many finished cells were made by other code than the present one; ``rerun_changed`` runs those
    again and puts the old ones into ``runs_dir/.replaced``. ``seed_by_seed`` compares rows with the baseline for each
    seed, too. Older records do not name their code; they are counted,
    and kept.

    Raises:
        ConfigurationError: a bad table, a missing config or paper CSV, an unknown preset or baseline, no ``data_dir``
            where the preset needs one, ``jobs`` below 1, a place that is not to be had, a point, split or client that a
            run does not have.
            All before anything runs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the children were ended.
    """
    table, chosen = chosen_table(name, preset, jobs, seeds, baseline)
    cells = make_cells(table, preset, chosen)
    results, folder = Path(results_dir), data_folder(data_dir, cells.values(), f"the preset {preset} of table {name}")
    work = Work(Path(runs_dir), results / "runs" if kept else None, folder, tuple(program), rerun_changed)
    if not all(map(work.has, cells.values())):
        place.get_ready(work, jobs)
    check_readings(table, chosen, cells, work)
    make_folder(results / "tables")
    outcomes = run_cells(list(cells.values()), work, jobs, place)
    rendered = render(Path(name).stem, table, preset, chosen, cells, outcomes)
    return write_table(f"{Path(name).stem}_{preset}", results, table, rendered, outcomes, seed_by_seed)


def chosen_table(
    name: str, preset: str, jobs: int | None, seeds: Sequence[int] | None, baseline: str | None
) -> tuple[Table, Preset]:
    """A table and its preset, with what a command says otherwise.

    Raises:
        ConfigurationError: as :func:`run_table`, of what stands in the table and its papers' CSVs.
    """
    table = load_table(name)
    chosen = preset_of(table, name, preset)
    check_jobs(jobs)
    if seeds is not None:
        check_seeds(seeds)
        chosen = replace(chosen, seeds=list(seeds))
    if chosen.summary is not None:
        table = replace(table, summary=chosen.summary)
    if chosen.split is not None:
        table = replace(table, split=chosen.split)
    if baseline is not None:
        table = replace(table, baseline=baseline, gains=[])
        check_baseline(table, name)
    labels = [row.label for row in rows_of(table, chosen)]
    if baseline is not None and baseline not in labels:
        raise ConfigurationError(f"the preset {preset} of table {name} does not run the baseline {baseline!r}")
    if table.baseline not in labels:
        table = replace(table, baseline=None)
    read_paper(table.paper)
    return table, chosen


def data_folder(data_dir: str | Path | None, cells: Iterable[Cell], where: str) -> Path | None:
    """The folder of the data sets.

    Raises:
        ConfigurationError: it is no folder, or none is given and a cell needs one.
    """
    folder = None if data_dir is None else user_path(data_dir)
    if folder is None and any("{data_dir}" in entry for cell in cells for entry in cell.overrides):
        raise ConfigurationError(f"{where} reads data sets: give their folder with --data_dir or DATA_DIR")
    if folder is not None and not folder.is_dir():
        raise ConfigurationError(f"data_dir {folder} is not a folder")
    return folder


def write_table(
    stem: str,
    results: Path,
    table: Table,
    rendered: Rendered,
    outcomes: Mapping[str, Outcome],
    seed_by_seed: bool = False,
) -> TableResult:
    """Write a rendered table and its curves to ``results/tables/<stem>``.

    A table whose files say the same already, apart from what runs measure anew (:mod:`benchmark.tables.made_again`),
    leaves its text files as they are: so a reproduced table changes no committed file.
    """
    target = make_folder(results / "tables")
    paths = {suffix: target / f"{stem}.{suffix}" for suffix in ("md", "csv", "tex")}
    unchanged = says_the_same(rendered, paths)
    if not unchanged:
        write_text(paths["md"], rendered.markdown)
        write_text(paths["csv"], rendered.csv)
        write_text(paths["tex"], rendered.latex)
    picture = target / f"{stem}.png"
    if rendered.across:
        draw_across(rendered.across, picture)
    else:
        draw_curves(table, rendered.lines, picture)
    failed = {cell: outcome for cell, outcome in outcomes.items() if outcome.run_dir is None}
    return TableResult(
        paths["md"],
        paths["csv"],
        paths["tex"],
        failed,
        rendered.problems,
        rendered.markdown,
        picture if picture.is_file() else None,
        unchanged,
        "\n".join(map(markdown_block, by_seed(rendered.lines, table))) if seed_by_seed else "",
    )
