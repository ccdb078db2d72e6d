"""TPFL against a federation by hand, against PromptFL, and its message."""

from typing import Any

import torch
import torch.nn.functional as F
from federation import Witness, build, first_step, fit
from oracle import FEW, Values, simulate
from torch import Tensor

from benchmark.backbones.pixel_prompts import FixedPatchPrompt
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import MiniBatch, Phase, Stage
from benchmark.engine.roles import read_roles
from methods import TPFL
from methods.promptfl import PromptFL

FRAME = "--model.init_args.visual_prompt=null"
PARTS = ("up", "down", "left", "right")


def framed(x: Tensor, values: Values) -> Tensor:
    """Images of 32 pixels with a frame of 4, by slices."""
    up, down, left, right = (values[f"visual_prompt.{part}"] for part in PARTS)
    middle = torch.cat([x[:, :, 4:-4, :4] + left, x[:, :, 4:-4, 4:-4], x[:, :, 4:-4, -4:] + right], dim=3)
    return torch.cat([x[:, :, :4] + up, middle, x[:, :, -4:] + down], dim=2)


def cross_entropy(method: Any, values: Values, x: Tensor, y: Tensor) -> Tensor:
    """Eq. 2 with the denominator over classes."""
    text = method.clip.text_features(method.class_prompts("train"), values["context"])
    cosines = F.cosine_similarity(method.clip.image_features(framed(x, values))[:, None], text[None], dim=2)
    return F.cross_entropy(method.clip.logit_scale * cosines, y)


def test_agrees_with_a_sequential_simulation() -> None:
    def loss(method: Any, values: Values, *others: Any) -> Tensor:
        return cross_entropy(method, values, *others[-2:])

    expected = simulate("TPFL", 2, loss, FRAME)
    method, data = build("TPFL", *FEW, FRAME)
    fit(method, data, 2)
    assert set(expected) == {"context", *(f"visual_prompt.{part}" for part in PARTS)}
    for name, value in expected.items():
        assert value.any()
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-3, atol=2e-4)


def test_it_is_promptfl_while_the_pixels_rest_at_zero() -> None:
    class Resting(TPFL):
        def local_phases(self) -> list[Phase]:
            return [self.training_settings.phase("context")]

    def run(kind: type) -> Any:
        template, data = build("TPFL", *FEW, FRAME)
        method = kind(4, data.class_names, template.clip, num_context=3, training=template.training_settings)
        fit(method, data, 2)
        return method

    resting, plain = run(Resting), run(PromptFL)
    for part in PARTS:
        assert not resting.get_parameter(f"visual_prompt.{part}").any()
    start = PromptFL(4, ["a"], plain.clip, num_context=3).context
    assert not torch.equal(plain.get_parameter("context"), start)
    torch.testing.assert_close(resting.get_parameter("context"), plain.get_parameter("context"), rtol=1e-4, atol=1e-5)


def test_both_parts_are_averaged_with_the_same_weights() -> None:
    method, data = build("TPFL", *FEW, FRAME)
    witness = Witness()
    method.make_server = lambda: witness
    fit(method, data, 1)
    uploads = witness.last
    sizes = {client: len(data.train_indices[client]) for client in uploads}
    assert len(set(sizes.values())) == 3
    for name in method.roles.shared:
        mean = sum(n * uploads[c][name].double() for c, n in sizes.items()) / sum(sizes.values())
        torch.testing.assert_close(method.get_parameter(name).double(), mean, rtol=1e-5, atol=1e-7)


def test_interior_pixels_are_untouched_and_round_0_is_that_of_promptfl() -> None:
    method, _ = build("TPFL", FRAME)
    method.set_label_spaces({})
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(method(x), PromptFL.forward(method, x))
    for part in PARTS:
        method.get_parameter(f"visual_prompt.{part}").data.fill_(2.0)
    added = method.visual_prompt(x, {}) - x
    assert not added[:, :, 4:-4, 4:-4].any()
    assert torch.allclose(added[:, :, :4], torch.tensor(2.0))
    assert not torch.equal(method(x), PromptFL.forward(method, x))


def test_message_of_vit_b16_is_312128_bytes() -> None:
    with torch.device("meta"):  # shapes only
        method = TPFL(10, ["a", "b"], PromptedCLIP("ViT-B-16", "random"))
    roles = read_roles(method)
    sent = [method.get_parameter(name) for name in roles.shared]
    assert sum(value.numel() * value.element_size() for value in sent) == 312_128
    assert (method.visual_prompt.size, method.visual_prompt.image_size) == (30, 224)


def test_any_pixel_prompt_can_be_taken_and_the_wandering_one_gets_its_corner() -> None:
    method, data = build("TPFL")
    corners = [method.draw_noise(torch.Generator().manual_seed(i), 4, Stage.TRAIN)["corner"] for i in range(20)]
    assert len({tuple(corner.tolist()) for corner in corners}) > 10
    method.get_parameter("visual_prompt.patch").data.fill_(5.0)
    method.clip.image_features = lambda x: x
    batch = MiniBatch(torch.zeros(2, 3, 32, 32), torch.zeros(2), torch.ones(2), noise={"corner": torch.tensor([3, 7])})
    seen = method.image_features(batch)
    assert (seen[:, :, 3:9, 7:13] == 5).all()
    assert seen.sum() == 2 * 3 * 36 * 5
    fixed = TPFL(8, data.class_names, method.clip, num_context=3, visual_prompt=FixedPatchPrompt(6, init="zeros"))
    assert fixed.draw_noise(torch.Generator(), 4, Stage.TRAIN) == {}
    assert read_roles(fixed).shared == ("context", "visual_prompt.patch")


def test_images_pass_the_tower_in_every_step() -> None:
    method, data = build("TPFL", *FEW[:2], "--data.cache_features=true")
    fit(method, data, 1)
    step = first_step(data.loaders.training(2))
    assert method.simulation.images.fill(step).features == {}
    assert "images" in method.inputs
