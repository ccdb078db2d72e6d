"""The last layer for the class token alone: equal to timm's whole layer, for less."""

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmark.backbones.tiny_vit import TinyViT
from benchmark.backbones.vit import TimmViT
from benchmark.backbones.vit_layers import class_token_after, reads_the_class_token_alone, rows_kept
from benchmark.errors import ConfigurationError

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"qkv_bias": True},
    "no biases": {"proj_bias": False},
    "normed and scaled": {"qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True, "init_values": 0.3},
    "gated": {},
}


def block_of(kind: str, fused: bool) -> Block:
    torch.manual_seed(3)
    block = Block(24, num_heads=3, **KINDS[kind])
    if kind == "gated":
        block.attn = timm.layers.Attention(24, num_heads=3, gated=True)
    block.double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    block.attn.fused_attn = fused  # type: ignore[assignment, union-attr]
    return block


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_class_token_and_every_gradient_are_those_of_the_whole_layer(kind: str, fused: bool, batch: int) -> None:
    block = block_of(kind, fused)
    tokens = torch.randn(batch, 7, 24, dtype=torch.float64, requires_grad=True)
    over = torch.randn(batch, 24, dtype=torch.float64)
    values = [tokens, *block.parameters()]

    def through(made: Tensor) -> list[Tensor]:
        return [made, *torch.autograd.grad((made * over).sum(), values)]

    alone = class_token_after(block, tokens)
    assert alone.shape == (batch, rows_kept(batch), 24)
    torch.testing.assert_close(through(alone[:, 0]), through(block(tokens)[:, 0]))


def test_a_large_batch_keeps_one_row_an_image_and_a_small_one_four_in_all() -> None:
    assert [rows_kept(batch) for batch in (0, 1, 2, 3, 4, 64)] == [4, 4, 2, 2, 1, 1]


def test_a_third_of_the_layer_is_left() -> None:
    block, tokens = Block(64, num_heads=4), torch.randn(8, 65, 64)
    counts = []
    for layer in (block, partial(class_token_after, block)):
        with FlopCounterMode(display=False) as counter:
            layer(tokens)
        counts.append(counter.get_total_flops())
    assert 0.2 < counts[1] / counts[0] < 0.34


@pytest.mark.parametrize(
    ("name", "given", "alone"),
    [
        ("test_vit", {}, True),
        ("deit_tiny_patch16_224", {}, True),
        ("test_vit", {"proj_drop_rate": 0.1}, False),  # what is drawn would be another draw
        ("test_vit", {"attn_drop_rate": 0.1}, False),
        ("test_vit", {"drop_path_rate": 0.1}, False),
        ("test_vit", {"global_pool": "avg"}, False),
        ("test_vit3", {}, False),  # pools by attention
        ("deit_tiny_distilled_patch16_224", {}, False),  # reads a second token
        ("vit_tiny_r_s16_p8_224", {}, True),
    ],
)
def test_only_where_nothing_else_is_read_and_nothing_is_drawn(name: str, given: dict[str, Any], alone: bool) -> None:
    assert reads_the_class_token_alone(timm.create_model(name, num_classes=0, **given)) is alone


def test_a_layer_of_another_kind_is_left_as_it_is() -> None:
    vit = timm.create_model("test_vit", num_classes=0)
    vit.blocks[-1] = timm.models.vision_transformer.ParallelScalingBlock(64, num_heads=2)
    assert not reads_the_class_token_alone(vit)


@pytest.mark.parametrize("prompts", [None, (3,), (2, 3)])
def test_the_models_of_this_project_leave_out_what_nobody_reads(prompts: tuple[int, ...] | None) -> None:
    for model in (TinyViT(image_size=16), TimmViT("micro_vit", "embedded")):
        assert reads_the_class_token_alone(model.vit)
        given = [] if prompts is None else [torch.randn(*prompts, model.embed_dim)]
        seen: list[Tensor] = []
        model.vit.norm.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        model(torch.randn(5, 3, *model.image_size), *given)
        assert seen[0].shape == (5, 1, model.embed_dim)


def adapt(module: nn.Module, how: str) -> Any:
    """Put an adapter around a module by one of torch's ways, or by replacing its function; returns what undoes it."""
    forward = module.forward

    def changed(made: Tensor) -> Tensor:
        return made + 0.1 * made.roll(1, dims=-1).tanh()

    if how == "hook":
        return module.register_forward_hook(lambda _, inputs, made: changed(made)).remove
    if how == "pre-hook":
        return module.register_forward_pre_hook(lambda _, inputs: (changed(inputs[0]), *inputs[1:])).remove
    module.forward = lambda x, *more, **named: changed(forward(x, *more, **named))  # type: ignore[method-assign]
    return lambda: delattr(module, "forward")


#: Parts of a layer, "" the whole; drop paths and dropouts do nothing themselves, and are still called by timm.
PARTS = ("", "norm1", "attn", "attn.qkv", "attn.proj", "attn.proj_drop", "drop_path1", "norm2", "mlp", "drop_path2")


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward"])
def test_an_adapter_on_any_part_of_any_layer_is_called_as_timm_calls_it(how: str) -> None:
    model = TimmViT("micro_vit", "embedded").double()
    x = torch.randn(2, 3, *model.image_size, dtype=torch.float64)
    plain, silent = model(x), []
    for layer, block in enumerate(model.vit.blocks):
        for part in PARTS:
            undo = adapt(block.get_submodule(part), how)
            made, expected = model(x), model.vit(x)
            undo()
            torch.testing.assert_close(made, expected)
            silent += [f"{layer} {part}"] if torch.equal(made, plain) else []
    assert not silent
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("name", ["vit", "vit.blocks", "vit.head"])
def test_an_adapter_that_would_never_be_called_is_refused(name: str) -> None:
    model = TinyViT(image_size=16)
    x = torch.randn(2, 3, 16, 16)
    for how in ("hook", "pre-hook", "forward"):
        undo = adapt(model.get_submodule(name), how)
        for call in (model, model.token_features, partial(model.grow, inserted={})):
            with pytest.raises(
                ConfigurationError, match=rf"the backbone's {name} \(\w+\) would never be called: hook its"
            ):
                call(x)
        undo()
    model(x)
