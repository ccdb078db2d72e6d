"""The terms of a federation: all that a server's rule knows of it, and what makes a client's steps its own."""

import pytest
import torch
from federation import CONF, SIZES, build, terms

from benchmark.contract import MiniBatch, Stage
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.simulation import Simulation

METHODS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "base")
#: More than any client holds, so that the largest one decides how long a mini-batch is.
BATCH = "--data.batch_size=64"


def steps_of(simulation: Simulation, stage: Stage, clients: list[int], client: int) -> list[MiniBatch]:
    """One client's mini-batches of a round, with its padding and its draws."""
    phases, facts = simulation.phases[stage], simulation.federation
    plan = RoundPlan(clients, facts.holdings.train_rows, facts.terms, phases, stage, len(clients), 1)
    own = []
    for number in range(len(plan.steps)):
        step = plan[number]
        if client in step.clients:
            batch, k = simulation.mini_batch(step), step.clients.index(client)
            noise = {name: value[k] for name, value in batch.noise.items()}
            features = {name: value[k] for name, value in batch.features.items()}
            own.append(MiniBatch(batch.x[k], batch.y[k], batch.mask[k], batch.phase, noise=noise, features=features))
    return own


@pytest.mark.parametrize("conf", METHODS)
def test_a_clients_steps_do_not_depend_on_who_else_takes_part(conf: str) -> None:
    method, data = build(conf, BATCH)
    data.setup()
    simulation = method.join(data)
    largest = max(range(11), key=SIZES.__getitem__)
    for stage in (Stage.TRAIN, Stage.FINETUNE):
        every = steps_of(simulation, stage, list(range(11)), client=1)
        for clients in ([c for c in range(11) if c != largest], [1]):
            alone = steps_of(simulation, stage, clients, client=1)
            assert len(alone) == len(every)
            for one, other in zip(every, alone, strict=True):
                for name in ("x", "y", "mask"):
                    assert torch.equal(getattr(one, name), getattr(other, name)), name
                assert len(one.mask) == simulation.terms.row == max(SIZES)
                for mine, theirs in ((one.noise, other.noise), (one.features, other.features)):
                    assert mine.keys() == theirs.keys()
                    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.parametrize("conf", METHODS)
def test_a_rule_starts_with_terms_alone(conf: str) -> None:
    method, data = build(conf)
    data.setup()
    method.join(data)
    rule, public = method.make_server(), terms(11, participants=4)
    rule.start(method.initial_values(), public)
    assert rule.terms is public
    assert rule.select(1) == rule.select(1)
    assert len(rule.select(1)) == 4


def test_the_row_is_the_batch_where_a_client_fills_one() -> None:
    _, data = build("FedVPT")
    data.setup()
    assert (data.federation.terms.row, data.federation.terms.own_row) == (4, max(SIZES))
