"""A federation of separate clients that exchange bytes with a server: bit for bit the simulation's numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from federation import build, clients_and_server, fit
from safetensors.torch import load, save

from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Parcel, Round, Uploads, Values
from benchmark.internals import tree_flatten
from benchmark.live import LocalClient, OwnImages
from datamodules.source import ImagePool

ROUNDS = 3
#: every tensor that has passed between the processes, by name
Wire = list[Values]


def own_images(data: Any, client: int) -> OwnImages:
    """The images of one client, in a pool of their own."""
    train, held = data.train_indices[client], {split: rows[client] for split, rows in data.held_out.items()}
    rows = np.concatenate([train, *held.values()])
    pool = ImagePool(
        images=data.pool.images[rows],
        labels=data.pool.labels[rows],
        test=torch.zeros(len(rows), dtype=torch.bool),
        domains=torch.zeros(len(rows), dtype=torch.int64),
        group=torch.arange(len(rows)),
    )
    ends = np.cumsum([len(train), *map(len, held.values())])
    places = np.split(np.arange(len(rows)), ends[:-1])
    scored = dict(zip(held, places[1:], strict=True))
    return OwnImages(pool, data.transform, places[0], scored, cache_features=data.cache_features)


def over_the_wire(sent: Values, wire: Wire) -> Values:
    """Send values as bytes that hold numbers alone; return the new tensors that arrive."""
    arrived = load(save({name: value.contiguous() for name, value in sent.items()}))
    wire.append(arrived)
    return arrived


def to_client(sent: Broadcast, place: int, wire: Wire) -> Broadcast:
    """Return the part of a broadcast that the receiver at position ``place`` gets, sent over the wire."""
    parts = {f"common/{n}": v for n, v in sent.common.items()} | {f"own/{n}": v[place] for n, v in sent.own.items()}
    parts |= {f"masks/{n}": v[place] for n, v in sent.masks.items()}
    found: dict[str, Values] = {"common": {}, "own": {}, "masks": {}}
    for name, value in over_the_wire(parts, wire).items():
        part, _, of = name.partition("/")
        found[part][of] = value if part == "common" else value.unsqueeze(0)
    return Broadcast(**found)


class Live:
    """A server and its clients, who share nothing but bytes.

    Args:
        conf: the method.
        overrides: options of the command line.
    """

    def __init__(self, conf: str, *overrides: str) -> None:
        torch.manual_seed(0)
        method, data = build(conf, *overrides)
        data.setup()
        data.match(method)
        self.wire: Wire = []
        self.terms = data.federation.terms
        self.sizes = data.train_sizes
        self.method, self.data, self.overrides, self.conf = method, data, overrides, conf
        self.clients = {number: self.client(number) for number in self.terms.training_clients}
        method.join(data)
        self.rule = method.make_server()
        self.shared = method.initial_values()
        self.rule.start(dict(self.shared), self.terms)
        self.shared = {name: self.shared[name] for name in method.roles.shared}

    def client(self, number: int) -> LocalClient:
        """A client that has just been started."""
        torch.manual_seed(0)
        method, _ = build(self.conf, *self.overrides)
        return LocalClient(method, number, own_images(self.data, number), self.terms, ROUNDS)

    def round(self, number: int) -> None:
        """Train for a round."""
        round = Round(number, tuple(self.rule.select(number)), self.terms.seed)
        sent = self.rule.broadcast(round, dict(self.shared), round.clients)
        parcels = []
        for place, client in reversed([*enumerate(round.clients)]):  # they answer in any order
            received = to_client(sent, place, self.wire)
            parcel, _ = self.clients[client].train(round, received)
            values = over_the_wire({n: v[0] for n, v in parcel.values.items()}, self.wire)
            known = sent.common | {name: rows[place] for name, rows in sent.own.items()}
            began = {name: known[name].unsqueeze(0) for name in values if name in known}
            parcels.append(Parcel((client,), {n: v.unsqueeze(0) for n, v in values.items()}, began, {}))
        self.shared |= self.rule.aggregate(round, self.shared, Uploads.gathered(parcels, self.sizes, number))

    def scores(self) -> dict[tuple[str, str, str, int], float]:
        """Every client's metrics, by metric, point, split and number."""
        clients = self.terms.training_clients
        sent = self.rule.broadcast(Round(ROUNDS, (), self.terms.seed), dict(self.shared), clients)
        found = {}
        for place, client in enumerate(clients):
            made = self.clients[client].evaluate(ROUNDS, to_client(sent, place, self.wire))
            for (point, split), scores in made.items():
                for metric, values in scores.compute().items():
                    found[metric, point, split, client] = values[client].item()
        return found


def assert_same(left: Any, right: Any) -> None:
    """Every tensor of two states is equal, and so is all else."""
    leaves, of = tree_flatten(left)
    others, like = tree_flatten(right)
    assert of == like
    for one, other in zip(leaves, others, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


#: Kept features are made of all images together in a simulation, and may round by where an image stands among them.
OPTIONS = ("--data.clients_per_round=4", "--data.clients_at_once=1", "--data.cache_features=false")


@pytest.mark.parametrize("conf", ["FedVPT", "PFedPG", "FedAvg", "FedBABU", "PFedBayesPT", "FedPGP"])
def test_clients_over_bytes_are_those_of_the_simulation(conf: str) -> None:
    torch.manual_seed(0)
    simulated, data = build(conf, *OPTIONS)
    fit(simulated, data, ROUNDS, settings={"check_val_every_n_epoch": ROUNDS})
    expected = clients_and_server(simulated)

    live = Live(conf, *OPTIONS)
    for number in range(1, ROUNDS + 1):
        live.round(number)
    for name, value in live.shared.items():
        assert torch.equal(value, expected[name]), name
    assert_same(dict(live.rule.state_dict()), dict(simulated.server.rule.state_dict()))
    for number, client in live.clients.items():
        for name, value in client.state().items():
            assert torch.equal(value, expected[f"store.{name}"][number]), (name, number)
    whole = {
        (metric, point, split): scores
        for (point, split), of in simulated.evaluation.scores.items()
        for metric, scores in of.compute().items()
    }
    found = live.scores()
    assert found
    for (metric, point, split, client), value in found.items():
        # A loss may round by how many clients are scored together; which class is the likeliest does not.
        most = 1e-6 if metric == "loss" else 0
        expected_value = whole[metric, point, split][client].item()
        np.testing.assert_allclose(value, expected_value, rtol=most, err_msg=f"{metric} {point} {split} {client}")
    # Nothing but what the roles say has left a client or the server.
    roles = simulated.roles
    allowed = {*roles.shared, *roles.uploaded, *roles.reported}
    travelled = {name.removeprefix("common/").removeprefix("own/") for message in live.wire for name in message}
    assert travelled <= allowed
    assert travelled.isdisjoint(set(roles.personal) - set(roles.uploaded))


def test_a_client_that_is_started_again_goes_on_from_its_kept_state() -> None:
    whole, broken = Live("FedPer", *OPTIONS), Live("FedPer", *OPTIONS)
    whole.round(1)
    broken.round(1)
    for number, client in list(broken.clients.items()):
        kept = load(save(client.state()))
        assert kept
        broken.clients[number] = broken.client(number)
        broken.clients[number].restore(kept)
    for live in (whole, broken):
        live.round(2)
    for name, value in whole.shared.items():
        assert torch.equal(value, broken.shared[name])
    for number, client in whole.clients.items():
        assert_same(client.state(), broken.clients[number].state())
    state = whole.clients[0].state()
    name = min(state)
    for wrong, said in [
        (state | {"x": torch.ones(1)}, r"x is \(\(1,\), torch.float32\); expected nothing of that name"),
        ({n: v for n, v in state.items() if n != name}, rf"{name} is not there; expected \("),
        (state | {name: state[name].flatten()[:1]}, rf"{name} is \(\(1,\), torch.float32\); expected \("),
        (state | {name: state[name].double()}, rf"{name} is \(.*torch.float64\); expected \(.*torch.float32\)"),
    ]:
        with pytest.raises(ConfigurationError, match=f"the kept state is of another method than FedPer: {said}"):
            whole.clients[0].restore(wrong)


def test_a_client_that_cannot_be_one_is_told_before_it_trains() -> None:
    method, data = build("HeadTune", "--data.clients_per_round=4")
    data.setup()
    terms, own = data.federation.terms, own_images(data, 0)
    with pytest.raises(ConfigurationError, match="client 11 is none of this federation's 11, from 0"):
        LocalClient(method, 11, own, terms, 1)
    other = own_images(data, 0)
    other.pool.labels[2] = 8
    with pytest.raises(ConfigurationError, match=r"client 0 has images of classes \d to 8, and the federation"):
        LocalClient(method, 0, other, terms, 1)
    own.train = np.tile(own.train, 9)
    with pytest.raises(ConfigurationError, match="client 0 trains on 45 images, and the federation's terms say"):
        LocalClient(method, 0, own, terms, 1)
    own.train = own.train[:0]
    with pytest.raises(ConfigurationError, match="client 0 holds no image to train on"):
        LocalClient(method, 0, own, terms, 1)
