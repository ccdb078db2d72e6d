"""Momentum that outlives a round: a client's own, or one handed from client to client."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import EACH_ROUND, build, fit, learned
from oracle import Images, Values, descend, mini_batches, selected, values_of, weighted
from torch import Tensor, nn

from benchmark.errors import ConfigurationError

ROUNDS = 3


def fedavg(state: str, *overrides: str) -> tuple[Any, Any]:
    return build("FedAvg", f"--model.init_args.training.optimizer_state={state}", *overrides)


def naive(state: str, method: Any, data: Any, start: nn.ModuleDict) -> Values:
    """FedAvg with one optimizer object a client (or one for all) for the whole run, one client after the other."""
    models: dict[int, nn.ModuleDict] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}

    def train(client: int, round: int, shared: Values) -> Values:
        owner = client if state == "client" else 0
        if owner not in models:
            models[owner] = copy.deepcopy(start).requires_grad_(True)
            optimizers[owner] = torch.optim.SGD(models[owner].parameters(), 0.02, 0.5)
        model = models[owner]
        model.load_state_dict(shared)

        def loss(batch: Images) -> Tensor:
            return nn.functional.cross_entropy(model["head"](model["backbone"](batch.x)), batch.y)

        descend(model, optimizers[owner], loss, mini_batches(data, client, round, 2))
        return values_of(model)

    # With one optimizer for all, the order counts: the largest clients are first.
    shared = values_of(start)
    for round in range(1, ROUNDS + 1):
        clients = sorted(selected(method, data, round), key=lambda client: (-data.train_sizes[client], client))
        shared = weighted(data, {client: train(client, round, shared) for client in clients})
    return shared


@pytest.mark.parametrize(("state", "width"), [("client", 1), ("client", 3), ("shared", 1)])
def test_momentum_outlives_the_round_as_in_a_naive_loop(state: str, width: int) -> None:
    method, data = fedavg(state, f"--data.clients_at_once={width}")
    start = copy.deepcopy(nn.ModuleDict({"backbone": method.backbone, "head": method.head}))
    fit(method, data, ROUNDS)
    chosen = [sorted(method.server.rule.select(number)) for number in range(1, ROUNDS + 1)]
    assert len({tuple(c) for c in chosen}) > 1
    expected = naive(state, method, data, start)
    fresh, same = fedavg("fresh")
    fit(fresh, same, ROUNDS)
    for name, value in expected.items():
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-4, atol=1e-6)
    assert (method.get_parameter("head.weight") - fresh.get_parameter("head.weight")).abs().max() > 1e-4
    kept = method.store.all_rows("momentum.0.head.weight").flatten(1).norm(dim=1)
    taken = {client for c in chosen for client in c} if state == "client" else {0}
    assert set(kept.nonzero().flatten().tolist()) == taken
    assert method.server.traffic.state_dict() == fresh.server.traffic.state_dict(), "it is never sent"


def test_kept_momentum_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, data = fedavg("client")
    fit(whole, data, ROUNDS, settings=EACH_ROUND)
    half, data = fedavg("client")
    fit(half, data, 2, save_to=tmp_path, settings=EACH_ROUND)
    again, data = fedavg("client")
    fit(again, data, ROUNDS, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"), settings=EACH_ROUND)
    expected, found = learned(whole), learned(again)
    assert set(expected) == set(found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("client", "--model.init_args.training.momentum=0.0"), "keeps the momentum of SGD.*momentum \\[0.0\\]"),
        (("client", "--model.init_args.training.optimizer=adam"), "keeps the momentum of SGD.*optimizer is adam"),
        (("shared", "--data.clients_at_once=3"), "data.clients_at_once must be 1, got 3"),
        (("shared", "--data.clients_at_once=auto"), "data.clients_at_once must be 1, got auto"),
    ],
)
def test_state_that_cannot_be_kept_is_refused(overrides: tuple[str, ...], message: str) -> None:
    method, data = fedavg(*overrides)
    with pytest.raises(ConfigurationError, match=message):
        fit(method, data, 1)


def test_a_fitted_copy_starts_without_the_momentum_of_its_clients_training() -> None:
    """After one round, before which there was none, the kept momenta have changed nothing else."""
    scores = []
    for state in ("client", "fresh"):
        settings = [f"{name}.optimizer_state={state}" for name in ("training", "finetuning")]
        settings += ["finetuning.momentum=0.9", "finetuning.epochs=2"]
        method, data = build("FedAvgFT", *[f"--model.init_args.{setting}" for setting in settings])
        fit(method, data, 1)
        if state == "client":
            assert method.store.all_rows("momentum.0.head.weight").norm() > 0
        scores.append(learned(method))
    kept, fresh = scores
    for name in fresh:
        assert torch.equal(kept[name].nan_to_num(), fresh[name].nan_to_num()), name
