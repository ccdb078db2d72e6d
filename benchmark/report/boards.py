"""Leaderboards: methods are ranked within one identical setting, and never across settings."""

import functools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from benchmark.config.yaml_files import read_mapping
from benchmark.metrics import STATISTICS, within_clients
from benchmark.records.classes import class_of
from benchmark.records.grouped_runs import Experiment, Run, flat, tell_apart
from benchmark.records.hashes import canonical
from benchmark.records.words import POINT_WORDS, ROUND_WORDS
from benchmark.report.grid import Grid, GridCell, anchor_of, grid
from benchmark.report.published import READINGS, beside
from benchmark.report.readings import (
    evaluated_rounds,
    hardware_of,
    last_by_client,
    points_of,
    statistic_of,
    traffic_of,
)
from benchmark.shipped import SHIPPED
from benchmark.tables.numbers import mean_std
from benchmark.tables.paper import table_title

if TYPE_CHECKING:  # slow to import
    import pandas as pd

PAPER = ("Read as in the paper", "Paper")
WORST = ("Worst", "Second", "Third", "Fourth", "Fifth")


@dataclass(frozen=True)
class Board:
    """Everything in one setting: data, their partition, backbone, local work and rounds.

    Attributes:
        anchor: of its section.
        ranked: one experiment a method, named by it, the best first.
        variants: the methods' further experiments, such as ablations, named by what they differ in.
        alike: the ranked experiments of methods that have variants, named as those.
    """

    anchor: str
    ranked: tuple[Experiment, ...]
    variants: tuple[Experiment, ...]
    alike: tuple[Experiment, ...]

    @property
    def experiments(self) -> tuple[Experiment, ...]:
        return self.ranked + self.variants

    @property
    def first(self) -> Run:
        """One of the runs, for what all share."""
        return self.ranked[0].first

    @property
    def points(self) -> list[str]:
        """The points of a round at which at least one of the experiments was evaluated."""
        return [point for point in POINT_WORDS if any(point in points_of(each) for each in self.experiments)]

    @property
    def facts(self) -> str:
        """The facts that all rows share, in words."""
        return "; ".join(self.parts)

    @property
    def parts(self) -> tuple[str, str, str]:
        """The setting, the backbone, and rounds with their local work."""
        rounds = self.first.record.rounds
        work = f" of {self.first.local_work}" if self.first.local_work else ""
        return self.first.setting, self.first.backbone, f"{rounds} round{'s' * (rounds != 1)}{work}"


def boards(experiments: Sequence[Experiment]) -> list[Board]:
    """The boards in the order of the experiments; what has no test accuracy is on none."""
    settings: dict[tuple[object, ...], list[Experiment]] = {}
    for each in experiments:
        if points_of(each):
            settings.setdefault(_setting(each.first), []).append(each)
    found: dict[str, Board] = {}
    for part in settings.values():
        methods: dict[str, list[Experiment]] = {}
        for each in tell_apart(part):
            methods.setdefault(_named(each.first), []).append(each)
        usual = _usual(part)
        several = [sorted(each, key=lambda e: _precedence(e, usual)) for each in methods.values() if len(each) > 1]
        alike = [first for first, *_ in several]
        ranked = alike + [each[0] for each in methods.values() if len(each) == 1]
        plain = [Experiment(each.runs, _named(each.first)) for each in sorted(ranked, key=_score, reverse=True)]
        run = part[0].first
        anchor = anchor_of("data", *part[0].place, str(run.record.rounds), "rounds", run.local_work)
        while anchor in found:  # the same words, of another partition or other weights
            anchor += "-other"
        further = tuple(each for _, *more in several for each in more)
        found[anchor] = Board(anchor, tuple(plain), further, tuple(alike))
    return list(found.values())


def headings(found: Sequence[Board]) -> list[str]:
    """Name each board by its data set and, where several have the same one, by the facts that tell them apart."""
    by_data: dict[str, list[tuple[str, ...]]] = {}
    for board in found:
        by_data.setdefault(board.first.dataset, []).append(board.parts)

    def differing(board: Board) -> list[str]:
        columns = zip(board.parts, *by_data[board.first.dataset], strict=True)
        return [own for own, *others in columns if any(other != own for other in others)]

    return [", ".join([board.first.dataset, *differing(board)]) for board in found]


def _named(run: Run) -> str:
    """The method, whose tuned runs are ranked beside those at its given values."""
    return f"{run.method}, tuned" if run.record.tuning else run.method


def _setting(run: Run) -> tuple[object, ...]:
    """Return the settings that all experiments of a board share, as a key to group them by.

    They are the images, their partition and held-out part, backbone, local work, clients per round and rounds. Of an
    experiment with several seeds the partition of the lowest seed counts.
    """
    of_record = run.record.manifest_hash, run.images_sha256, run.record.rounds
    backbone = run.backbone, canonical(run.backbone_config)
    return run.dataset, run.setting, *backbone, run.local_work, *run.held_out, *of_record


def _precedence(experiment: Experiment, usual: Mapping[str, object]) -> tuple[int, int, int, str]:
    """Return a sort key for a method's experiments, of which the first is ranked; scores do not enter it.

    The experiment with the most seeds comes first, then the one with the fewest departures from the values that the
    method is shipped with, then the one with the fewest from those ``usual`` on its board, then the first by name.
    """
    run = experiment.first
    given = flat(run.get("model.init_args", {}))

    def departures(values: Mapping[str, object]) -> int:
        return sum(given[key] != value for key, value in values.items() if key in given)

    own = shipped_values().get(str(run.get("model.class_path")), {})
    return -len(experiment.runs), departures(own), departures(usual), experiment.name


@functools.cache
def shipped_values() -> dict[str, dict[str, object]]:
    """The arguments of each method's class in its file of ``configs/methods``, by their dotted keys."""
    files = (SHIPPED / "configs" / "methods").glob("*.yaml")
    models = [model for path in files if isinstance(model := read_mapping(path)["model"], dict)]
    return {str(model["class_path"]): flat(model.get("init_args") or {}) for model in models}


def _usual(experiments: Sequence[Experiment]) -> dict[str, object]:
    """Of each of the models' arguments the most frequent value."""
    values: dict[str, list[object]] = {}
    for each in experiments:
        for key, value in flat(each.first.get("model.init_args", {})).items():
            values.setdefault(key, []).append(value)
    return {key: max(given, key=given.count) for key, given in values.items()}


def _score(experiment: Experiment) -> float:
    """Average over clients in the last round after aggregation; what was not evaluated or diverged there comes last."""
    scores = [-math.inf if value is None else value for value in statistic_of(experiment, "server", "last", "average")]
    return fmean(scores)


def _averages(experiment: Experiment, which: str) -> list[float | None]:
    return statistic_of(experiment, points_of(experiment)[0], which, "average")


def ranking(board: Board, paper: "pd.DataFrame") -> Grid:
    """The board's ranked methods, each beside its published number if there is one."""
    names = {each.first.folder: each.name for each in board.alike}
    rows = []
    for rank, each in enumerate(board.ranked, 1):
        named, *numbers = _row(each, board)
        settings = _settings(names.get(each.first.folder, each.name), each)
        rows.append([GridCell(str(rank)), named._replace(note=settings), *numbers])
    if not board.first.demo:
        published = [_published(each, paper) for each in board.ranked]
        alike = len({theirs.note for _, theirs in published if theirs.text}) == 1  # then it is said once, below
        for row, (ours, theirs) in zip(rows, published, strict=True):
            row += [ours, theirs._replace(note="") if alike else theirs]
    return grid(f"Ranking, {board.first.dataset}, {board.facts}", _heads(board), rows)


def sources(board: Board, paper: "pd.DataFrame") -> str:
    """Return the tables of the published numbers beside the board's methods; empty if there are none."""
    known = () if board.first.demo else (_published(each, paper)[1].note for each in board.ranked)
    return "; ".join(dict.fromkeys(filter(None, known)))


def variants(board: Board) -> Grid:
    """Further experiments of the ranked methods, each method's ranked one before them."""
    heads = [head for head in _heads(board) if head not in ("#", *PAPER)]
    shown = sorted(board.alike + board.variants, key=lambda each: (each.first.method, each not in board.alike))
    return grid(f"Variants, {board.first.dataset}, {board.facts}", heads, [_row(each, board) for each in shown])


def _heads(board: Board) -> list[str]:
    heads = ["#", "Method", *(words.capitalize() for point, words in POINT_WORDS.items() if point in board.points)]
    heads += ["Last ten rounds", "Best round, on test data", *(each.words.capitalize() for each in within_clients())]
    return [*heads, "Tuned", "Seeds", "kB a round", "Seconds", *([] if board.first.demo else PAPER)]


def _row(experiment: Experiment, board: Board) -> list[GridCell]:
    there = points_of(experiment)
    codes = len({canonical(run.record.code) for run in experiment.runs})
    scores = [
        mean_std(statistic_of(experiment, point, "last", "average")) if point in there else "" for point in board.points
    ]
    evaluated = min(evaluated_rounds(run, there[0]) for run in experiment.runs)
    few = f"of {evaluated}" if evaluated < experiment.first.record.rounds else ""
    numbers = [
        *map(GridCell, scores),
        GridCell(mean_std(_averages(experiment, "last10")), few if evaluated < 10 else ""),
        GridCell(mean_std(_averages(experiment, "best_on_test")), few),
        *(GridCell(mean_std(statistic_of(experiment, there[0], "last", each.name))) for each in within_clients()),
        GridCell(_tuning(experiment.first)),
        GridCell(str(len(experiment.runs)), f"of {codes} codes" if codes > 1 else ""),
        GridCell(mean_std([value / 1e3 for value in traffic_of(experiment)], 1).partition(" ± ")[0]),
        GridCell(mean_std([run.record.seconds["total"] for run in experiment.runs], 0).partition(" ± ")[0]),
    ]
    above = "ranked above: " if experiment in board.alike else ""
    return [GridCell(_named(experiment.first), above + _settings(experiment.name, experiment), board.anchor), *numbers]


def _settings(name: str, experiment: Experiment) -> str:
    """Return the settings in the name of an experiment: the name without the method's."""
    return name.removeprefix(_named(experiment.first)).removeprefix(experiment.first.method).strip(" ()")


def _tuning(run: Run) -> str:
    tuning = run.record.tuning
    return f"{tuning['trials']} trials, {tuning['chosen_on']}" if tuning else "no"


def _published(experiment: Experiment, paper: "pd.DataFrame") -> tuple[GridCell, GridCell]:
    """Our number read as the paper reads its own; the paper's, in its own scale, where it stands and how it is read."""
    rows = beside(experiment.first, paper)
    rows = rows[~rows["setting"].astype("str").str.contains(";")]  # what stands behind it is a variant's
    for row in rows.itertuples():
        statistic, which = READINGS[str(row.metric)]
        point = _paper_point(experiment)
        where = f", {POINT_WORDS[point]}" if point != "server" else ""
        read = f"{STATISTICS[statistic].reading}, {ROUND_WORDS[which]}{where}"
        theirs = GridCell(f"{row.value:.2f}", f"{table_title(str(row.paper), str(row.table))}, {row.backbone}, {read}")
        return GridCell(mean_std(statistic_of(experiment, point, which, statistic))), theirs
    return GridCell(""), GridCell("")


def _paper_point(experiment: Experiment) -> str:
    """Return the evaluation point that the method's paper reports, else the first available one."""
    there = points_of(experiment)
    point = getattr(class_of(experiment.first.get("model")), "paper_point", there[0])
    return point if point in there else there[0]


def runs_of(board: Board, days: Mapping[str, str]) -> Grid:
    """Every run of a board: on what, when, by which code, and the command that makes it again.

    Args:
        board: of the runs.
        days: of commits, from :func:`benchmark.records.environment.commit_days`.
    """
    runs = [(each, run) for each in board.experiments for run in each.runs]
    heads = ["Method", "Seed", "Rounds done", "Batch", "Hardware", "Peak MB", "Date", "Commit", "Command"]
    rows = [[GridCell(each.name), *_circumstances(run, days)] for each, run in runs]
    return grid(f"Runs, {board.first.dataset}, {board.facts}", heads, rows)


def _circumstances(run: Run, days: Mapping[str, str]) -> list[GridCell]:
    revision, peak = revision_of(run), run.record.peak_memory_bytes
    day = str(run.record.environment.get("date") or "")
    committed = days.get(revision, "")
    config = shlex.quote(f"{run.folder.as_posix()}/config.yaml")  # a stranger's folder may be called anything
    return [
        GridCell(str(run.record.seed)),
        GridCell(str(run.record.rounds_trained)),
        GridCell(str(run.get("data.batch_size", ""))),
        GridCell(hardware_of(run)),
        GridCell("" if peak is None else f"{peak / 1e6:.0f}"),
        GridCell(day or committed, "" if day or not committed else "of the commit"),
        GridCell(revision[:7], "with changes" if run.record.environment.get("git", {}).get("dirty") else "", code=True),
        GridCell(f"lightning-cli fit --config {config} --run_dir again", code=True),
    ]


def revision_of(run: Run) -> str:
    """The commit of the code that made it; empty where that is not known."""
    return run.record.environment.get("git", {}).get("revision") or ""


def worst_clients(board: Board) -> Grid:
    """The clients that fare worst under each ranked method, at the first point where it is evaluated."""
    heads = ["Method", *WORST[: len(board.first.record.client_names)]]
    rows = []
    for each in board.ranked:
        worst = sorted(last_by_client(each, points_of(each)[0]), key=lambda entry: entry[1])[: len(WORST)]
        cells = [GridCell(f"{value:.2f}", client) for client, value in worst]
        rows.append([GridCell(each.name), *cells, *[GridCell("")] * (len(heads) - 1 - len(worst))])
    return grid(f"Worst clients, {board.first.dataset}, {board.facts}", heads, rows)
