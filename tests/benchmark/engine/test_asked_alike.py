"""Training and evaluation ask a server's rule for the same values, in every precision of the Trainer."""

from itertools import pairwise

import pytest
import torch
from federation import EACH_ROUND, build, fit
from torch import Tensor

from benchmark.contract import LocalTraining
from benchmark.engine.device.precision import float32_outside_of_steps
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
    fit(method, data, 2, settings=EACH_ROUND | {"precision": precision})
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert {made for made, _ in method.server.rule.made_in} <= {expected, torch.float32}
    assert {default for _, default in method.server.rule.made_in} == {torch.float32}
    # An evaluation and the round after it ask of the same values: what was sent changes with these alone, twice.
    sent = [made for _, made in method.server.rule.sent]
    assert len(sent) > 4
    assert sum(not torch.equal(one, other) for one, other in pairwise(sent)) == 2


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
