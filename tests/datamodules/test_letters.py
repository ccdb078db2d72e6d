"""The second data set that comes with the code."""

import torch

from datamodules.digits import DigitDomains
from datamodules.letters import FONTS, TEST_FONTS, Letters


def test_letters_look_as_the_digits_do_and_are_none() -> None:
    source = Letters()
    pool = source.load()
    letters, fonts = len(source.class_names), len(FONTS) + len(TEST_FONTS)
    assert pool.images.shape == (2 * letters * fonts, 3, 32, 32)
    assert torch.bincount(pool.labels).tolist() == [2 * fonts] * letters
    assert int(pool.test.sum()) == 2 * letters * len(TEST_FONTS)
    assert source.domain_names == DigitDomains.domain_names
    assert not {*"ilo"} & {*source.class_names}
    for label in range(letters):  # each in every style
        assert torch.bincount(pool.domains[pool.labels == label], minlength=6).min() >= 2
    assert len(torch.unique(pool.images.flatten(1), dim=0)) > 0.9 * len(pool.labels)
    # In the first style ink is black on white paper, in the second it is the other way round.
    paper = [pool.images[pool.domains == style].float().flatten(1).quantile(0.95, 1).mean() for style in (0, 1)]
    assert paper[0] > 250
    assert torch.equal(pool.images, Letters().load().images)
