"""Check what every method must keep, for every class that ``methods`` exports: a new one needs a YAML in tests/conf."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import CONF, EACH_ROUND, Few, fit, learned
from federation import build as build_tiny
from lightning.pytorch.callbacks import Callback

import methods
from benchmark.checks.methods import (
    MethodUnderCheck,
    Wire,
    check_images,
    check_messages,
    check_order_of_clients,
    check_resting_clients,
    check_resume,
    last_client_first,
    require_roles,
    require_same_at_width,
)
from benchmark.engine.device import capacity
from benchmark.server import ServerRule

METHODS = sorted(methods.__all__)
#: Methods that train nothing take no step.
UNTRAINED = ["ZeroShotCLIP"]
#: Nor do those that send sums over their images.
SUMMED = ["FederatedRidge", "NearestClassMean"]
TRAINED = [name for name in METHODS if name not in (*UNTRAINED, *SUMMED)]
#: What changes in every round, trained or not.
RENEWED = {
    "FLoRA": ("lora.a.",),
    "FOCoOp": ("context",),
    "FedMGP": ("store.context", "store.image_prompts", "server."),
    "FedPromptSRC": ("server.",),
    "HiLoRA": ("lora.", "server."),
    "PLAN": ("context", "image_prompts", "server."),
    "PEPFedPT": ("prototype", "server."),
    "PF2LoRAPruned": ("store.pruning.",),
    "TRIP": ("server.",),
}
#: Methods whose images two processes load in turn, which takes the tests' process twice as long as one.
TWO_WORKERS = ["FedAvg", "FedVPT", "PromptFL"]
#: A method's tests come one after the other, so that they share what was made for it.
of_each = partial(pytest.mark.parametrize, "conf", scope="module")
#: Six clients, of which four train in a round.
FEW = ("--data.partition=federation.Few", "--data.clients_per_round=4")
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def build(conf: str, *overrides: str) -> Any:
    """A method and its data on few clients."""
    return build_tiny(conf, *FEW, *overrides)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """The same names, and values equal (bit for bit without a tolerance; NaN equals NaN)."""
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def documented(name: str) -> list[set[str]]:
    """Read in docs/methods.md what is shared, is personal and makes something of the uploads: words in backticks."""
    page = (Path(__file__).parents[2] / "docs/methods.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    return [set(re.findall(r"`([^`]+)`", cell)) for cell in row.split("|")[2:5]]


def test_every_method_has_a_tiny_configuration() -> None:
    assert {path.stem for path in CONF.glob("[A-Z]*.yaml")} == set(METHODS)


@lru_cache(maxsize=2)
def subject(conf: str) -> MethodUnderCheck:
    """A method with its tiny configuration; its reference run is made once."""
    # Stacked weights are summed in another order, and on some processors a product of matrices with frozen weights
    # rounds by its number of rows. Adam divides by a gradient's own size, so that it makes much of what was rounded
    # where the gradient is next to nothing; a step of it is 0.02 here.
    adam = "optimizer: adam" in (CONF / f"{conf}.yaml").read_text()
    return MethodUnderCheck(lambda *options: build(conf, *options), 1e-3 if adam else 2e-5)


@of_each(METHODS)
@pytest.mark.parametrize("width", [3, "auto"])
def test_clients_at_once_and_workers_change_nothing(
    conf: str, width: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = 0 if width == 3 else 2 if conf in TWO_WORKERS else 1
    monkeypatch.setattr(capacity, "CPU_STEP", 2**40)  # auto takes as many clients as there are
    method: Any = require_same_at_width(subject(conf), width, workers)
    if width == "auto":
        assert method.trainer.datamodule.loaders.width == method.simulation.terms.participants > 1


@of_each([*TRAINED, *SUMMED])
def test_training_moves_what_it_should_and_nothing_frozen(conf: str) -> None:
    method = require_roles(subject(conf))
    assert method.roles.trained, "a method that trains nothing has its place in UNTRAINED"
    rule = set() if type(method.server.rule) is ServerRule else {type(method.server.rule).__name__}
    assert documented(conf) == [set(method.shared), set(method.personal), rule]


@of_each(METHODS)
def test_the_checks_see_six_clients_of_which_four_train(conf: str) -> None:
    _, data = build(conf)
    data.setup()
    assert (data.num_clients, data.participants) == (6, 4)
    assert tuple(len(rows) for rows in data.splits.train) == Few.sizes


@pytest.mark.parametrize("check", [check_resting_clients, check_messages])
@of_each(METHODS)
def test_every_method_keeps_what_it_must(conf: str, check: Callable[[MethodUnderCheck], None]) -> None:
    check(subject(conf))


@of_each(TRAINED)
def test_a_test_image_never_trains_and_every_training_image_does(conf: str) -> None:
    check_images(subject(conf))


@of_each(METHODS)
def test_neither_a_resume_nor_the_order_of_clients_changes_a_bit(conf: str) -> None:
    assert subject(conf).reference  # of the usual order
    with last_client_first():
        check_resume(subject(conf))


@of_each(UNTRAINED)
def test_what_trains_nothing_sends_nothing_and_stays_as_it_is(conf: str) -> None:
    check_order_of_clients(subject(conf))
    wire = Wire()
    method, data = build(conf)
    fit(method, data, 3, [wire], settings=EACH_ROUND)
    assert method.roles.trained == method.roles.slots == ()
    assert len(wire.down) == len(wire.up) == 3 * 4
    assert not any(wire.down + wire.up)
    scores = {n.split("/", 1)[1]: v for n, v in learned(method).items() if n.startswith("metric.0/")}
    assert any("accuracy" in name for name in scores)
    for round in (1, 2, 3):
        again = {n.split("/", 1)[1]: v for n, v in learned(method).items() if n.startswith(f"metric.{round}/")}
        assert_equal(scores, {name: value for name, value in again.items() if name in scores})


class NoEpochs(Callback):
    """Sets every local phase to zero epochs."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        phases = [replace(phase, epochs=0) for phase in pl_module.local_phases()]
        pl_module.local_phases = lambda: phases


@of_each([*UNTRAINED, *TRAINED])
def test_zero_local_epochs_change_nothing(conf: str) -> None:
    untouched, data = build(conf)
    fit(untouched, data, 0, evaluate=False)
    method, data = build(conf)
    fit(method, data, 2, [NoEpochs()], settings={"check_val_every_n_epoch": 2})
    # What a client was sent may be its own, and then so is what it scores after its local training; and it took part.
    moved = ("metric.", "trained", "store.participated", *(("store.last.",) if method.evaluate_local else ()))
    moved += RENEWED.get(conf, ())
    before, after = ({n: v for n, v in learned(m).items() if not n.startswith(moved)} for m in (untouched, method))
    assert_equal(before, after)
