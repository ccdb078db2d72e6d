"""A share of the embedded digits, for tests whose claims hold with fewer of them."""

from dataclasses import fields

import pytest
import torch

from datamodules import DigitDomains, ImagePool


def fewer_digits(monkeypatch: pytest.MonkeyPatch, train: int, test: int) -> None:
    """Have all sources of digits give, in each style, one training image of ``train`` and one test image of ``test``.

    A style has more test images than training images, and all are scored after each round and before the first one, so
    that scores take longer than training does.
    """
    load = DigitDomains.load

    def fewer(source: DigitDomains) -> ImagePool:
        pool = load(source)
        kept = torch.zeros_like(pool.test)
        for held, share in ((False, train), (True, test)):
            kept[(pool.test == held).nonzero().flatten()[::share]] = True
        return ImagePool(*(getattr(pool, field.name)[kept] for field in fields(pool)))

    monkeypatch.setattr(DigitDomains, "load", fewer)
