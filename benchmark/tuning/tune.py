"""Tunes every row of a table with the same number of trials, and sets the tuned rows beside the untuned ones."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.cells.identity import Cell, cell_command, with_overrides
from benchmark.cells.outcome import Outcome, said_of_code
from benchmark.cells.queue import run_cells
from benchmark.cells.this_machine import THIS_MACHINE
from benchmark.cells.work import Place, Work
from benchmark.config.overview import PROGRAM
from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, write_text
from benchmark.run.command import resolved
from benchmark.tables.cells import check_readings, make_cell, make_cells
from benchmark.tables.layout import DataGroup, Preset, Row, Table, rows_of
from benchmark.tables.render import render
from benchmark.tables.run_table import TableResult, chosen_table, data_folder, write_table
from benchmark.tuning.blocks import tuning_block
from benchmark.tuning.space import checked_space, read_space, with_own_values
from benchmark.tuning.study import Studies, Study
from benchmark.tuning.task import Task
from benchmark.tuning.trials_file import Tuned, kept_trials, trials_csv

SEEDS = (0, 1, 2)
TUNED = ", tuned"


@dataclass(frozen=True)
class TuningResult:
    """The table's files, if one was made, the file of all trials, and the studies without an end, by name, with why."""

    table: TableResult | None
    trials: Path
    stopped: dict[str, str]


def tune_table(
    name: str,
    preset: str = "demo",
    trials: int = 16,
    rounds: int | None = None,
    val_fraction: float = 0.2,
    data_dir: str | Path | None = None,
    jobs: int | None = None,
    results_dir: str | Path = "results",
    runs_dir: str | Path = "runs",
    seeds: Sequence[int] = SEEDS,
    kept: bool = False,
    place: Place = THIS_MACHINE,
    program: Sequence[str] = PROGRAM,
    rerun_changed: bool = False,
    trials_only: bool = False,
) -> TuningResult:
    """Tune each row of a table on each of its data groups, then run it with the values that were chosen, and untuned.

    A trial is a run with the first seed that scores held-out training images and no others. The first one has the row's
    own values. Only when all studies are done are the test images looked at, by runs that train on everything. Written
    are ``results_dir/tables/<name>_<preset>_tuned.{md,csv,tex,png}`` and every trial as
    ``results_dir/tuning/<name>_<preset>.csv``. What was begun is continued, and more ``trials`` go on with those that
    there are.

    Args:
        name: of the table.
        preset: of the table.
        trials: of each row.
        rounds: of a trial; None takes the table's own.
        val_fraction: part of each client's training images that trials hold out.
        data_dir: folder of the data sets.
        jobs: runs at a time, no two of them of one study.
        results_dir: of the tables.
        runs_dir: of the runs; the studies lie in ``.studies`` there.
        seeds: of the runs on the test images.
        kept: whether records in ``results_dir/runs`` count as finished runs too, and the trials of a row that all
            stand in the CSV, of the very same study, as tuning it.
        place: where the runs are done.
        program: command in front of ``fit``.
        rerun_changed: do again what other code made than the present one: finished runs, and whole studies with such a
            run among their trials.
        trials_only: end when the trials are written: no run looks at a test image, and there is no table.

    Raises:
        ConfigurationError: as :func:`benchmark.tables.run_table.run_table`; a number out of range, a row without search
            space or with an option that it does not have, rows of different rounds, no Optuna, or a study that
            another process has or that is of another search space. All before anything runs.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP, after the children were ended.
    """
    if trials < 1 or (rounds is not None and rounds < 1):
        raise ConfigurationError(f"trials and rounds are at least 1, got {trials if trials < 1 else rounds}")
    if not 0 < val_fraction < 1:
        raise ConfigurationError(f"val_fraction is {val_fraction}, expected a number above 0 and below 1")
    table, chosen = chosen_table(name, preset, jobs, seeds, None)
    untuned = make_cells(table, preset, chosen)
    where = f"the preset {preset} of table {name}"
    folder = data_folder(data_dir, untuned.values(), where)
    results = Path(results_dir)
    work = Work(Path(runs_dir), results / "runs" if kept else None, folder, tuple(program), rerun_changed)
    check_readings(table, chosen, untuned, work)
    held_out = (f"--data.val_fraction={val_fraction}", "--data.val_only=true")
    tasks = {
        (group.name, row.label): _task(row, preset, chosen, group, table.metric, trials, rounds, held_out, folder)
        for group in chosen.data
        for row in rows_of(table, chosen)
    }
    _check_rounds(tasks.values(), where)
    for task in tasks.values():
        _check_values(task, folder)
    stem = f"{Path(name).stem}_{preset}"
    make_folder(results / "tables")
    every_trial = make_folder(results / "tuning") / f"{stem}.csv"
    tuning = _Tuning(tasks, every_trial, work, jobs, place)
    tuned = tuning.tune(kept)
    stopped = {entry.task.name: entry.error for entry in tuned.values() if entry.error}
    if trials_only:
        return TuningResult(None, every_trial, stopped)
    cells, outcomes = tuning.run(untuned, tuned)
    both, preset_of_both = _side_by_side(table, chosen, tuned, trials, val_fraction)
    rendered = render(
        Path(name).stem, both, preset, preset_of_both, cells, outcomes,
        lambda lines: [tuning_block(tuned, lines, both, TUNED)],
    )  # fmt: skip
    return TuningResult(write_table(f"{stem}_tuned", results, both, rendered, outcomes), every_trial, stopped)


@dataclass(frozen=True)
class _Tuning:
    """The two parts of a tuned table that run something: the trials of all rows, then the runs on the test images.

    Attributes:
        tasks: of each row on each data group, by group and row; one without choices has nothing to tune.
        every_trial: the CSV of all trials.
        work: folders and command.
        jobs: runs at a time.
        place: where the runs are done.
    """

    tasks: dict[tuple[str, str], Task]
    every_trial: Path
    work: Work
    jobs: int | None
    place: Place

    def tune(self, kept: bool) -> dict[tuple[str, str], Tuned]:
        """Do the trials of all rows, write them, and return the values that each row has from them.

        Args:
            kept: take a row's trials from the CSV where all stand there.
        """
        found = {task.name: task for task in self.tasks.values() if task.choices}
        there = kept_trials(self.every_trial, found.values()) if kept and not self.work.rerun_changed else {}
        studies = _open({name: task for name, task in found.items() if name not in there}, self.work)
        try:
            course = Studies(list(studies.values()))
            run_cells(course.first(), self.work, self.jobs, self.place, course)
            there |= {name: study.trials for name, study in studies.items()}
            for line in said_of_code([record for study in studies.values() for record in study.records]):
                print(f"trials: {line}", flush=True)
        finally:
            for study in studies.values():
                study.close()
        errors = {name: study.error for name, study in studies.items()}
        tuned = {
            key: Tuned.by(task, there[task.name], errors.get(task.name, "")) if task.choices else Tuned(task)
            for key, task in self.tasks.items()
        }
        write_text(self.every_trial, trials_csv(tuned.values()))
        return tuned

    def run(
        self, untuned: dict[tuple[str, str, int], Cell], tuned: dict[tuple[str, str], Tuned]
    ) -> tuple[dict[tuple[str, str, int], Cell], dict[str, Outcome]]:
        """Run each row with its own values and with the tuned ones; a row whose study failed has the former alone.

        Args:
            untuned: the table's cells, by group, row and seed.
            tuned: values of each row, by group and row.

        Returns:
            The cells of both, the tuned ones under :data:`TUNED` behind the row's label; and all outcomes, by name.
        """
        cells, outcomes = dict(untuned), {}
        for (group, label, seed), cell in untuned.items():
            entry = tuned[group, label]
            again = with_overrides(cell, entry.arguments)
            if entry.error:  # its values are not known, and the run with the row's own is another cell
                again = replace(cell, name=f"{cell.name}-not-tuned")
                outcomes[again.name] = Outcome(None, entry.error)
            cells[group, label + TUNED, seed] = again
        left = [cell for cell in cells.values() if cell.name not in outcomes]
        return cells, outcomes | run_cells(left, self.work, self.jobs, self.place)


def _check_rounds(tasks: Iterable[Task], where: str) -> None:
    """Refuse trials of different lengths."""
    asked = sorted({task.rounds for task in tasks if task.choices})
    if len(asked) > 1:
        raise ConfigurationError(
            f"rows of {where} train for {' and '.join(map(str, asked))} rounds; give --rounds, so that trials of all "
            "rows have the same number"
        )


def _task(
    row: Row,
    preset_name: str,
    preset: Preset,
    group: DataGroup,
    metric: str,
    trials: int,
    rounds: int | None,
    held_out: Sequence[str],
    data_dir: Path | None,
) -> Task:
    cell = make_cell(row, preset_name, preset, group, preset.seeds[0])
    cell = with_overrides(cell, [*held_out, *([] if rounds is None else [f"--trainer.max_epochs={rounds}"])])
    own = row.search.get(preset_name)
    space = read_space(cell.configs, row.label) if own is None else checked_space(own, f"row {row.label}")
    config = resolved(cell_command(cell, Path(), data_dir, ())[1:])
    last, every = config["trainer"]["max_epochs"], config["trainer"]["check_val_every_n_epoch"]
    if every and last % every:
        raise ConfigurationError(
            f"{row.label} on {group.label} is evaluated after every {every} rounds, so that nothing would be known of "
            f"the last of {last}; give --rounds as a multiple of {every}"
        )
    prefix, _, digest = cell.name.rpartition("-")
    choices = with_own_values(space, config, row.label)
    task = Task(
        row.label,
        preset.called(group),
        f"{prefix}-{row.point}-{digest}",
        cell,
        choices,
        row.point,
        metric,
        last,
        trials,
    )
    return replace(task, trials=min(trials, task.combinations))  # a further one would repeat one of them


def _check_values(task: Task, data_dir: Path | None) -> None:
    """Refuse a value of a search space that its run would refuse.

    All values are given on one command line, whose options are checked one by one; only a refusal is looked for.

    Raises:
        ConfigurationError: names row, option and value.
    """
    command = cell_command(task.cell, Path(), data_dir, ())[1:]
    given = [choice.argument(at) for choice in task.choices for at in range(len(choice.values))]
    try:
        resolved([*command, *given])
        return
    except ConfigurationError as error:
        refused = error
    for argument in given:
        try:
            resolved([*command, argument])
        except ConfigurationError as error:
            option, _, value = argument.removeprefix("--").partition("=")
            raise ConfigurationError(
                f"row {task.row}: search: {option}: the value {value} is refused ({error})"
            ) from error
    raise refused


def _open(tasks: dict[str, Task], work: Work) -> dict[str, Study]:
    """The studies of these tasks; none stays open where one cannot be had."""
    studies: dict[str, Study] = {}
    try:
        for name, task in tasks.items():
            studies[name] = Study(task, work.runs_dir / ".studies", work.runs_dir, work.rerun_changed)
    except BaseException:
        for study in studies.values():
            study.close()
        raise
    return studies


def _with_gains_over(group: DataGroup, name: Callable[[str], str]) -> DataGroup:
    """Return a data group whose columns of gains are over rows of other names."""
    columns = [replace(each, over=name(each.gains_over)) if each.gains_over else each for each in group.columns]
    return replace(group, columns=columns)


def _side_by_side(
    table: Table, preset: Preset, tuned: dict[tuple[str, str], Tuned], trials: int, val_fraction: float
) -> tuple[Table, Preset]:
    """The table with a tuned row below each row that there was something to tune of."""
    rows = []
    for row in rows_of(table, preset):
        rows.append(row)
        if any(entry.task.choices for (_, label), entry in tuned.items() if label == row.label):
            rows.append(replace(row, label=row.label + TUNED))
    labels = [row.label for row in rows]

    def tuned_if_any(label: str) -> str:
        return label + TUNED if label + TUNED in labels else label

    tasks = [entry.task for entry in tuned.values() if entry.task.choices]
    rounds = sorted({task.rounds for task in tasks})
    every = any(
        e.task.choices and e.task.trials < trials and not e.task.untried(t.values for t in e.trials)
        for e in tuned.values()
    )
    fewer = " (of all combinations, where these are fewer)" if every else ""
    note = (
        f"Tuned rows: the best of {trials} trials{fewer} of {' or '.join(map(str, rounds))} rounds with seed "
        f"{preset.seeds[0]}, the first of which has the row's own values, by the {table.metric} on the "
        f"{val_fraction:.0%} of each client's training images that trials hold out; then, with all training images, "
        "the runs of this table."
    )
    return (
        replace(
            table,
            title=f"{table.title}; tuned and untuned",
            rows=rows,
            baseline=None if table.baseline is None else tuned_if_any(table.baseline),
            gains=[tuned_if_any(label) for label in table.gains],
        ),
        replace(
            preset,
            rows=[],
            data=[_with_gains_over(group, tuned_if_any) for group in preset.data],
            note=" ".join(filter(None, [preset.note, note])),
        ),
    )
