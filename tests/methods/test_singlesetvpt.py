"""Local baselines on a ViT: SingleSet-VPT, and SingleSet-Full, which is Local."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation import build, fit
from oracle import Images, descend, images_at, mini_batches
from torch import Tensor, nn

from benchmark.contract import LocalTraining
from methods.fedavg import FedAvg
from methods.fedrep import FedRep
from methods.local import Local

ONE = ["--data.partition.init_args.num_clients=1", "--data.clients_per_round=1"]
TRAINING = LocalTraining(lr=0.02, epochs=2, momentum=0.9, weight_decay=1e-3)


def run(conf: str, *overrides: str, rounds: int = 2) -> tuple[Any, Any]:
    method, data = build(conf, *overrides)
    fit(method, data, rounds)
    return method, data


def whole_model(kind: type, *overrides: str, rounds: int = 2, **arguments: Any) -> Any:
    """A method that trains the tiny ViT itself."""
    template, data = build("SingleSetVPT", *overrides)
    method = kind(8, data.num_clients, template.backbone, **arguments)
    fit(method, data, rounds)
    return method


def head_loss(head: nn.Module, encode: Callable[[Tensor], Tensor]) -> Callable[[Images], Tensor]:
    """Cross-entropy of a head on frozen features."""

    def loss(batch: Images) -> Tensor:
        with torch.no_grad():
            features = encode(batch.x)
        return nn.functional.cross_entropy(head(features), batch.y)

    return loss


def test_nothing_is_sent() -> None:
    method, _ = run("SingleSetVPT")
    assert not any(method.server.traffic.per_client().values())


def test_with_one_client_it_is_fedvpt_bit_for_bit() -> None:
    alone, _ = run("SingleSetVPT", *ONE)
    shared, _ = run("FedVPT", *ONE)
    assert torch.equal(alone.store.all_rows("prompt.tokens")[0], shared.get_parameter("prompt.tokens"))
    assert torch.equal(alone.store.all_rows("head.weight"), shared.store.all_rows("head.weight"))


def test_a_client_does_not_depend_on_the_others() -> None:
    alone, _ = run("SingleSetVPT", *ONE)
    among, _ = run("SingleSetVPT", "--data.clients_per_round=11")
    for name in alone.roles.personal:
        # Another row length of the padded batches, so another order of sums.
        torch.testing.assert_close(alone.store.all_rows(name)[0], among.store.all_rows(name)[0], rtol=1e-4, atol=1e-5)


def test_without_prompts_it_is_a_linear_probe_of_each_clients_own() -> None:
    method, data = run("SingleSetVPT", "--model.init_args.num_prompts=0", "--data.clients_per_round=11")
    client = 4
    fresh, _ = build("SingleSetVPT")
    head = fresh.head.requires_grad_(True)
    for round in (1, 2):
        optimizer = torch.optim.SGD(head.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
        descend(head, optimizer, head_loss(head, fresh.backbone), mini_batches(data, client, round, 2))
    torch.testing.assert_close(method.store.all_rows("head.weight")[client], head.weight.detach(), rtol=1e-4, atol=1e-6)


def test_fedrep_that_leaves_the_body_alone_is_that_probe() -> None:
    probe, _ = run("SingleSetVPT", "--model.init_args.num_prompts=0")
    still = LocalTraining(lr=0.01, epochs=0)
    rep = whole_model(FedRep, head_training=TRAINING, training=still)
    body = sum(p.numel() for p in rep.backbone.parameters())
    assert rep.server.traffic.per_client()["up_floats"] == body, "the backbone is sent, the head is not"
    torch.testing.assert_close(
        rep.store.all_rows("head.weight"), probe.store.all_rows("head.weight"), rtol=1e-4, atol=1e-6
    )


def test_local_training_of_a_whole_vit_is_fedavg_where_there_is_one_client() -> None:
    local = whole_model(Local, *ONE, training=TRAINING)
    average = whole_model(FedAvg, *ONE, training=TRAINING)
    assert not any(local.server.traffic.per_client().values())
    assert all(torch.equal(local.store.all_rows(n)[0], average.get_parameter(n)) for n in average.roles.shared)


@pytest.mark.parametrize("conf", ["SingleSetVPT", "FedVPT", "FedVPTDeep"])
def test_a_new_client_fits_its_head_for_five_epochs(conf: str) -> None:
    new = "--data.new_clients=0.3"
    method, data = run(conf, new, "--data.clients_per_round=4", rounds=1)
    recorded = method.trainer.callbacks[0].values[1, "server", "new", "loss"]
    assert (~recorded.isnan()).nonzero().flatten().tolist() == data.new_clients
    client = data.new_clients[0]
    fresh, _ = build(conf, new)
    prompt = method.get_parameter("prompt.tokens")
    if conf == "SingleSetVPT":
        assert torch.equal(prompt, fresh.prompt.tokens), "it has received nothing"
    head = fresh.head.requires_grad_(True)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    loss = head_loss(head, lambda x: method.backbone(x, prompt))
    descend(head, optimizer, loss, mini_batches(data, client, 0, 5, stage="adapt"))
    expected = loss(images_at(data, data.splits.test[client])).item()
    assert recorded[client].item() == pytest.approx(expected, rel=1e-4)
