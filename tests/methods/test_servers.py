"""The servers that any averaging method can be given: by hand, round by round, and by the command line."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from federation import CONF, build, fit, learned, terms
from refusal import refused

from benchmark.engine.rounds import Server
from benchmark.federation import Round, Uploads, Values
from benchmark.records.record_file import read_record
from benchmark.run.cli import main
from benchmark.server import ServerRule
from methods.servers import ClusteredServer, FedAdam, FedAvgM, FedYogi


def round_of(rule: ServerRule, number: int, shared: Values, rows: list[list[float]]) -> Values:
    """One round of clients 0, 1, ... that upload these rows; client k holds k + 1 images."""
    clients = tuple(range(len(rows)))
    weights = torch.arange(1, len(rows) + 1, dtype=torch.float64)
    return rule.aggregate(Round(number, clients, 0), shared, Uploads(clients, {"w": torch.tensor(rows)}, weights))


def started(rule: ServerRule, clients: int = 2) -> ServerRule:
    rule.start({"w": torch.zeros(2)}, terms(clients))
    return rule


#: What two clients add to the shared values in each round; the mean, weighted 1 : 2, is (3, -1) and then (1, 2).
UPDATES = ([[1.0, 5.0], [4.0, -4.0]], [[3.0, 0.0], [0.0, 3.0]])
MEANS = ((3.0, -1.0), (1.0, 2.0))


def by_hand(rule: ServerRule) -> list[list[float]]:
    """The values after each round by the papers' formulas, in Python's numbers."""
    values = []
    for column in range(2):
        w, m, path = 0.0, 0.0, []
        v = rule.tau**2 if isinstance(rule, FedAdam) else 0.0
        for means in MEANS:
            g = -means[column]
            if isinstance(rule, FedAdam):
                beta1, beta2 = rule.betas
                m = beta1 * m + (1 - beta1) * g
                if isinstance(rule, FedYogi):
                    v -= (1 - beta2) * g**2 * math.copysign(1, v - g**2)
                else:
                    v = beta2 * v + (1 - beta2) * g**2
                w -= rule.lr * m / (math.sqrt(v) + rule.tau)
            else:
                assert isinstance(rule, FedAvgM)
                m = rule.momentum * m + g
                w -= rule.lr * m
            path.append(w)
        values.append(path)
    return [list(row) for row in zip(*values, strict=True)]


OPTIMIZERS = [
    FedAvgM(lr=0.5, momentum=0.8),
    FedAdam(lr=0.1, beta1=0.8, beta2=0.6, tau=0.25),
    FedYogi(lr=0.1, beta1=0.8, beta2=0.6, tau=0.25),
    FedYogi(lr=0.1, beta1=0.8, beta2=0.6, tau=1.5),  # its second moment falls in the column of small updates
]


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_two_rounds_of_a_server_optimizer_by_hand(rule: ServerRule) -> None:
    started(rule)
    shared = {"w": torch.zeros(2)}
    for number, (updates, expected) in enumerate(zip(UPDATES, by_hand(rule), strict=True), 1):
        shared = round_of(rule, number, shared, (shared["w"] + torch.tensor(updates)).tolist())
        assert shared["w"].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_two_rounds_of_fedadam_in_numbers() -> None:
    # g = -3: m = -0.6, v = 0.6 * 0.0625 + 0.4 * 9 = 3.6375; g = -1: m = -0.68, v = 0.6 * 3.6375 + 0.4 = 2.5825.
    first = 0.1 * 0.6 / (3.6375**0.5 + 0.25)
    assert by_hand(OPTIMIZERS[1])[0][0] == pytest.approx(first)
    assert by_hand(OPTIMIZERS[1])[1][0] == pytest.approx(first + 0.1 * 0.68 / (2.5825**0.5 + 0.25))


def test_without_momentum_at_rate_one_the_server_is_fedavgs_but_for_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    shared = {"w": torch.randn(1000, generator=generator)}
    uploads = Uploads((0, 1), {"w": torch.randn(2, 1000, generator=generator)}, torch.tensor([1.0, 3.0]).double())
    rule = FedAvgM(lr=1.0, momentum=0.0)
    rule.start(shared, terms(2))
    mean = ServerRule().aggregate(Round(1, (0, 1), 0), shared, uploads)["w"]
    made = rule.aggregate(Round(1, (0, 1), 0), shared, uploads)["w"]
    ratio = mean / shared["w"]
    near = (ratio > 0.5) & (ratio < 2)
    assert 50 < near.sum() < 950
    assert torch.equal(made[near], mean[near])
    bound = torch.finfo(torch.float32).eps / 2 * ((shared["w"].double() - mean).abs() + mean.double().abs())
    assert ((made.double() - mean).abs() <= bound * 1.000001).all()


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_clients_that_move_alike_share_a_model(similarity: str) -> None:
    rule = started(ClusteredServer(2, 2, similarity), clients=6)
    shared = {"w": torch.zeros(2)}
    shared = round_of(rule, 1, shared, [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert not rule.broadcast(Round(1, (), 0), shared, (0, 1)).own  # one model for all, before the clustering round
    at = shared["w"]
    moves = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]])
    shared = round_of(rule, 2, shared, (at + moves).tolist())
    torch.testing.assert_close(shared["w"], at + torch.tensor([0.44, 0.63]))  # weights 1, 2, 3, 4
    sent = rule.broadcast(Round(3, (0, 1, 2, 3), 0), shared, (0, 1, 2, 3, 5))
    assert not sent.common
    even, odd = at + torch.tensor([1.0, 0.075]), at + torch.tensor([0.4 / 6, 1.0])
    torch.testing.assert_close(sent.own["w"], torch.stack([even, odd, even, odd, shared["w"]]))

    # Client 5 comes for the first time and lies near the odd ones; its cluster's model is then its alone.
    new = torch.stack([even + 1, odd])
    uploads = Uploads((0, 5), {"w": new}, torch.tensor([1.0, 6.0]).double())
    shared = rule.aggregate(Round(3, (0, 5), 0), shared, uploads)
    sent = rule.broadcast(Round(3, (), 0), shared, (1, 2, 4, 5))
    torch.testing.assert_close(sent.own["w"], torch.stack([odd, even + 1, shared["w"], odd]))


@pytest.mark.parametrize(("similarity", "together"), [("cosine", (0, 2)), ("euclidean", (0, 1))])
def test_an_angle_does_not_see_how_far_clients_move(similarity: str, together: tuple[int, int]) -> None:
    rule = started(ClusteredServer(2, 1, similarity), clients=4)
    shared = round_of(rule, 1, {"w": torch.zeros(2)}, [[0.1, 0.0], [0.0, 0.1], [9.0, 0.0], [0.0, 9.0]])
    sent = rule.broadcast(Round(2, (), 0), shared, (0, 1, 2, 3)).own["w"]
    assert torch.equal(sent[together[0]], sent[together[1]])
    assert not torch.equal(sent[0], sent[3])


def test_a_client_that_comes_later_joins_a_cluster_that_there_is() -> None:
    """With fewer participants than clusters some models belong to no client."""
    rule = started(ClusteredServer(3, 1), clients=3)
    shared = round_of(rule, 1, {"w": torch.zeros(2)}, [[5.0, 0.0], [0.0, 5.0]])
    uploads = Uploads((2,), {"w": torch.tensor([[0.1, 0.2]])}, torch.tensor([1.0]).double())  # near the initial values
    rule.aggregate(Round(2, (2,), 0), shared, uploads)
    sent = rule.broadcast(Round(3, (), 0), shared, (0, 1, 2)).own["w"]
    assert torch.equal(sent[2], sent[1])  # whose cluster it has joined and moved
    assert not torch.equal(sent[2], sent[0])


@pytest.mark.parametrize("rule", [FedAvgM, FedAdam, FedYogi, ClusteredServer])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(rule: type[ServerRule], tmp_path: Path) -> None:
    def run(rounds: int, folder: str, ckpt_path: str | None = None) -> dict[str, torch.Tensor]:
        method, data = build("HeadTune", "--data.clients_per_round=4")
        fit(method, data, rounds, [Server(rule())], ckpt_path, tmp_path / folder, evaluate=False)
        return learned(method)

    whole = run(3, "whole")
    run(1, "part")
    again = run(3, "again", str(tmp_path / "part" / "checkpoints" / "last.ckpt"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


CONFIGS = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / "HeadTune.yaml"), "--trainer.max_epochs=1"]


def test_the_command_line_gives_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", *CONFIGS, f"--run_dir={tmp_path / 'run'}", "--server=FedAdam", "--server.lr=0.1"])
    record = read_record(tmp_path / "run")
    assert (record.server, record.other_server) == ("methods.servers.FedAdam",) * 2
    assert "methods.servers" in (record.code or {})
    given = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["server"]
    assert given == {
        "class_path": "methods.servers.FedAdam",
        "init_args": {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 0.001},
    }
    go_on = [f"--run_dir={tmp_path / 'other'}", f"--ckpt_path={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}"]
    assert "another configuration: server" in refused(capsys, main, ["fit", *CONFIGS, *go_on])


@pytest.mark.parametrize(
    ("conf", "given", "expected"),
    [
        ("PFedPG", ["--server=FedAdam"], "server: PFedPG has a server of its own, GeneratorRule; leave server out"),
        ("Local", ["--server=FedAdam"], "server: Local shares nothing that a server could make anew; leave server out"),
        ("HeadTune", ["--server=FedAdm"], "expected one of ClusteredServer, FedAdam, FedAvgM, FedYogi"),
        (
            "HeadTune",
            ["--server=methods.generator_rule.GeneratorRule"],
            "belongs to a method; expected one of ClusteredServer",
        ),
        ("HeadTune", ["--server=methods.servers.ServerOptimizer", "--server.lr=1"], "is a base of others"),
        ("HeadTune", ["--server=FedAdam", "--server.lr=-1"], "expected a number above 0, got -1"),
        ("HeadTune", ["--server=FedAdam", "--trainer.callbacks=benchmark.engine.rounds.Server"], "holds a Server as"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_in_one_line(
    conf: str, given: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml")]
    assert expected in refused(capsys, main, ["fit", *configs, f"--run_dir={tmp_path / 'run'}", *given])
