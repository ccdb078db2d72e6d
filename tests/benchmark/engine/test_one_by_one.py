"""Clients stepped one by one in plain PyTorch: the same numbers, as real tensors that can be inspected."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from federation import EACH_ROUND, build, fit, learned
from torch import Tensor

from benchmark.contract import Client, LocalTraining, MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.records.hashes import config_hash
from methods.fedvpt import FedVPT

DOUBLE = {"precision": "64-true"}


def both(conf: str, rounds: int = 1) -> list[dict[str, Tensor]]:
    """Return the learned values of a run with cohorts of three, and of the same run one by one."""
    found = []
    for option in ("--data.clients_at_once=3", "--data.one_by_one=true"):
        method, data = build(conf, option, "--data.clients_per_round=4")
        fit(method, data, rounds, settings=DOUBLE)
        found.append(learned(method))
    return found


@pytest.mark.parametrize("conf", ["FedVPT", "PFedPT", "FedAvg"])
def test_the_numbers_are_those_of_cohorts(conf: str) -> None:
    together, alone = both(conf)
    assert together.keys() == alone.keys()
    for name, value in together.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-9, atol=1e-11, equal_nan=True, msg=name)


class Looks(FedVPT):
    """Does what only numbers allow: looks, decides, stops."""

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        loss = super().client_loss(client, batch)
        print("loss", loss, "prompt", type(self.prompt.tokens).__name__, f"{loss.item():.3f}")
        if loss > 0 and batch.mask.all():
            breakpoint()
        return loss  # type: ignore[return-value]


class Stumbles(FedVPT):
    """Fails at one client's second step, of one image."""

    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        if batch.mask.sum() == 1 and client.class_counts.sum() == 5:
            raise ValueError("five images")
        return super().client_loss(client, batch)


class Draws(FedVPT):
    """Draws without a key."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


def made(kind: type, *options: str) -> tuple[Any, Any]:
    """A method of this file, and data that step clients one by one."""
    template, data = build("FedVPT", "--data.one_by_one=true", "--data.clients_per_round=11", *options)
    return kind(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1)), data


def test_prints_and_breakpoints_see_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stops: list[Any] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(sys._getframe(1).f_locals["loss"].item()))
    method, data = made(Looks)
    fit(method, data, 1, evaluate=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
    assert len(lines) > len(stops) > 10
    assert all(line.startswith("loss tensor(") and "BatchedTensor" not in line for line in lines)


def test_an_error_names_client_round_and_step() -> None:
    method, data = made(Stumbles)
    with pytest.raises(ValueError, match="five images") as error:
        fit(method, data, 1)
    assert error.value.__notes__ == ["in Stumbles.client_loss: client 0, round 1, train step 1"]
    method, data = made(Draws)
    with pytest.raises(ConfigurationError) as told:
        fit(method, data, 1, settings=EACH_ROUND)
    line = Draws.forward.__code__.co_firstlineno + 1
    assert f"line {line} of {__file__}, draws random numbers from a global" in str(told.value)
    assert str(told.value).endswith(" (client 0, round 0, evaluate step 0)")


def test_without_it_an_error_names_the_clients_that_were_stepped_together() -> None:
    # those with the most images first
    for width, whose in ((3, "clients 7, 2, 10 together"), (11, "clients 7, 2, 10, 5, 4, ... together")):
        method, data = build("FedVPT", "--data.clients_per_round=11", f"--data.clients_at_once={width}")
        with (
            patch.object(type(method), "client_loss", side_effect=ZeroDivisionError("mine")),
            pytest.raises(ZeroDivisionError) as error,
        ):
            fit(method, data, 1, evaluate=False)
        assert error.value.__notes__ == [f"in FedVPT.client_loss: {whose}, round 1, train step 0"]


def test_a_run_of_cohorts_goes_on_one_by_one(tmp_path: Path) -> None:
    method, data = build("FedVPT", "--data.clients_per_round=3")
    fit(method, data, 1, save_to=tmp_path, evaluate=False)
    after = {}
    for option in ("false", "true"):
        method, data = build("FedVPT", "--data.clients_per_round=3", f"--data.one_by_one={option}")
        fit(method, data, 2, ckpt_path=str(tmp_path / "checkpoints/last.ckpt"), evaluate=False)
        after[option] = learned(method)
    torch.testing.assert_close(after["true"]["prompt.tokens"], after["false"]["prompt.tokens"], rtol=1e-4, atol=1e-6)


def test_it_is_no_part_of_a_runs_settings() -> None:
    assert config_hash({"data": {"one_by_one": True}}) == config_hash({"data": {}})


def test_the_older_name_of_clients_at_once_still_works(tmp_path: Path) -> None:
    method, data = build("FedVPT", "--data.cohort_width=3")
    assert data.clients_at_once == 3
    fit(method, data, 1, save_to=tmp_path, evaluate=False)
    assert data.loaders is not None
    assert data.loaders.width == 3
    method, data = build("FedVPT", "--data.clients_at_once=3")
    fit(method, data, 2, ckpt_path=str(tmp_path / "checkpoints/last.ckpt"), evaluate=False)
    whole, data = build("FedVPT", "--data.cohort_width=3")
    fit(whole, data, 2, evaluate=False)
    for name, value in learned(whole).items():
        assert torch.equal(value, learned(method)[name]), name
