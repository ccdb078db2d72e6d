import pytest
import torch

from benchmark.errors import ConfigurationError
from datamodules.transform import STATISTICS, ImageTransform


@pytest.mark.parametrize("name", ["half", "imagenet", "clip"])
def test_training_and_test_images_are_normalised_alike(name: str) -> None:
    images = torch.full((2, 3, 8, 8), 51, dtype=torch.uint8)
    mean, std = STATISTICS[name]
    expected = [(0.2 - m) / s for m, s in zip(mean, std, strict=True)]
    test = ImageTransform(normalize=name)(images, None)
    assert test[0, :, 3, 3].tolist() == pytest.approx(expected)
    centre = ImageTransform(normalize=name, augment="clip")(images, torch.full((2, 5), 0.5))
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


def test_clip_crops_between_8_percent_and_all_of_the_image() -> None:
    ramp = torch.arange(64, dtype=torch.uint8).mul(4).expand(1, 3, 64, 64).contiguous()
    transform = ImageTransform(size=64, augment="clip")

    def span(area: float) -> float:
        out = transform(ramp, torch.tensor([[0.9, area, 0.5, 0.5, 0.5]]))[0, 0, 32]
        return (out.max() - out.min()).item() / 2 * 255 / 4

    assert span(0.0) == pytest.approx(64 * 0.08**0.5, abs=1.5)
    assert span(1.0) == pytest.approx(63, abs=1)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"transform.size .* at least 1, got 0"):
        ImageTransform(size=0)
