"""Handwritten digits in six domains."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from datamodules.digits import DigitDomains
from datamodules.source import ImagePool

ROOT = Path(__file__).parents[2]
PRINT_DIGEST = """
import hashlib
from datamodules.digits import DigitDomains
pool = DigitDomains(seed=3).load()
parts = (pool.images, pool.labels, pool.test, pool.domains, pool.group)
print(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
"""


@pytest.fixture(scope="module")
def pool() -> ImagePool:
    return DigitDomains().load()


def test_names_are_fixed_words() -> None:
    assert DigitDomains.class_names[7] == "seven"
    assert len(DigitDomains.class_names) == 10
    assert DigitDomains.domain_names == ("ink", "inverted", "coloured", "outline", "noise", "low_contrast")


def test_shapes_and_types(pool: ImagePool) -> None:
    n = len(pool.labels)
    assert pool.images.shape == (n, 3, 32, 32)
    assert pool.images.dtype == torch.uint8
    assert pool.images.is_contiguous()
    for column in (pool.labels, pool.domains, pool.group):
        assert column.shape == (n,)
        assert column.dtype == torch.int64
    assert pool.test.shape == (n,)
    assert pool.test.dtype == torch.bool


def test_every_original_is_used_and_labels_are_those_of_scikit_learn(pool: ImagePool) -> None:
    digits = load_digits()
    assert set(pool.group.tolist()) == set(range(1797))
    assert torch.equal(pool.labels, torch.from_numpy(digits.target)[pool.group])


def test_an_ink_image_shows_its_original(pool: ImagePool) -> None:
    digits = load_digits()
    for row in torch.nonzero(pool.domains == 0)[::40, 0].tolist():
        ink = 1 - pool.images[row, 0].numpy() / 255
        shrunk = ink.reshape(8, 4, 8, 4).mean(axis=(1, 3))
        original = digits.images[pool.group[row]] / 16
        assert np.corrcoef(shrunk.ravel(), original.ravel())[0, 1] > 0.95


def test_a_test_digit_never_trains_in_any_style(pool: ImagePool) -> None:
    train, test = set(pool.group[~pool.test].tolist()), set(pool.group[pool.test].tolist())
    assert not train & test


def test_training_digits_are_in_one_domain_each_and_test_digits_in_all(pool: ImagePool) -> None:
    assert len(pool.group[~pool.test].unique()) == int((~pool.test).sum())
    in_first = pool.group[pool.test & (pool.domains == 0)]
    assert len(in_first.unique()) == len(in_first)
    for domain in range(1, 6):
        assert torch.equal(pool.group[pool.test & (pool.domains == domain)], in_first)


def test_split_is_stratified(pool: ImagePool) -> None:
    of_class = np.bincount(load_digits().target)
    for domain in range(6):
        here = pool.domains == domain
        tested = torch.bincount(pool.labels[here & pool.test], minlength=10)
        assert tested.tolist() == [round(0.2 * n) for n in of_class]
        trained = torch.bincount(pool.labels[here & ~pool.test], minlength=10)
        # A sixth of a class's training digits, to the whole digit.
        assert all((n - t) // 6 <= k <= -(-(n - t) // 6) for k, n, t in zip(trained, of_class, tested, strict=True))
    sizes = torch.bincount(pool.domains[~pool.test])
    assert sizes.max() - sizes.min() <= 3


def test_styles_look_different(pool: ImagePool) -> None:
    pixels = {
        name: pool.images[pool.test & (pool.domains == domain)].float() / 255
        for domain, name in enumerate(DigitDomains.domain_names)
    }
    assert torch.allclose(pixels["ink"], 1 - pixels["inverted"], atol=1 / 255)
    assert pixels["ink"].mean() > 0.6
    assert pixels["inverted"].mean() < 0.4
    assert pixels["outline"].mean() > pixels["ink"].mean() + 0.05
    assert pixels["low_contrast"].std() < 0.05
    red, green, _ = pixels["coloured"].mean(dim=(0, 2, 3))
    assert red > green + 0.2
    neighbours = {name: (image[..., 1:] - image[..., :-1]).abs().mean() for name, image in pixels.items()}
    assert max(neighbours, key=lambda name: float(neighbours[name])) == "noise"
    for name in set(pixels) - {"coloured", "noise"}:
        assert torch.equal(pixels[name][:, 0], pixels[name][:, 1])


def test_noise_is_keyed_by_image_and_seed(pool: ImagePool) -> None:
    noise = pool.images[pool.test & (pool.domains == 4)].float()
    ink = pool.images[pool.test & (pool.domains == 0)].float()
    residue = noise - ink * 0.5
    assert not torch.equal(residue[0], residue[1])
    other = DigitDomains(seed=1).load()
    assert not torch.equal(other.group, pool.group)
    rows, there = (
        {group: row for row, group in enumerate(p.group.tolist()) if p.domains[row] == 4} for p in (pool, other)
    )
    both = next(iter(rows.keys() & there.keys()))
    assert not torch.equal(pool.images[rows[both]], other.images[there[both]])


def test_two_processes_with_other_hash_seeds_make_the_same_pool() -> None:
    pool = DigitDomains(seed=3).load()
    parts = (pool.images, pool.labels, pool.test, pool.domains, pool.group)
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", PRINT_DIGEST], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == digest
