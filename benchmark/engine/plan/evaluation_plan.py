"""The stacked steps of an evaluation: per cohort and point the fitting of copies, then the test images."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch

from benchmark.contract import ClientMethod, Stage
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.plan.work import Part, Share, Shown, Step, by_cohort, with_equal_spaces
from benchmark.engine.roles import Roles, overrides
from benchmark.federation import Federation, Terms

HeldOutRows = Mapping[int, np.ndarray]

#: Bytes of what clients differ in (whole models, with some methods) that are tested together at most.
EVALUATED_STATE = 2**32


def evaluated_clients(federation: Federation) -> dict[Stage, tuple[int, ...]]:
    """Return the clients that train and those that never do, where there are any, by how copies of them are fitted.

    Testers have no images to fit a copy on. In a deployment they are those whose images lie here.
    """
    terms, held = federation.terms, federation.holdings.train_rows
    testers = tuple(sorted({client for of in terms.testers.values() for client in of}))
    clients = {Stage.FINETUNE: terms.training_clients, Stage.ADAPT: terms.new_clients, Stage.EVALUATE: testers}
    here = {stage: tuple(client for client in of if client in held) for stage, of in clients.items()}
    return {stage: of for stage, of in here.items() if of}


def evaluation_plans(
    method: ClientMethod,
    roles: Roles,
    federation: Federation,
    splits: Sequence[str],
    fitting: Mapping[Stage, RoundPlan],
    one_by_one: bool = False,
) -> list["EvaluationPlan"]:
    """Lay out an evaluation of every client: of those that train, then of the others.

    Args:
        method: says which states are evaluated.
        roles: of its parameters.
        federation: who holds what.
        splits: to evaluate on.
        fitting: the fine-tuning of copies, where there is one.
        one_by_one: a client a step.
    """
    names = roles.personal + (roles.shared if method.evaluate_local else ())
    own = sum(value.numel() * value.element_size() for value in map(method.get_parameter, names))
    most = 1 if one_by_one else max(1, EVALUATED_STATE // max(own, 1))
    noisy = overrides(method, "draw_noise") and bool(method.draw_noise(torch.Generator(), 1, Stage.EVALUATE))
    size, largest = federation.terms.eval_batch_size, federation.terms.held_out_row
    plans = []
    for stage, clients in evaluated_clients(federation).items():
        points = ("server", "local") if method.evaluate_local and stage is Stage.FINETUNE else ("server",)
        rows = {name: held for name, held in federation.holdings.held_out.items() if name in splits}
        # All that train hold images of the same splits, and all that never do.
        alike = _by_splits(clients, rows) if stage is Stage.EVALUATE else [clients]
        for who in alike:
            held = {name: of for name, of in rows.items() if who[0] in of}
            if not held:
                continue
            streams = {name: foreign for name, foreign in federation.holdings.streams.items() if name in held}
            corrupted = federation.holdings.corrupted.rows if "test" in held else {}
            facts = fitting.get(stage), points, size, most, noisy, largest, streams, corrupted, federation.terms
            plans.append(EvaluationPlan(who, held, *facts))
    return plans


def _by_splits(clients: Sequence[int], held_out: Mapping[str, HeldOutRows]) -> list[list[int]]:
    """Return clients by the splits that they hold images of."""
    found: dict[tuple[str, ...], list[int]] = {}
    for client in clients:
        found.setdefault(tuple(name for name, rows in held_out.items() if client in rows), []).append(client)
    return [*found.values()]


def homes(
    method: ClientMethod, roles: Roles, federation: Federation, count: int, one_by_one: bool = False
) -> list[int]:
    """Return for each client the rank that holds its rows: the one that scores it, so that a score moves none.

    Where copies are fitted before, others may score it, and rows move.

    Args:
        method: of the federation.
        roles: of its parameters.
        federation: who holds what.
        count: of ranks.
        one_by_one: a client a step.
    """
    if count == 1:
        return [0] * federation.terms.num_clients
    plans = evaluation_plans(method, roles, federation, [*federation.holdings.held_out], {}, one_by_one)
    owners = Share(plans, 0, count).owners
    return [owners.get(client, 0) for client in range(federation.terms.num_clients)]


def filling(
    clients: Sequence[int], sizes: Mapping[int, int], batch_size: int, most: int, terms: Terms | None = None
) -> list[tuple[int, ...]]:
    """Cut clients into cohorts of as many as the images of their first one, and so of each, fit into a step.

    Args:
        clients: their ids.
        sizes: images of each.
        batch_size: images in a step.
        most: clients in a cohort at most.
        terms: of the federation; clients with different label spaces are apart.
    """
    made: list[tuple[int, ...]] = []
    for alike in with_equal_spaces(clients, terms):
        ordered = sorted(alike, key=lambda client: (-sizes[client], client))
        start = 0
        while start < len(ordered):
            together = min(most, max(1, batch_size // max(sizes[ordered[start]], 1)))
            made.append(tuple(ordered[start : start + together]))
            start += together
    return made


def rows_of_a_step(images: int, batch_size: int) -> int:
    """Return how many rows each of the equal steps has that so many images are cut into."""
    return -(-images // max(-(-images // batch_size), 1))


class EvaluationPlan:
    """Steps of all cohorts of an evaluation; item i is the i-th with its rows and masks.

    As many clients are tested together as their images fit into one step; with fine-tuning, those that are fine-tuned
    together. So the scores do not depend on the width of training's cohorts. The images of a split are cut into equal
    steps, so that little is padding. Where a split's images are held against a stream of foreign ones, the steps of a
    client's own are followed by those of the stream.

    Args:
        clients: the clients to evaluate.
        held_out: per split name, per client, rows of the pool to test on.
        training: the fine-tuning of a copy: a plan over the same clients, or None.
        points: which states to evaluate, ``"server"`` and/or ``"local"``.
        batch_size: images in one step at most: of one client, or of several that have few.
        most_clients: tested together at most; with fine-tuning, the plan's own width holds.
        noisy: the scores rest on draws, which are of a step's number of rows: it is one for all clients of a split, so
            that nothing depends on who is tested together, or on which splits are.
        most_images: per split, the most images of any client of the federation; by default of these clients.
        streams: per split that has one, the stream's rows in its own pool.
        corrupted: per client, the rows of corrupted versions of its images of split ``test`` in their own pool.
        terms: of the federation; clients with different label spaces are tested apart.
    """

    def __init__(
        self,
        clients: Sequence[int],
        held_out: Mapping[str, HeldOutRows],
        training: RoundPlan | None,
        points: Sequence[str],
        batch_size: int,
        most_clients: int,
        noisy: bool = False,
        most_images: Mapping[str, int] = MappingProxyType({}),
        streams: Mapping[str, np.ndarray] = MappingProxyType({}),
        corrupted: HeldOutRows = MappingProxyType({}),
        terms: Terms | None = None,
    ) -> None:
        self.held_out = held_out
        self.streams = streams
        self.corrupted = corrupted
        self.training = training
        sizes = {split: {client: len(lists[client]) for client in clients} for split, lists in held_out.items()}
        largest = {split: most_images.get(split, max(of.values())) for split, of in sizes.items()}
        fitting, fitted = (by_cohort(training.parts), training.steps) if training is not None else ({}, [])
        if training is not None:  # both must step the same clients together
            self.cohorts = training.cohorts
        else:
            images = {client: max(of[client] for of in sizes.values()) for client in clients}
            fit = max(1, batch_size // max(1, *images.values())) if noisy else most_clients
            self.cohorts = filling(clients, images, batch_size, min(fit, most_clients), terms)
        alone = training is None and not noisy
        self.steps: list[Step] = []
        self.parts: list[Part] = []
        #: per step its position in ``training``, -1 for a step that scores
        self._source: list[int] = []
        #: per step its rows, of one that scores
        self._rows: list[int] = []
        for cohort in self.cohorts:
            for point in points:
                for part in fitting.get(cohort, ()) if point == "server" else ():
                    steps = [replace(fitted[position], point=point) for position in part.positions]
                    self._add(replace(part, point=point), steps, part.positions, [0] * len(steps))
                for split, of in sizes.items():
                    # The cohorts of fine-tuning are as wide as those of training, on which no result may depend.
                    own = max(of[client] for client in cohort)
                    rows = rows_of_a_step(own if alone else largest[split], batch_size)
                    first = Step(cohort, cohort, Stage.EVALUATE, point=point, split=split)
                    self._add_scoring(first, rows, batch_size if alone else 0)

    def _add_scoring(self, first: Step, rows: int, most: int) -> None:
        """Add what scores a cohort on a split: its own images, then the stream; and a part of corrupted images.

        Args:
            first: step of the cohort at the point on the split.
            rows: of a step with own images.
            most: images in a step with others; 0 where scores rest on draws or fitted copies, and it has as many rows.
        """
        part = Part(first.cohort, first.stage, 0, first.point, first.split, range(0))
        steps, sizes = self._cut(first, rows, 0)
        if steps and first.split in self.streams:
            more, of_more = self._cut(replace(first, shown=Shown.FOREIGN), rows, most)
            steps, sizes = steps + more, sizes + of_more
        self._add(part, steps, [-1] * len(steps), sizes)
        if steps and self.corrupted and first.split == "test":
            steps, sizes = self._cut(replace(first, shown=Shown.CORRUPTED), rows, most)
            self._add(replace(part, shown=Shown.CORRUPTED), steps, [-1] * len(steps), sizes)

    def _cut(self, first: Step, rows: int, most: int) -> tuple[list[Step], list[int]]:
        """Cut the images that a step's clients are shown into steps; return them with the rows of each."""
        longest = max(len(self._shown_to(client, first)) for client in first.clients)
        if most:  # many small steps take long
            rows = rows_of_a_step(longest, max(rows, most // len(first.clients)))
        steps = [replace(first, number=number) for number in range(-(-longest // max(rows, 1)))]
        return steps, [rows] * len(steps)

    def _shown_to(self, client: int, step: Step) -> np.ndarray:
        """Return the rows of their pool that a client is shown in steps such as this one."""
        if step.shown is Shown.FOREIGN:
            return self.streams[step.split]
        return self.corrupted[client] if step.shown is Shown.CORRUPTED else self.held_out[step.split][client]

    def _add(self, part: Part, steps: Sequence[Step], sources: Sequence[int], rows: Sequence[int]) -> None:
        """Add a part with its steps, if it has any; ``rows`` of each."""
        if steps:
            self.parts.append(replace(part, positions=range(len(self.steps), len(self.steps) + len(steps))))
        self.steps += steps
        self._source += sources
        self._rows += rows

    def __getitem__(self, item: int) -> Step:
        step, source, size = self.steps[item], self._source[item], self._rows[item]
        if source >= 0 and self.training is not None:
            drawn = self.training[source]
            return replace(step, index=drawn.index, mask=drawn.mask, uniform=drawn.uniform)
        begin = step.number * size
        rows = [self._shown_to(client, step)[begin : begin + size] for client in step.clients]
        mask = np.arange(size) < np.fromiter(map(len, rows), np.int64, len(rows))[:, np.newaxis]
        index = np.zeros(mask.shape, dtype=np.int64)
        index[mask] = np.concatenate(rows)
        return replace(step, index=torch.from_numpy(index), mask=torch.from_numpy(mask))
