import math
from typing import Any

import pytest
import torch
from torch import nn

from benchmark.errors import ConfigurationError
from datamodules.transform import STATISTICS, ImageTransform, crop_boxes


@pytest.mark.parametrize("name", ["half", "imagenet", "clip"])
def test_training_and_test_images_are_normalised_alike(name: str) -> None:
    images = torch.full((2, 3, 8, 8), 51, dtype=torch.uint8)
    mean, std = STATISTICS[name]
    expected = [(0.2 - m) / s for m, s in zip(mean, std, strict=True)]
    test = ImageTransform(normalize=name)(images, None)
    assert test[0, :, 3, 3].tolist() == pytest.approx(expected)
    centre = ImageTransform(normalize=name, augment="clip")(images, torch.full((2, 23), 0.5))
    assert centre[0, :, 3, 3].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_images_of_a_stack_keep_their_places_and_are_not_changed() -> None:
    images = torch.arange(2 * 3 * 3 * 4 * 4).reshape(2, 3, 3, 4, 4).remainder(256).to(torch.uint8)
    before = images.clone()
    out = ImageTransform(size=8)(images, None)
    assert out.shape == (2, 3, 3, 8, 8)
    torch.testing.assert_close(out[1, 2], ImageTransform(size=8)(images[1, 2:3], None)[0])
    assert torch.equal(images, before)


def test_fedbn_flips_left_and_right_by_the_first_number_and_turns_by_the_second() -> None:
    image = torch.zeros(1, 3, 9, 9, dtype=torch.uint8)
    image[..., 4, 1] = 255
    transform = ImageTransform(augment="fedbn")
    straight, flipped = (transform(image, torch.tensor([[u, 0.5]]))[0, 0] for u in (0.9, 0.1))
    assert straight.argmax().item() == 4 * 9 + 1
    assert flipped.argmax().item() == 4 * 9 + 7
    turned = transform(image, torch.tensor([[0.9, 1.0]]))[0, 0]
    row, column = divmod(turned.argmax().item(), 9)
    assert (row - 4) ** 2 + (column - 4) ** 2 == pytest.approx(9, abs=3)
    assert row != 4


@pytest.mark.parametrize("augment", ["fedbn", "clip"])
def test_augmented_images_are_the_same_in_every_precision_of_the_trainer(augment: str) -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4, 3, 48, 48), dtype=torch.uint8, generator=draw)
    transform = ImageTransform(size=32, augment=augment)
    numbers = torch.rand(4, transform.augment_numbers, generator=draw)
    expected = transform(images, numbers)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(transform(images, numbers), expected)
    try:
        torch.set_default_dtype(torch.float64)  # as Lightning has it in the steps of 64-true
        assert torch.equal(transform(images, numbers), expected)
        other = ImageTransform(normalize="clip", augment=augment)(images, numbers)  # statistics that are made now
        assert other.dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_turned_image_of_a_large_one_is_as_smooth_as_a_test_image() -> None:
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    transform = ImageTransform(size=16, augment="fedbn", normalize="half")
    straight = torch.tensor([[0.75, 0.5], [0.75, 0.5]])  # no flip, no turn
    torch.testing.assert_close(transform(images, straight), transform(images, None), rtol=0, atol=1e-5)


def test_clip_crops_between_8_percent_and_all_of_the_image() -> None:
    ramp = torch.arange(64, dtype=torch.uint8).mul(4).expand(1, 3, 64, 64).contiguous()
    transform = ImageTransform(size=64, augment="clip")

    def span(area: float) -> float:
        numbers = torch.tensor([[0.9, *[area] * 10, *[0.5] * 10, 0.5, 0.5]])
        out = transform(ramp, numbers)[0, 0, 32]
        return (out.max() - out.min()).item() / 2 * 255 / 4

    assert span(0.0) == pytest.approx(64 * 0.08**0.5, abs=1.5)
    assert span(1.0) == pytest.approx(63, abs=1)


def test_a_crop_shows_the_box_that_was_drawn() -> None:
    images = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    u = torch.rand(20, 23, generator=torch.Generator().manual_seed(1))
    out = ImageTransform(size=16, augment="clip")(images, u)
    for image, numbers, box, found in zip(images, u, crop_boxes(u[:, 1:], 32, 32).int().tolist(), out, strict=True):
        top, left, height, width = box
        x = image.float()[None] / 127.5 - 1
        if numbers[0] < 0.5:
            x, left = x.flip(3), 32 - left - width
        ys, xs = (  # two points a pixel each way, since what is stored is twice as large
            (2 * start + side * (torch.arange(32) + 0.5) / 16) / 32 - 1
            for start, side in ((top, height), (left, width))
        )
        grid = torch.stack(torch.meshgrid(ys, xs, indexing="ij")[::-1], dim=-1)[None]
        points = torch.nn.functional.grid_sample(x + 1, grid, align_corners=False)[0] - 1
        expected = points.unflatten(2, (16, 2)).unflatten(1, (16, 2)).mean((2, 4))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("stored", "contrast"), [(48, 0.5), (64, 0.01), (128, 0.01)])
def test_a_crop_of_a_larger_image_misses_nothing_between_its_pixels(stored: int, contrast: float) -> None:
    stripes = (torch.arange(stored) % 2 * 255).to(torch.uint8).expand(1, 3, stored, stored).contiguous()
    whole = torch.tensor([[0.9, *[1.0] * 10, *[0.5] * 10, 0.5, 0.5]])
    out = ImageTransform(size=32, augment="clip", normalize="half")(stripes, whole)
    assert out.abs().max() < contrast  # grey; single points of it are black and white


def torchvisions_box(u: list[float], height: int, width: int) -> list[int]:
    """RandomResizedCrop.get_params of one image with these numbers instead of its random ones."""
    for area, ratio in zip(u[:10], u[10:20], strict=True):
        target = height * width * (0.08 + 0.92 * area)
        aspect = math.exp(-math.log(4 / 3) + 2 * math.log(4 / 3) * ratio)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return [int(u[20] * (height - h + 1)), int(u[21] * (width - w + 1)), h, w]
    if width / height < 3 / 4:
        w, h = width, round(width / (3 / 4))
    elif width / height > 4 / 3:
        w, h = round(height * (4 / 3)), height
    else:
        w, h = width, height
    return [(height - h) // 2, (width - w) // 2, h, w]


@pytest.mark.parametrize(("height", "width"), [(224, 224), (32, 32), (5, 5), (1, 1), (20, 50), (50, 20), (30, 33)])
def test_boxes_are_those_of_torchvisions_rule_for_the_same_numbers(height: int, width: int) -> None:
    u = torch.rand(2000, 22, generator=torch.Generator().manual_seed(height))
    u[:40, :10] = 0.999  # nearly the whole area fits with few ratios: the central box
    u[:20, 10:20] = u[:20, 10:20] / 100
    expected = [torchvisions_box(row, height, width) for row in u.double().tolist()]
    found = crop_boxes(u, height, width)
    assert found.tolist() == expected
    largest = crop_boxes(torch.full((1, 22), 1.0), height, width)[0]
    assert largest[0] + largest[2] <= height
    assert largest[1] + largest[3] <= width


def test_boxes_are_distributed_as_torchvisions() -> None:
    from torchvision.transforms import RandomResizedCrop

    torch.manual_seed(0)
    image = torch.zeros(1, 224, 224)
    theirs = torch.tensor([RandomResizedCrop.get_params(image, [0.08, 1], [3 / 4, 4 / 3]) for _ in range(4000)])
    ours = crop_boxes(torch.rand(40_000, 22), 224, 224)
    for measure in (
        lambda box: box[:, 2] * box[:, 3] / 224**2,
        lambda box: (box[:, 2] * box[:, 3] > 0.9 * 224**2).float(),
        lambda box: ((box[:, 2] == 224) | (box[:, 3] == 224)).float(),
        lambda box: box[:, 0].float(),
        lambda box: box[:, 1].float(),
    ):
        a, b = measure(ours).float(), measure(theirs).float()
        error = (a.var() / len(a) + b.var() / len(b)).sqrt()
        assert abs(a.mean() - b.mean()) < 4 * error
    area = ours[:, 2] * ours[:, 3] / 224**2
    assert area.mean().item() == pytest.approx(0.48, abs=0.01)
    assert (area > 0.9).float().mean().item() == pytest.approx(0.025, abs=0.005)


class Backbone(nn.Module):
    image_size = (32, 32)
    mean = STATISTICS["imagenet"][0]
    std = STATISTICS["imagenet"][1]
    pretrained = True


def test_what_is_not_given_is_the_backbones() -> None:
    images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    given = ImageTransform(size=32, normalize="imagenet")
    open_one = ImageTransform()
    expected = given(images, None)
    torch.testing.assert_close(open_one.matched(Backbone())(images, None), expected, atol=0, rtol=0)
    torch.testing.assert_close(given.matched(Backbone())(images, None), expected, atol=0, rtol=0)
    assert open_one.size is None


def test_a_network_from_scratch_takes_any_statistics() -> None:
    scratch = Backbone()
    scratch.pretrained = False
    assert ImageTransform(normalize="clip").matched(scratch).statistics == STATISTICS["clip"]
    assert ImageTransform().matched(scratch).statistics == STATISTICS["imagenet"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"size": 64},
            r"transform.init_args.size=64, but the backbone takes 32 x 32 .*source.*backbone.init_args.image",
        ),
        ({"normalize": "half"}, r"normalize=half, but the backbone's weights .* 0.456, 0.406\) .*\(imagenet\): leave"),
    ],
)
def test_what_a_backbone_does_not_take_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ImageTransform(**given).matched(Backbone())


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="ImageTransform: size: expected a whole number from 1 to 10,000 or null, got 0"
    ):
        ImageTransform(size=0)
