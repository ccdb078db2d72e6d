"""Compare every method, client by client, with those whose clients train alone."""

import numpy as np

from benchmark.metrics import GAINS, SHARES, gains
from benchmark.records.grouped_runs import Experiment
from benchmark.records.summary import client_values
from benchmark.report.boards import Board
from benchmark.report.grid import Grid, grid
from benchmark.report.readings import points_of, traffic_of
from benchmark.tables.numbers import number, signed

HEADS = ("Method", "Against", *(each.heading for each in GAINS.values()), "Pairs")


def gains_over_alone(board: Board) -> Grid:
    """Return a row for each ranked method and each that trains alone on the same board; none where none does.

    A gain is a client's test accuracy in the last round minus its accuracy under the other method with the same seed
    and the same partition, at the first point of a round at which each is evaluated.
    """
    alone = [each for each in board.ranked if _trains_alone(each)]
    rows = []
    for each in board.ranked:
        for baseline in alone if each not in alone else ():
            found = _gains(each, baseline)
            if len(found):
                values = {name: of(found, False) for name, gain in GAINS.items() if (of := gain.of)}
                shown = [number(value, 1) if name in SHARES else signed(value, 2) for name, value in values.items()]
                rows.append([each.name, baseline.name, *shown, str(len(found))])
    return grid(f"Gain over training alone, {board.first.dataset}, {board.facts}", HEADS, rows)


def _trains_alone(experiment: Experiment) -> bool:
    """Tell whether clients train and send nothing."""
    return max(traffic_of(experiment)) == 0 and bool(experiment.first.local_work)


def _gains(experiment: Experiment, baseline: Experiment) -> np.ndarray:
    """Return the gains of all pairs of a seed and a client that have both values, in points."""
    known = {run.record.seed: run for run in baseline.runs}
    found = [np.empty(0)]
    for run in experiment.runs:
        other = known.get(run.record.seed)
        if other is None or other.record.manifest_hash != run.record.manifest_hash:
            continue
        sides = [
            np.asarray(client_values(each.metrics, each.record, points_of(of)[0], "test", "accuracy", "last"))
            for each, of in ((run, experiment), (other, baseline))
        ]
        found.append(gains(100 * sides[0], 100 * sides[1], "accuracy"))
    return np.concatenate(found)
