"""Prompted ViTs: features against timm, prompt insertion against a naive oracle, weights, vmap."""

import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from benchmark.backbones.tiny_vit import TinyViT
from benchmark.backbones.vit import PromptedViT, TimmViT
from benchmark.errors import ConfigurationError

# timm's own test models, at 64 pixels: 16 patches
TOKEN, AVERAGE, MAP = "test_vit", "test_vit2", "test_vit3"
DISTILLED = "deit_tiny_distilled_patch16_224"


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def small(name: str = TOKEN) -> TimmViT:
    return TimmViT(name, "random", image_size=64).eval()


def images(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 64, 64)


def randomised(vit: torch.nn.Module) -> dict[str, Tensor]:
    """A state of the model whose every value is random (fresh norms and biases are ones and zeros)."""
    return {key: 0.2 * torch.randn_like(value) for key, value in vit.state_dict().items()}


def naive(vit: VisionTransformer, x: Tensor, layers: list[Tensor | None]) -> Tensor:
    """CLS feature by slicing: ``layers[l]`` [K, d] replaces what stands after CLS, None carries it on."""
    tokens = vit._pos_embed(vit.patch_embed(x))
    k = 0
    for block, prompts in zip(vit.blocks, layers, strict=True):
        if prompts is not None:
            repeated = torch.stack([prompts] * len(x))
            tokens = torch.cat([tokens[:, :1], repeated, tokens[:, 1 + k :]], dim=1)
            k = len(prompts)
        tokens = block(tokens)
    return vit.norm(tokens)[:, 0]


# ------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("name", [TOKEN, AVERAGE, MAP, DISTILLED])
def test_without_prompts_it_is_timms_model(name: str) -> None:
    model = small(name)
    reference = timm.create_model(name, num_classes=0, img_size=64).eval()
    reference.load_state_dict(model.vit.state_dict())
    x = images()
    expected = reference(x)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model(x, torch.empty(0, model.embed_dim)), expected)


def test_attributes_are_those_of_the_model() -> None:
    model = small()
    assert (model.num_features, model.embed_dim, model.depth) == (64, 64, 6)
    assert (model.num_patches, model.patch_size, model.image_size) == (16, 16, (64, 64))
    assert TimmViT(TOKEN, "random").image_size == (160, 160)
    assert small(DISTILLED).num_prefix_tokens == 2
    assert TimmViT("deit_tiny_patch16_224", "random", image_size=32).mean == (0.485, 0.456, 0.406)
    assert TimmViT("vit_tiny_patch16_224", "random", image_size=32).std == (0.5, 0.5, 0.5)


def test_token_features_are_the_inputs_of_the_layers() -> None:
    model = small()
    x = images()
    seen: list[Tensor] = []
    for block in model.vit.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.vit(x)
    expected, seen = torch.stack(seen, dim=1), []
    features = model.token_features(x)
    assert features.shape == (3, 6, 1 + 16, 64)
    torch.testing.assert_close(features, expected)
    position = model.vit.pos_embed
    assert position is not None
    patches = model.vit.patch_embed(x).flatten(1, 2)
    torch.testing.assert_close(features[:, 0, 1:], patches + position[:, 1:])


# -------------------------------------------------------------------------------------------- prompts


def test_shallow_prompts_stand_after_cls_and_travel_on() -> None:
    model, x, prompts = small(), images(), torch.randn(4, 64)
    expected = naive(model.vit, x, [prompts, None, None, None, None, None])
    inputs: list[Tensor] = []
    model.vit.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    torch.testing.assert_close(model(x, prompts), expected)
    embedded = model.token_features(x)[:, 0]
    by_hand = torch.cat([embedded[:, :1], prompts.expand(3, -1, -1), embedded[:, 1:]], dim=1)
    assert torch.equal(inputs[0], by_hand)  # no position embedding on the prompts
    assert not torch.allclose(model(x), expected, atol=1e-3)


@pytest.mark.parametrize("depth", [1, 2, 4, 6])
def test_deep_prompts_replace_outputs_up_to_their_depth(depth: int) -> None:
    model, x, prompts = small(), images(), torch.randn(depth, 4, 64)
    layers = [*prompts, *[None] * (6 - depth)]
    torch.testing.assert_close(model(x, prompts), naive(model.vit, x, layers))


def test_a_deep_prompt_of_one_layer_is_the_shallow_one() -> None:
    model, x, prompts = small(), images(), torch.randn(4, 64)
    assert torch.equal(model(x, prompts), model(x, prompts[None]))


def test_every_image_can_have_its_own_prompts() -> None:
    model, x, prompts = small(), images(), torch.randn(3, 5, 2, 64)
    together = model(x, prompts)
    for i in range(3):
        torch.testing.assert_close(together[i : i + 1], model(x[i : i + 1], prompts[i]))


def test_families_side_by_side_each_have_their_own_depth() -> None:
    model, x = small(), images()
    common, own = torch.randn(2, 3, 64), torch.randn(3, 4, 1, 64)
    together = model(x, common, own)
    for i in range(3):
        vit = model.vit
        tokens = vit._pos_embed(vit.patch_embed(x[i : i + 1]))
        tokens = torch.cat([tokens[:, :1], common[0][None], own[i, 0][None], tokens[:, 1:]], dim=1)
        for layer, block in enumerate(vit.blocks):
            if layer < 2:
                tokens[:, 1:4] = common[layer]
            if layer < 4:
                tokens[:, 4:5] = own[i, layer]
            tokens = block(tokens)
        torch.testing.assert_close(together[i], vit.norm(tokens)[0, 0])


@pytest.mark.parametrize("name", [AVERAGE, DISTILLED])
def test_other_poolings_leave_prompts_out(name: str) -> None:
    model, x, prompts = small(name), images(), torch.randn(5, 64 if name == AVERAGE else 192)
    vit, at = model.vit, 1 if name == DISTILLED else 0
    tokens = vit._pos_embed(vit.patch_embed(x))
    tokens = torch.cat([tokens[:, :at], prompts.expand(3, -1, -1), tokens[:, at:]], dim=1)
    tokens = vit.norm(vit.blocks(tokens))
    # test_vit2 averages the patches behind its register token; DeiT averages class and distillation token
    expected = (tokens[:, 0] + tokens[:, 6]) / 2 if name == DISTILLED else vit.fc_norm(tokens[:, 6:].mean(1))
    torch.testing.assert_close(model(x, prompts), expected)


def test_prompts_of_a_layer_do_not_reach_earlier_layers() -> None:
    model, x, prompts = small(), images(), torch.randn(6, 2, 64, requires_grad=True)
    inputs: list[Tensor] = []
    model.vit.blocks[3].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model(x, prompts)
    (gradient,) = torch.autograd.grad(inputs[0].square().sum(), prompts)
    assert gradient[4:].abs().max() == 0  # layers 5 and 6
    assert gradient[3].abs().max() > 0


@pytest.mark.parametrize("shape", [(64,), (4, 63), (7, 4, 64), (0, 4, 64), (2, 6, 4, 64), (1, 1, 1, 4, 64)])
def test_prompts_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match="with d = 64 and L from 1 to 6") as error:
        small()(images(), torch.zeros(shape))
    assert f"prompts have shape {list(shape)}" in str(error.value)


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"takes images \[B, 3, 64, 64\], got \[2, 3, 32, 32\]"):
        small()(torch.zeros(2, 3, 32, 32))


# ------------------------------------------------------------------------------------------------ vmap


@pytest.mark.parametrize("name", [TOKEN, AVERAGE, MAP])
@pytest.mark.parametrize("shape", [(4, 64), (3, 4, 64), (2, 3, 4, 64)])
def test_clients_with_their_own_prompts_equal_a_loop(name: str, shape: tuple[int, ...]) -> None:
    model = small(name).requires_grad_(False)
    x = torch.randn(3, 2, 3, 64, 64)
    prompts = torch.randn(3, *shape[:-1], model.embed_dim, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "performance drop because we have not yet implemented the batching rule"
        together = vmap(model)(x, prompts)
        (gradient,) = torch.autograd.grad(together.square().sum(), prompts)
    alone = torch.stack([model(x[k], prompts[k]) for k in range(3)])
    (expected,) = torch.autograd.grad(alone.square().sum(), prompts)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["timm", "tiny"])
def test_clients_with_their_own_weights_equal_a_loop(kind: str) -> None:
    models: list[PromptedViT] = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(small() if kind == "timm" else TinyViT(image_size=16))
    size, width = models[0].image_size[0], models[0].embed_dim
    x, prompts = torch.randn(3, 2, 3, size, size), torch.randn(3, 4, width)
    stacked, _ = stack_module_state(models)

    def one(weights: dict[str, Tensor], x: Tensor, prompts: Tensor) -> Tensor:
        return functional_call(models[0], weights, (x, prompts))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together = vmap(one)(stacked, x, prompts)
        gradients = torch.autograd.grad(together.square().sum(), list(stacked.values()))
    for k, model in enumerate(models):
        alone = model(x[k], prompts[k])
        torch.testing.assert_close(together[k], alone, rtol=1e-4, atol=1e-4)
        for stack, gradient in zip(
            gradients, torch.autograd.grad(alone.square().sum(), list(model.parameters())), strict=True
        ):
            torch.testing.assert_close(stack[k], gradient, rtol=1e-3, atol=1e-3)


def test_attention_is_fused_on_cuda_only() -> None:
    model = small()
    attention = [module for module in model.modules() if hasattr(module, "fused_attn")]
    assert len(attention) == model.depth
    assert all(module.fused_attn for module in attention)  # timm's default
    model(images())
    assert not any(module.fused_attn for module in attention)


# --------------------------------------------------------------------------------------------- weights


def test_random_weights_are_keyed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    untouched = torch.rand(1)
    torch.manual_seed(1)
    first = small().state_dict()
    assert torch.equal(torch.rand(1), untouched)
    again = small().state_dict()
    torch.manual_seed(2)
    other = small().state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["vit.blocks.0.attn.qkv.weight"], other["vit.blocks.0.attn.qkv.weight"])


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_half_precision_file_with_classifier_is_loaded_into_float32(tmp_path: Path, suffix: str) -> None:
    state = {
        key: value.half() for key, value in randomised(timm.create_model(TOKEN, num_classes=7, img_size=64)).items()
    }
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pth":
        torch.save({"model": state}, path)
    else:
        save_file(state, path)
    loaded = TimmViT(TOKEN, "file", str(path), image_size=64).vit.state_dict()
    assert set(loaded) == set(state) - {"head.weight", "head.bias"}
    assert all(value.dtype == torch.float32 and torch.equal(value, state[key].float()) for key, value in loaded.items())


def test_position_embeddings_are_interpolated_to_the_image_size(tmp_path: Path) -> None:
    state = randomised(timm.create_model(TOKEN, num_classes=0, img_size=64))
    state["pos_embed"][:, 1:] = 0.5  # a constant stays that constant at every size
    save_file(state, tmp_path / "weights.safetensors")
    loaded = TimmViT(TOKEN, "file", str(tmp_path / "weights.safetensors"), image_size=96).vit.pos_embed
    assert loaded is not None
    assert loaded.shape == (1, 1 + 36, 64)
    torch.testing.assert_close(loaded[:, :1], state["pos_embed"][:, :1])
    torch.testing.assert_close(loaded[:, 1:], torch.full((1, 36, 64), 0.5))
    half = {key: value.half() for key, value in randomised(timm.create_model(TOKEN, img_size=64)).items()}
    save_file(half, tmp_path / "half.safetensors")
    loaded = TimmViT(TOKEN, "file", str(tmp_path / "half.safetensors"), image_size=96).vit.pos_embed
    assert loaded is not None
    assert not torch.equal(loaded, loaded.half().float())  # interpolated in float32


def google_arrays(state: dict[str, Tensor], depth: int, heads: int) -> dict[str, np.ndarray]:
    """A state in the names and layouts of the official Flax files."""
    width = state["cls_token"].shape[-1]
    transformer = "Transformer"
    arrays = {
        "cls": state["cls_token"],
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        f"{transformer}/posembed_input/pos_embedding": state["pos_embed"],
        f"{transformer}/encoder_norm/scale": state["norm.weight"],
        f"{transformer}/encoder_norm/bias": state["norm.bias"],
        "head/kernel": torch.zeros(width, 21843),
        "head/bias": torch.zeros(21843),
    }
    for i in range(depth):
        ours, theirs = f"blocks.{i}", f"{transformer}/encoderblock_{i}"
        for norm, number in (("norm1", 0), ("norm2", 2)):
            arrays[f"{theirs}/LayerNorm_{number}/scale"] = state[f"{ours}.{norm}.weight"]
            arrays[f"{theirs}/LayerNorm_{number}/bias"] = state[f"{ours}.{norm}.bias"]
        attention = f"{theirs}/MultiHeadDotProductAttention_1"
        weights, biases = state[f"{ours}.attn.qkv.weight"].chunk(3), state[f"{ours}.attn.qkv.bias"].chunk(3)
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            arrays[f"{attention}/{part}/kernel"] = weight.T.reshape(width, heads, -1)
            arrays[f"{attention}/{part}/bias"] = bias.reshape(heads, -1)
        arrays[f"{attention}/out/kernel"] = state[f"{ours}.attn.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}/out/bias"] = state[f"{ours}.attn.proj.bias"]
        for number in (0, 1):
            dense = f"{theirs}/MlpBlock_3/Dense_{number}"
            arrays[f"{dense}/kernel"] = state[f"{ours}.mlp.fc{number + 1}.weight"].T
            arrays[f"{dense}/bias"] = state[f"{ours}.mlp.fc{number + 1}.bias"]
    return {key: value.contiguous().numpy() for key, value in arrays.items()}


def test_an_official_google_file_is_loaded(tmp_path: Path) -> None:
    state = randomised(timm.create_model(TOKEN, num_classes=0, img_size=64))
    np.savez(tmp_path / "google.npz", **google_arrays(state, depth=6, heads=2))  # type: ignore[arg-type]
    loaded = TimmViT(TOKEN, "file", str(tmp_path / "google.npz"), image_size=64).vit.state_dict()
    assert set(loaded) == set(state)
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_a_google_file_of_another_architecture_is_refused(tmp_path: Path) -> None:
    state = randomised(timm.create_model(TOKEN, num_classes=0, img_size=64))
    path = tmp_path / "google.npz"
    np.savez(path, **google_arrays(state, depth=5, heads=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="it has 5 layers, the model 6") as error:
        TimmViT(TOKEN, "file", str(path), image_size=64)
    assert str(path) in str(error.value)
    np.savez(path, **google_arrays(state, depth=6, heads=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"is \[16, 16, 3, 64\], the model's \[16, 16, 3, 192\]"):
        TimmViT("vit_tiny_patch16_224", "file", str(path), image_size=64)
    np.savez(path, **{"embedding/kernel": np.array([{}], dtype=object)})  # type: ignore[arg-type]  # a pickle
    with pytest.raises(
        ConfigurationError, match=r"cannot be read as weights of 'test_vit' \(ValueError: Object arrays"
    ):
        TimmViT(TOKEN, "file", str(path), image_size=64)


def test_a_file_of_another_architecture_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.safetensors")
    save_file(randomised(timm.create_model(TOKEN, num_classes=0, img_size=64)), path)
    with pytest.raises(ConfigurationError) as error:
        TimmViT("vit_tiny_patch16_224", "file", path, image_size=64)
    shapes = "patch_embed.proj.weight is [64, 3, 16, 16], the model's [192, 3, 16, 16]"
    assert str(error.value) == f"{path}: not weights of 'vit_tiny_patch16_224': {shapes}"
    with pytest.raises(ConfigurationError) as error:
        TimmViT(AVERAGE, "file", path, image_size=64)
    assert f"{path}: not weights of 'test_vit2': reg_token is missing; blocks.0.ls1.gamma is missing" in str(
        error.value
    )
    assert str(error.value).endswith(" more")

    state = randomised(timm.create_model("deit_tiny_patch16_224", num_classes=0, img_size=64))
    save_file(state, path)
    with pytest.raises(ConfigurationError, match=r"dist_token is missing; pos_embed is \[1, 17, 192\], the model's"):
        TimmViT(DISTILLED, "file", path, image_size=64)
    save_file({**state, "extra": torch.zeros(1)}, path)
    with pytest.raises(ConfigurationError, match="extra is not expected"):
        TimmViT("deit_tiny_patch16_224", "file", path, image_size=64)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file; the weights of 'test_vit' are expected there"):
        TimmViT(TOKEN, "file", str(tmp_path / "missing.safetensors"))
    for name in ("broken.safetensors", "broken.npz", "broken.pth"):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(ConfigurationError, match=f"{name}: cannot be read as weights of 'test_vit'"):
            TimmViT(TOKEN, "file", str(tmp_path / name))
    torch.save({"model": Path()}, tmp_path / "pickle.pth")
    with pytest.raises(ConfigurationError, match="weights_only=True blocked loading this checkpoint"):
        TimmViT(TOKEN, "file", str(tmp_path / "pickle.pth"))
    torch.save({"model": {"norm.weight": 1}}, tmp_path / "number.pth")
    with pytest.raises(ConfigurationError, match="it holds more than tensors"):
        TimmViT(TOKEN, "file", str(tmp_path / "number.pth"))


def test_a_failed_download_names_the_weights_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **arguments: object) -> torch.nn.Module:
        if pretrained:
            raise OSError("We could not connect. Check your\nconnection.")
        return create(name, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ConfigurationError) as error:
        TimmViT("test_vit.r160_in1k", "hub")
    message = str(error.value)
    assert "the weights of 'test_vit.r160_in1k' (timm/" in message
    assert "OSError: We could not connect. Get the file" in message
    assert "pass weights='file' with its checkpoint_path" in message
    assert "\n" not in message


def test_hub_weights_are_those_that_timm_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def hub(name: str, pretrained: bool = False, **arguments: object) -> torch.nn.Module:
        model = create(name, **arguments)  # type: ignore[arg-type]
        if pretrained:
            torch.nn.init.constant_(model.get_parameter("cls_token"), 0.25)
        return model

    monkeypatch.setattr(timm, "create_model", hub)
    token = TimmViT(TOKEN, "hub", image_size=64).vit.cls_token
    assert token is not None
    assert torch.equal(token, torch.full((1, 1, 64), 0.25))


def test_embedded_weights_are_read_from_the_committed_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmark.backbones import micro

    path = tmp_path / "micro_vit.safetensors"
    state = randomised(timm.create_model("micro_vit", num_classes=0))
    save_file({key: value.half() for key, value in state.items()}, path)
    monkeypatch.setattr(micro, "micro_vit_path", lambda: path)
    model = TimmViT("micro_vit", "embedded")
    assert model.image_size == (32, 32)
    assert torch.equal(model.vit.state_dict()["norm.weight"], state["norm.weight"].half().float())
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"micro_vit.safetensors: no such file"):
        TimmViT("micro_vit", "embedded")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no model 'vit_tinny_patch16_224'; the closest names: vit_tiny_"):
        TimmViT("vit_tinny_patch16_224", "random")
    with pytest.raises(ConfigurationError, match=r"Invalid pretrained tag \(nope\)"):
        TimmViT("test_vit.nope", "random")
    with pytest.raises(ConfigurationError, match="'test_resnet' is not a plain timm VisionTransformer"):
        TimmViT("test_resnet", "random")
    with pytest.raises(ConfigurationError, match="'vit_tiny_r_s16_p8_224' is not a plain timm VisionTransformer"):
        TimmViT("vit_tiny_r_s16_p8_224", "random")
    with pytest.raises(
        ConfigurationError, match="image_size=100 is not a multiple of 16, the patch size of 'test_vit'"
    ):
        TimmViT(TOKEN, "random", image_size=100)
    with pytest.raises(ConfigurationError, match="weights='random' with checkpoint_path='x': a path is given"):
        TimmViT(TOKEN, "random", "x")
    with pytest.raises(ConfigurationError, match="weights='file' with checkpoint_path=None"):
        TimmViT(TOKEN, "file")
    with pytest.raises(ConfigurationError, match="embedded weights exist for micro_vit only, got name='test_vit'"):
        TimmViT(TOKEN, "embedded")
    with pytest.raises(ConfigurationError, match="weights: expected hub or file or random or embedded, got pretrained"):
        TimmViT(TOKEN, "pretrained")  # type: ignore[arg-type]


def test_importing_the_module_does_not_import_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "timm" or name.startswith("timm.")]:
        monkeypatch.setitem(sys.modules, name, None)  # an import would raise
    for name in ("vit", "tiny_vit"):
        module = sys.modules[f"benchmark.backbones.{name}"]
        assert module.__file__ is not None
        fresh = types.ModuleType(f"fresh_{name}")
        exec(compile(Path(module.__file__).read_text(), module.__file__, "exec"), fresh.__dict__)


# ------------------------------------------------------------------------------------------- tiny ViT


def test_tiny_vit_has_the_published_number_of_parameters() -> None:
    model = TinyViT()
    count = sum(p.numel() for p in model.parameters())
    assert count + 129 * 10 == 1_076_106
    assert count + 129 * 100 == 1_087_716
    assert (model.num_features, model.depth, model.patch_size, model.num_patches) == (128, 8, 4, 64)
    assert TinyViT(image_size=64).num_patches == 256
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-6}
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))


def test_tiny_vit_starts_from_zero_tokens_and_torchs_linear_layers() -> None:
    state = TinyViT().vit.state_dict()
    assert state["cls_token"].abs().max() == 0
    assert state["pos_embed"].abs().max() == 0
    # torch's default is uniform within 1 / sqrt(fan_in): weight and bias of the first MLP layer, fan_in 128
    for key in ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc1.bias"):
        assert 0.08 < state[key].abs().max().item() <= 128**-0.5


def test_tiny_vit_gives_the_class_token_and_takes_prompts() -> None:
    model, x, prompts = TinyViT(image_size=16), torch.randn(2, 3, 16, 16), torch.randn(8, 3, 128)
    assert model(x).shape == (2, 128)
    torch.testing.assert_close(model(x, prompts), naive(model.vit, x, list(prompts)))
    with pytest.raises(ConfigurationError, match="image_size=30 is not a multiple of TinyViT's patch size 4"):
        TinyViT(image_size=30)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "deit_tiny_patch16_224",
            "mean 0.485, 0.456, 0.406 and standard deviation 0.229, 0.224, 0.225, those of deit_tiny",
        ),
        (
            "vit_tiny_patch16_224",
            "mean 0.500, 0.500, 0.500 and standard deviation 0.500, 0.500, 0.500, those of vit_tiny",
        ),
    ],
)
def test_a_file_of_weights_says_which_pixels_it_gets(
    name: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deit.safetensors"
    save_file(timm.create_model("deit_tiny_patch16_224", num_classes=0, img_size=32).state_dict(), path)
    with caplog.at_level("INFO", "benchmark.backbones.vit"):
        TimmViT(name, "file", str(path), image_size=32)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "benchmark.backbones.vit"]
    assert message.startswith(f"{path}: its weights get images of {said}")
