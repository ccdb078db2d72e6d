"""The layout of rounds and evaluations: who is stepped when, with which rows of the pool."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from federation import terms
from torch import Tensor

from benchmark.contract import Group, Phase, Stage
from benchmark.engine.plan.evaluation_plan import EvaluationPlan
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.plan.work import CohortWork, Share, Shown, Step, cohorts, steps_per_epoch
from benchmark.seeds import derived_seed

TERMS = terms(3, batch_size=3, row=3)
INDICES = {0: np.arange(0, 5), 1: np.arange(10, 12), 2: np.arange(20, 27)}


def of(epochs: int) -> Phase:
    """A phase of so many epochs."""
    return Phase((Group(("head",), 0.1),), epochs)


def plan(
    width: int, phases: tuple[int, ...] = (2,), drop_last: bool = False, round: int = 1, clients: tuple = (0, 1, 2)
) -> RoundPlan:
    own = replace(TERMS, drop_last=drop_last)
    return RoundPlan(clients, INDICES, own, [of(e) for e in phases], Stage.TRAIN, width, round, 2)


def test_phases_that_alternate_have_a_step_in_their_rounds_alone() -> None:
    odd, even = replace(of(1), every=2), replace(of(1), first_round=2, every=2)
    found = [[phase.is_in(number) for number in range(6)] for phase in (odd, even)]
    assert found == [[True, True, False, True, False, True], [True, False, True, False, True, False]]
    third = replace(of(1), first_round=2, last_round=7, every=3)
    assert [number for number in range(1, 12) if third.is_in(number)] == [2, 5]
    for number in range(1, 5):
        made = RoundPlan((0, 1, 2), INDICES, TERMS, [odd, even], Stage.TRAIN, 3, number, 2)
        assert {step.phase for step in made.steps} == {1 - number % 2}


def fitting(width: int) -> RoundPlan:
    """The fine-tuning of copies, one epoch."""
    return RoundPlan([0, 1, 2], INDICES, TERMS, [of(1)], Stage.FINETUNE, width, 4)


def rows_of(made: RoundPlan, client: int, phase: int = 0) -> list[list[int]]:
    """The client's own mini-batches of a phase, in order."""
    return [
        batch.index[k][batch.mask[k]].tolist()
        for batch in (made[i] for i in range(len(made.steps)))
        if batch.phase == phase
        for k, c in enumerate(batch.clients)
        if c == client and batch.mask[k].any()
    ]


@pytest.mark.parametrize(
    ("samples", "batch", "drop", "steps"),
    [(7, 3, False, 3), (7, 3, True, 2), (6, 3, True, 2), (2, 3, True, 1), (1, 3, False, 1), (0, 3, False, 0)],
)
def test_steps_in_an_epoch(samples: int, batch: int, drop: bool, steps: int) -> None:
    assert steps_per_epoch(samples, batch, drop) == steps


def test_cohorts_put_similar_sizes_together() -> None:
    assert cohorts([0, 1, 2, 3, 4], {0: 5, 1: 2, 2: 7, 3: 5, 4: 1}, 2) == [(2, 0), (3, 1), (4,)]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_epoch_holds_every_image_once(width: int) -> None:
    for client, own in INDICES.items():
        batches = rows_of(plan(width), client)
        per_epoch = -(-len(own) // 3)
        assert len(batches) == 2 * per_epoch
        for epoch in range(2):
            seen = [row for batch in batches[epoch * per_epoch : (epoch + 1) * per_epoch] for row in batch]
            assert sorted(seen) == own.tolist()


def test_a_client_sees_the_same_in_any_cohort_and_something_else_each_round() -> None:
    for client in INDICES:
        alone = rows_of(plan(1), client)
        assert alone == rows_of(plan(3), client) == rows_of(plan(2, clients=(2, 1, 0)), client)
    assert rows_of(plan(1, (3,)), 2) != rows_of(plan(1, (3,), round=2), 2)


def splitmix64(state: int) -> Iterator[int]:
    """The numbers of the generator, one at a time."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        yield z ^ z >> 31


def nth(state: int, n: int) -> int:
    """The number of the generator that comes after n others."""
    return next(islice(splitmix64(state), n, None))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_images_are_in_the_order_of_their_keyed_numbers(width: int, drop_last: bool) -> None:
    made = plan(width, (1, 3), drop_last)
    for phase, epochs in enumerate((1, 3)):
        for client, own in INDICES.items():
            expected = []
            for epoch in range(epochs):
                state = nth(nth(derived_seed(0, "train order", 1, phase), epoch), client)
                order = [row for _, row in sorted(zip(splitmix64(state), own.tolist(), strict=False))]
                kept = steps_per_epoch(len(own), 3, drop_last) * 3
                expected += [order[:kept][start : start + 3] for start in range(0, min(kept, len(own)), 3)]
            assert rows_of(made, client, phase) == expected


def test_every_order_of_the_images_is_as_likely() -> None:
    clients = range(2400)
    own = terms(2400, seed=5)
    made = RoundPlan(clients, dict.fromkeys(clients, np.arange(4)), own, [of(1)], Stage.TRAIN, 2400, 9)
    orders = Counter(tuple(row) for row in made[0].index.tolist())
    assert len(orders) == 24
    # Chi-squared with 23 degrees of freedom is below 49.7 in 999 of 1,000 cases.
    assert sum((count - 100) ** 2 / 100 for count in orders.values()) < 49.7


def test_augmentation_numbers_are_a_clients_own() -> None:
    def noise(width: int) -> list:
        made = plan(width)
        return [
            step.uniform[step.clients.index(0)].tolist()
            for step in map(made.__getitem__, range(len(made.steps)))
            if 0 in step.clients
        ][:4]

    assert noise(1) == noise(3)
    assert len(np.unique(noise(1))) == np.size(noise(1))
    assert 0 <= np.min(noise(1)) <= np.max(noise(1)) < 1


def test_augmentation_depends_on_round_and_seed_and_changes_training_alone() -> None:
    def numbers(seed: int = 0, round: int = 1, stage: Stage = Stage.TRAIN) -> Tensor | None:
        return RoundPlan([0, 1, 2], INDICES, replace(TERMS, seed=seed), [of(1)], stage, 3, round, 2)[0].uniform

    made = [numbers(), numbers(round=2), numbers(seed=1)]
    drawn = torch.cat([numbers.flatten() for numbers in made if numbers is not None])
    assert len(drawn.unique()) == len(drawn) == 3 * 3 * 3 * 2
    assert numbers(stage=Stage.FINETUNE) is None
    assert numbers(stage=Stage.ADAPT) is None


def test_parts_of_a_ragged_cohort_with_two_phases() -> None:
    made = plan(3, (1, 2))
    batches = [made[i] for i in range(len(made.steps))]
    # Sorted by size: clients 2 (3 steps an epoch), 0 (2), 1 (1); the stacked steps are the longest list's: 3, then 6.
    # A client that has done its own steps is not in the batch any more.
    three = [(2, 0, 1), (2, 0), (2,)]
    assert [b.clients for b in batches] == three + [(2, 0, 1)] * 2 + [(2, 0)] * 2 + [(2,)] * 2
    assert all(b.cohort == (2, 0, 1) and b.index.shape == b.mask.shape == (len(b.clients), 3) for b in batches)
    assert [b.phase for b in batches] == [0] * 3 + [1] * 6
    assert [(part.phase, part.positions) for part in made.parts] == [(0, range(3)), (1, range(3, 9))]
    stops = [[i for i, b in enumerate(batches) if c in b.clients and b.stopping[b.clients.index(c)]] for c in (2, 0, 1)]
    assert stops == [[], [1, 6], [0, 4]], "the longest list ends with its phase"


def test_an_incomplete_batch_is_dropped_only_beside_a_full_one() -> None:
    made = plan(1, (1,), drop_last=True)
    assert [len(rows_of(made, client)) for client in (0, 1, 2)] == [1, 1, 2]


def test_a_batch_has_the_terms_rows_whatever_the_width_and_the_rounds_clients() -> None:
    for width, clients in ((1, (1,)), (3, (1,)), (1, (0, 1, 2)), (3, (0, 1, 2))):
        made = plan(width, clients=clients)
        assert {made[step].index.shape[1] for step in range(len(made.steps))} == {TERMS.row}


def test_no_epochs_leave_cohorts_without_a_part() -> None:
    made = plan(2, (0,))
    assert made.steps == made.parts == []
    assert [(work.clients, work.parts, work.last) for work in Share([made])] == [((2, 0), [], False), ((1,), [], True)]


@pytest.mark.parametrize(("batch_size", "cohorts"), [(4, 3), (14, 2), (21, 1)])
def test_evaluation_covers_every_held_out_image_once_at_each_point(batch_size: int, cohorts: int) -> None:
    held = {"test": {0: np.arange(5), 1: np.arange(5, 6), 2: np.arange(6, 13)}}
    made = EvaluationPlan([0, 1, 2], held, None, ("server", "local"), batch_size, most_clients=9)
    for point in ("server", "local"):
        seen = [
            row
            for batch in (made[i] for i in range(len(made.steps)))
            if batch.point == point
            for row in batch.index[batch.mask].tolist()
        ]
        assert sorted(seen) == list(range(13))
    # As many clients of up to seven images as fit into one step.
    assert len(made.parts) == 2 * len(made.cohorts) == 2 * cohorts


@pytest.mark.parametrize(("most", "widths"), [(1, {1}), (2, {1, 2}), (3, {3})])
def test_no_more_clients_than_allowed_are_tested_together(most: int, widths: set[int]) -> None:
    made = EvaluationPlan([0, 1, 2], {"test": {c: np.arange(2) for c in range(3)}}, None, ("server",), 64, most)
    assert {len(made[i].clients) for i in range(len(made.steps))} == widths
    assert sum(int(made[i].mask.sum()) for i in range(len(made.steps))) == 6


def test_evaluation_steps_are_equal_and_hold_as_many_clients_as_fit() -> None:
    held = {
        "test": {0: np.arange(5), 1: np.arange(5, 7), 2: np.arange(7, 14), 3: np.arange(14, 15)},
        "val": {0: np.arange(15, 17), 1: np.arange(17, 18), 2: np.arange(18, 19), 3: np.arange(19, 20)},
    }
    made = EvaluationPlan([0, 1, 2, 3], held, None, ("server",), 4, most_clients=9)
    shapes = [(made[i].clients, made[i].split, *made[i].index.shape) for i in range(len(made.steps))]
    assert shapes == [
        ((2,), "test", 1, 4),  # 7 images in two steps of 4 and 3
        ((2,), "test", 1, 4),
        ((2,), "val", 1, 1),
        ((0,), "test", 1, 3),  # 5 in steps of 3 and 2, not of 4 and 1
        ((0,), "test", 1, 3),
        ((0,), "val", 1, 2),
        ((1, 3), "test", 2, 2),
        ((1, 3), "val", 2, 1),
    ]


def test_scores_with_draws_take_as_many_rows_whoever_is_tested_together() -> None:
    held = {
        "test": {0: np.arange(5), 1: np.arange(5, 7), 2: np.arange(7, 14), 3: np.arange(14, 15)},
        "val": {0: np.arange(15, 27), 1: np.arange(17, 18), 2: np.arange(18, 19), 3: np.arange(19, 20)},
    }
    for asked in (["test"], ["val", "test"]):
        for most in (1, 9):
            splits = {name: held[name] for name in asked}
            made = EvaluationPlan([0, 1, 2, 3], splits, None, ("server",), 8, most_clients=most, noisy=True)
            steps = [made[i] for i in range(len(made.steps))]
            assert {(step.split, step.index.shape[1]) for step in steps} <= {("test", 7), ("val", 6)}
            assert all(step.index.numel() <= 8 or len(step.clients) == 1 for step in steps)
            for name in asked:
                seen = [row for step in steps if step.split == name for row in step.index[step.mask].tolist()]
                assert sorted(seen) == sorted(row for rows in held[name].values() for row in rows)


STREAMS = {"test": np.arange(10), "new": np.arange(3)}


@pytest.mark.parametrize(("width", "noisy"), [(0, False), (0, True), (1, False), (2, False), (3, False)])
def test_every_client_scores_the_whole_stream_after_its_own_images(width: int, noisy: bool) -> None:
    """In steps that do not depend on the other clients where copies are fitted, or where scores rest on draws."""
    held, largest = {"test": INDICES, "val": INDICES}, {"test": 7, "val": 7}
    copies = fitting(width) if width else None
    made = EvaluationPlan([0, 1, 2], held, copies, ("server", "local"), 6, 9, noisy, largest, STREAMS)
    without = EvaluationPlan([0, 1, 2], held, copies, ("server", "local"), 6, 9, noisy, largest)
    assert made.cohorts == without.cohorts
    kept = [made[i] for i, step in enumerate(made.steps) if step.shown is Shown.OWN]
    for step, same in zip(kept, (without[i] for i in range(len(without.steps))), strict=True):
        assert (step.clients, step.point, step.split, step.number) == (
            same.clients,
            same.point,
            same.split,
            same.number,
        )
        assert torch.equal(step.index, same.index)
    for point in ("server", "local"):
        foreign = [made[i] for i, step in enumerate(made.steps) if step.shown is Shown.FOREIGN and step.point == point]
        assert {step.split for step in foreign} == {"test"}
        seen = [
            (client, row)
            for step in foreign
            for client, index, mask in zip(step.clients, step.index, step.mask, strict=True)
            for row in index[mask].tolist()
        ]
        assert sorted(seen) == [(client, row) for client in range(3) for row in range(10)]
        if width or noisy:
            assert {step.index.shape[1] for step in foreign} == {4}
        else:
            assert all(step.index.numel() <= 6 for step in foreign)


def test_who_has_no_image_scores_no_stream() -> None:
    held = {"test": {0: np.arange(0), 1: np.arange(2)}}
    made = EvaluationPlan([0, 1], held, None, ("server",), 2, 1, streams=STREAMS)
    assert {step.clients for step in made.steps} == {(1,)}


def test_fine_tuned_clients_are_tested_in_steps_that_do_not_depend_on_the_width() -> None:
    for width in (1, 2, 3):
        made = EvaluationPlan([0, 1, 2], {"test": INDICES}, fitting(width), ("server",), 4, most_clients=9)
        lengths = {made[i].index.shape[1] for i in range(len(made.steps)) if made[i].stage is Stage.EVALUATE}
        most = max(len(rows) for rows in INDICES.values())
        assert lengths == {-(-most // -(-most // 4))}


def test_fine_tuning_steps_come_before_the_server_point_only() -> None:
    made = EvaluationPlan([0, 1, 2], {"test": INDICES}, fitting(3), ("server", "local"), 8, most_clients=9)
    parts = [(part.stage, part.point, len(part.positions)) for part in made.parts]
    assert parts == [("finetune", "server", 3), ("evaluate", "server", 1), ("evaluate", "local", 1)]
    assert [(made[i].stage, made[i].point) for part in made.parts for i in part.positions] == [
        *[("finetune", "server")] * 3,
        ("evaluate", "server"),
        ("evaluate", "local"),
    ]
    # Fine-tuning is another draw than the training of the same round.
    train = plan(3, (1,), round=4)
    assert any(not np.array_equal(made[i].index, train[i].index) for i in range(3))


def test_steps_cut_the_epochs_short() -> None:
    def made(*phases: Phase) -> RoundPlan:
        return RoundPlan([0], {0: np.arange(10)}, TERMS, phases, Stage.TRAIN, 1, 1)

    cut, whole = made(replace(of(2), steps=5), replace(of(3), steps=99)), made(of(2))
    assert [cut[i].phase for i in range(len(cut.steps))] == [0] * 5 + [1] * 12
    assert all(torch.equal(cut[i].index, whole[i].index) for i in range(5))
    assert [part.positions for part in cut.parts] == [range(5), range(5, 17)]


@pytest.mark.parametrize("together", [1, 4])
def test_cohorts_of_all_ranks_hold_every_step_once(together: int) -> None:
    indices = {c: np.arange(c, c + 7) for c in range(5)}
    made = RoundPlan(list(range(5)), indices, TERMS, [of(3)], Stage.TRAIN, 2, 1)
    seen = []
    for rank in range(4):
        share = Share([made, made], rank, 4, together=together)
        works = list(share)
        assert len(share) == len(works)
        assert [work.last for work in works] == [False] * (len(works) - 1) + [True]
        assert share.local_steps == sum(len(s.clients) for work in works for s in steps_of(work, together))
        for work in works:
            steps = steps_of(work, together)
            assert {step.cohort for step in steps} == {work.clients}
            seen += [(step.cohort, step.number) for step in steps]
    assert sorted(seen) == sorted((step.cohort, step.number) for step in made.steps * 2)
    assert {share.owners[client] for client in range(5)} <= set(range(4))
    (idle,) = Share([made], 3, 4)
    assert (idle.clients, idle.parts, idle.last) == ((), (), True)


def steps_of(work: CohortWork, together: int) -> list[Step]:
    """All steps of a cohort's work, as many at a time as there are together."""
    chunks = [some for part in work.parts for some in work.steps(part, torch.device("cpu"))]
    assert all(0 < len(some) <= together for some in chunks)
    return [step for some in chunks for step in some]
