"""What training and evaluation ask a server's rule for is the same, in every precision of the Trainer."""

from typing import Any

import pytest
import torch
from federation import build, fit
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from benchmark.contract import Client, LocalTraining, Stage
from benchmark.engine.precision import float32_outside_of_steps
from benchmark.federation import Broadcast, Round, Values
from benchmark.server import ServerRule
from methods.fedavg import FedAvg
from methods.fedvpt import FedVPT

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


class Multiplying(ServerRule):
    """Sends a product of matrices, and notes what it was made in."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, Tensor]] = []
        self.made_in: set[tuple[torch.dtype, torch.dtype]] = set()

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """The prompt times a matrix, to all alike."""
        (name,) = shared
        prompt = shared[name]
        made = prompt @ torch.linspace(-1, 1, prompt.shape[-1] ** 2).view(prompt.shape[-1], -1).to(prompt.dtype)
        self.made_in.add((made.dtype, torch.zeros(()).dtype))
        self.sent.append((round.number, made))
        return Broadcast(own={name: made.expand(len(clients), *made.shape)})

    def adapt(self, round: Round, clients: tuple[int, ...], phase: int, values: Values) -> Values:
        """Note the precision alone."""
        self.made_in.add(((torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.zeros(()).dtype))
        return {}


class Sent(FedVPT):
    def make_server(self) -> ServerRule:
        return Multiplying()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_a_rule_works_in_float32_wherever_it_is_asked(precision: str) -> None:
    template, data = build("FedVPT", "--data.new_clients=0.3", "--data.clients_per_round=2")
    method = Sent(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
    fit(method, data, 2, settings={"precision": precision})
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert {made for made, _ in method.server.rule.made_in} <= {expected, torch.float32}
    assert {default for _, default in method.server.rule.made_in} == {torch.float32}
    before = torch.cat([value.flatten() for number, value in method.server.rule.sent if number == 1])
    assert len(before) > 0


def test_the_context_costs_nothing_where_there_is_nothing_to_switch_off() -> None:
    with torch.autocast("cpu", torch.bfloat16), float32_outside_of_steps(torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert type(float32_outside_of_steps(torch.device("cpu"))).__name__ == "nullcontext"


class Negating(ServerRule):
    """Keeps one network and sends another one."""

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Every value with the other sign, to all in common."""
        return Broadcast({name: -value for name, value in shared.items()})


class Negated(FedAvg):
    def make_server(self) -> ServerRule:
        return Negating()


def test_what_is_sent_in_common_is_what_is_scored() -> None:
    template, data = build("FedAvg")
    method = Negated(8, 11, template.backbone, training=LocalTraining(lr=0.02, epochs=1))
    scored = fit(method, data, 1).callbacks[0].values[1, "server", "test", "accuracy"]
    images, labels = data.pool.images, data.pool.labels
    tested = [tuple(rows.tolist()) for rows in data.held_out["test"].values()]

    def accuracies() -> list[float]:
        made = {rows: method.eval()(data.transform(images[[*rows]], None)).argmax(1) for rows in tested}
        return [(guessed == labels[[*rows]]).double().mean().item() for rows, guessed in made.items()]

    with torch.no_grad():
        own = accuracies()
        for name in method.roles.shared:
            method.get_parameter(name).neg_()
        sent = accuracies()
    assert sent != own
    assert scored.tolist() == pytest.approx(sent)


class Anchored(FedVPT):
    """Held near where its own head was when the round began."""

    moved: list[float]

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """The head as it is."""
        return {"start": client.parameters["head.weight"]}

    def client_loss(self, client: Client, batch: Any) -> tuple[Tensor, Values]:
        """The loss, and how far the head has moved since ``prepare``."""
        moved = (client.parameters["head.weight"] - client.prepared["start"]).square().sum()
        return super().client_loss(client, batch) + 0 * moved, {"moved": moved.detach()}


@pytest.mark.parametrize("width", [1, 4])
def test_what_prepare_returns_stays_as_it_was(width: int) -> None:
    template, data = build("FedVPT", f"--data.cohort_width={width}")
    method = Anchored(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
    trainer = fit(method, data, 1)
    moved = trainer.callbacks[0].values[1, "local", "train", "moved"]
    assert (moved[~moved.isnan()] > 0).any()


@pytest.mark.parametrize("asked", ["current_epoch", "global_step"])
def test_a_step_does_not_ask_the_trainer_how_far_it_is(asked: str) -> None:
    class Scheduled(FedAvg):
        def client_loss(self, client: Client, batch: Any) -> Any:
            """The loss, ten times as much later on."""
            return super().client_loss(client, batch) * (10 if getattr(self, asked) > 2 else 1)

    template, data = build("FedAvg")
    method = Scheduled(8, 11, template.backbone, training=LocalTraining(lr=0.02, epochs=1))
    assert getattr(method, asked) == 0
    with pytest.raises(MisconfigurationException, match=rf"self\.{asked} in a step, .* client\.round\.number"):
        fit(method, data, 1)


@pytest.mark.parametrize(("given", "width"), [("2", 2), ("auto", 3)])
def test_a_width_that_is_given_counts_when_a_run_goes_on(given: str, width: int) -> None:
    _, data = build("FedAvg", f"--data.cohort_width={given}")
    data.setup()
    method, _ = build("FedAvg")
    fit(method, data, 1)
    state = data.state_dict() | {"width": 3}
    data.load_state_dict(state)
    assert data.loaders is not None
    assert data.loaders.width == width
