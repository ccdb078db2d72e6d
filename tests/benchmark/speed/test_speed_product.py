"""The long run of ``lightning-cli``: what is compared with what, and that it runs."""

import pytest

from benchmark.errors import ConfigurationError
from benchmark.speed import product


def test_rounds_are_compared_with_those_of_their_kind() -> None:
    rounds = [(9.0, 9.0, 1)] + [(1.0 + r / 100, 1.0, r) for r in range(2, 41)]
    rows = product.round_rows([(5 * s, c, m) if r % 10 == 0 else (s, c, m) for r, (s, c, m) in enumerate(rounds, 1)])
    assert [(row.what, row.work) for row in rows] == [
        ("round without evaluation", "rounds 2 to 9, median of 8"),
        ("round without evaluation", "rounds 32 to 39, median of 8"),
        ("round with evaluation", "rounds 10 to 30, median of 3"),
        ("round with evaluation", "rounds 20 to 40, median of 3"),
    ]
    assert rows[1].ratio == pytest.approx(1.355 / 1.055)
    assert rows[3].ratio == pytest.approx(1.3 / 1.2)
    assert [row.memory for row in rows] == [9, 39, 30, 40]


def test_many_clients_are_planned_and_evaluated() -> None:
    rows = product.evaluation_rows((20, 40))
    assert [(row.what, row.work) for row in rows] == [
        ("planning an evaluation", "20 clients"),
        ("planning an evaluation", "40 clients"),
        ("evaluating", "20 clients"),
        ("evaluating", "40 clients"),
    ]


@pytest.mark.slow
def test_every_round_of_lightning_cli_is_timed() -> None:
    rounds = product.long_run(clients=20, rounds=20)
    assert len(rounds) == 20
    assert all(wall > 0 and cpu > 0 and peak > 2**26 for wall, cpu, peak in rounds)


@pytest.mark.slow
def test_a_run_that_fails_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"lightning-cli ended with status 2: .*error: "):
        product.long_run(clients=5, rounds=2)
