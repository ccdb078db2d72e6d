"""Prompted CLIP towers against open_clip itself, and against plain re-implementations."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import open_clip
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from benchmark.backbones import prompted_clip
from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.clip import load_clip
from benchmark.backbones.fixed_batch_norm import FixedBatchNorm2d
from benchmark.backbones.parts import Adapter, LowRank, Norms, Prompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.errors import ConfigurationError
from benchmark.seeds import torch_generator

NAMES = ["cat", "great_white shark", "7", "boat with a very long name"]
TEXT = {"context_length": 20, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 3}
VISION: dict[str, dict[str, Any]] = {
    "vit": {"image_size": 16, "layers": 3, "width": 16, "head_width": 8, "patch_size": 8},
    "resnet": {"image_size": 64, "layers": [1, 2, 1, 1], "width": 8, "head_width": 64},
}


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """An operation without a rule for vmap warns, and loops."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def tiny(monkeypatch: pytest.MonkeyPatch, kind: str, **text: Any) -> PromptedCLIP:
    """A CLIP of three text layers whose every tensor is random; it has QuickGELU and layer scale."""
    generator = torch_generator("tiny", kind)
    model = open_clip.CLIP(8, VISION[kind], TEXT | text, quick_gelu=True)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape, generator=generator) / max(value.shape[-1:] or (1,)) ** 0.5)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.running_var.abs_().add_(0.5)  # type: ignore[union-attr]
        if isinstance(module, nn.LayerNorm):
            module.weight.data.add_(1)
    model.logit_scale.data.fill_(2.0)
    model.visual.image_mean = model.visual.image_std = (0.5, 0.5, 0.5)
    model.requires_grad_(False).eval()
    tokenizer = open_clip.SimpleTokenizer(context_length=20)
    monkeypatch.setattr(prompted_clip, "load_clip", lambda *arguments: (model, tokenizer))
    return PromptedCLIP()


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch) -> PromptedCLIP:
    return tiny(monkeypatch, "vit")


@pytest.fixture
def resnet(monkeypatch: pytest.MonkeyPatch) -> PromptedCLIP:
    return tiny(monkeypatch, "resnet")


@pytest.fixture(scope="module")
def micro() -> PromptedCLIP:
    return PromptedCLIP()


def normal(*shape: int, key: str = "x") -> Tensor:
    return torch.randn(shape, generator=torch_generator(key))


def images(clip: PromptedCLIP, *leading: int) -> Tensor:
    return normal(*leading, 3, *clip.image_size, key="images")


def tokens_of(clip: PromptedCLIP, num_context: int, template: str = "{}.") -> Tensor:
    """CoOp's placeholder strings, tokenized by open_clip to the full length."""
    texts = [" ".join(["X"] * num_context + [template.replace("{}", name.replace("_", " "))]) for name in NAMES]
    return clip.tokenizer(texts, context_length=clip.context_length)


def naive_text(clip: PromptedCLIP, tokens: Tensor, context: Tensor, deep: Tensor | None = None) -> Tensor:
    """Every position of every class, through open_clip's own blocks with ``nn.MultiheadAttention``."""
    model, after = clip.model, 1 + context.shape[-2]
    x = model.token_embedding(tokens)
    x = torch.cat([x[:, :1], context.expand(len(x), -1, -1), x[:, after:]], dim=1) + model.positional_embedding
    for layer, block in enumerate(model.transformer.resblocks):
        if deep is not None and 0 < layer <= len(deep):
            x = torch.cat([x[:, :1], deep[layer - 1].expand(len(x), -1, -1), x[:, after:]], dim=1)
        x = block(x, attn_mask=model.attn_mask)
    x = model.ln_final(x)[torch.arange(len(x)), tokens.argmax(dim=1)]
    return F.normalize(x @ model.text_projection, dim=-1)


# ---------------------------------------------------------------------- equality with open_clip


@pytest.mark.parametrize("kind", ["micro", "vit", "resnet"])
def test_features_are_those_of_open_clip(request: pytest.FixtureRequest, kind: str) -> None:
    clip: PromptedCLIP = request.getfixturevalue(kind)
    x = images(clip, 5)
    torch.testing.assert_close(clip.image_features(x), clip.model.encode_image(x, normalize=True), atol=1e-6, rtol=0)
    texts = ["a photo of a cat.", "x", "one two three four"]
    expected = clip.model.encode_text(clip.tokenizer(texts, context_length=clip.context_length), normalize=True)
    torch.testing.assert_close(clip.text_features_of(texts), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["micro", "vit"])
def test_context_of_words_gives_the_features_of_the_sentence(request: pytest.FixtureRequest, kind: str) -> None:
    clip: PromptedCLIP = request.getfixturevalue(kind)
    texts = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
    features = clip.text_features(clip.class_prompts(NAMES, 4), clip.initial_context(4, "a photo of a"))
    expected = clip.model.encode_text(clip.tokenizer(texts, context_length=clip.context_length), normalize=True)
    torch.testing.assert_close(features, expected, atol=1e-6, rtol=0)
    # What zero-shot classification uses is the same bit for bit.
    assert torch.equal(features, clip.text_features_of(texts))
    assert torch.equal(features, clip.text_features(clip.class_prompts(NAMES, 0, "a photo of a {}.")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B-16", "RN50"])
def test_real_architectures_give_the_features_of_open_clip(name: str) -> None:
    clip = PromptedCLIP(name, weights="random")
    with torch.no_grad():
        for module in clip.modules():  # a ResNet starts with residual branches of zero
            if isinstance(module, FixedBatchNorm2d):
                module.weight.fill_(0.5)
        x = images(clip, 2)
        torch.testing.assert_close(
            clip.image_features(x), clip.model.encode_image(x, normalize=True), atol=2e-6, rtol=0
        )
        context = clip.initial_context(16)
        features = clip.text_features(clip.class_prompts(NAMES, 16), context)
        torch.testing.assert_close(features, naive_text(clip, tokens_of(clip, 16), context), atol=2e-6, rtol=0)
    assert (clip.text_width, clip.text_depth, clip.context_length) == (512, 12, 77)
    assert clip.image_size == (224, 224)
    resnet = name == "RN50"
    assert (clip.embed_dim, clip.vision_width, clip.vision_depth) == ((1024, 2048, 0) if resnet else (512, 768, 12))


# ---------------------------------------------------------------------- text prompts


def test_prompts_hold_the_tokens_of_coop(vit: PromptedCLIP) -> None:
    prompts = vit.class_prompts(["red cat", "red_ant eater"], 3)
    tokens = vit.tokenizer(["X X X red cat.", "X X X red ant eater."], context_length=20)
    assert prompts.shared_tokens.tolist()[4:] == tokens[0, 4:5].tolist()  # "red" is common
    for row, own, positions in zip(tokens, prompts.own_tokens, prompts.own_positions, strict=True):
        end = int(row.argmax())
        assert own[-(end - 4) :].tolist() == row[5 : end + 1].tolist()
        assert positions[-(end - 4) :].tolist() == list(range(5, end + 1))
    # The shorter name is padded in front, and nothing sees the padding: not the name, nor the end.
    shorter = prompts.own_mask[0]
    assert shorter.shape == (4, 4)
    assert torch.isinf(shorter[:, 0]).all()
    assert shorter[3, 1:].tolist() == [0, 0, 0]
    assert torch.isinf(shorter[1, 2:]).all()


@pytest.mark.parametrize("num_context", [1, 4, 8])
def test_only_what_is_needed_is_computed_and_nothing_changes(micro: PromptedCLIP, num_context: int) -> None:
    context = normal(num_context, micro.text_width)
    prompts = micro.class_prompts(NAMES, num_context)
    assert len(prompts.shared_tokens) + prompts.own_tokens.shape[1] < micro.context_length
    expected = naive_text(micro, tokens_of(micro, num_context), context)
    torch.testing.assert_close(micro.text_features(prompts, context), expected, atol=1e-6, rtol=0)


def test_one_class_alone_has_the_same_features(vit: PromptedCLIP) -> None:
    context = normal(2, vit.text_width)
    together = vit.text_features(vit.class_prompts(NAMES, 2), context)
    for c, name in enumerate(NAMES):
        alone = vit.text_features(vit.class_prompts([name], 2), context)
        torch.testing.assert_close(alone[0], together[c], atol=1e-6, rtol=0)


def test_context_of_each_image_and_of_each_class(vit: PromptedCLIP) -> None:
    prompts = vit.class_prompts(NAMES, 2)
    contexts = normal(3, len(NAMES), 2, vit.text_width)
    one_by_one = torch.stack([torch.stack([vit.text_features(prompts, own) for own in row]) for row in contexts])
    by_image = vit.text_features(prompts, contexts[:, 0])
    assert by_image.shape == (3, len(NAMES), vit.embed_dim)
    torch.testing.assert_close(by_image, one_by_one[:, 0], atol=1e-6, rtol=0)
    by_class = vit.text_features(prompts, contexts)
    expected = one_by_one.diagonal(dim1=1, dim2=2).movedim(-1, 1)
    torch.testing.assert_close(by_class, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_deep_text_prompts_replace_the_context(vit: PromptedCLIP, depth: int) -> None:
    context, deep = normal(2, 16), normal(depth, 2, 16, key="deep")
    prompts = vit.class_prompts(NAMES, 2, template="of a {}.")
    expected = naive_text(vit, tokens_of(vit, 2, "of a {}."), context, deep)
    parts = [Prompts(deep, first_layer=1)] if depth else []
    torch.testing.assert_close(vit.text_features(prompts, context, *parts), expected, atol=1e-6, rtol=0)


def test_initial_context() -> None:
    clip = PromptedCLIP()
    state = torch.get_rng_state()
    random = clip.initial_context(200)
    assert torch.equal(random, clip.initial_context(200))
    assert torch.equal(state, torch.get_rng_state())
    assert random.shape == (200, 64)
    assert random.std().item() == pytest.approx(0.02, rel=0.05)
    words = clip.initial_context(2, "a photo of a")
    ids = clip.tokenizer(["a photo"])[0, 1:3]
    assert torch.equal(words, clip.model.token_embedding.weight[ids])


# ---------------------------------------------------------------------- images


@pytest.mark.parametrize("depth", [0, 2])
def test_visual_prompts_follow_the_patches(vit: PromptedCLIP, depth: int) -> None:
    visual = vit.model.visual
    x, prompts, deep = images(vit, 3), normal(2, 16), normal(depth, 2, 16, key="deep")
    patches = visual.conv1(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([visual.class_embedding.expand(3, 1, -1), patches], dim=1) + visual.positional_embedding
    tokens = visual.ln_pre(torch.cat([tokens, prompts.expand(3, -1, -1)], dim=1))
    for layer, block in enumerate(visual.transformer.resblocks):
        if 0 < layer <= depth:
            tokens = torch.cat([tokens[:, :5], deep[layer - 1].expand(3, -1, -1)], dim=1)
        tokens = block(tokens)
    expected = F.normalize(visual.ln_post(tokens) @ visual.proj, dim=-1)
    given = torch.cat([prompts[None], deep])
    torch.testing.assert_close(vit.image_features(x, given), expected[:, 0], atol=1e-6, rtol=0)
    features, spatial = vit.spatial_features(x, given)
    torch.testing.assert_close(features, expected[:, 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(spatial, expected[:, 1:5], atol=1e-6, rtol=0)


def test_tokens_before_the_last_norm_are_those_that_features_are_made_of(vit: PromptedCLIP) -> None:
    x, visual = images(vit, 3), vit.model.visual
    features, tokens = vit.features_and_tokens(x)
    expected = visual.transformer(visual._embeds(x))
    torch.testing.assert_close(tokens, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(features, vit.image_features(x), atol=1e-6, rtol=0)


def test_tokens_kept_before_a_block_are_open_clips_and_give_the_same_features(vit: PromptedCLIP) -> None:
    x, visual = images(vit, 3), vit.model.visual
    kept = vit.tokens_before(x, 1)
    torch.testing.assert_close(kept, visual.transformer.resblocks[0](visual._embeds(x)), atol=1e-6, rtol=1e-5)
    assert torch.equal(vit.tokens_before(x, 0), visual._embeds(x))
    late = (LowRank(2, first_block=2), Norms(["norm2", "final"], first_block=2), Adapter(3, first_block=2))
    fitted = [part.fit(vit.image_tower) for part in late]
    for number, part in enumerate(fitted):
        for name, value in part.named_parameters():
            value.data = value.detach() + 0.1 * normal(*value.shape, key=f"{number} {name}")
    for part in (*fitted, Prompts(normal(2, vit.vision_width), 1)):
        found = vit.image_features(x, part)
        assert torch.equal(vit.image_features_from(kept, 1, part), found)
        assert not torch.allclose(found, vit.image_features(x), atol=1e-4)


def test_a_resnet_has_no_tokens_before_a_block(resnet: PromptedCLIP) -> None:
    with pytest.raises(ConfigurationError, match="tokens at the input of a block are those of a ViT"):
        resnet.tokens_before(images(resnet, 2), 1)


def test_spatial_features_of_a_resnet_are_the_unpooled_attention(resnet: PromptedCLIP) -> None:
    x = images(resnet, 2)
    visual, pool = resnet.model.visual, resnet.model.visual.attnpool
    tokens = visual.layer4(visual.layer3(visual.layer2(visual.layer1(visual.stem(x))))).flatten(2).transpose(1, 2)
    tokens = torch.cat([tokens.mean(dim=1, keepdim=True), tokens], dim=1) + pool.positional_embedding
    attention = nn.MultiheadAttention(256, pool.num_heads, batch_first=True)
    projections = (pool.q_proj, pool.k_proj, pool.v_proj)
    attention.in_proj_weight.data = torch.cat([part.weight for part in projections])
    attention.in_proj_bias.data = torch.cat([part.bias for part in projections])
    attention.out_proj = nn.Identity()  # type: ignore[assignment]
    attention.out_proj.weight, attention.out_proj.bias = pool.c_proj.weight, pool.c_proj.bias
    expected = F.normalize(attention(tokens, tokens, tokens, need_weights=False)[0], dim=-1)
    features, spatial = resnet.spatial_features(x)
    assert spatial.shape == (2, 4, 8)
    torch.testing.assert_close(features, expected[:, 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(spatial, expected[:, 1:], atol=1e-6, rtol=0)
    torch.testing.assert_close(features, resnet.image_features(x), atol=1e-6, rtol=0)


# ---------------------------------------------------------------------- clients and gradients


def same_for_all_clients(function: Callable[..., Tensor], *stacked: Tensor) -> None:
    """A mapped function gives what a loop gives, for each number of clients, and the same gradients."""
    stacked = tuple(values.clone().requires_grad_() for values in stacked)
    looped = torch.stack([function(*row) for row in zip(*stacked, strict=True)])
    mapped = vmap(function)(*stacked)
    torch.testing.assert_close(mapped, looped, atol=1e-6, rtol=0)
    weights = normal(*looped.shape, key="weights")
    gradients = torch.autograd.grad((mapped * weights).sum(), stacked)
    for own, expected in zip(gradients, torch.autograd.grad((looped * weights).sum(), stacked), strict=True):
        assert expected.abs().max() > 0
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-4)
    for count in (1, 2):
        fewer = vmap(function)(*(values[:count] for values in stacked))
        torch.testing.assert_close(fewer, mapped[:count], atol=1e-6, rtol=0)
        for own, expected in zip(torch.autograd.grad((fewer * weights[:count]).sum(), stacked), gradients, strict=True):
            torch.testing.assert_close(own[:count], expected[:count], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("names", [NAMES, NAMES[:2]])
def test_text_features_of_a_cohort(vit: PromptedCLIP, names: list[str]) -> None:
    prompts = vit.class_prompts(names, 4)
    contexts, deep = normal(3, 4, 16), normal(3, 2, 4, 16, key="deep")
    same_for_all_clients(lambda context: vit.text_features(prompts, context), contexts)
    same_for_all_clients(
        lambda context, own: vit.text_features(prompts, context, Prompts(own, first_layer=1)), contexts, deep
    )
    by_image = normal(3, 5, 4, 16)
    same_for_all_clients(lambda context: vit.text_features(prompts, context), by_image)


@pytest.mark.parametrize("batch", [2, 5])
def test_image_features_of_a_cohort(vit: PromptedCLIP, resnet: PromptedCLIP, batch: int) -> None:
    for clip in (vit, resnet):
        same_for_all_clients(clip.image_features, images(clip, 3, batch))
        same_for_all_clients(lambda x, clip=clip: clip.spatial_features(x)[1], images(clip, 3, batch))
    prompts, deep = normal(3, 2, 16), normal(3, 3, 2, 16, key="deep")
    same_for_all_clients(vit.image_features, images(vit, 3, batch), prompts, deep)


def test_gradients_against_finite_differences(vit: PromptedCLIP) -> None:
    vit.double()
    prompts = vit.class_prompts(NAMES[:2], 2)
    context, deep = normal(2, 16).double().requires_grad_(), normal(1, 2, 16, key="deep").double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda first, then: vit.text_features(prompts, first, Prompts(then, first_layer=1)), (context, deep)
    )
    x = images(vit, 1).double().requires_grad_()
    prompt, deeper = normal(1, 16).double().requires_grad_(), normal(2, 1, 16, key="deep").double().requires_grad_()
    assert torch.autograd.gradcheck(vit.image_features, (x, prompt, deeper), fast_mode=True)


class Logits(nn.Module):
    """Zero-shot logits of a CLIP all of whose weights may be replaced."""

    def __init__(self, clip: PromptedCLIP, prompts: ClassPrompts) -> None:
        super().__init__()
        self.clip = clip
        self.prompts = prompts

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        features = self.clip.image_features(x) @ self.clip.text_features(self.prompts, context).T
        return self.clip.logit_scale * features


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_every_weight_can_be_a_clients_own(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    clip = tiny(monkeypatch, kind)
    logits = Logits(clip, clip.class_prompts(NAMES, 2))
    stacked = {
        name: torch.stack([value, value + 0.02 * normal(*value.shape, key=name)]).requires_grad_()
        for name, value in logits.named_parameters()
    }
    x, context = images(clip, 2, 4), normal(2, clip.text_width)
    mapped = vmap(lambda own, x: functional_call(logits, own, (x, context)))(stacked, x)
    rows = [{name: value[k] for name, value in stacked.items()} for k in range(2)]
    looped = torch.stack([functional_call(logits, own, (x[k], context)) for k, own in enumerate(rows)])
    torch.testing.assert_close(mapped, looped, atol=1e-4, rtol=1e-4)
    gradients = torch.autograd.grad(mapped.pow(2).sum(), list(stacked.values()))
    # Logits of the first client are those of the model itself: weights were replaced, and only by its own.
    torch.testing.assert_close(mapped[0], logits(x[0], context), atol=1e-4, rtol=1e-4)
    for name, gradient in zip(stacked, gradients, strict=True):
        assert gradient.reshape(2, -1).abs().amax(dim=1).min() > 0, name


def test_resnet_keeps_its_names_and_its_statistics(monkeypatch: pytest.MonkeyPatch, resnet: PromptedCLIP) -> None:
    assert not any(isinstance(module, _BatchNorm) for module in resnet.modules())
    clip = tiny(monkeypatch, "resnet")
    names = set(open_clip.CLIP(8, VISION["resnet"], TEXT).state_dict())
    assert {name for name in names if "num_batches" not in name} == set(clip.model.state_dict())
    before = {name: value.clone() for name, value in clip.state_dict().items()}
    features = clip.image_features(images(clip, 3))
    assert torch.equal(clip.train().image_features(images(clip, 3)), features)
    assert all(torch.equal(value, before[name]) for name, value in clip.state_dict().items())


# ---------------------------------------------------------------------- what it says of itself


def test_attributes(micro: PromptedCLIP, resnet: PromptedCLIP) -> None:
    assert not any(parameter.requires_grad for parameter in micro.parameters())
    assert not micro.model.training
    assert micro.visual_kind == "vit"
    assert (micro.text_width, micro.text_depth, micro.context_length) == (64, 2, 32)
    assert (micro.embed_dim, micro.vision_width, micro.vision_depth) == (64, 96, 4)
    assert micro.image_size == (32, 32)
    assert micro.mean == micro.std == (0.5, 0.5, 0.5)
    assert torch.equal(micro.logit_scale, micro.model.logit_scale.exp())
    assert resnet.visual_kind == "resnet"
    assert (resnet.vision_width, resnet.vision_depth, resnet.image_size) == (256, 0, (64, 64))


@pytest.mark.parametrize("weights", ["random", "embedded"])
def test_image_size_can_be_chosen(weights: str) -> None:
    clip = PromptedCLIP(weights=weights, image_size=64)  # type: ignore[arg-type]
    assert clip.image_size == (64, 64)
    assert clip.image_features(images(clip, 2)).shape == (2, 64)
    assert clip.model.visual.positional_embedding.shape == (65, 96)
    if weights == "embedded":
        own, _ = load_clip()
        assert torch.equal(clip.model.visual.positional_embedding[0], own.visual.positional_embedding[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.class_prompts(["a " * 20], 4), "has 27 tokens (4 of them context), the text tower takes 20"),
        (lambda c: c.class_prompts({"a", "b"}, 4), "got a set; a set has no order"),
        (lambda c: c.class_prompts("ab", 4), "class_names is a list in the order of the labels, got a str"),
        (lambda c: c.class_prompts([], 4), "prompts need at least one class name"),
        (lambda c: c.class_prompts(["a"], 4, "a photo"), "template has one {} for the class name, got 'a photo'"),
        (lambda c: c.class_prompts(["a"], -1), "num_context must be 0 or more, got -1"),
        (lambda c: c.initial_context(8, "a photo"), "init_words='a photo' has 2 tokens, num_context is 8"),
        (
            lambda c: c.text_features(c.class_prompts(NAMES, 2), normal(3, 16)),
            "the context has shape [3, 16]; these prompts take [2, 16], [B, 2, 16] or [B, 4, 2, 16]",
        ),
        (lambda c: c.text_features(c.class_prompts(NAMES, 2)), "the context has shape [0, 16]"),
        (
            lambda c: c.text_features(c.class_prompts(NAMES, 2), normal(2, 16), Prompts(normal(3, 2, 16), 1)),
            "prompts have shape [3, 2, 16]; this tower (text) takes [K, d], [L, K, d] with d = 16 and L from 1 to 2",
        ),
        (
            lambda c: c.text_features(c.class_prompts(NAMES, 2), normal(2, 16), Prompts(normal(3, 16), 1)),
            "text prompts of layer 2 have shape [3, 16]; from layer 2 on those of one part take the place of the",
        ),
        (lambda c: c.image_features(normal(2, 3, 32, 32)), "takes images [B, 3, 16, 16], got [2, 3, 32, 32]"),
        (
            lambda c: c.image_features(images(c, 2), normal(2, 12)),
            "have shape [2, 12]; this tower (image) takes [K, d]",
        ),
        (lambda c: c.image_features(images(c, 2), normal(4, 2, 16)), "or [2, L, K, d] with d = 16 and L from 1 to 3"),
    ],
)
def test_bad_input_is_explained(vit: PromptedCLIP, call: Callable[[PromptedCLIP], Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call(vit)
    assert message in str(caught.value)


def test_resnet_takes_no_prompt_tokens(resnet: PromptedCLIP) -> None:
    with pytest.raises(ConfigurationError, match="a CLIP ResNet takes no prompt tokens, and no other parts; use a ViT"):
        resnet.image_features(images(resnet, 2), normal(2, 256))


def test_other_architectures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in (
        ({"pool_type": "first"}, "text features are pooled in another way"),
        ({"pool_type": "eos", "eos_id": 7}, "text features are pooled in another way"),
        ({"qk_norm": True}, "attention blocks are of another kind"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            tiny(monkeypatch, "vit", **text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 36}, "image_size=36 is not a multiple of 8, as 'micro_clip' needs it"),
        ({"name": "RN50", "weights": "random", "image_size": 100}, "image_size=100 is not a multiple of 32"),
        (
            {"name": "RN50", "weights": "hub", "image_size": 256},
            "the weights of 'RN50' are for images of 224 pixels, got image_size=256; only a ViT's can be interpolated",
        ),
    ],
)
def test_bad_image_size_is_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PromptedCLIP(**arguments)
    assert message in str(caught.value)


# ---------------------------------------------------------------------- hooks


def adapted(_: nn.Module, inputs: Any, made: Any) -> Any:
    return made + made.roll(1, dims=-1).tanh() if isinstance(made, Tensor) else made


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_a_hook_anywhere_is_called_or_refused(request: pytest.FixtureRequest, kind: str) -> None:
    clip: PromptedCLIP = request.getfixturevalue(kind)
    x, prompts = images(clip, 3), clip.class_prompts(NAMES, 0)
    plain, refused, called = (clip.image_features(x), clip.text_features(prompts)), set(), set()
    for name, module in clip.model.named_modules(prefix="model"):
        if isinstance(module, nn.ModuleList | nn.Dropout) or name.endswith("patch_dropout"):
            continue  # open_clip does not call these either, or they do nothing
        hook = module.register_forward_hook(adapted)
        made = []
        with suppress(ConfigurationError):
            made = [clip.image_features(x), clip.text_features(prompts)]
        if not made:
            with pytest.raises(
                ConfigurationError, match=rf"the backbone's {name} \(\w+\) would never be called: hook its"
            ):
                clip.text_features(prompts)
            refused.add(name)
        else:
            changed = [not torch.equal(*pair) for pair in zip(made, plain, strict=True)]
            assert changed == ([True, False] if "visual" in name else [False, True]), name
            called.add(name)
        hook.remove()
    blocks = {f"model.transformer.resblocks.{layer}" for layer in range(3)}
    blocks |= {f"model.visual.transformer.resblocks.{layer}" for layer in range(3)} if kind == "vit" else set()
    attention = {f"{block}.attn" for block in blocks}
    rest = {"model.visual.transformer"} if kind == "vit" else {"model.visual.attnpool"}
    assert refused == blocks | attention | rest | {"model", "model.visual", "model.transformer"}
    assert {f"{block}.{part}" for block in blocks for part in ("ln_1", "attn.out_proj", "ln_2", "mlp")} <= called
    assert torch.equal(clip.image_features(x), plain[0])


def test_an_adapter_on_the_mlp_of_any_block_is_that_of_the_whole_tower(vit: PromptedCLIP) -> None:
    texts, x = ["a cat.", "two great sharks."], images(vit, 3)
    tokens = vit.tokenizer(texts, context_length=vit.context_length)
    for tower in (vit.model.transformer, vit.model.visual.transformer):
        for block in tower.resblocks:
            hook = block.mlp.register_forward_hook(adapted)
            made = vit.image_features(x), vit.text_features_of(texts)
            expected = vit.model.encode_image(x, normalize=True), vit.model.encode_text(tokens, normalize=True)
            hook.remove()
            torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)


def test_classes_with_the_same_tokens_are_refused(micro: PromptedCLIP) -> None:
    for names in (["dog", "Cat", "cat"], ["hot_dog", "hot dog"], ["eel", "eel"]):
        with pytest.raises(ConfigurationError, match=f"{names[-2]!r} and {names[-1]!r} have the same tokens"):
            micro.class_prompts(names, 2)
    assert micro.class_prompts(["Cat", "cats"], 2).num_classes == 2
