"""ATPFL against a federation by hand and against TPFL; its contrast by hand."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit, learned
from lightning.pytorch.callbacks import Callback
from oracle import FEW, Values, simulate
from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.engine.roles import read_roles
from benchmark.errors import ConfigurationError
from methods import ATPFL
from methods.losses import model_contrast

SHARED = ("context", "visual_prompt.up", "visual_prompt.down", "visual_prompt.left", "visual_prompt.right")


def framed(x: Tensor, values: Values) -> Tensor:
    """Images of 32 pixels with a frame of 4, by padding."""
    up, down, left, right = (values[name] for name in SHARED[1:])
    sides = F.pad(left, (0, 28, 4, 4)) + F.pad(right, (28, 0, 4, 4))
    return x + sides + F.pad(up, (0, 0, 0, 28)) + F.pad(down, (0, 0, 28, 0))


def l_aug(z: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """As it is written in Eq. 5, mean over the rows."""
    a, b = (torch.exp(F.cosine_similarity(z, other, dim=1) / temperature) for other in (near, far))
    return -(a / (a + b)).log().mean()


@pytest.mark.parametrize("prev", ["round", "step"])
def test_agrees_with_a_sequential_simulation(prev: str) -> None:
    def loss(
        method: Any, values: Values, received: Values, previous: Values, before: Values, x: Tensor, y: Tensor
    ) -> Tensor:
        clip, prompts = method.clip, method.class_prompts("train")
        old = previous if prev == "round" else before
        text = [clip.text_features(prompts, v["context"]) for v in (values, received, old)]
        images = [clip.image_features(framed(x, v)) for v in (values, received, old)]
        contrast = l_aug(*text, 0.5) + l_aug(*images, 0.5)
        return F.cross_entropy(clip.logit_scale * images[0] @ text[0].T, y) + 2.0 * contrast

    arguments = (f"--model.init_args.prev={prev}", "--model.init_args.training.lr=0.005")
    expected = simulate("ATPFL", 3, loss, *arguments)
    method, data = build("ATPFL", *FEW, *arguments)
    start = method.get_parameter("context").detach().clone()
    fit(method, data, 3)
    plain, data = build("ATPFL", *FEW, *arguments, "--model.init_args.mu=0")
    fit(plain, data, 3)
    for name in SHARED:
        error, effect = (
            (value - expected[name]).abs().mean().item()
            for value in (method.get_parameter(name), plain.get_parameter(name))
        )
        # Adam's steps have one size whatever the gradient's, so that where it is nearly 0 rounding decides.
        assert error < 0.02 * effect, name
    assert not torch.equal(expected["context"], start)


@pytest.mark.parametrize("prev", ["round", "step"])
def test_without_its_contrast_it_is_tpfl_bit_for_bit(prev: str) -> None:
    frame = "--model.init_args.visual_prompt=null"
    tpfl, data = build("TPFL", *FEW, frame)
    fit(tpfl, data, 3)
    atpfl, data = build("ATPFL", *FEW, "--model.init_args.mu=0", f"--model.init_args.prev={prev}")
    fit(atpfl, data, 3)
    left, right = learned(tpfl), learned(atpfl)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=0, equal_nan=True)


def test_a_first_participation_has_log_2_and_no_gradient() -> None:
    runs = []
    for mu in (7.0, 0.0):
        settings = (f"--model.init_args.mu={mu}", "--model.init_args.prev=round", "--data.clients_per_round=4")
        method, data = build("ATPFL", *FEW, *settings)
        runs.append((method, fit(method, data, 1)))
    (method, trainer), (plain, _) = runs
    contrast = trainer.callbacks[0].values[1, "local", "train", "contrast"]
    assert contrast[:4].tolist() == pytest.approx([2 * math.log(2)] * 4, rel=1e-6)
    assert method.store.all_rows("participated").tolist() == [1.0] * 4
    for name in SHARED:
        assert torch.equal(method.get_parameter(name), plain.get_parameter(name))


def test_at_the_received_prompt_the_contrast_pulls_away_from_the_previous_one() -> None:
    generator = torch.Generator().manual_seed(0)
    received, previous = (F.normalize(torch.randn(5, 6, generator=generator), dim=1) for _ in range(2))
    z = received.clone().requires_grad_()
    model_contrast(z, received, previous, 0.5).sum().backward()
    far = torch.func.grad(lambda v: F.cosine_similarity(v, previous, dim=1).sum())(received)
    weight = torch.sigmoid((F.cosine_similarity(received, previous, dim=1) - 1) / 0.5) / 0.5
    torch.testing.assert_close(z.grad, weight[:, None] * far)


def test_the_contrast_by_hand_and_its_bounds() -> None:
    z, near, far = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])
    # cosines 0.6 and 0: -log(e^1.2 / (e^1.2 + 1))
    assert model_contrast(z, near, far, 0.5).item() == pytest.approx(math.log(1 + math.exp(-1.2)))
    assert model_contrast(z, z, z, 0.5).item() == pytest.approx(math.log(2), rel=1e-7)
    worst = model_contrast(z, -z, z, 0.5).item()
    assert worst == pytest.approx(math.log(1 + math.exp(2 / 0.5)))
    assert 0 < model_contrast(z, z, -z, 0.5).item() < worst


def test_only_the_prompts_travel() -> None:
    with torch.device("meta"):  # shapes only
        method = ATPFL(10, ["a", "b"], PromptedCLIP("ViT-B-16", "random"), prev="step")
    roles = read_roles(method)
    sent = [method.get_parameter(name) for name in roles.shared]
    assert sum(value.numel() * value.element_size() for value in sent) == 312_128
    assert {name.split(".")[0] for name in roles.personal} == {"previous_context", "previous_visual_prompt"}


def test_prompts_one_step_behind_are_followed() -> None:
    method, data = build("ATPFL", *FEW[:1], "--data.clients_at_once=1", "--data.clients_per_round=1")
    values: list[Values] = []

    class Spy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            method.simulation.local_steps.on_step.append(
                lambda *_: values.append({name: value[0].clone() for name, value in method.slots.detached().items()})
            )

    fit(method, data, 1, [Spy()])
    assert len(values) >= 2
    for before, after in itertools.pairwise(values):
        for name in SHARED:
            torch.testing.assert_close(after[f"previous_{name}"], before[name])
            assert not torch.equal(after[name], before[name])


def test_unknown_settings_are_refused() -> None:
    clip = build("ATPFL")[0].clip
    with pytest.raises(ConfigurationError, match="ATPFL: prev: expected round or step, got epoch"):
        ATPFL(2, ["a"], clip, prev="epoch")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"ATPFL: temperature: expected a number above 0, got 0\.0"):
        ATPFL(2, ["a"], clip, temperature=0.0)
