"""FedMaPLe against a federation by hand and against PromptFL, its initial values, its message and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from oracle import FEW, Values, simulate
from torch import Tensor

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.parts import Prompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining
from benchmark.engine.roles import read_roles
from benchmark.errors import ConfigurationError
from methods import FedMaPLe
from methods.promptfl import PromptFL


def test_agrees_with_a_sequential_simulation() -> None:
    def loss(method: Any, values: Values, *others: Any) -> Tensor:
        x, y = others[-2:]
        clip, prompts = method.clip, method.class_prompts("train")
        text = clip.text_features(prompts, values["context"], Prompts(values["deep_context"], first_layer=1))
        first = values["context"] @ values["projection.weight"].T + values["projection.bias"]
        second = values["deep_context"][0] @ values["deep_projections.0.weight"].T + values["deep_projections.0.bias"]
        images = clip.image_features(x, torch.stack([first, second]))
        return F.cross_entropy(clip.logit_scale * images @ text.T, y)

    expected = simulate("FedMaPLe", 2, loss)
    method, data = build("FedMaPLe", *FEW)
    start = {name: value.detach().clone() for name, value in method.named_parameters()}
    fit(method, data, 2)
    assert len(expected) == 6
    for name, value in expected.items():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-3, atol=2e-5)


def test_text_side_of_depth_1_alone_is_promptfl_with_2_tokens() -> None:
    class TextAlone(FedMaPLe):
        def encode_images(self, x: Tensor) -> Tensor:
            return self.clip.image_features(x)

    class SameWords(PromptFL):
        def make_class_prompts(self, split: str) -> ClassPrompts:
            return self.clip.class_prompts(self.names_of(split), 2, "of a {}.")

    training = LocalTraining(lr=0.05, epochs=1, momentum=0.9)
    runs = []
    for kind, settings in ((TextAlone, {"depth": 1}), (SameWords, {})):
        template, data = build("FedMaPLe", *FEW)
        words = {"training": training, "init_words": "a photo of a"}
        method = kind(4, data.class_names, template.clip, num_context=2, **settings, **words)
        start = method.context.detach().clone()
        fit(method, data, 2)
        assert not torch.equal(method.get_parameter("context"), start)
        runs.append(method.get_parameter("context"))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-6)


def test_prompts_of_both_towers_are_coupled() -> None:
    method, _ = build("FedMaPLe")
    method.set_label_spaces({})
    seen: list[Any] = []
    method.clip.image_features = lambda *arguments: seen.append(arguments) or torch.zeros(1, 64)
    x = torch.zeros(1, 3, 32, 32)
    for deep in (method.deep_context, method.deep_context * 0):
        method.deep_context.data.copy_(deep)
        method.encode_images(x)
    (_, (prompts, deep)), (_, (same, bias)) = seen
    assert (prompts.shape, deep.shape) == ((2, 96), (2, 96))
    torch.testing.assert_close(prompts, method.projection(method.context))
    assert torch.equal(prompts, same)
    assert torch.allclose(bias, method.deep_projections[0].bias)
    assert not torch.allclose(deep, bias)


def test_it_starts_from_the_first_words_and_keeps_the_others() -> None:
    method, _ = build("FedMaPLe")
    tokens = method.clip.tokenizer.encode("a photo")
    assert torch.equal(method.context, method.clip.model.token_embedding.weight[torch.tensor(tokens)])
    assert method.name_template == "of a {}."
    method.set_label_spaces({})
    # With the words' own embeddings and no deeper prompts it says what a hand-written prompt says.
    text = method.clip.text_features(method.class_prompts("test"), method.context)
    hand = method.clip.text_features_of([f"a photo of a {name}." for name in method.class_names])
    torch.testing.assert_close(text, hand, rtol=1e-4, atol=1e-5)
    drawn = FedMaPLe(4, ["a"], method.clip, num_context=2, depth=2, init_words=None)
    assert drawn.name_template == "{}."
    assert 0.01 < drawn.context.std() < 0.03


def test_a_context_starts_from_whole_words() -> None:
    clip = build("FedMaPLe")[0].clip
    with pytest.raises(ConfigurationError, match=r"the context starts from the first 2 words, which "):
        FedMaPLe(4, ["a"], clip, num_context=2, depth=2, init_words="a photomicrograph of a")
    none = FedMaPLe(4, ["a"], clip, num_context=0, depth=2)
    assert none.context.shape == (0, clip.text_width)
    assert none.name_template == "a photo of a {}."


def test_message_of_vit_b16_is_14220288_bytes() -> None:
    with torch.device("meta"):  # shapes only
        method = FedMaPLe(10, ["a", "b"], PromptedCLIP("ViT-B-16", "random"))
    roles = read_roles(method)
    sent = [method.get_parameter(name) for name in roles.shared]
    assert sum(value.numel() * value.element_size() for value in sent) == 14_220_288
    assert (method.context.numel(), method.deep_context.numel(), len(method.deep_projections)) == (1024, 8192, 8)


def test_maps_of_the_deeper_prompts_start_alike_and_are_not_tied() -> None:
    with torch.device("meta"):
        clip = PromptedCLIP("ViT-B-16", "random")
    method = FedMaPLe(10, ["a", "b"], clip, depth=3, init_words=None)
    first, second = method.deep_projections
    assert torch.equal(first.weight, second.weight)
    assert first.weight is not second.weight
    assert not torch.equal(first.weight, method.projection.weight)
    assert 0.018 < method.deep_context.std() < 0.022


def test_a_resnet_and_a_depth_that_is_not_there_are_refused() -> None:
    with torch.device("meta"):
        resnet = PromptedCLIP("RN50", "random")
    with pytest.raises(
        ConfigurationError, match=r"patches of a ViT, and this CLIP's image tower is a ResNet; use one such as ViT"
    ):
        FedMaPLe(2, ["a"], resnet)
    clip = build("FedMaPLe")[0].clip
    with pytest.raises(ConfigurationError, match=r"depth=9, the towers have 2 \(text\) and 4 \(image\) layers; give 1"):
        FedMaPLe(2, ["a"], clip)
