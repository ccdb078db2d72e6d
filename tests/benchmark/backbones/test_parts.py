"""Parts in a ViT and in both towers of a CLIP, against weights that are changed by hand."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from benchmark.backbones.changes import Changes, Places
from benchmark.backbones.parts import Adapter, Biases, LowRank, Norm, Norms, Prompts, Tower, TowerPart
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.backbones.prompts import VisualPromptTokens
from benchmark.backbones.tiny_vit import TinyViT
from benchmark.backbones.vit import TimmViT
from benchmark.errors import ConfigurationError

TARGETS = ("q", "k", "v", "proj", "fc1", "fc2")
NORMS: tuple[Norm, ...] = ("norm1", "norm2", "final")
NAMES = ["cat", "dog", "oak tree"]


@pytest.fixture(scope="module")
def vit() -> TimmViT:
    return TimmViT("micro_vit", "embedded")


@pytest.fixture(scope="module")
def clip() -> PromptedCLIP:
    return PromptedCLIP()


def drawn(module: Any) -> Any:
    """Give all parameters of a part values that are not 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    return module


def images(tower: Any, count: int = 3) -> Tensor:
    return torch.randn(count, 3, *tower.image_size, generator=torch.Generator().manual_seed(1))


def add(weight: Tensor, target: str, change: Tensor) -> None:
    """Add a change to the rows of a weight that a target means."""
    third = {"q": 0, "k": 1, "v": 2}.get(target)
    rows = slice(None) if third is None else slice(third * len(change), (third + 1) * len(change))
    weight.data[rows] += change


def merge_into_vit(vit: TimmViT, part: LowRank) -> TimmViT:
    """Return the model whose weights hold the factors' products."""
    merged = copy.deepcopy(vit)
    for at, block in enumerate(merged.vit.blocks[part.first_layer :]):
        places = {"proj": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}
        for target in part.targets:
            weight = places.get(target, block.attn.qkv).weight
            add(weight, target, part.alpha / part.rank * part.b[target][at] @ part.a[target][at])
    return merged


def merge_into_clip(blocks: Any, part: LowRank) -> None:
    for at, block in enumerate(blocks[part.first_layer :]):
        places = {"proj": block.attn.out_proj.weight, "fc1": block.mlp.c_fc.weight, "fc2": block.mlp.c_proj.weight}
        for target in part.targets:
            weight = places.get(target, block.attn.in_proj_weight)
            add(weight, target, part.alpha / part.rank * part.b[target][at] @ part.a[target][at])


@pytest.mark.parametrize("first_block", [1, 2])
@pytest.mark.parametrize("target", TARGETS)
def test_factors_in_a_vit_are_merged_weights(vit: TimmViT, target: str, first_block: int) -> None:
    part = drawn(LowRank(3, 6.0, [target], first_block).fit(vit.tower))
    x = images(vit)
    made = vit(x, part)
    assert (made - vit(x)).abs().max() > 1e-3
    torch.testing.assert_close(made, merge_into_vit(vit, part)(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tower", ["image", "text"])
def test_factors_in_a_clip_are_merged_weights(clip: PromptedCLIP, tower: str) -> None:
    part = drawn(LowRank(2, 4.0, TARGETS, first_block=2).fit(getattr(clip, f"{tower}_tower")))
    merged = copy.deepcopy(clip)
    x, prompts, context = images(clip), clip.class_prompts(NAMES, 2), clip.initial_context(2)
    if tower == "image":
        merge_into_clip(merged.model.visual.transformer.resblocks, part)
        made, plain, expected = clip.image_features(x, part), clip.image_features(x), merged.image_features(x)
    else:
        merge_into_clip(merged.model.transformer.resblocks, part)
        made, plain, expected = (
            c.text_features(prompts, context, *parts) for c, parts in ((clip, [part]), (clip, []), (merged, []))
        )
    assert (made - plain).abs().max() > 1e-3
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)


def add_to_norms(part: Norms, norms: dict[str, list[Any]]) -> None:
    """Add a part's values to the weights of the tower's own norms, those of its blocks in their order."""
    for name in part.norms:
        for at, norm in enumerate(norms[name] if name == "final" else norms[name][part.first_layer :]):
            of_block = () if name == "final" else (at,)
            norm.weight.data += part.gains[name][of_block]
            norm.bias.data += part.biases[name][of_block]


@pytest.mark.parametrize("first_block", [1, 2])
@pytest.mark.parametrize("targets", [["norm1"], ["norm2"], ["final"], ["final", "norm2", "norm1"]])
def test_tuned_norms_are_other_layer_norms(
    vit: TimmViT, clip: PromptedCLIP, targets: list[Norm], first_block: int
) -> None:
    part, x = drawn(Norms(targets, first_block).fit(vit.tower)), images(vit)
    tuned = copy.deepcopy(vit)
    blocks: Any = list(tuned.vit.blocks)
    own = {"norm1": [b.norm1 for b in blocks], "norm2": [b.norm2 for b in blocks], "final": [tuned.vit.norm]}
    add_to_norms(part, own)
    assert (vit(x, part) - vit(x)).abs().max() > 1e-3
    torch.testing.assert_close(vit(x, part), tuned(x), atol=1e-5, rtol=1e-4)

    x, prompts, context = images(clip), clip.class_prompts(NAMES, 2), clip.initial_context(2)
    for tower in ("image", "text"):
        part, changed = drawn(Norms(targets, first_block).fit(getattr(clip, f"{tower}_tower"))), copy.deepcopy(clip)
        of: Any = changed.model.visual if tower == "image" else changed.model
        blocks = list(of.transformer.resblocks)
        last = of.ln_post if tower == "image" else of.ln_final
        add_to_norms(part, {"norm1": [b.ln_1 for b in blocks], "norm2": [b.ln_2 for b in blocks], "final": [last]})
        if tower == "image":
            made, plain, expected = clip.image_features(x, part), clip.image_features(x), changed.image_features(x)
        else:
            made, plain, expected = (
                c.text_features(prompts, context, *parts) for c, parts in ((clip, [part]), (clip, []), (changed, []))
            )
        assert (made - plain).abs().max() > 1e-3
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=1e-4)


def test_a_tuned_norm_by_hand() -> None:
    # tokens (1, 3): z = (-1, 1); gain 2 and bias 1 give (-1, 3); dg = (1, 0), db = (0, 5) give (-2, 8)
    part = Norms(["norm2"], first_block=2).fit(Tower("vit", 2, 2, 4))
    assert {name: tuple(value.shape) for name, value in part.named_parameters()} == {
        "gains.norm2": (1, 2),
        "biases.norm2": (1, 2),
    }
    part.gains["norm2"].data, part.biases["norm2"].data = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0]])
    module, x = nn.LayerNorm(2, eps=0.0), torch.tensor([[1.0, 3.0]])
    module.weight.data, module.bias.data = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0])
    assert Changes([part], 1).norm("norm2", x, module).tolist() == [[-2.0, 8.0]]
    assert Changes([part], 1).norm("norm1", x, module).tolist() == [[-1.0, 3.0]], "another norm"
    assert Changes([part], 0).norm("norm2", x, module).tolist() == [[-1.0, 3.0]], "a block before the first one"
    with pytest.raises(ConfigurationError, match="the norm 'norm2', and this backbone has a Identity there"):
        Changes([part], 1).norm("norm2", x, nn.Identity())


def test_a_changed_final_norm_changes_no_block(vit: TimmViT) -> None:
    part = Norms(["final"]).fit(vit.tower)
    assert not Changes([part], 0)
    assert Changes([Norms().fit(vit.tower)], 0)
    assert sum(value.numel() for value in part.parameters()) == 2 * vit.embed_dim


def idle(tower: Tower) -> Iterator[TowerPart]:
    """Yield parts that do nothing at their start."""
    for first in (1, 2):
        yield LowRank(4, targets=TARGETS, first_block=first).fit(tower)
        yield LowRank(0, first_block=first).fit(tower)
        yield Adapter(4, first_block=first).fit(tower)
        yield Adapter(4, place="beside", first_block=first).fit(tower)
        yield Biases(first_block=first).fit(tower)
        yield Norms(NORMS, first).fit(tower)
        yield TowerPart()


def test_idle_parts_leave_the_features_of_timm_and_open_clip(vit: TimmViT, clip: PromptedCLIP) -> None:
    # In double precision: in float32 rounding alone is 1e-6 on some machines.
    exact, x = copy.deepcopy(vit).double(), images(vit).double()
    own = exact.vit.forward_head(exact.vit.forward_features(x), pre_logits=True)
    for part in idle(exact.tower):
        torch.testing.assert_close(
            exact(x, part.double() if isinstance(part, nn.Module) else part), own, atol=1e-12, rtol=0
        )
    x, texts = images(clip), [f"a photo of a {name}." for name in NAMES]
    image = clip.model.encode_image(x, normalize=True)
    text = clip.model.encode_text(clip.tokenizer(texts), normalize=True)
    prompts = clip.class_prompts(NAMES, 0, "a photo of a {}.")
    for part in idle(clip.image_tower):
        torch.testing.assert_close(clip.image_features(x, part), image, atol=1e-6, rtol=0)
    for part in idle(clip.text_tower):
        torch.testing.assert_close(clip.text_features(prompts, None, part), text, atol=1e-6, rtol=0)


def test_a_bottleneck_by_hand() -> None:
    # d = 2, one unit: down (1, 0), up (2, 0), of x = (1, -1): relu(1) = 1, up gives (2, 0), scaled by 0.001
    part = Adapter(1, place="beside", scale=0.001).fit(Tower("vit", 2, 1, 4))
    part.down.data = torch.tensor([[[1.0, 0.0]]])
    part.up.data = torch.tensor([[[2.0], [0.0]]])
    torch.testing.assert_close(part.beside(0, torch.tensor([[1.0, -1.0]])), torch.tensor([[0.002, 0.0]]))
    part.down.data *= -1
    assert not part.beside(0, torch.tensor([[1.0, -1.0]])).any()


def test_factors_by_hand() -> None:
    # x = (1, 2), W = I, A = (1, 1), B = (1, 0), scale 2: y = x + 2 * 3 * (1, 0) = (7, 2)
    part = LowRank(1, 2.0, ["proj"]).fit(Tower("vit", 2, 1, 4))
    part.a["proj"].data, part.b["proj"].data = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0], [0.0]]])
    x = torch.tensor([[1.0, 2.0]])
    assert part.linear(0, "proj", x, x).tolist() == [[7.0, 2.0]]
    assert Changes([part], 0).linear("proj", x, x).tolist() == [[7.0, 2.0]]
    assert Changes([part], 0).linear("fc1", x, x) is x


def test_initial_factors() -> None:
    part = LowRank(8, targets=["q", "fc2"]).fit(Tower("vit", 192, 12, 768))
    assert part.a["q"].shape == (12, 8, 192)
    assert part.b["fc2"].shape == (12, 192, 8)
    assert part.a["q"].abs().max().item() == pytest.approx(192**-0.5, rel=1e-2)
    assert part.a["fc2"].abs().max().item() == pytest.approx(768**-0.5, rel=1e-2)
    assert not any(value.any() for value in part.b.values())
    assert torch.equal(part.a["q"], LowRank(8, targets=["q", "fc2"]).fit(Tower("vit", 192, 12, 768)).a["q"])
    count = sum(value.numel() for value in LowRank().fit(Tower("vit", 192, 12, 768)).parameters())
    assert count == 73_728, "of q and v of DeiT-Tiny"
    late = LowRank(first_block=9).fit(Tower("vit", 192, 12, 768))
    assert sum(value.numel() for value in late.parameters()) == 24_576, "of its blocks 9 to 12"


def test_an_adapter_in_sequence_is_a_hook_of_the_mlp(vit: TimmViT) -> None:
    part = drawn(Adapter(3, first_block=2).fit(vit.tower))
    hooked = copy.deepcopy(vit)
    for at, block in enumerate(hooked.vit.blocks[1:]):

        def changed(mlp: nn.Module, given: Any, made: Tensor, at: int = at) -> Tensor:
            return made + F.relu(made @ part.down[at].T + part.down_bias[at]) @ part.up[at].T + part.up_bias[at]

        block.mlp.register_forward_hook(changed)
    torch.testing.assert_close(vit(images(vit), part), hooked(images(vit)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [lambda: LowRank(2, targets=TARGETS), lambda: Adapter(3, "beside"), Biases, lambda: Norms(NORMS)],
)
def test_clients_with_parts_of_their_own_give_the_same_together(vit: TimmViT, make: Callable[[], Any]) -> None:
    clients = [drawn(make().fit(vit.tower)) for _ in range(3)]
    for factor, client in enumerate(clients, start=1):
        with torch.no_grad():
            for value in client.parameters():
                value.mul_(factor)
    values, _ = stack_module_state(clients)

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = clients[0]

        def forward(self, x: Tensor) -> Tensor:
            return vit(x, self.part)

    method, x = Alone(), images(vit)
    named = {f"part.{name}": value for name, value in values.items()}
    together = vmap(lambda own: functional_call(method, own, (x,)))(named)
    alone = torch.stack([vit(x, client) for client in clients])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def test_tokens_kept_before_a_block_give_the_same_features(vit: TimmViT) -> None:
    x = images(vit)
    kept = vit.tokens_before(x, 1)
    assert torch.equal(kept, vit.token_features(x)[:, 1])
    prompts = VisualPromptTokens(2, vit.embed_dim, patch_size=vit.patch_size, first_block=2)
    late = (LowRank(2, first_block=2), Norms(NORMS, first_block=2))
    for part in (prompts, *(drawn(part.fit(vit.tower)) for part in late)):
        assert torch.equal(vit.from_tokens(kept, part, first_layer=1), vit(x, part))


def test_prompts_from_a_block_on_stand_behind_the_class_token(vit: TimmViT) -> None:
    x, prompts = images(vit), torch.randn(2, vit.embed_dim, generator=torch.Generator().manual_seed(2))
    tokens = vit.vit.blocks[0](vit.tokens_before(x, 0))
    tokens = torch.cat([tokens[:, :1], prompts.expand(3, -1, -1), tokens[:, 1:]], dim=1)
    for block in vit.vit.blocks[1:]:
        tokens = block(tokens)
    torch.testing.assert_close(vit(x, Prompts(prompts, 1)), vit.vit.norm(tokens)[:, 0], atol=1e-5, rtol=0)


class Shift(TowerPart, nn.Module):
    """A custom part: the output of a block's projection is shifted, and the block's output gets a constant."""

    projections = ("proj",)
    in_parallel = True

    def fit(self, tower: Tower) -> "Shift":
        self.by = nn.Parameter(torch.full((tower.width,), 0.1))
        return self

    def linear(self, layer: int, name: str, x: Tensor, y: Tensor) -> Tensor:
        return y + self.by if name == "proj" else y

    def beside(self, layer: int, x: Tensor) -> Tensor:
        return self.by.expand_as(x)


def test_a_part_of_ones_own(vit: TimmViT) -> None:
    part = Shift().fit(vit.tower)
    hooked = copy.deepcopy(vit)
    for block in hooked.vit.blocks:
        block.attn.proj.bias.data += 0.1
        block.mlp.fc2.bias.data += 0.1
    torch.testing.assert_close(vit(images(vit), part), hooked(images(vit)), atol=1e-5, rtol=1e-4)


def test_parts_and_hooks_of_one_block_are_refused() -> None:
    vit, part = TinyViT(image_size=16), LowRank()
    part.fit(vit.tower)
    vit.vit.blocks[0].register_forward_hook(lambda *given: None)
    with pytest.raises(ConfigurationError, match="would leave out what the parts change in it"):
        vit(images(vit), part)
    other = TinyViT(image_size=16)
    other.vit.blocks[0].mlp.register_forward_hook(lambda *given: None)
    assert other(images(other), part).shape == (3, other.num_features), "the MLP is called as it is"
    with pytest.raises(ConfigurationError, match=r"fc1 and fc2 of timm's Mlp without hooks.*choose other projections"):
        other(images(other), LowRank(targets=["fc1"]).fit(other.tower))


def test_settings_that_a_tower_cannot_have_are_refused(vit: TimmViT) -> None:
    with pytest.raises(ConfigurationError, match=r"LowRank: first_block=99, but the tower \(vit\) has"):
        LowRank(first_block=99).fit(vit.tower)
    with pytest.raises(ConfigurationError, match="give at least one, each once"):
        LowRank(targets=["q", "q"])
    with pytest.raises(ConfigurationError, match="give at least one, each once"):
        Biases([])
    with pytest.raises(ConfigurationError, match=r"Norms: targets=\['final', 'final'\]; give at least one, each once"):
        Norms(["final", "final"])
    with pytest.raises(ConfigurationError, match=r"Norms: first_block=99, but the tower \(vit\) has"):
        Norms(first_block=99).fit(vit.tower)


def test_places_of_parts_side_by_side() -> None:
    tokens = torch.tensor([[[0.0], [1.0], [2.0]]])
    first, second = Prompts(torch.tensor([[10.0], [11.0]])), Prompts(torch.tensor([[[20.0]], [[21.0]]]))
    places = Places([first, second], at=1)
    filled = places.fill(0, tokens)
    assert filled.flatten().tolist() == [0, 10, 11, 20, 1, 2]
    assert places.fill(1, filled).flatten().tolist() == [0, 10, 11, 21, 1, 2]
    assert places.without(filled).flatten().tolist() == [0, 1, 2]
    assert not Changes([first, second], 0)
