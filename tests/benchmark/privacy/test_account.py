"""Epsilon of dp-accounting 0.6.0 as computed by hand for the specification, and how it moves."""

import math
import sys

import pytest

from benchmark.errors import ConfigurationError
from benchmark.privacy.account import Mechanism

DELTA = 1e-5


def full(relation: str = "add_or_remove") -> Mechanism:
    return Mechanism("full", 10, 10, relation, DELTA)  # type: ignore[arg-type]


def poisson(q: float, relation: str = "add_or_remove") -> Mechanism:
    return Mechanism("poisson", 1000, round(1000 * q), relation, DELTA)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rounds", "z", "expected"),
    [
        (1, 1, 4.3772), (10, 1, 17.8566), (25, 1, 33.1037), (25, 5, 4.3772), (25, 10, 1.9931), (25, 20, 0.9263),
        (100, 5, 9.9973), (100, 10, 4.3772), (100, 20, 1.9931), (150, 10, 5.5448),
    ],
)  # fmt: skip
def test_full_participation(rounds: int, z: float, expected: float) -> None:
    assert full().epsilon(z, rounds) == pytest.approx(expected, rel=1e-3)


def test_another_clients_data_is_twice_as_far_as_none() -> None:
    assert full("replace_one").epsilon(1, 1) == pytest.approx(9.9973, rel=1e-3)
    assert full("replace_one").epsilon(2, 1) == pytest.approx(4.3772, rel=1e-3)
    assert Mechanism("full", 10, 5, "add_or_remove", DELTA).epsilon(2, 150) == pytest.approx(44.1102, rel=1e-3)


@pytest.mark.parametrize(
    ("q", "rounds", "z", "expected", "replaced"),
    [
        (0.1, 150, 1, 8.5995, 13.3347), (0.1, 150, 2, 2.8847, 5.5207), (0.05, 100, 1, 3.5021, 4.8895),
        (0.2, 150, 1, 18.2184, 30.8826), (0.5, 25, 2, 6.4206, 12.7259), (0.01, 150, 0.8, 1.6694, 1.8699),
    ],
)  # fmt: skip
def test_poisson_sampling(q: float, rounds: int, z: float, expected: float, replaced: float) -> None:
    assert poisson(q).epsilon(z, rounds) == pytest.approx(expected, rel=1e-3)
    assert poisson(q, "replace_one").epsilon(z, rounds) == pytest.approx(replaced, rel=1e-3)


def test_poisson_sampling_round_by_round() -> None:
    assert poisson(0.1).epsilon(1, 1) == pytest.approx(1.684544, rel=1e-3)
    assert poisson(0.1).epsilon(1, 10) == pytest.approx(2.854519, rel=1e-3)


@pytest.mark.parametrize(
    ("clients", "participants", "rounds", "z", "expected"),
    [
        (100, 10, 150, 1, 120.8421), (100, 10, 150, 2, 18.0675), (100, 10, 150, 4, 6.7354), (50, 10, 150, 2, 39.6420),
        (50, 10, 150, 4, 15.3348), (100, 5, 100, 2, 6.4666), (1000, 10, 150, 2, 1.6167),
    ],
)  # fmt: skip
def test_clients_drawn_without_replacement(
    clients: int, participants: int, rounds: int, z: float, expected: float
) -> None:
    mechanism = Mechanism("fixed", clients, participants, "replace_one", DELTA)
    assert mechanism.epsilon(z, rounds) == pytest.approx(expected, rel=1e-6, abs=6e-5)


def test_no_round_costs_nothing_and_no_noise_everything() -> None:
    assert full().epsilon(1, 0) == 0
    assert full().epsilon(0, 1) == math.inf
    assert poisson(0.1).epsilon(0, 1) == math.inf


def test_more_rounds_and_clients_cost_more_and_more_noise_less() -> None:
    costs = [poisson(0.1).epsilon(1, rounds) for rounds in (1, 2, 20)]
    assert costs == sorted(costs)
    costs = [poisson(q).epsilon(1, 5) for q in (0.1, 0.5, 1)]
    assert costs == sorted(costs)
    costs = [poisson(0.1).epsilon(z, 5) for z in (2, 1, 0.5, 0.2)]
    assert costs == sorted(costs)


@pytest.mark.parametrize(("epsilon", "z"), [(1, 3.730632), (2, 1.993812), (4, 1.081162), (8, 0.600229)])
def test_noise_for_a_target_is_the_smallest(epsilon: float, z: float) -> None:
    for rounds in (1, 25):
        found = full().noise_for(epsilon, rounds)
        assert found == pytest.approx(z * math.sqrt(rounds), rel=5e-4)
        assert full().epsilon(found, rounds) <= epsilon


def test_a_target_that_no_noise_meets_is_refused() -> None:
    mechanism = Mechanism("fixed", 100, 10, "replace_one", DELTA)
    said = r"no noise_multiplier up to 100000 meets target_epsilon 0.004 with sampling fixed; give a larger target"
    with pytest.raises(ConfigurationError, match=said):
        mechanism.noise_for(0.004, 10)
    assert mechanism.epsilon(mechanism.noise_for(0.1, 10), 10) <= 0.1


def test_noise_for_a_target_under_poisson_sampling() -> None:
    assert poisson(0.1).noise_for(8, 150) == pytest.approx(1.0398, rel=1e-3)


def test_records_name_what_has_accounted() -> None:
    sampled = Mechanism("poisson", 100, 10, "add_or_remove", DELTA)
    assert [sampled.accountant(z) for z in (0.2, 1.0)] == ["exact Gaussian", "PLD"]
    assert Mechanism("fixed", 100, 10, "replace_one", DELTA).accountant(1.0) == "RDP"
    assert full().accountant(1.0) == "exact Gaussian"


def test_what_has_no_account_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"delta is 0.01; expected more than 0 and less than one in 200 clients"
    ):
        Mechanism("full", 200, 10, "add_or_remove", 0.01)
    with pytest.raises(ConfigurationError, match="sampling fixed is accounted for relation replace_one alone"):
        Mechanism("fixed", 200, 10, "add_or_remove", DELTA)


def test_without_the_library_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigurationError, match=r"accounted by dp-accounting>=0.6.*\[privacy\]"):
        full().epsilon(1, 1)
