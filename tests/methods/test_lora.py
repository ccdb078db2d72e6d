"""Low-rank factors in a federation: the servers' formulas by hand, and settings in which methods are equal."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import build as build_tiny
from federation import fit, learned
from torch import Tensor

from benchmark.backbones.parts import LowRank, Tower
from benchmark.federation import Round, Terms, Uploads
from benchmark.run.cli import FederatedCLI
from methods.alignment import alignment_weights
from methods.fedsdg import FedSDG, GatedLowRank
from methods.flora import StackingRule
from methods.lorafair import FairRule, corrected
from methods.pf2lorapruned import ranks_kept

ROOT = Path(__file__).parents[2]
FEW = ("--data.partition=federation.Few", "--data.clients_per_round=4")
OPTION = "--model.init_args."


def run(conf: str, *options: str, rounds: int = 2) -> Any:
    method, data = build_tiny(conf, *FEW, *(f"{OPTION}{option}" if option[0] != "-" else option for option in options))
    fit(method, data, rounds)
    return method


def values(method: Any, *left_out: str) -> dict[str, Tensor]:
    return {name: value for name, value in learned(method).items() if not any(part in name for part in left_out)}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value.nan_to_num(), right[name].nan_to_num()), name


def uploads(**given: list[Any]) -> Uploads:
    """Uploads of clients with equally many images."""
    made = {name.replace("__", "."): torch.tensor(rows) for name, rows in given.items()}
    count = len(next(iter(made.values())))
    return Uploads(tuple(range(count)), made, torch.ones(count, dtype=torch.float64))


def started(rule: Any, initial: dict[str, Tensor]) -> Any:
    terms = Terms(0, 2, (0, 1), (), 2, 4, False, 4, 2, 4, 4)
    rule.start(initial, terms)
    return rule


# ------------------------------------------------------------------------------------------ LoRA-FAIR

A = torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]])
B = torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]]])


@pytest.mark.parametrize(
    ("weights", "mu", "expected"),
    [
        ((0.5, 0.5), 0.1, (0.407407, 1.185185)),
        ((0.5, 0.5), 0.0, (0.4, 1.2)),
        ((0.75, 0.25), 0.1, (0.709677, 0.580645)),
    ],
)
def test_the_mean_of_b_is_corrected(weights: tuple[float, float], mu: float, expected: tuple[float, float]) -> None:
    made = corrected(A, B, torch.tensor(weights), 0.01, mu).flatten()
    torch.testing.assert_close(made, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_correction_sees_the_row_space_of_a_alone() -> None:
    a, b = torch.eye(2).unsqueeze(1), torch.eye(2).unsqueeze(2)
    half = torch.tensor([0.5, 0.5])
    torch.testing.assert_close(corrected(a, b, half, 0.01).flatten(), torch.full((2,), 0.5).double())


def test_the_corrected_product_is_nearer_and_the_nearer_the_less_it_is_held() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 4, 2, 5, generator=generator), torch.randn(3, 4, 6, 2, generator=generator)
    weights = torch.tensor([0.2, 0.3, 0.5])
    mean = torch.einsum("s,s...->...", weights, a).double()
    aim = torch.einsum("s,s...->...", weights.double(), (b @ a).double())
    away = [(corrected(a, b, weights, rho) @ mean - aim).norm().item() for rho in (1e6, 1.0, 0.1, 0.001)]
    assert away == sorted(away, reverse=True)
    assert away[-1] < away[0]
    scaled = corrected(3 * a, b / 3, weights, 0.1) @ (3 * mean)
    torch.testing.assert_close(scaled, corrected(a, b, weights, 0.1) @ mean)
    same = corrected(a[:1].expand_as(a), b, weights, 0.1)
    torch.testing.assert_close(same, torch.einsum("s,s...->...", weights.double(), b.double()))


def test_a_correction_that_is_held_for_good_is_fedavg_lora() -> None:
    plain = run("FedLoRA", "head=shared", "training.lr=0.1")
    fair = run("LoRAFAIR", "training.lr=0.1", "residual_rho=0.5")
    rule = FairRule(float("inf"))
    rule.start({}, fair.simulation.terms)
    given = uploads(lora__a__q=[[[[1.0, 0.0]]], [[[1.0, 1.0]]]], lora__b__q=[[[[1.0], [0.0]]], [[[0.0], [2.0]]]])
    shared = {name: rows[0] for name, rows in given.values.items()}
    made = rule.aggregate(Round(1, (0, 1), 0), shared, given)
    assert made["lora.b.q"].flatten().tolist() == [0.5, 1.0]
    assert not torch.equal(plain.lora.b["q"], fair.lora.b["q"])
    assert torch.isfinite(fair.lora.b["q"]).all()


# ------------------------------------------------------------------------------------------ stacking


def test_stacked_products_are_averaged_and_factors_begin_anew() -> None:
    given = uploads(
        lora__a__q=[[[[1.0, 0.0]]], [[[0.0, 1.0]]]],
        lora__b__q=[[[[1.0], [0.0]]], [[[0.0], [1.0]]]],
        head=[[0.0], [2.0]],
    )
    shared = {name: rows[0] for name, rows in given.values.items()} | {"merged.weights.q": torch.zeros(1, 2, 2)}
    rule = started(StackingRule(2.0), shared)
    made = rule.aggregate(Round(1, (0, 1), 0), shared, given)
    assert made["merged.weights.q"].tolist() == [[[1.0, 0.0], [0.0, 1.0]]], "2 diag(1/2, 1/2), not 2 times 1/4 all over"
    assert made["head"].tolist() == [1.0]
    assert not made["lora.b.q"].any()
    assert 0 < made["lora.a.q"].abs().max() <= 2**-0.5
    again = rule.aggregate(Round(2, (0, 1), 0), shared, given)["lora.a.q"]
    assert not torch.equal(again, made["lora.a.q"])


def test_one_clients_merged_weights_are_its_adapted_ones() -> None:
    one = "--data.partition.init_args.num_clients=1"
    options = ("--data.partition=federation.Ragged", one, "--data.clients_per_round=1")
    method, data = build_tiny("FLoRA", *options)
    other, same = build_tiny("FedLoRA", *options)
    fit(method, data, 1)
    fit(other, same, 1)
    product = other.lora.scale * other.lora.b["q"] @ other.lora.a["q"]
    torch.testing.assert_close(method.merged.weights["q"], product, atol=1e-6, rtol=1e-4)
    assert method.merged.weights["q"].abs().max() > 1e-4


def test_the_sum_of_earlier_rounds_never_goes_back() -> None:
    method, data = build_tiny("FLoRA", *FEW)
    fit(method, data, 1)
    up = {n for n, _ in method.named_parameters() if n.startswith(("lora.", "merged."))}
    sent = method.trainer.callbacks[0].values
    assert up
    assert sent
    client = type("C", (), {"parameters": dict(method.named_parameters())})()
    assert {name.split(".")[0] for name in method.message(client, {})} == {"lora"}


# ------------------------------------------------------------------------------------------ equal methods


@pytest.mark.parametrize("order", ["joint", "alternate"])
def test_without_own_factors_pf2lora_is_fedavg_lora(order: str) -> None:
    decay = "training.weight_decay=0.0"
    plain = run("FedLoRA", "head=shared", decay)
    assert_same(values(plain), values(run("PF2LoRA", "own_rank=0", f"order={order}", decay), "own_lora"))


def test_a_part_of_factors_is_fedavg_lora() -> None:
    plain = run("FedLoRA")
    part = '{"class_path": "benchmark.backbones.parts.LowRank", "init_args": {"rank": 2}}'
    method = run("FedPart", f"part={part}")
    renamed = {name.replace("part.", "lora."): value for name, value in values(method).items()}
    assert_same(values(plain), renamed)


@pytest.mark.parametrize("first_block", [1, 2])
def test_a_part_of_prompt_tokens_is_fedvpt_and_can_share_the_head(first_block: int) -> None:
    decay = "training.weight_decay=0.001"
    plain = run("FedVPT", f"first_block={first_block}", decay)
    sizes = {"num_tokens": 3, "dim": plain.backbone.embed_dim, "patch_size": plain.backbone.patch_size}
    tokens = {
        "class_path": "benchmark.backbones.prompts.VisualPromptTokens",
        "init_args": {**sizes, "first_block": first_block},
    }
    method = run("FedPart", f"part={json.dumps(tokens)}", decay)
    renamed = {name.replace("part.", "prompt."): value for name, value in values(method).items()}
    assert_same(values(plain), renamed)
    shared = run("FedPart", f"part={json.dumps(tokens)}", decay, "head=shared")
    assert sorted(shared.roles.shared) == ["head.bias", "head.weight", "part.tokens"]
    assert shared.roles.personal == ()
    assert shared.server.traffic.per_client()["up_floats"] == plain.server.traffic.per_client()["up_floats"] + sum(
        value.numel() for value in shared.head.parameters()
    )


def test_tuned_norms_from_a_block_on_take_kept_tokens_and_give_the_same_numbers() -> None:
    norms = (
        '{"class_path": "benchmark.backbones.parts.Norms", "init_args": {"targets": [norm2, final], "first_block": 2}}'
    )
    kept = run("FedPart", f"part={norms}")
    assert kept.inputs == ("features",)
    assert sorted(kept.roles.shared) == [
        f"part.{of}.{norm}" for of in ("biases", "gains") for norm in ("final", "norm2")
    ]
    assert kept.part.gains["final"].any()
    assert kept.part.biases["norm2"].any()
    assert_same(values(kept), values(run("FedPart", f"part={norms}", "--data.cache_features=false")))


def test_without_ranks_the_head_alone_is_trained() -> None:
    assert not list(filter(lambda v: v.numel(), run("FedLoRA", "rank=0", rounds=1).lora.parameters()))
    left, right = (run(conf, "rank=0") for conf in ("FedLoRA", "LocalLoRA"))
    for name in left.store.names:
        if name.startswith("head"):
            assert torch.equal(left.store.all_rows(name), right.store.all_rows(name))


def test_a_resting_a_makes_the_mean_of_b_the_mean_of_the_products() -> None:
    method = run("FFALoRA", rounds=1)
    start, _ = build_tiny("FFALoRA", *FEW)
    assert torch.equal(method.lora.a["q"], start.lora.a["q"])
    assert method.lora.b["q"].any()


def test_in_a_first_step_b_alone_moves() -> None:
    one = ("training.epochs=1", "training.steps=1", "training.weight_decay=0.0")
    method, start = run("FedSALoRA", *one, rounds=1), build_tiny("FedSALoRA", *FEW)[0]
    assert torch.equal(method.lora.a["q"], start.lora.a["q"])
    assert any(method.store.all_rows("lora.b.q")[client].any() for client in range(6))


@pytest.mark.parametrize(("conf", "count"), [("FedLoRA", 1), ("FFALoRA", 2), ("FedSALoRA", 2), ("LocalLoRA", 0)])
def test_the_numbers_of_a_message(conf: str, count: int) -> None:
    method, _ = build_tiny(conf, *FEW, f"{OPTION}first_block=1")
    sent = sum(value.numel() for name, value in method.named_parameters() if name.startswith(method.shared or "none"))
    whole = 2 * 2 * 3 * (64 + 64)  # two targets, rank 2, three blocks, of width 64
    assert sent == (whole // count if count else 0)


def test_factors_from_a_block_on_take_kept_tokens_and_give_the_same_numbers() -> None:
    kept = run("FedLoRA", "first_block=2")
    assert kept.inputs == ("features",)
    anew = run("FedLoRA", "first_block=2", "--data.cache_features=false")
    assert_same(values(kept), values(anew))
    x = torch.randn(3, 3, 32, 32)
    late = kept.backbone.from_tokens(kept.frozen_features(x)["tokens"].float(), kept.lora, first_layer=1)
    torch.testing.assert_close(late, kept.backbone(x, kept.lora), atol=5e-3, rtol=1e-2)


# ------------------------------------------------------------------------------------------ PF2LoRA's ranks


def test_small_ranks_are_switched_off() -> None:
    a = torch.diag(torch.tensor([3.0, 1.0, 2.0, 0.5]))
    b = torch.diag(torch.tensor([0.1, 1.0, 0.0, 2.0]))
    there = torch.ones(4)
    assert ranks_kept(a, b, there, "largest", 0.5).tolist() == [0, 1, 0, 1]
    assert ranks_kept(a, b, there, "largest", 0.1).sum() == 1, "one rank is left"
    assert ranks_kept(a, b, there, "threshold", 0.1).tolist() == [1, 1, 0, 1]
    assert ranks_kept(a, b, torch.tensor([1.0, 0.0, 1.0, 1.0]), "threshold", 0.1).tolist() == [1, 0, 0, 1]
    equal = torch.eye(4)
    assert ranks_kept(equal, equal, there, "largest", 0.5).tolist() == [1, 1, 0, 0], "ties go to the lower rank"


def test_pruned_ranks_stay_off_under_momentum_and_decay() -> None:
    options = ("training.momentum=0.9", "training.weight_decay=0.1")
    first, third = (run("PF2LoRAPruned", *options, rounds=rounds) for rounds in (1, 3))
    off = first.store.all_rows("own_lora.kept.q") == 0
    assert off.any()
    assert (third.store.all_rows("own_lora.kept.q")[off] == 0).all()
    assert (third.store.all_rows("own_lora.a.q")[off] == 0).all()
    assert (third.store.all_rows("own_lora.b.q").transpose(2, 3)[off] == 0).all()
    assert third.store.all_rows("pruning.rounds").max() == 3


# ------------------------------------------------------------------------------------------ FedSDG


def gated(gate: float) -> GatedLowRank:
    part = GatedLowRank(1, 2.0, ["proj"]).fit(Tower("vit", 2, 1, 4))
    part.a["proj"].data, part.b["proj"].data = torch.tensor([[[1.0, -1.0]]]), torch.tensor([[[0.0], [1.0]]])
    part.gate["proj"].data.fill_(gate)
    return part


@pytest.mark.parametrize(("gate", "second", "slope"), [(0.0, 1.0, -0.5), (-2.0, 1.761594, -0.209987)])
def test_a_gated_branch_by_hand(gate: float, second: float, slope: float) -> None:
    shared = LowRank(1, 2.0, ["proj"]).fit(Tower("vit", 2, 1, 4))
    shared.a["proj"].data, shared.b["proj"].data = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0], [0.0]]])
    own, x = gated(gate), torch.tensor([[1.0, 2.0]])
    y = own.linear(0, "proj", x, shared.linear(0, "proj", x, x))
    torch.testing.assert_close(y, torch.tensor([[7.0, second]]), atol=1e-5, rtol=0)
    (moved,) = torch.autograd.grad(y[0, 1], [own.gate["proj"]])
    assert moved.item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize(
    ("updates", "tau", "expected"),
    [
        ([[1, 0], [1, 1], [0, 1]], 0.05, [0.000016, 0.999968, 0.000016]),
        ([[1, 0], [1, 1], [0, 1]], 0.3, [0.120293, 0.759415, 0.120293]),
        ([[1, 0], [1, 1], [-1, 0]], 0.3, [0.487633, 0.487633, 0.024733]),
        ([[1, 2]], 0.05, [1.0]),
        ([[1, 2], [1, 2]], 0.05, [0.5, 0.5]),
        ([[0, 0], [1, 2], [1, 2]], 1.0, [0.155362, 0.422319, 0.422319]),
    ],
)
def test_weights_by_alignment(updates: list[list[float]], tau: float, expected: list[float]) -> None:
    made = alignment_weights(torch.tensor(updates, dtype=torch.float64), tau)
    torch.testing.assert_close(made, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_penalties_by_hand() -> None:
    for penalty, own in (("factors", 3.0), ("product", 2.0)):  # ||A||^2 + ||B||^2 = 2 + 1; ||B A||^2 = 2
        method = FedSDG.__new__(FedSDG)
        torch.nn.Module.__init__(method)
        method.own_lora, method.penalty, method.gate_weight, method.own_weight = gated(0.0), penalty, 0.5, 0.1
        assert method.regulariser(None, 0).item() == pytest.approx(0.5 * 0.5 + 0.1 * own)


def test_a_gate_and_its_factors_stay_at_home() -> None:
    method = run("FedSDG", "training.lr=0.05", rounds=1)
    assert not any(name.startswith("own_lora") for name in method.roles.shared)
    gates = method.store.all_rows("own_lora.gate.fc2")
    assert (gates != -2.0).any()


# ------------------------------------------------------------------------------------------ a part of one's own


def test_the_page_on_parts_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/adding_a_part.md").read_text()
    for name, _, text in re.findall(r"^`(scaled\.\w+)`:\n\n```(\w+)\n(.*?)```", page, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text)
    command = re.search(r"^PYTHONPATH=\. lightning-cli (fit .*)$", page, re.MULTILINE)
    assert command is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    short = ["--trainer.max_epochs=1", "--model.init_args.training.steps=2", "--trainer.enable_progress_bar=false"]
    words = shlex.split(command[1].replace("configs/", f"{ROOT}/configs/"))
    cli = FederatedCLI([*words, *short, "--run_dir=run"])
    method = cli.model
    assert method.roles.shared == ("part.hidden",)
    assert set(method.roles.personal) == {"part.attended", "head.weight", "head.bias"}
    assert not torch.equal(method.part.hidden, torch.ones_like(method.part.hidden))
    assert (method.store.all_rows("part.attended") != 1).any()
