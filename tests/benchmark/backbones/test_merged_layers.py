"""Frozen layers and attention that merge clients into the batch: torch's numbers, in fewer operations."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import EACH_ROUND, build, fit, learned
from operations import Operations
from torch import Tensor, nn

from benchmark.backbones.merged_layers import MergedLayers

CLIENTS, IMAGES, TOKENS, HEADS, WIDTH = 3, 2, 5, 2, 8
#: torch's own rule loops over clients here, and says so; what is merged does not.
UNMERGED = pytest.mark.filterwarnings("ignore:There is a performance drop")


class Block(nn.Module):
    """Attention between two frozen layers, the second without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        made: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return made


def within(mode: MergedLayers, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with the mode on while it runs."""

    def merged(*arguments: Any) -> Tensor:
        with mode:
            return function(*arguments)

    return merged


def tokens() -> Tensor:
    """Of each client, [K, B, T, d]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(CLIENTS, IMAGES, TOKENS, WIDTH, generator=generator).requires_grad_()


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def with_gradient(function: Callable[..., Tensor], *arguments: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a function, and the gradient of a weighted sum of it in the first argument."""
    out = function(*arguments)
    shape = (IMAGES, TOKENS, WIDTH)
    weights = torch.linspace(-1, 1, IMAGES * TOKENS * WIDTH).view(shape)  # each client's alike
    (gradient,) = torch.autograd.grad((out.float() * weights).sum(), [arguments[0]])
    return out.detach(), gradient


def close(made: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-6) -> None:
    """Raise unless every number is as far from the expected as summation in another order brings it."""
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, check_dtype=False)


@pytest.mark.parametrize("masked", [False, True])
def test_merged_layers_give_each_client_what_it_gets_alone(block: Block, masked: bool) -> None:
    x, mask = tokens(), torch.full((TOKENS, TOKENS), float("-inf")).triu(1) if masked else None
    alone = [with_gradient(block, x[k].detach().requires_grad_(), *([mask] if masked else [])) for k in range(CLIENTS)]
    expected = tuple(torch.stack(parts) for parts in zip(*alone, strict=True))
    mapped = torch.vmap(within(MergedLayers(), lambda own: block(own, mask)))
    with Operations() as operations:
        made = with_gradient(mapped, x)
    close(made, expected)
    # One product a layer and one attention, each forward and backward; with a mask the attention's operations.
    assert operations.counts["addmm"] + operations.counts["mm"] == 4
    fused = [name for name in operations.counts if name.startswith("_scaled_dot_product_flash_attention_for_cpu")]
    assert [operations.counts[name] for name in fused] == ([] if masked else [1, 1])


def test_under_autocast_all_stays_in_bfloat16_and_weights_are_cast_once(block: Block) -> None:
    x, mode = tokens(), MergedLayers()
    mapped = torch.vmap(within(mode, block))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = torch.stack([block(own) for own in x.detach()])
        not_merged = torch.vmap(block.qkv)(x)
        with Operations() as first:
            made = mapped(x)
        with Operations() as second:
            again = mapped(x)
    assert made.dtype == expected.dtype == torch.bfloat16
    assert not_merged.dtype == torch.float32  # a product in bfloat16 and, outside of it, a bias in float32
    close((made, again), (expected, expected), 2e-2)
    assert (first.counts["_to_copy"], second.counts["_to_copy"]) == (4, 1)  # two weights, a bias and the tokens


def test_a_frozen_weight_that_was_loaded_anew_is_cast_anew(block: Block) -> None:
    x, mode = tokens(), MergedLayers()
    mapped = torch.vmap(within(mode, block))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        before = mapped(x)
        block.load_state_dict({name: -2 * value for name, value in block.state_dict().items()})
        after = mapped(x)
        expected = torch.stack([block(own) for own in x.detach()])
    assert not torch.equal(before, after)
    close((after,), (expected,), 2e-2)


def test_a_cast_made_in_inference_serves_training(block: Block) -> None:
    x, mode = tokens(), MergedLayers()
    mapped = torch.vmap(within(mode, block))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        with torch.inference_mode():
            mapped(x)
        gradient = with_gradient(mapped, x)[1]
    assert gradient.abs().sum() > 0


@UNMERGED
def test_weights_that_train_keep_their_gradients(block: Block) -> None:
    """Both kinds: weights that all clients share, and each client's own."""
    x = tokens().detach()
    block.qkv.requires_grad_(True)
    own = {"qkv.weight": torch.stack([block.qkv.weight.detach() * (1 + k) for k in range(CLIENTS)]).requires_grad_()}

    def of_client(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(block, values, (x,))

    found = []
    for wrapped in (lambda function: function, lambda function: within(MergedLayers(), function)):
        shared = torch.autograd.grad(torch.vmap(wrapped(block))(x).square().sum(), [*block.qkv.parameters()])
        theirs = torch.autograd.grad(torch.vmap(wrapped(of_client))(own, x).square().sum(), [*own.values()])
        found.append((*shared, *theirs))
    close(found[1], found[0], 1e-5)
    assert all(gradient.abs().sum() > 0 for gradient in found[1])


@UNMERGED
def test_what_cannot_be_merged_is_left_to_torch(block: Block) -> None:
    """A mask of each client's own, and a gradient taken inside of the mapped function."""
    x = tokens().detach()
    masks = torch.zeros(CLIENTS, TOKENS, TOKENS)
    masks[1, :, 2] = float("-inf")
    made = torch.vmap(within(MergedLayers(), block))(x, masks)
    close((made,), (torch.stack([block(own, mask) for own, mask in zip(x, masks, strict=True)]),))
    inner = torch.func.grad(lambda x: block(x).square().sum())
    close((torch.vmap(within(MergedLayers(), inner))(x),), (torch.stack([inner(own) for own in x]),), 1e-5)


def test_queries_of_all_clients_at_keys_of_each() -> None:
    """And the other way round; five dimensions, as class prompts have them."""
    generator = torch.Generator().manual_seed(2)
    shared = torch.randn(IMAGES, HEADS, 1, TOKENS, 4, generator=generator)
    own = torch.randn(CLIENTS, IMAGES, HEADS, 1, TOKENS, 4, generator=generator)

    def attend(own: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(shared, own, own) + F.scaled_dot_product_attention(own, shared, shared)

    made = torch.vmap(within(MergedLayers(), attend))(own)
    close((made,), (torch.stack([attend(part) for part in own]),))


@pytest.mark.parametrize(("precision", "kind"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_on_a_cpu_frozen_layers_merge_clients_where_autocast_gives_bfloat16(
    precision: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule of torch for ``vmap`` adds a bias in float32, and all that follows is float32 then."""
    entered, enter = [], MergedLayers.__enter__
    monkeypatch.setattr(MergedLayers, "__enter__", lambda mode: (entered.append(mode), enter(mode))[1])
    method, data = build("FedVPT")
    found: set[torch.dtype] = set()
    for block in method.backbone.vit.blocks:
        block.mlp.fc1.register_forward_hook(lambda _, __, made: found.add(made.dtype))
    fit(method, data, 1, settings={"precision": precision})
    assert found == {kind}
    assert bool(entered) == (kind is torch.bfloat16)
    assert method.prompt.tokens.dtype == torch.float32


class Forgetful(MergedLayers):
    """Begins with no cast whenever it is entered."""

    def __enter__(self) -> "Forgetful":
        super().__init__()
        return super().__enter__()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("conf", "overrides"),
    [
        ("HeadTune", []),
        ("FedCoCoOp", []),
        ("FedMaPLe", []),
        ("SGPT", ["--model.init_args.head=global"]),
        ("PFedBayesPT", ["--model.init_args.head=global"]),
        ("FedBABU", ["--model.init_args.finetuning.epochs=0"]),
    ],
)
def test_layers_that_are_shared_are_scored_at_their_new_values(
    conf: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an evaluation they are the same for all clients, as frozen ones are, but not the same in each round."""
    once = "--model.init_args.training.epochs=1"

    def rounds() -> dict[str, Tensor]:
        method, data = build(conf, "--data.partition=federation.Few", "--data.clients_per_round=4", once, *overrides)
        fit(method, data, 2, settings=EACH_ROUND | {"precision": "bf16-mixed"})
        return {name: value for name, value in learned(method).items() if name.startswith("metric.")}

    found = rounds()
    monkeypatch.setattr("benchmark.engine.mapping.MergedLayers", Forgetful)
    expected = rounds()
    assert found.keys() == expected.keys()
    assert len([name for name in found if "server/test/loss" in name]) == 3
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, equal_nan=True)
    losses = [value for name, value in sorted(found.items()) if "server/test/loss" in name]
    assert not torch.equal(losses[1], losses[2])


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_is_torchs_and_what_sees_nothing_is_zero(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, HEADS, TOKENS, 4, generator=generator)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    if kind is torch.bool:
        mask[1] = False
    else:
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(~mask, -torch.inf)

    def attend(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key[0], value[0], attn_mask=mask)

    found = torch.vmap(within(MergedLayers(), attend))(query)
    close((found,), (torch.stack([attend(own) for own in query]),))
    gradient = torch.vmap(torch.func.grad(lambda own: within(MergedLayers(), attend)(own).sum()))(query)
    assert gradient.isfinite().all()
