"""Corrupted versions of test images: what happens to a pixel, which images they are of, and what is refused."""

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from federation import Ragged, TinyImages
from PIL import Image

from benchmark.engine.plan.work import Shown
from benchmark.errors import ConfigurationError
from benchmark.metrics import CLEAN, CORRUPTIONS
from benchmark.records.hashes import config_hash
from datamodules import corruptions
from datamodules.corruptions import STRENGTHS, CorruptedTests, corrupted, smallest_side
from datamodules.federated import FederatedDataModule
from datamodules.source import ImagePool

SMALL = torch.randint(0, 256, (3, 10, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
LARGE = torch.randint(0, 256, (3, 70, 66), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def image(*pixels: tuple[float, float, float]) -> torch.Tensor:
    """An image of one row of these pixels, 0 to 255."""
    return torch.tensor(pixels, dtype=torch.uint8).T[:, None]


def test_brightness_raises_the_largest_channel_and_keeps_the_colour() -> None:
    # 0.3 more: V of (51, 102, 204) rises from 0.8 to 1, so that all are divided by 0.8; black becomes grey.
    made = corrupted(image((51, 102, 204), (0, 0, 0), (100, 50, 0)), "brightness", 5)
    ratio = (100 / 255 + 0.3) / (100 / 255)
    expected = [(64, 128, 255), (77, 77, 77), (math.floor(100 * ratio + 0.5), math.floor(50 * ratio + 0.5), 0)]
    assert made[:, 0].T.tolist() == [list(pixel) for pixel in expected]


def test_contrast_draws_each_channel_to_its_mean() -> None:
    # 0.3 of the distances from a mean of 0.25: (0, 0.5) to (0.175, 0.325).
    made = corrupted(image((0, 0, 200), (127, 255, 200)), "contrast", 4)
    assert made[:, 0].T.tolist() == [[44, 89, 200], [83, 166, 200]]


def test_noise_has_its_deviation_and_a_key_of_the_image() -> None:
    grey = torch.full((3, 60, 60), 128, dtype=torch.uint8)
    for severity, deviation in enumerate(STRENGTHS["gaussian_noise"][0], start=1):
        made = corrupted(grey, "gaussian_noise", severity).double() / 255
        assert made.std().item() == pytest.approx(deviation, rel=0.05)
        assert made.mean().item() == pytest.approx(128 / 255, abs=0.01)
    assert torch.equal(corrupted(grey, "gaussian_noise", 3), corrupted(grey.clone(), "gaussian_noise", 3))
    other = grey.clone()
    other[0, 0, 0] = 129
    apart = corrupted(grey, "gaussian_noise", 3).int() - corrupted(other, "gaussian_noise", 3).int()
    assert apart.abs().float().mean() > 5


def test_blur_weighs_neighbours_by_a_gaussian() -> None:
    sigma, x = STRENGTHS["gaussian_blur"][0][4], SMALL.double().numpy() / 255
    radius = math.ceil(3 * sigma)
    weights = np.array([math.exp(-(d**2) / (2 * sigma**2)) for d in range(-radius, radius + 1)])
    weights /= weights.sum()
    padded = np.pad(x, ((0, 0), (radius, radius), (radius, radius)), mode="reflect")
    expected = np.zeros_like(x)
    for down, of_down in enumerate(weights):
        for right, of_right in enumerate(weights):
            expected += of_down * of_right * padded[:, down : down + x.shape[1], right : right + x.shape[2]]
    made = corrupted(SMALL, "gaussian_blur", 5).numpy()
    assert np.abs(made - np.floor(255 * expected + 0.5)).max() <= 1


def test_jpeg_is_pillows_at_the_quality() -> None:
    stream = io.BytesIO()
    Image.fromarray(LARGE.permute(1, 2, 0).numpy()).save(stream, "JPEG", quality=15, subsampling=2)
    assert np.array_equal(corrupted(LARGE, "jpeg", 3).permute(1, 2, 0).numpy(), np.asarray(Image.open(stream)))


def test_pixelation_makes_blocks() -> None:
    flat = torch.zeros(3, 100, 100, dtype=torch.uint8)
    flat[:, :, 52:] = 240
    made = corrupted(flat, "pixelate", 5)  # to a quarter of the side and back
    assert torch.equal(made, flat)
    steps = torch.arange(100, dtype=torch.uint8).expand(3, 100, 100)
    assert corrupted(steps, "pixelate", 5)[0, 0].unique().tolist() == [4 * block + 2 for block in range(25)]


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("image", [SMALL, LARGE], ids=["small", "large"])
def test_every_version_is_an_image_and_stronger_ones_are_further_away(kind: str, image: torch.Tensor) -> None:
    distances = []
    for severity in range(1, 6):
        before = image.clone()
        made = corrupted(image, kind, severity)
        assert torch.equal(before, image)
        assert (made.shape, made.dtype) == (image.shape, torch.uint8)
        distances.append((made.double() - image.double()).abs().mean().item())
    assert distances[0] > 0
    assert distances[-1] > distances[0]
    assert torch.equal(corrupted(image, CLEAN, 0), image)


def data_of(tests: CorruptedTests | str | None, **settings: Any) -> FederatedDataModule:
    """The tiny federation, read."""
    given = {"source": TinyImages(), "partition": Ragged(), "corruptions": tests}
    data = FederatedDataModule(**given | settings)
    data.setup()
    return data


def test_images_are_drawn_by_client_and_all_versions_lie_together() -> None:
    tests = CorruptedTests(kinds=["contrast", "jpeg"], severities=[2, 5], images=4)
    data = data_of(tests)
    rows = data.federation.holdings.corrupted
    assert rows.versions == ("accuracy_clean_0", *(f"accuracy_{k}_{s}" for k in ("contrast", "jpeg") for s in (2, 5)))
    shown = data.others[Shown.CORRUPTED]
    versions = [(CLEAN, 0), ("contrast", 2), ("contrast", 5), ("jpeg", 2), ("jpeg", 5)]
    drawn = set()
    for client, own in rows.rows.items():
        assert own.tolist() == [row + n for row in own[::5] for n in range(5)]
        for row in own[::5].tolist():
            (place,) = [p for p in data.splits.test[client] if torch.equal(data.pool.images[p], shown.images[row])]
            drawn.add(int(place))
            for number, (kind, severity) in enumerate(versions):
                assert torch.equal(shown.images[row + number], corrupted(data.pool.images[place], kind, severity))
                assert shown.labels[row + number] == data.pool.labels[place]
    assert len(drawn) == 11 * 4
    again = data_of(tests, seed=3, partition_seed=4).federation.holdings.corrupted
    assert all(np.array_equal(again.rows[client], own) for client, own in rows.rows.items())
    whole = data_of("default").federation.holdings.corrupted
    assert len(whole.versions) == 1 + 6 * 3
    assert {len(own) for own in whole.rows.values()} == {6 * 19}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"kinds": []}, r"data.corruptions.kinds: expected some of gaussian_noise, .*, each once; got none$"),
        ({"kinds": ["fog"]}, r"got fog$"),
        ({"kinds": ["jpeg", "jpeg"]}, r"each once; got jpeg, jpeg$"),
        ({"severities": [0, 6]}, r"data.corruptions.severities: expected some of 1, 2, 3, 4, 5, each once; got 0, 6$"),
        ({"images": 0}, r"CorruptedTests: images: expected a whole number from 1"),
        ({"images": -2}, r"CorruptedTests: images: expected a whole number from 1"),
    ],
)
def test_settings_that_corrupt_nothing_are_refused(made: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        CorruptedTests(**made)


def test_where_test_images_are_not_scored_none_are_corrupted() -> None:
    assert data_of("default", val_only=True, val_fraction=0.2, partition=Ragged(1)).others == {}


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize("longer", [1, 3, 80])
def test_images_of_the_smallest_side_can_be_corrupted(kind: str, severity: int, longer: int) -> None:
    side = smallest_side(kind, severity, (1, longer))
    shape = (3, side, max(side, longer))
    assert corrupted(torch.zeros(shape, dtype=torch.uint8), kind, severity).shape == shape
    if side > 1:
        with pytest.raises((RuntimeError, ValueError)):
            corrupted(torch.zeros(3, side - 1, max(side - 1, longer), dtype=torch.uint8), kind, severity)


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        ((1, 1), "gaussian_blur of severity 1 needs images of at least 3 pixels a side, .* with 1 x 1; leave it out"),
        ((3, 3), "gaussian_blur of severity 3 needs images of at least 4 pixels a side, .* with 3 x 3; leave it out"),
        ((16, 80), "gaussian_blur of severity 5 needs images of at least 19 pixels a side, .* with 16 x 80; leave it"),
    ],
)
def test_images_too_small_to_corrupt_are_refused_before_training(sides: tuple[int, int], said: str) -> None:
    none = torch.zeros(2, dtype=torch.int64)
    pool = ImagePool(torch.zeros(2, 3, *sides, dtype=torch.uint8), none, none == 0, none, torch.arange(2))
    with pytest.raises(ConfigurationError, match=said):
        CorruptedTests().read(pool, {0: np.arange(2)})


def test_what_does_not_fit_into_memory_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruptions, "free_memory", lambda device: 1e6)
    with pytest.raises(
        ConfigurationError, match=r"19 versions of 66 images take 4 MB, and half of the free .* is 0 MB; give fewer ima"
    ):
        data_of("default")


def test_without_corruptions_nothing_is_read_and_the_hash_is_as_before() -> None:
    data = data_of(None)
    assert data.others == {}
    assert data.federation.holdings.corrupted.versions == ()
    assert data_of("default").manifest == data.manifest
    config = {"data": {"source": "a.B"}}
    assert config_hash({"data": config["data"] | {"corruptions": None}}) == config_hash(config)
    assert config_hash({"data": config["data"] | {"corruptions": "default"}}) != config_hash(config)
