import math

import numpy as np
import pytest
from scipy import stats

from benchmark.tables.paired import paired_comparison

NAN = math.nan


def test_one_seed_is_scipys_paired_t_interval() -> None:
    method, baseline = [0.9, 0.7, 0.8, 0.95], [0.8, 0.75, 0.6, 0.9]
    found = paired_comparison([method], [baseline], same_clients=True)
    expected = stats.ttest_rel(method, baseline).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.mean == pytest.approx(0.075)
    assert (found.seeds, found.pairs, found.over) == (1, 4, "clients")


def test_clients_and_seeds_by_hand() -> None:
    # Differences: seed 0: 1, 3; seed 1: 2, 6. Client means 1.5, 4.5; seed means 2, 4.
    found = paired_comparison([[1.0, 3.0], [2.0, 6.0]], [[0.0, 0.0], [0.0, 0.0]], same_clients=True)
    reach = stats.t.ppf(0.975, 1) * math.sqrt(4.5 / 2 + 2.0 / 2)
    assert found.mean == 3.0
    assert (found.low, found.high) == pytest.approx((3 - reach, 3 + reach))
    assert (found.pairs, found.over) == (4, "clients and seeds")
    # With other clients under every seed, client 0 of seed 0 and client 0 of seed 1 have nothing in common:
    # within seeds 2 and 8, pooled 5.
    found = paired_comparison([[1.0, 3.0], [2.0, 6.0]], [[0.0, 0.0], [0.0, 0.0]], same_clients=False)
    quantile = (1.25 * stats.t.ppf(0.975, 2) + 1.0 * stats.t.ppf(0.975, 1)) / 2.25
    reach = quantile * math.sqrt(5.0 / 4 + 2.0 / 2)
    assert (found.low, found.high) == pytest.approx((3 - reach, 3 + reach))


def test_one_client_speaks_of_seeds_and_one_pair_of_nothing() -> None:
    found = paired_comparison([[1.0], [2.0], [4.0]], [[0.0]] * 3, same_clients=True)
    expected = stats.t.interval(0.95, 2, np.mean([1, 2, 4]), stats.sem([1, 2, 4]))
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.over == "seeds"
    single = paired_comparison([[1.0]], [[0.5]], same_clients=True)
    assert single.mean == 0.5
    assert math.isnan(single.low)
    assert single.over == "nothing"


def test_clients_without_a_value_are_left_out_of_both() -> None:
    found = paired_comparison([[0.9, NAN, 0.8, 0.5]], [[0.7, 0.1, 0.7, NAN]], same_clients=True)
    assert found.mean == pytest.approx(0.15)
    assert found.pairs == 2
    with pytest.raises(ValueError, match="no client with a value on both sides"):
        paired_comparison([[0.9, NAN]], [[NAN, 0.1]], same_clients=True)


@pytest.mark.parametrize("method", [[[0.5, 0.6]], [[0.7, 0.8]], [[0.75, 0.85], [0.75, 0.85]]])
def test_one_difference_counted_several_times_has_no_interval(method: list[list[float]]) -> None:
    found = paired_comparison(method, [[0.5, 0.6]] * len(method), same_clients=True)
    assert found.mean == pytest.approx(method[0][0] - 0.5)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.over == "nothing"


@pytest.mark.parametrize("by", [10.0, 0.1])
def test_differences_that_cancel_in_every_mean_have_no_interval(by: float) -> None:
    """Neither the clients' means over seeds nor the seeds' over clients vary, though the differences do."""
    method, baseline = [[0.5 + by, 0.5], [0.5, 0.5 + by]], [[0.5, 0.5 + by], [0.5 + by, 0.5]]
    found = paired_comparison(method, baseline, same_clients=True)
    assert (found.mean, found.pairs, found.over) == (0.0, 4, "nothing")
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert paired_comparison(method, baseline, same_clients=False).over == "clients and seeds"


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="the same seeds and the same clients"):
        paired_comparison([[1.0]], [[1.0, 2.0]], same_clients=True)
    with pytest.raises(ValueError, match="the same number of clients"):
        paired_comparison([[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.0]], same_clients=True)


@pytest.mark.parametrize(("seeds", "clients"), [(1, 6), (2, 20), (2, 50), (3, 4), (3, 30), (3, 100)])
@pytest.mark.parametrize("same_clients", [True, False])
def test_the_interval_covers_the_truth_at_least_as_often_as_it_says(
    seeds: int, clients: int, same_clients: bool
) -> None:
    rng = np.random.default_rng(seeds * 100 + clients)
    hits = 0
    for _ in range(400):
        # Seeds and clients have effects of their own; with one seed its effect is no part of the question.
        effect = rng.normal(0, 0.5 if seeds > 1 else 0.0, (seeds, 1))
        of_client = rng.normal(0, 1, (1 if same_clients else seeds, clients))
        draw = 2 + effect + of_client + rng.normal(0, 0.7, (seeds, clients))
        found = paired_comparison(draw.tolist(), np.zeros_like(draw).tolist(), same_clients)
        hits += found.low <= 2 <= found.high
    assert hits / 400 >= 0.93
