"""Costs that must not grow: work is counted where it can be, and timed against less of the same where it cannot."""

import time
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import EACH_ROUND, build, fit, terms

from benchmark.contract import LocalTraining, Stage
from benchmark.engine import evaluation
from benchmark.engine.batches import noise
from benchmark.engine.plan.evaluation_plan import EvaluationPlan, filling
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.scores import ClientScores
from benchmark.run.checkpoint import read_checkpoint
from benchmark.seeds import torch_generator


class Counted(UserDict[int, np.ndarray]):
    """Rows by client, counting how often they are looked up."""

    looked_up = 0

    def __getitem__(self, client: int) -> np.ndarray:
        self.looked_up += 1
        return super().__getitem__(client)


def look_ups(clients: int, finetuned: bool) -> int:
    """Count how often the plan of an evaluation looks up a client's images."""
    images = Counted({client: np.arange(1 + client % 3) for client in range(clients)})
    training = None
    if finetuned:
        phases = [LocalTraining(lr=0.0, epochs=1).phase("head")]
        own = terms(clients, batch_size=2, row=2)
        training = RoundPlan(range(clients), images, own, phases, Stage.FINETUNE, width=8, round=0)
    images.looked_up = 0
    EvaluationPlan(range(clients), {"test": images}, training, ("server", "local"), batch_size=6, most_clients=8)
    return images.looked_up


@pytest.mark.parametrize("finetuned", [False, True])
def test_planning_an_evaluation_looks_at_each_client_a_few_times(finetuned: bool) -> None:
    assert look_ups(4000, finetuned) <= 4 * look_ups(1000, finetuned) + 10


def test_filling_cohorts_takes_time_linear_in_the_clients() -> None:
    def seconds(clients: int) -> float:
        sizes = dict.fromkeys(range(clients), 50)
        began = time.process_time()
        filling(range(clients), sizes, batch_size=100, most=10**6)
        return time.process_time() - began

    assert min(seconds(160_000) for _ in range(2)) < 8 * max(seconds(40_000) for _ in range(3))


def test_scores_are_made_once_for_each_point_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Scores(ClientScores):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(evaluation, "ClientScores", Scores)
    method, data = build("FedVPT")
    fit(method, data, 2, settings=EACH_ROUND)
    assert len(made) == 3 * 2  # rounds 0, 1, 2; points server and local


@pytest.mark.parametrize(("conf", "most"), [("FedAvg", 3), ("PFedBayesPT", 7)])  # of 7 clients in 3 cohorts
def test_generators_are_made_only_for_those_who_draw(conf: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[tuple[Any, ...], int] = {}

    def counted(seed: int, *key: Any, **named: Any) -> torch.Generator:
        made[key[:-1]] = made.get(key[:-1], 0) + 1
        return torch_generator(seed, *key, **named)

    monkeypatch.setattr(noise, "torch_generator", counted)
    method, data = build(conf, "--data.clients_at_once=3")
    fit(method, data, 1)
    assert max(count for key, count in made.items() if key[1] == "train") == most


def test_a_checkpoint_holds_no_momenta_that_the_next_phase_clears(tmp_path: Path) -> None:
    method, data = build("FedVPT")
    fit(method, data, 1, save_to=tmp_path)
    states = read_checkpoint(tmp_path / "checkpoints/last.ckpt")["optimizer_states"]
    assert [state["state"] for state in states] == [{}]
    assert method.trainer.optimizers[0].state  # what would have been in it
