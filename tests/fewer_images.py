"""A share of the embedded digits, for tests whose claims hold with fewer of them."""

import pytest

from datamodules import DigitDomains


def fewer_digits(monkeypatch: pytest.MonkeyPatch, train: int, test: int) -> None:
    """Have all sources of digits give, in each style, one training image of ``train`` and one test image of ``test``.

    A style has more test images than training images, and all are scored after each round and before the first one, so
    that scores take longer than training does.
    """
    rows_of = DigitDomains._rows

    def fewer(source: DigitDomains, labels: object) -> list[tuple[int, int, bool]]:
        rows = rows_of(source, labels)  # type: ignore[arg-type]
        kept = {
            row for held, share in ((False, train), (True, test)) for row in [r for r in rows if r[2] is held][::share]
        }
        return [row for row in rows if row in kept]

    monkeypatch.setattr(DigitDomains, "_rows", fewer)
