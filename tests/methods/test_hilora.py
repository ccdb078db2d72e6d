"""HiLoRA: mean products, subspaces and clusters by hand, and what rests, travels and is shared in each stage."""

from typing import Any

import pytest
import torch
from federation import build, fit, learned
from torch import Tensor

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from benchmark.method import Server
from benchmark.seeds import torch_generator
from methods.hilora import HiLoRA, overlap
from methods.subspaces import basis, distances, gaps, mean_product, spectral_clusters
from methods.tiers import TierRule

FEW = ("--data.partition=federation.Few", "--data.clients_per_round=4", "--data.clients_at_once=2")
#: a round in each of the first two stages
ONE_EACH = "--model.init_args.cluster_rounds=1"
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def drawn(*shape: int, key: str) -> Tensor:
    return torch.randn(shape, generator=torch_generator(key), dtype=torch.float64)


# ------------------------------------------------------------------------------------------ formulas


def test_the_mean_product_by_hand() -> None:
    """B_1 A_1 = diag(4, 0) and B_2 A_2 = diag(0, 2): their mean is diag(2, 1), of which rank 1 keeps the 2."""
    a = torch.tensor([[[4.0, 0.0]], [[0.0, 2.0]]])
    b = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])
    made_a, made_b = mean_product(a, b, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(made_b, torch.tensor([[1.0], [0.0]], dtype=torch.float64))
    torch.testing.assert_close(made_a, torch.tensor([[2.0, 0.0]], dtype=torch.float64))


def test_the_mean_product_is_the_nearest_matrix_of_its_rank() -> None:
    a, b, weights = drawn(4, 3, 2, 6, key="a"), drawn(4, 3, 5, 2, key="b"), torch.tensor([0.1, 0.2, 0.3, 0.4])
    made_a, made_b = mean_product(a, b, weights)
    whole = torch.einsum("s,slor,slri->loi", weights.double(), b, a)
    u, sizes, v = torch.linalg.svd(whole, full_matrices=False)
    nearest = u[..., :2] * sizes[:, None, :2] @ v[:, :2]
    torch.testing.assert_close(made_b @ made_a, nearest)
    torch.testing.assert_close(made_b.mT @ made_b, torch.eye(2, dtype=torch.float64).expand(3, 2, 2))
    largest = made_b.gather(1, made_b.abs().argmax(1, keepdim=True))
    assert (largest > 0).all()


@pytest.mark.parametrize("clients", [1, 3])
def test_the_mean_of_equal_products_is_their_product(clients: int) -> None:
    a, b = drawn(2, 2, 6, key="a"), drawn(2, 5, 2, key="b")
    weights = torch.full((clients,), 1 / clients)
    made_a, made_b = mean_product(a.expand(clients, 2, 2, 6), b.expand(clients, 2, 5, 2), weights)
    torch.testing.assert_close(made_b @ made_a, b @ a, atol=1e-6, rtol=1e-6)


def lines(*angles: float) -> Tensor:
    """Subspaces of the plane at these angles, [N, 2, 1]."""
    at = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([at.cos(), at.sin()], 1).unsqueeze(2)


def test_distances_gaps_and_clusters_by_hand() -> None:
    of = lines(0.0, 0.1, torch.pi / 2, torch.pi / 2 + 0.1)
    apart = distances(basis(of), basis(of))
    torch.testing.assert_close(apart[0], torch.tensor([0, 0.009967, 1, 0.990033]).double(), atol=1e-6, rtol=0)
    sigma = 0.990033
    affinity = torch.exp(-apart.square() / (2 * sigma**2))
    torch.testing.assert_close(affinity[0], torch.tensor([1, 0.999949, 0.600425, 0.606531]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(gaps(affinity), torch.tensor([0.752723, 0.245357, 0.003808]).double(), atol=2e-6, rtol=0)
    assert spectral_clusters(apart, None, 0).tolist() == [0, 0, 1, 1]
    order = [2, 0, 3, 1]
    assert spectral_clusters(apart[order][:, order], None, 0).tolist() == [0, 1, 0, 1]


def test_alike_clients_are_one_cluster() -> None:
    assert spectral_clusters(torch.zeros(4, 4), None, 0).tolist() == [0, 0, 0, 0]


def test_a_distance_knows_the_subspace_alone() -> None:
    b, turn = drawn(3, 4, 6, 2, key="b"), drawn(2, 2, key="turn")
    apart = distances(basis(b), basis(b))
    torch.testing.assert_close(distances(basis(b @ turn), basis(b)), apart)
    torch.testing.assert_close(apart, apart.mT)
    torch.testing.assert_close(apart.diagonal(), torch.zeros(3).double(), atol=1e-9, rtol=0)
    assert ((apart >= -1e-9) & (apart <= 1)).all()


def test_the_penalty_by_hand() -> None:
    before, after = torch.tensor([[[1.0], [0.0]]]), torch.tensor([[[0.6], [0.8]]])
    assert overlap({"q": before}.items(), {"q": after}).item() == pytest.approx(0.36)


# ------------------------------------------------------------------------------------------ stages


class Seen(TierRule):
    """Remembers what has arrived."""

    def aggregate(self, round: Round, shared: Any, uploads: Uploads) -> Any:
        self.__dict__.setdefault("uploads", []).append(uploads)
        made = super().aggregate(round, shared, uploads)
        self.__dict__.setdefault("made", []).append(made)
        return made


def staged(rounds: int, *options: str) -> Any:
    method, data = build("HiLoRA", *FEW, ONE_EACH, *options)
    rule = Seen(2)
    fit(method, data, rounds, [Server(rule)])
    return method


def tier(method: Any, name: str) -> dict[str, Tensor]:
    return {n: value for n, value in learned(method).items() if n.startswith((f"{name}.", f"store.{name}."))}


def test_each_stage_sends_and_moves_its_tier_alone() -> None:
    made = [staged(rounds) for rounds in (1, 2, 3)]
    uploads = made[2].server.rule.uploads
    prefixes = [{name.split(".")[0] for name in each.values} for each in uploads]
    assert prefixes == [{"lora"}, {"cluster_lora"}, set()]
    one, _, three = made
    assert all(torch.equal(value, tier(three, "lora")[name]) for name, value in tier(one, "lora").items())
    tiers = [method.server.rule.tiers.all_rows("cluster_lora.b.q") for method in made]
    assert not tiers[0].any()
    assert tiers[1].any()
    assert torch.equal(tiers[1], tiers[2])
    leaves = [method.store.all_rows("own_lora.b.q") for method in made]
    assert not leaves[1].any()
    assert leaves[2].any()
    sizes = {name: value.numel() for name, value in three.named_parameters() if name.startswith("lora.")}
    per_client = 4 * sum(sizes.values())
    up = [row[2] for row in three.server.traffic.rounds]
    assert up == [4 * per_client, 4 * per_client, 0]


def test_the_root_is_the_mean_product_and_clusters_share_the_root_alone() -> None:
    rule = staged(2).server.rule
    first, second = rule.uploads
    for target in ("q", "v"):
        a, b = (first.values[f"lora.{kind}.{target}"] for kind in "ab")
        expected = mean_product(a, b, first.weights / first.weights.sum())
        for kind, value in zip("ab", expected, strict=True):
            torch.testing.assert_close(rule.made[0][f"lora.{kind}.{target}"], value.float())
    cluster = rule.cluster_of[list(second.clients)]
    for number in (0, 1):
        members = second.of((cluster == number).nonzero().flatten().tolist())
        if members.clients:
            a, b = (members.values[f"cluster_lora.{kind}.q"] for kind in "ab")
            expected = mean_product(a, b, members.weights / members.weights.sum())
            torch.testing.assert_close(rule.tiers.all_rows("cluster_lora.a.q")[number], expected[0].float())


def test_clients_receive_their_clusters_factors_and_score_with_them() -> None:
    method = staged(2)
    rule, shared = method.server.rule, method.simulation.shared()
    sent = rule.broadcast(Round(2, (), 0), shared, tuple(range(6)))
    assert (rule.cluster_of >= 0).all()
    for client in range(6):
        of = rule.tiers.all_rows("cluster_lora.b.v")[rule.cluster_of[client]]
        assert torch.equal(sent.own["cluster_lora.b.v"][client], of)
    assert set(sent.common) == {name for name in shared if name.startswith("lora.")}


def test_a_leaf_from_the_first_round_on_is_local_lora() -> None:
    """All images in one mini-batch: a phase of another number has them in another order."""
    found = []
    for conf, options in (("LocalLoRA", ()), ("HiLoRA", ("root_rounds=0", "cluster_rounds=0"))):
        given = ("training.epochs=2", "training.momentum=0.9", "training.lr=0.02", "rank=2", *options)
        method, data = build(conf, *FEW, "--data.batch_size=8", *(f"--model.init_args.{option}" for option in given))
        if isinstance(method, HiLoRA):  # the same draw
            for target, value in method.own_lora.a.items():
                value.data.copy_(method.lora.a[target])
        fit(method, data, 2)
        found.append({name.replace("own_lora", "lora"): value for name, value in learned(method).items()})
    kept = "store.lora", "store.head", "metric.1/server", "metric.2/server"
    local, leaf = ({n: v for n, v in each.items() if n.startswith(kept)} for each in found)
    assert local.keys() == leaf.keys()
    for name, value in local.items():
        torch.testing.assert_close(leaf[name], value, equal_nan=True, rtol=1e-4, atol=1e-6, msg=name)


def test_a_newcomer_joins_the_nearest_cluster_with_the_servers_root() -> None:
    method, data = build("HiLoRA", *FEW[:1], FEW[2], ONE_EACH, "--data.new_clients=0.34", "--data.clients_per_round=4")
    rule = Seen(2)
    fit(method, data, 2, [Server(rule)])
    seen = rule.seen.nonzero().flatten().tolist()
    newcomer = data.new_clients[0]
    fitted = {f"lora.b.{t}": rule.spans.all_rows(t)[[seen[0]]] for t in ("q", "v")}
    fitted |= {name: value.unsqueeze(0) for name, value in method.simulation.shared().items() if name not in fitted}
    made = rule.adapt(Round(2, (), 0), (newcomer,), 0, fitted)
    # Its subspace is that of a client, whose cluster it joins unless the cluster's other members lie farther off.
    numbers = [rule.cluster_of[client].item() for client in seen]
    spans = {t: rule.spans.all_rows(t)[seen] for t in ("q", "v")}
    apart = torch.stack([distances(basis(s[:1]), basis(s))[0] for s in spans.values()]).mean(0)
    means = {n: apart[[k for k, of in enumerate(numbers) if of == n]].mean() for n in set(numbers)}
    nearest = min(means, key=means.__getitem__)
    assert torch.equal(made["cluster_lora.b.q"][0], rule.tiers.all_rows("cluster_lora.b.q")[nearest])
    assert torch.equal(made["lora.b.q"][0], method.get_parameter("lora.b.q"))
    assert rule.adapt(Round(2, (), 0), (newcomer,), 2, fitted) == {}
    assert [phase.epochs for phase in method.finetune_phases(new=True)] == [1, 0, 5]
    assert method.simulation.phases[Stage.ADAPT]


@pytest.mark.parametrize("change", ["--data.clients_at_once=3", "--data.num_workers=1"])
def test_neither_width_nor_workers_change_what_comes_of_three_stages(change: str) -> None:
    left, right = (learned(staged(3, *options)) for options in ((), (change,)))
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], equal_nan=True, rtol=1e-4, atol=2e-5, msg=name)


def test_without_a_root_all_are_one_cluster_and_newcomers_keep_what_they_have() -> None:
    rule = staged(2, "--model.init_args.root_rounds=0", "--model.init_args.cluster_rounds=2").server.rule
    assert rule.cluster_of.tolist() == [0] * 6
    fitted = {name: value.clone() for name, value in root_of(rule).items()}
    assert rule.adapt(Round(2, (), 0), (0,), 0, fitted).keys() == fitted.keys()
    with pytest.raises((ConfigurationError, ValueError), match="rank=0 leaves no subspace"):
        build("HiLoRA", "--model.init_args.rank=0")


def root_of(rule: TierRule) -> dict[str, Tensor]:
    return {name: rule.root.all_rows(name) for name in rule.root.names}


def test_who_was_never_seen_joins_the_largest_cluster() -> None:
    rule = staged(2, "--data.clients_per_round=3").server.rule
    unseen = (~rule.seen).nonzero().flatten()
    assert len(unseen)
    known = rule.cluster_of[rule.seen].bincount()
    assert (rule.cluster_of[unseen] == known.argmax()).all()


def test_a_stage_that_the_run_does_not_reach_is_named() -> None:
    method, data = build("HiLoRA", *FEW, ONE_EACH)
    with pytest.warns(UserWarning, match=r"HiLoRA trains own_lora from round 3 on, and the run has 2: that never happ"):
        fit(method, data, 2)
