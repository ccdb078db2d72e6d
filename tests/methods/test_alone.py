"""ONE client of a federation, stepped alone through the contract: equal to its steps in the simulation."""

from typing import Any

import pytest
import torch
from federation import SIZES, build, fit
from lightning.pytorch.callbacks import Callback
from live_client import constructed, mini_batch, parameters_of, train

from benchmark.federation import Broadcast, Round, Uploads, Values

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


class Overheard(Callback):
    """Records a client's personal, received and uploaded values in a round."""

    def __init__(self, client: int, round: int) -> None:
        self.client, self.round = client, round

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        rule, self.method = pl_module.server.rule, pl_module
        send, collect = rule.broadcast, rule.aggregate

        def broadcast(round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
            sent = send(round, shared, clients)
            if round.clients and round.number == self.round and self.client in clients:
                own = {name: rows[clients.index(self.client)] for name, rows in sent.rows().items()}
                self.received = {name: value.clone() for name, value in (sent.common | own).items()}
                self.before = self.personal()
            return sent

        def aggregate(round: Round, shared: Values, uploads: Uploads) -> Values:
            if round.number == self.round:
                place = uploads.clients.index(self.client)
                self.after = {name: rows[place].clone() for name, rows in uploads.values.items()} | self.personal()
            return collect(round, shared, uploads)

        rule.broadcast, rule.aggregate = broadcast, aggregate

    def personal(self) -> Values:
        return {name: self.method.store.all_rows(name)[self.client].clone() for name in self.method.roles.personal}


@pytest.mark.parametrize("conf", ["FedKgCoOp", "FedOTP", "PFedMoAP"])
def test_a_client_alone_takes_the_steps_that_it_takes_in_the_simulation(conf: str) -> None:
    simulated, data = build(conf, "--data.batch_size=64", "--data.clients_per_round=11", "--data.clients_at_once=3")
    overheard = Overheard(client=2, round=2)
    fit(simulated, data, 2, [overheard])

    method = constructed(conf)
    for name, value in overheard.before.items():
        method.get_parameter(name).data.copy_(value)
    start = {name: value.clone() for name, value in (parameters_of(method) | overheard.received).items()}
    made = train(method, overheard.received, mini_batch(method, sum(SIZES[:2]), sum(SIZES[:3])))

    assert set(made) == set(overheard.after)
    for name, value in made.items():
        torch.testing.assert_close(value, overheard.after[name], rtol=1e-4, atol=1e-5)
    moved = {name.split(".")[0] for name, value in made.items() if (value - start[name]).abs().max() > 1e-3}
    assert moved == {*method.shared, *method.personal}
