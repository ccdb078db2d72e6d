"""Before the first round a client's own state is the server's: what is equal is not evaluated twice."""

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from federation import EACH_ROUND, build, fit
from lightning.pytorch.callbacks import Callback

from benchmark.contract import LocalTraining, Phase
from benchmark.engine.cohort import Cohort
from benchmark.engine.mapping import ClientMap
from methods.fedvpt import FedVPT


class Evaluations(Callback):
    """Keeps the scores of every evaluation, by round, point and split."""

    def __init__(self) -> None:
        self.scores: dict[tuple[int, str, str], dict[str, torch.Tensor]] = {}

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Take them."""
        for (point, split), scores in pl_module.evaluation.scores.items():
            self.scores[pl_module.server.finished_rounds, point, split] = scores.compute()


def evaluated(conf: str) -> tuple[Counter[int], dict[tuple[int, str, str], dict[str, torch.Tensor]]]:
    """Calls of ``client_logits`` in each evaluation, and its scores; one round."""
    calls: Counter[int] = Counter()
    mapped = ClientMap.__call__

    def counted(self: ClientMap, name: str, function: Any, cohort: Cohort, *arguments: Any, **settings: Any) -> Any:
        calls[cohort.round.number] += name == "client_logits"
        return mapped(self, name, function, cohort, *arguments, **settings)

    method, data = build(conf)
    kept = Evaluations()
    with patch.object(ClientMap, "__call__", counted):
        fit(method, data, 1, [kept], settings=EACH_ROUND)
    return calls, kept.scores


def test_the_clients_own_states_are_scored_from_the_first_round_on() -> None:
    calls, scores = evaluated("FedVPT")
    assert calls[1] == 2 * calls[0] > 0
    for metric, values in scores[0, "local", "test"].items():
        assert values.isfinite().any()
        torch.testing.assert_close(values, scores[0, "server", "test"][metric], rtol=0, atol=0, equal_nan=True)
    after = scores[1, "local", "test"]["loss"], scores[1, "server", "test"]["loss"]
    assert not torch.equal(after[0].nan_to_num(), after[1].nan_to_num())


def test_what_the_server_sends_to_each_client_alone_is_scored_beside_its_own() -> None:
    """Prompts that pFedPG generates are each client's own before the first round, too."""
    calls, scores = evaluated("PFedPG")
    assert calls[0] == calls[1] > 0
    local, server = (scores[0, point, "test"]["loss"].nan_to_num() for point in ("local", "server"))
    assert not torch.equal(local, server)


def test_what_a_fine_tuned_copy_scores_is_not_the_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def phases(method: FedVPT, new: bool) -> list[Phase]:
        return [LocalTraining(lr=0.5, epochs=1).phase("prompt")]

    monkeypatch.setattr(FedVPT, "finetune_phases", phases)
    calls, scores = evaluated("FedVPT")
    assert calls[0] == calls[1] > 0
    local, server = (scores[0, point, "test"]["loss"].nan_to_num() for point in ("local", "server"))
    assert not torch.equal(local, server)
