"""LoRA, adapters and a gate in CLIP: by hand, and against zero-shot CLIP where they do nothing."""

import copy
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build as build_tiny
from federation import fit, learned
from torch import Tensor

from benchmark.backbones.parts import LowRank, TowerPart
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.errors import ConfigurationError
from methods import FedPartCLIP
from methods.bottlenecks import Bottleneck, Linears
from methods.fedclip import contrast

FEW = ("--data.partition=federation.Few", "--data.clients_per_round=4")


def run(conf: str, *options: str, rounds: int = 2) -> Any:
    method, data = build_tiny(conf, *FEW, *(f"--model.init_args.{option}" for option in options))
    fit(method, data, rounds)
    return method


def part_of(name: str, **settings: Any) -> str:
    """Return a part as an option says it."""
    return json.dumps({"class_path": f"benchmark.backbones.parts.{name}", "init_args": settings})


def scores(method: Any) -> dict[str, Tensor]:
    return {name: value for name, value in learned(method).items() if name.startswith("metric.") and "/test/" in name}


def test_factors_that_are_not_trained_are_zero_shot_clip() -> None:
    zero, method = scores(run("ZeroShotCLIP")), scores(run("FedLoRACLIP", "training.lr=0.0"))
    assert zero.keys() <= method.keys()
    for name, value in zero.items():
        exact = {"atol": 1e-6, "rtol": 1e-6} if "loss" in name else {"atol": 0.0, "rtol": 0.0}
        torch.testing.assert_close(method[name], value, **exact), "features are kept there, and made with others here"


def test_norms_that_are_not_trained_are_zero_shot_clip() -> None:
    norms = part_of("Norms", targets=["norm1", "norm2", "final"], first_block=1)
    parts = [f"{tower}={norms}" for tower in ("text", "image")]
    zero, method = scores(run("ZeroShotCLIP")), scores(run("FedPartCLIP", *parts, "training.lr=0.0"))
    assert zero.keys() <= method.keys()
    for name, value in zero.items():
        torch.testing.assert_close(method[name], value, atol=1e-6, rtol=1e-6)


def test_a_part_of_factors_in_clip_is_federated_lora() -> None:
    factors = part_of("LowRank", rank=2, first_block=1)
    for towers, text, image in (("both", factors, factors), ("text", factors, "null")):
        lora = learned(run("FedLoRACLIP", f"towers={towers}"))
        method = run("FedPartCLIP", f"text={text}", f"image={image}")
        assert method.inputs == (("features",) if towers == "text" else ("images",))
        renamed = {name.replace("_part.", "_lora."): value for name, value in learned(method).items()}
        assert lora.keys() == renamed.keys()
        for name, value in lora.items():
            assert torch.equal(value.nan_to_num(), renamed[name].nan_to_num()), name


@pytest.mark.parametrize("text", ["null", part_of("Norms")])
def test_late_parts_of_the_image_tower_take_kept_tokens_to_the_same_numbers(text: str) -> None:
    options = (f"text={text}", f"image={part_of('LowRank', rank=2, first_block=2)}")
    kept = run("FedPartCLIP", *options)
    assert kept.inputs == ("features",)
    method, data = build_tiny(
        "FedPartCLIP", *FEW, *(f"--model.init_args.{option}" for option in options), "--data.cache_features=false"
    )
    fit(method, data, 2)
    anew = learned(method)
    for name, value in learned(kept).items():
        torch.testing.assert_close(value, anew[name], atol=1e-6, rtol=1e-6, equal_nan=True, msg=name)
    assert kept.image_part.b["q"].any()
    x = torch.randn(3, 3, *kept.clip.image_size, generator=torch.Generator().manual_seed(0))
    tokens = kept.frozen_features(x)["tokens"]
    assert (tokens.dtype, tokens.shape[2]) == (torch.float16, kept.clip.vision_width)
    late = kept.clip.image_features_from(tokens.float(), 1, kept.image_part)
    torch.testing.assert_close(late, kept.clip.image_features(x, kept.image_part), atol=5e-3, rtol=1e-2)


def test_kept_tokens_in_full_precision_train_as_images_do(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (f"--model.init_args.{part}" for part in ("text=null", f"image={part_of('Adapter', first_block=2)}"))
    method, data = build_tiny("FedPartCLIP", *FEW, *options)
    live = copy.deepcopy(method)
    monkeypatch.setattr(method, "frozen_features", lambda x: {"tokens": method.clip.tokens_before(x, 1)})
    fit(method, data, 2)
    live.first_layer, live.inputs = 0, ("images",)
    fit(live, data, 2)
    expected = learned(live)
    for name, value in learned(method).items():
        torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("share", "shared", "personal"),
    [
        ("declared", ["gains.final", "gains.norm1"], ["biases.final", "biases.norm1"]),
        ("all", ["biases.final", "biases.norm1", "gains.final", "gains.norm1"], []),
        ("nothing", [], ["biases.final", "biases.norm1", "gains.final", "gains.norm1"]),
    ],
)
def test_what_of_the_parts_is_shared(
    share: str, shared: list[str], personal: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmark.backbones.parts.Norms.shared", ("gains",))
    monkeypatch.setattr("benchmark.backbones.parts.Norms.personal", ("biases",))
    method = run("FedPartCLIP", f"share={share}", "image=null", rounds=1)
    assert sorted(method.roles.shared) == [f"text_part.{name}" for name in shared]
    assert sorted(method.roles.personal) == [f"text_part.{name}" for name in personal]
    start, _ = build_tiny("FedPartCLIP", *FEW)
    if shared:
        assert not torch.equal(method.text_part.gains["final"], start.text_part.gains["final"])


def test_parts_that_cannot_be_trained_are_refused() -> None:
    clip, names = PromptedCLIP(), ["cat", "dog"]
    for given, said in (
        ({"text": None}, "FedPartCLIP: text and image are null; give a part for one of them"),
        ({"text": TowerPart()}, "FedPartCLIP: TowerPart has no parameters to train; give an nn.Module with some"),
        ({"image": LowRank(first_block=9)}, r"LowRank: first_block=9, but the tower \(image\) has"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            FedPartCLIP(2, names, clip, **given)


def test_adapters_that_give_nothing_are_zero_shot_clip() -> None:
    zero, method = build_tiny("ZeroShotCLIP", *FEW)[0], build_tiny("PFedMMA", *FEW)[0]
    x = torch.randn(3, 3, *method.clip.image_size, generator=torch.Generator().manual_seed(0))
    for model in (zero, method):
        model.set_label_spaces({})
    assert not torch.equal(method(x), zero(x))
    method.text_up.weight.data.zero_()
    method.image_up.weight.data.zero_()
    assert torch.equal(method(x), zero(x))


@pytest.mark.parametrize(
    ("share", "shared", "personal"),
    [
        ("both", ["a", "b"], []),
        ("A", ["a"], ["b"]),
        ("B", ["b"], []),
        ("none", [], ["a", "b"]),
    ],
)
@pytest.mark.parametrize("towers", ["text", "image"])
def test_what_is_shared(towers: str, share: str, shared: list[str], personal: list[str]) -> None:
    method = run("FedLoRACLIP", f"share={share}", f"towers={towers}", rounds=1)
    factors = [f"{towers}_lora.{kind}.{target}" for kind in shared for target in "qv"]
    assert sorted(method.roles.shared) == sorted(factors)
    assert sorted(method.roles.personal) == sorted(f"{towers}_lora.{k}.{t}" for k in personal for t in "qv")
    assert method.inputs == (("features",) if towers == "text" else ("images",))
    start, _ = build_tiny("FedLoRACLIP", *FEW, f"--model.init_args.towers={towers}")
    resting = share == "B"
    assert torch.equal(getattr(method, f"{towers}_lora").a["q"], getattr(start, f"{towers}_lora").a["q"]) or not resting


def bottleneck(down: float, true_gradient: bool) -> tuple[Bottleneck, list[Linears]]:
    """D = 2, one unit: down (down, 0), middle (3), up (2, 0)."""
    maps = [Linears(1, 2, 1), Linears(1, 1, 1), Linears(1, 1, 2)]
    for linears, weight in zip(maps, ([[down, 0.0]], [[3.0]], [[2.0], [0.0]]), strict=True):
        linears.weight.data = torch.tensor([weight])
    return Bottleneck(*maps, 0, 0.001, true_gradient), maps


@pytest.mark.parametrize(("true_gradient", "expected"), [(True, 0.003), (False, 3.0)])
def test_an_adapter_of_mma_and_its_gradient_by_hand(true_gradient: bool, expected: float) -> None:
    part, (_, _, up) = bottleneck(1.0, true_gradient)
    x = torch.tensor([[1.0, -1.0]], requires_grad=True)
    made = part.beside(0, x)
    torch.testing.assert_close(made, torch.tensor([[0.006, 0.0]]))
    of_up, of_x = torch.autograd.grad(made.sum(), [up.weight, x])
    torch.testing.assert_close(of_up, torch.full((1, 2, 1), expected))
    torch.testing.assert_close(of_x, torch.tensor([[0.006, 0.0]])), "what comes before has the true gradient"
    part, maps = bottleneck(-1.0, true_gradient)
    made = part.beside(0, x)
    assert not made.any()
    assert not any(gradient.any() for gradient in torch.autograd.grad(made.sum(), [m.weight for m in maps]))


def test_the_middle_alone_is_sent_and_belongs_to_both_towers() -> None:
    method = run("PFedMMA", "training.lr=0.01", rounds=1)
    assert {name.split(".")[0] for name in method.roles.shared} == {"middle"}
    for tower in ("text", "image"):
        assert method.bottleneck(tower).maps[1] is method.middle
    start, _ = build_tiny("PFedMMA", *FEW)
    assert not torch.equal(method.middle.weight, start.middle.weight)
    for name in ("text_down.weight", "image_up.weight"):
        rows = method.store.all_rows(name)
        assert any(not torch.equal(row, start.get_parameter(name)) for row in rows)


def test_contrast_over_a_mini_batch_by_hand() -> None:
    logits, y, there = torch.tensor([[30.0, 0.0], [10.0, 0.0]]), torch.tensor([0, 0]), torch.ones(2, dtype=torch.bool)
    # rows (30, 30), (10, 10): log 2 each; columns (30, 10), (30, 10): 0 and 20; all halved and averaged
    assert contrast(logits, y, there).item() == pytest.approx(5.3466, abs=1e-4)
    padded = (
        torch.cat([logits, torch.tensor([[7.0, 7.0]])]),
        torch.tensor([0, 0, -100]),
        torch.tensor([True, True, False]),
    )
    assert contrast(*padded).item() == pytest.approx(5.3466, abs=1e-4), "a padded row is no image and no class"
    assert contrast(logits[:1], y[:1], there[:1]).item() == 0
    assert contrast(torch.zeros(2, 2), y, there).item() == pytest.approx(0.693147, abs=1e-6)


def test_a_gate_by_hand() -> None:
    method, _ = build_tiny("FedCLIP", *FEW)
    width = method.clip.embed_dim
    method.gate[2].weight.data.zero_()
    method.gate[2].bias.data.zero_()
    features = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(method.gated(features), F.normalize(features, dim=-1)), "all dimensions count alike"
    method.gate[2].bias.data[0] = torch.log(torch.tensor(3.0))
    only = torch.zeros(1, width)
    only[0, :2] = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(method.gated(only)[0, :2], torch.tensor([0.913812, 0.406138]), atol=1e-5, rtol=0)


def test_both_objectives_train_the_gate_alone() -> None:
    start, _ = build_tiny("FedCLIP", *FEW)
    for loss in ("ce", "contrastive"):
        method = run("FedCLIP", f"loss={loss}", rounds=1)
        assert not torch.equal(method.gate[0].weight, start.gate[0].weight)
        assert method.per_example == (loss == "ce")
        assert {name.split(".")[0] for name in method.roles.shared} == {"gate"}
