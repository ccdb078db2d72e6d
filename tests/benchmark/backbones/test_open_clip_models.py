"""Models of open_clip other than CLIP: their features against open_clip's own, what they learn, what they refuse."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from federation import build, fit, learned
from small_towers import CONFIGS, NAMES, SIZES, TEXTS, ids_of, known_models, normal, tiny
from torch import Tensor
from torch.func import vmap

import methods
from benchmark.backbones.parts import LowRank, Prompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.errors import ConfigurationError

WHOLE = ("tiny_eva", "tiny_mobile", "tiny_convnext", "tiny_siglip", "tiny_clipa", "tiny_coca")


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with known_models(tmp_path / "models", monkeypatch):
        yield


def of_open_clip(
    clip: PromptedCLIP, name: str, context: Tensor, deep: Tensor | None = None, adapted: LowRank | None = None
) -> Tensor:
    """Features of all prompts by open_clip's own pass, in which hooks put the context, and what else is given."""
    at, ids = ids_of(clip, name, len(context))
    text = clip.model.text if hasattr(clip.model, "text") else clip.model

    def put(tokens: Tensor, new: Tensor) -> Tensor:
        return torch.cat([tokens[:, :at], new.expand(len(tokens), -1, -1), tokens[:, at + len(new) :]], dim=1)

    hooks = [text.token_embedding.register_forward_hook(lambda _, __, made: put(made, context))]
    for layer, block in enumerate(text.transformer.resblocks):
        if deep is not None and layer:
            new = deep[layer - 1]
            hooks += [block.register_forward_pre_hook(lambda _, given, new=new: (put(given[0], new), *given[1:]))]
        if adapted is not None:
            b, a = adapted.b["fc2"][layer], adapted.a["fc2"][layer]
            hooks += [block.mlp.c_proj.register_forward_hook(lambda _, x, y, b=b, a=a: y + 2 * x[0] @ (b @ a).T)]
    features = clip.model.encode_text(ids, normalize=True)
    for hook in hooks:
        hook.remove()
    return features


# ---------------------------------------------------------------------- equality with open_clip


@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_those_of_open_clip(name: str) -> None:
    clip = tiny(name)
    x = normal(3, 3, *clip.image_size)
    with torch.no_grad():
        expected = clip.model.encode_image(x, normalize=True)
    assert clip.visual_kind == ("whole" if name in WHOLE else "vit")
    torch.testing.assert_close(clip.train().image_features(x), expected, rtol=1e-6, atol=1e-6)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    expected = clip.model.encode_text(clip.tokenizer(TEXTS, context_length=clip.context_length), normalize=True)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    torch.testing.assert_close(clip.text_features_of(TEXTS), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_open_clip(clip, name, torch.zeros(0, 16)), expected, rtol=0, atol=1e-5)
    assert clip.embed_dim == expected.shape[1]
    words = clip.tokenizer.encode("a b")
    torch.testing.assert_close(clip.initial_context(2, "a b"), clip.word_embeddings[words[:2]])


@pytest.mark.parametrize("name", CONFIGS)
def test_contexts_and_parts_of_the_text_tower(name: str) -> None:
    clip = tiny(name)
    prompts, context, deep = clip.class_prompts(NAMES, 3), normal(3, 16), normal(2, 3, 16, key="deep")
    expected = of_open_clip(clip, name, context)
    torch.testing.assert_close(clip.text_features(prompts, context), expected, rtol=0, atol=1e-5)
    made = clip.text_features(prompts, context, Prompts(deep, 1))
    torch.testing.assert_close(made, of_open_clip(clip, name, context, deep), rtol=0, atol=1e-5)
    adapted = LowRank(2, 4.0, targets=("fc2",)).fit(clip.text_tower)
    adapted.b["fc2"].data.copy_(normal(*adapted.b["fc2"].shape, key="b"))
    made = clip.text_features(prompts, context, adapted)
    torch.testing.assert_close(made, of_open_clip(clip, name, context, None, adapted), rtol=0, atol=1e-5)
    for given in (made, of_open_clip(clip, name, context, deep)):
        assert (given - expected).abs().max() > 1e-3
    contexts = torch.stack([context, -context, context.roll(1, 0)])
    each = torch.stack([clip.text_features(prompts, of) for of in contexts])
    torch.testing.assert_close(vmap(lambda of: clip.text_features(prompts, of))(contexts), each, rtol=0, atol=1e-6)
    torch.testing.assert_close(clip.text_features(prompts, contexts), each, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "tiny_coca"])
def test_a_shorter_context_is_as_if_the_rest_were_not_there(name: str) -> None:
    clip = tiny(name)
    context, lengths = normal(4, 16), torch.tensor([0, 2, 4])
    prompts = clip.class_prompts(NAMES, 4)
    made = vmap(lambda length: clip.text_features(prompts, context, length=length))(lengths)
    expected = torch.stack([of_open_clip(clip, name, context[: int(length)]) for length in lengths])
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- methods


@pytest.mark.parametrize("name", ["tiny_convnext", "tiny_mobile", "tiny_siglip", "tiny_coca"])
def test_a_method_learns_a_context_at_every_width(name: str) -> None:
    found = []
    size = [f"--model.clip.image_size={SIZES[name]}"] if name in SIZES else []
    options = [f"--model.clip.name={name}", "--model.clip.weights=random", *size, "--model.num_context=3"]
    for width in (1, 3):
        method, data = build("PromptFL", *options, f"--data.clients_at_once={width}")
        frozen = {key: value.clone() for key, value in method.clip.state_dict().items()}
        start = method.context.detach().clone()
        fit(method, data, 2)
        assert all(torch.equal(value, frozen[key]) for key, value in method.clip.state_dict().items())
        found.append(learned(method)["context"])
        assert (found[-1] - start).abs().max() > 1e-4
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


#: Methods that look at positions, put parts into the image tower or train through it.
NEED_THE_IMAGE_TOWER = (
    *("FedMaPLe", "FedPromptSRC", "FedMVP", "FedMGP", "FedLoRACLIP", "PFedMMA", "LocalCLIP", "FedOTP", "FedPLOT"),
    *("TRIP", "TPFL", "ATPFL"),
)


@pytest.mark.parametrize("name", ["tiny_convnext", "tiny_clipa"])
def test_what_an_image_tower_has_not_is_said_before_training(name: str) -> None:
    clip = tiny(name)
    for method in NEED_THE_IMAGE_TOWER:
        said = f"^{method} .*, and this CLIP's image tower is called as a whole, without parts and positions; use one"
        with pytest.raises(ConfigurationError, match=said):
            getattr(methods, method)(2, NAMES, clip)
    with pytest.raises(ConfigurationError, match=r"PFedPrompt with lfa=spatial .* or lfa=memory"):
        methods.PFedPrompt(2, NAMES, clip, lfa="spatial")
    methods.PFedPrompt(2, NAMES, clip)
    x = normal(2, 3, *clip.image_size)
    calls = (
        lambda: clip.image_features(x, normal(2, 16)),
        lambda: clip.spatial_features(x),
        lambda: clip.features_and_tokens(x),
        lambda: clip.patch_embeddings(x),
        lambda: clip.num_patches,
    )
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"called as a whole and has no .*, which this method needs"):
            call()
    with pytest.raises(ConfigurationError, match=r"takes images \[B, 3, \d+, \d+\], got \[2, 3, 7, 7\]"):
        clip.image_features(x[..., :7, :7])


def test_a_hook_is_called_or_refused() -> None:
    clip = tiny("tiny_siglip")
    x, prompts = normal(2, 3, *clip.image_size), clip.class_prompts(NAMES, 0)
    plain = clip.image_features(x), clip.text_features(prompts)
    for name in ("visual", "visual.trunk.blocks.1.attn", "text.transformer.resblocks.1.mlp", "text.ln_final"):
        hook = clip.model.get_submodule(name).register_forward_hook(lambda _, __, made: made + made.roll(1, -1).tanh())
        made = clip.image_features(x), clip.text_features(prompts)
        changed = [not torch.equal(*pair) for pair in zip(made, plain, strict=True)]
        assert changed == [name.startswith("visual"), name.startswith("text")]
        hook.remove()
    for name in ("text", "text.transformer", "text.transformer.resblocks.0.attn"):
        hook = clip.model.get_submodule(name).register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigurationError, match=f"a hook, or another forward, of the backbone's model.{name} "):
            clip.text_features(prompts)
        hook.remove()


def test_lengths_and_the_tower_of_coca() -> None:
    clip = tiny("tiny_coca")
    with pytest.raises(
        ConfigurationError, match="FedPHA needs contexts of different lengths: CoCa's text tower takes no"
    ):
        methods.FedPHA(2, NAMES, clip)
    with pytest.raises(ConfigurationError, match="CoCa's text tower takes no contexts of other lengths"):
        clip.text_features(clip.class_prompts(NAMES, 2), normal(2, 16), length=torch.tensor(1))
