"""One federation over several processes: the same bits as one, however clients are dealt, and no endless waiting."""

import os
import signal
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import EACH_ROUND, build, fit
from lightning.pytorch.callbacks import Callback
from over_ranks import at_a_port, over_ranks, run_over

from benchmark.engine.device.capacity import balanced
from benchmark.engine.ranks.ranks import dealt, fingerprint
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from benchmark.ranks.pulse import OtherRankError
from benchmark.ranks.strategy import RanksStrategy
from benchmark.run.checkpoint import finished_rounds
from benchmark.server import ServerRule

#: One of each kind: whole models of some clients, personal heads, a generator on the server, reported posteriors, text
#: prompts, fitted copies, a server that keeps every client's prompt, one that sends others' prompts, new clients.
KINDS = {
    "FedAvg": (),
    "FedPer": (),
    "PFedPG": (),
    "PFedBayesPT": (),
    "FedPGP": (),
    "FedBABU": (),
    "PromptAMP": (),
    "PFedMoAP": (),
    "FedRep": ("--data.new_clients=0.3", "--data.clients_per_round=4"),
}
WIDTH = "--data.clients_at_once=2"
#: Six clients, five of them in a round, in three cohorts.
FEW = (WIDTH, "--data.partition=federation.Few", "--data.clients_per_round=5")


@cache
def alone(conf: str, *overrides: str, rounds: int = 2) -> Any:
    return run_over(1, conf, *overrides, rounds=rounds)


def require_same_over(count: int, conf: str, *overrides: str, at: dict[str, str] | None = None) -> list[int]:
    """Require what a run over so many ranks leaves behind to be what one leaves; returns bytes of rows by rank."""
    expected, counted, _ = alone(conf, *overrides)
    found, found_counted, held = run_over(count, conf, *overrides, at=at)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(value.nan_to_num(7), found[name].nan_to_num(7)), name
    assert found_counted == counted
    return held


@pytest.mark.parametrize(("conf", "count"), [*product(KINDS, (2, 3)), ("FedAvg", 4), ("FedPer", 4), ("PFedPG", 4)])
def test_the_number_of_ranks_changes_no_bit(conf: str, count: int) -> None:
    require_same_over(count, conf, *FEW, *KINDS[conf])


@pytest.mark.parametrize("conf", ["FedAvg", "FedPer"])
def test_processes_that_a_launcher_has_started_come_to_the_same_bits(conf: str) -> None:
    require_same_over(3, conf, *FEW, *KINDS[conf], at=at_a_port())


def test_there_may_be_more_ranks_than_clients() -> None:
    require_same_over(4, "FedPer", WIDTH, "--data.partition.init_args.num_clients=2", "--data.clients_per_round=1")


def test_ranks_without_a_cohort_save_and_resume_with_the_others(tmp_path: Path) -> None:
    # One cohort a round, so that one of the ranks takes no step in it.
    one_cohort = ("FedPer", WIDTH, "--data.clients_per_round=2")
    expected, counted, _ = alone(*one_cohort, rounds=4)
    run_over(2, *one_cohort, rounds=2, save_to=tmp_path)
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert finished_rounds(last) == 2
    found, found_counted, _ = run_over(2, *one_cohort, rounds=4, ckpt_path=str(last), save_to=tmp_path)
    assert finished_rounds(last) == 4
    assert found_counted == counted
    for name, value in expected.items():
        assert torch.equal(value.nan_to_num(7), found[name].nan_to_num(7)), name


def test_each_rank_holds_its_part_of_what_is_personal() -> None:
    held = require_same_over(3, "FedPer", *FEW)
    _, _, (whole,) = alone("FedPer", *FEW)
    assert sum(held) == whole
    assert max(held) < 0.5 * whole


def test_the_longest_pieces_are_dealt_first() -> None:
    assert dealt([5, 3, 9, 1, 3], 2) == [1, 1, 0, 0, 1]
    assert dealt([2, 2], 3) == [0, 1]
    assert dealt([7, 1], 1) == [0, 0]


def test_the_automatic_width_keeps_ranks_equally_busy() -> None:
    assert balanced(64, [10] * 10, 1) == 64
    assert balanced(64, [10] * 10, 2) == 5
    assert balanced(3, [10] * 12, 2) == 3
    assert balanced(64, [90, 30, 20, 10], 2) == 1
    assert balanced(64, [10], 4) == 1
    assert balanced(64, [], 2) == 64  # whom a delivery has all lost


def test_a_fingerprint_tells_bits_and_places_apart() -> None:
    one = torch.tensor([1.0, -0.0, 3.0])
    assert fingerprint({"a": one}) == fingerprint([one.clone()])
    assert fingerprint(one) != fingerprint(torch.tensor([1.0, 0.0, 3.0]))
    assert fingerprint(one) != fingerprint(one.flip(0))
    assert fingerprint(torch.tensor([True, False, True])) != fingerprint(torch.tensor([False, True, True]))


# ------------------------------------------------------------------------------------------------- what goes wrong


class InRound(Callback):
    """Does something in the second round of one rank, at its first step."""

    def __init__(self, rank: int, what: Any) -> None:
        self.rank = rank
        self.what = what

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0 and trainer.global_rank == self.rank:
            self.what(trainer)


def failing(count: int, what: Any, rank: int = 1, save_to: Path | None = None) -> list[Any]:
    """Return the result or error of each rank of a run in which one rank does ``what`` in its second round."""

    def work(strategy: RanksStrategy) -> Any:
        method, data = build("FedPer", *FEW)
        settings = EACH_ROUND | {"devices": count, "strategy": strategy}
        fit(method, data, 3, [InRound(rank, what)], save_to=save_to, settings=settings)

    return over_ranks(count, work)


def test_a_killed_rank_ends_all_and_another_number_of_ranks_gives_the_same_bits(tmp_path: Path) -> None:
    first, second, third = failing(3, lambda trainer: os.kill(os.getpid(), signal.SIGKILL), save_to=tmp_path)
    assert second is None
    assert isinstance(first, OtherRankError)
    assert "rank 1 has ended without a word" in str(first)
    assert first.code
    assert isinstance(third, OtherRankError)
    assert first.told_here
    assert not third.told_here
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    expected, counted, _ = run_over(1, "FedPer", *FEW, rounds=3)
    for count in (1, 2):
        found, found_counted, _ = run_over(count, "FedPer", *FEW, rounds=3, ckpt_path=last)
        assert found_counted == counted
        for name, value in expected.items():
            assert torch.equal(value.nan_to_num(7), found[name].nan_to_num(7)), name


def refuse(trainer: Any) -> None:
    raise ConfigurationError("there is no such picture")


def test_an_error_of_one_rank_is_told_once_with_its_clients() -> None:
    first, second = failing(2, refuse)
    assert str(second) == "there is no such picture"
    assert isinstance(first, OtherRankError)
    assert str(first).startswith("rank 1, clients ")
    assert str(first).endswith(": there is no such picture")
    assert (first.code, first.told_here) == (2, True)


def test_a_callback_that_waits_inside_a_round_is_told_so() -> None:
    ended = failing(2, lambda trainer: trainer.strategy.barrier("mine"))
    assert any("does a callback of the Trainer wait for other ranks inside a round?" in str(each) for each in ended)


class OwnMind(ServerRule):
    """Makes something else in every process."""

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Add this process's number."""
        return {name: value + os.getpid() for name, value in super().aggregate(round, shared, uploads).items()}


def test_ranks_that_come_to_different_values_are_told_so() -> None:
    def work(strategy: RanksStrategy) -> Any:
        from benchmark.engine.rounds import Server

        method, data = build("FedAvg", WIDTH)
        fit(method, data, 2, [Server(OwnMind())], settings={"devices": 2, "strategy": strategy})

    for ended in over_ranks(2, work):
        assert "the server's values after round 1 of rank 0 and of rank 1 differ: OwnMind must make" in str(ended)


def test_one_momentum_for_all_is_refused_over_ranks() -> None:
    def work(strategy: RanksStrategy) -> Any:
        shared = ("--model.init_args.training.momentum=0.9", "--model.init_args.training.optimizer_state=shared")
        method, data = build("FedAvg", "--data.clients_at_once=1", *shared)
        fit(method, data, 2, settings={"devices": 2, "strategy": strategy})

    for ended in over_ranks(2, work):
        assert "trainer.devices must be 1, got 2 in all" in str(ended)
