"""Prompts on the pixels against plain slicing, their sizes, their draws."""

import pytest
import torch
from torch.func import vmap

from benchmark.backbones.pixel_prompts import FixedPatchPrompt, PaddingPrompt, PixelPrompt, RandomPatchPrompt
from benchmark.errors import ConfigurationError


def images(size: int, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("image_size", "size", "count"), [(32, 4, 1344), (64, 4, 2880), (224, 30, 69840)])
def test_a_frame_has_the_numbers_of_the_papers(image_size: int, size: int, count: int) -> None:
    prompt = PaddingPrompt(size, image_size)
    assert sum(p.numel() for p in prompt.parameters()) == count == 2 * 3 * size * (2 * image_size - 2 * size)
    assert [n for n, _ in prompt.named_parameters()] == ["up", "down", "left", "right"]
    assert prompt.up.shape == prompt.down.shape == (1, 3, size, image_size)
    assert prompt.left.shape == prompt.right.shape == (1, 3, image_size - 2 * size, size)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_frame_is_added_to_the_border_and_leaves_the_interior(channels: int) -> None:
    x, prompt = images(32), PaddingPrompt(4, 32, channels)  # type: ignore[arg-type]
    made = prompt(x, {})
    expected = x.clone()
    expected[:, :, :4] += prompt.up
    expected[:, :, 28:] += prompt.down
    expected[:, :, 4:28, :4] += prompt.left
    expected[:, :, 4:28, 28:] += prompt.right
    assert torch.equal(made, expected)
    assert torch.equal(made[:, :, 4:28, 4:28], x[:, :, 4:28, 4:28])
    assert ((made != x).sum(dim=(1, 2, 3)) == 3 * (32**2 - 24**2)).all()


def test_a_fixed_patch_is_at_the_top_left() -> None:
    x, prompt = images(16), FixedPatchPrompt(5, 16)
    expected = x.clone()
    expected[:, :, :5, :5] += prompt.patch
    assert torch.equal(prompt(x, {}), expected)
    assert prompt.patch.shape == (1, 3, 5, 5)


def test_a_patch_that_fills_the_image() -> None:
    x, prompt = images(8), FixedPatchPrompt(8, 8)
    assert torch.equal(prompt(x, {}), x + prompt.patch)


@pytest.mark.parametrize("channels", [1, 3])
def test_random_patches_of_several_clients_are_each_at_their_own_corner(channels: int) -> None:
    corners = torch.tensor([[0, 0], [3, 7], [10, 2]])
    prompt = RandomPatchPrompt(5, 16, channels)  # type: ignore[arg-type]
    patches = torch.randn(3, *prompt.patch.shape, requires_grad=True)
    x = torch.stack([images(16)] * 3)

    def one(patch: torch.Tensor, x: torch.Tensor, corner: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(prompt, {"patch": patch}, (x, {"corner": corner}))

    made = vmap(one)(patches, x, corners)
    naive = x.clone()
    for k, (top, left) in enumerate(corners.tolist()):
        naive[k, :, :, top : top + 5, left : left + 5] += patches[k]
    assert torch.equal(made, naive)
    weights = torch.randn_like(made)
    (ours,) = torch.autograd.grad((made * weights).sum(), patches)
    (expected,) = torch.autograd.grad((naive * weights).sum(), patches)
    torch.testing.assert_close(ours, expected)


def test_corners_are_drawn_evenly_and_never_at_the_last_place() -> None:
    prompt, generator = RandomPatchPrompt(4, 8), torch.Generator().manual_seed(1)
    drawn = torch.stack([prompt.draw(generator)["corner"] for _ in range(4000)])
    counts = torch.stack([torch.bincount(drawn[:, axis], minlength=5) for axis in (0, 1)])
    assert drawn.max() == 3, "0 to H - p - 1"
    assert (counts[:, :4] - 1000).abs().max() < 5 * (4000 * 0.25 * 0.75) ** 0.5
    together = torch.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16)
    assert (together - 250).abs().max() < 5 * (4000 / 16) ** 0.5, "row and column are independent"


def test_only_a_random_patch_needs_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    assert PaddingPrompt().draw(generator) == FixedPatchPrompt().draw(generator) == {}
    with pytest.raises(ConfigurationError, match=r"needs the corner that its draw\(\) returns"):
        RandomPatchPrompt()(images(32), {})


@pytest.mark.parametrize("kind", [PaddingPrompt, FixedPatchPrompt, RandomPatchPrompt])
def test_initial_values_depend_on_the_seed_alone(kind: type[PixelPrompt]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = kind(20, 64).state_dict()
        expected = torch.rand(1)
        torch.manual_seed(1)
        torch.rand(3)
        again = kind(20, 64).state_dict()
        torch.manual_seed(1)
        assert torch.equal(torch.rand(1), expected)  # the global generator was left alone
        torch.manual_seed(2)
        other = kind(20, 64).state_dict()
    values = torch.cat([value.flatten() for value in first.values()])
    assert abs(values.mean().item()) < 5 / len(values) ** 0.5
    assert values.std().item() == pytest.approx(1.0, abs=5 / (2 * len(values)) ** 0.5)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, other[name])
    assert not any(value.any() for value in kind(20, 64, init="zeros").state_dict().values())


@pytest.mark.parametrize(
    ("kind", "size", "largest"),
    [(PaddingPrompt, 8, 7), (FixedPatchPrompt, 17, 16), (RandomPatchPrompt, 16, 15)],
)
def test_sizes_that_do_not_fit_are_refused(kind: type[PixelPrompt], size: int, largest: int) -> None:
    kind(largest, 16)
    message = f"{kind.__name__}: size={size} does not fit images of 16 pixels; give 1 to {largest}"
    with pytest.raises(ConfigurationError, match=message):
        kind(size, 16)


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="PaddingPrompt: channels: expected 1 or 3, got 2"):
        PaddingPrompt(channels=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="PaddingPrompt: init: expected normal or zeros, got ones"):
        PaddingPrompt(init="ones")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match="PaddingPrompt: size: expected a whole number from 1 to 10,000, got 0"
    ):
        PaddingPrompt(0)
    with pytest.raises(ConfigurationError, match="PaddingPrompt is for images of 32 x 32 pixels, got 16 x 16"):
        PaddingPrompt()(images(16), {})
