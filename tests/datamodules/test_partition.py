import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusal import within

from benchmark.errors import ConfigurationError
from benchmark.seeds import numpy_generator
from datamodules.partition import (
    IID,
    AtMostClasses,
    ClientSplits,
    DirichletMerged,
    DirichletPFLlib,
    DirichletShared,
    DisjointClasses,
    DomainPerClient,
    IIDPFLlib,
    Partition,
    PathologicalPFLlib,
    PathologicalRandom,
    QuantitySkew,
    check_splits,
)
from datamodules.partition.at_most_classes import draw_shares, hand_out_shares
from datamodules.partition.dirichlet import dirichlet_cuts
from datamodules.partition.members import deal_stratified
from datamodules.partition.pathological_random import share_evenly
from datamodules.partition.units import split_units, units_of
from datamodules.source import ImagePool, ImageSource

SEEDS = range(5)


def make_pool(labels, test, group=None, domains=None):
    n = len(labels)
    return ImagePool(
        images=torch.zeros(n, 3, 1, 1, dtype=torch.uint8),
        labels=torch.tensor(labels),
        test=torch.tensor(test, dtype=torch.bool),
        domains=torch.zeros(n, dtype=torch.int64) if domains is None else torch.tensor(domains),
        group=torch.arange(n) if group is None else torch.tensor(group),
    )


def balanced(classes, train, test):
    """``classes`` classes with so many train and test images each."""
    labels = np.repeat(np.arange(classes), train + test)
    return make_pool(labels.tolist(), np.tile([False] * train + [True] * test, classes).tolist())


CIFAR10_LIKE = balanced(10, 500, 100)
CIFAR100_LIKE = balanced(100, 50, 10)


def class_counts(held, pool):
    labels = pool.labels.numpy()
    return np.array([np.bincount(labels[mine], minlength=labels.max() + 1) for mine in held])


def split(partition, pool, seed=0):
    return partition.split(pool, numpy_generator(seed, "partition"))


OFFICIAL = [
    (IID(7), CIFAR10_LIKE),
    (DirichletShared(0.1, 10, min_size=2), CIFAR10_LIKE),
    (DirichletShared(0.3, 20), CIFAR10_LIKE),
    (QuantitySkew(0.5, 10, min_size=3), CIFAR10_LIKE),
    (DisjointClasses(2), CIFAR10_LIKE),
    (DisjointClasses(10, num_clients=10), CIFAR100_LIKE),
    (PathologicalRandom(5, 50), CIFAR10_LIKE),
    (PathologicalRandom(3, 10), CIFAR10_LIKE),
    (AtMostClasses(5, 20), CIFAR100_LIKE),
    (AtMostClasses(15, 20), CIFAR100_LIKE),
]
MERGED = [
    (DirichletMerged(0.3, 50), CIFAR10_LIKE),
    (DirichletMerged(0.3, 50), CIFAR100_LIKE),
    (IIDPFLlib(20), CIFAR10_LIKE),
    (PathologicalPFLlib(5, 50), CIFAR10_LIKE),
    (PathologicalPFLlib(50, 50), balanced(100, 100, 20)),
]


def name(case):
    return type(case).__name__ if isinstance(case, Partition) else ""


@pytest.mark.parametrize(("partition", "pool"), OFFICIAL, ids=name)
@pytest.mark.parametrize("seed", SEEDS)
def test_official_sides_stay_apart_and_every_image_is_used_once(partition, pool, seed):
    splits = split(partition, pool, seed)
    train, test = np.concatenate(splits.train), np.concatenate(splits.test)
    assert not pool.test.numpy()[train].any()
    assert pool.test.numpy()[test].all()
    assert len(np.unique(train)) == len(train)
    assert len(np.unique(test)) == len(test)
    if not isinstance(partition, AtMostClasses):  # which leaves out what rounding leaves over
        assert len(train) + len(test) == len(pool.labels)


@pytest.mark.parametrize(("partition", "pool"), MERGED, ids=name)
@pytest.mark.parametrize("seed", SEEDS)
def test_merged_forms_use_every_image_once_and_train_on_three_quarters(partition, pool, seed):
    splits = split(partition, pool, seed)
    everything = np.concatenate(splits.train + splits.test)
    np.testing.assert_array_equal(np.sort(everything), np.arange(len(pool.labels)))
    for train, test in zip(splits.train, splits.test, strict=True):
        assert len(train) == (len(train) + len(test)) * 3 // 4


@pytest.mark.parametrize(("partition", "pool"), OFFICIAL + MERGED, ids=name)
def test_one_seed_one_partition(partition, pool):
    first, again, other = split(partition, pool, 3), split(partition, pool, 3), split(partition, pool, 4)
    for side in ("train", "test"):
        for a, b in zip(getattr(first, side), getattr(again, side), strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == np.int64
            assert (np.diff(a) > 0).all()
    assert any(not np.array_equal(a, b) for a, b in zip(first.train, other.train, strict=True))


@pytest.mark.parametrize("partition", [DirichletShared(0.1, 10, min_size=2), DirichletShared(0.5, 20)])
@pytest.mark.parametrize("seed", SEEDS)
def test_dirichlet_shared_gives_train_and_test_the_same_proportions(partition, seed):
    splits = split(partition, CIFAR10_LIKE, seed)
    train, test = class_counts(splits.train, CIFAR10_LIKE), class_counts(splits.test, CIFAR10_LIKE)
    # Both ends of a piece are rounded down: less than one image of either side off.
    assert np.abs(train / 500 - test / 100).max() < 1 / 100 + 1 / 500
    assert min(map(len, splits.train + splits.test)) >= partition.min_size


@pytest.mark.parametrize("partition", [DisjointClasses(2), PathologicalRandom(5, 50), AtMostClasses(2, 20)])
def test_same_proportions_in_train_and_test(partition):
    splits = split(partition, CIFAR10_LIKE)
    train, test = class_counts(splits.train, CIFAR10_LIKE), class_counts(splits.test, CIFAR10_LIKE)
    assert np.abs(train / 500 - test / 100).max() <= 2 * (1 / 100 + 1 / 500)


def test_dirichlet_cuts_by_hand():
    class Fixed:
        """Hands out proportions instead of draws."""

        rows = iter([[0.5, 0.3, 0.2], [0.6, 0.2, 0.2]])

        def dirichlet(self, alpha, size):
            assert alpha.tolist() == [0.3, 0.3, 0.3]
            return np.array([next(self.rows)])

    cuts = next(dirichlet_cuts(np.array([[10, 11], [4, 5]]), 3, 0.3, 1, 1, Fixed()))
    # Class 0: cumsum 0.5, 0.8, 1. The mean is 7 train images, nobody is there yet.
    # Class 1: cumsum 0.6, 0.8, 1 of 11 and 5: 6.6, 8.8, 11 and 3, 4, 5.
    np.testing.assert_array_equal(cuts[0], [[0, 5, 8, 10], [0, 6, 8, 11]])
    np.testing.assert_array_equal(cuts[1], [[0, 2, 3, 4], [0, 3, 4, 5]])

    Fixed.rows = iter([[0.8, 0.1, 0.1], [0.5, 0.25, 0.25]])
    cuts = next(dirichlet_cuts(np.array([[10, 10]]), 3, 0.3, 1, 1, Fixed()))
    # Client 0 has 8 of a mean of 6.67 after class 0, so class 1 goes half and half to the others.
    np.testing.assert_array_equal(cuts[0], [[0, 8, 9, 10], [0, 0, 5, 10]])


def test_dirichlet_cuts_agree_with_a_naive_loop():
    sizes = np.array([[40, 31, 25, 60], [9, 7, 5, 12]])
    drawn = []

    class Recording:
        rng = np.random.default_rng(0)

        def dirichlet(self, alpha, size):
            drawn.append(self.rng.dirichlet(alpha, size=size))
            return drawn[-1]

    found = list(zip(range(30), dirichlet_cuts(sizes, 4, 0.5, 2, 64, Recording()), strict=False))
    expected = []
    for draw in range(64):
        held = [[0] * 4, [0] * 4]
        cuts = [[], []]
        for c in range(4):
            p = [drawn[c][draw][k] if held[0][k] < 156 / 4 else 0.0 for k in range(4)]
            ends = np.cumsum(np.array(p) / sum(p))
            for side in range(2):
                at = [0] + [int(ends[k] * sizes[side][c]) for k in range(3)] + [int(sizes[side][c])]
                cuts[side].append(at)
                held[side] = [held[side][k] + at[k + 1] - at[k] for k in range(4)]
        if min(held[0] + held[1]) >= 2:
            expected.append(cuts)
    assert len(expected) > 3
    for (_, cuts), wanted in zip(found, expected, strict=False):
        np.testing.assert_array_equal(cuts, wanted)


def test_smaller_alpha_is_more_skewed():
    def largest_share(alpha):
        counts = class_counts(split(DirichletShared(alpha, 10, min_size=1), CIFAR10_LIKE).train, CIFAR10_LIKE)
        return (counts.max(axis=1) / counts.sum(axis=1)).mean()

    assert largest_share(0.1) > largest_share(1.0) + 0.15 > largest_share(100.0) + 0.25


def test_ten_thousand_failing_draws_are_quick_and_say_what_was_reached():
    expected = (
        "no Dirichlet draw with alpha=0.3 in 10000 gave all 20 clients min_size=2450 images: "
        r"the smallest client got at most \d+; raise alpha, use fewer clients or lower min_size, or raise max_retries"
    )
    with pytest.raises(ConfigurationError, match=expected):
        split(DirichletMerged(0.3, 20, min_size=2450), balanced(10, 4000, 1000))


def test_a_hopeless_draw_is_given_up_after_the_first():
    expected = (
        r"no Dirichlet draw with alpha=0.01 will give all 100 clients min_size=10 images: in 64 draws \d\d clients got "
        "fewer on average; raise alpha, use fewer clients or lower min_size"
    )
    with pytest.raises(ConfigurationError, match=expected):
        split(DirichletShared(0.01, 100), balanced(10, 5000, 1000))


@pytest.mark.parametrize(
    ("partition", "train", "test"),
    [
        pytest.param(DirichletMerged(0.5, 100_000, min_size=1), 15_000, 0, marks=pytest.mark.slow),
        (DirichletShared(0.5, 100_000, min_size=1), 15_000, 15_000),
    ],
)
def test_a_hundred_thousand_clients_are_refused_soon(partition, train, test):
    pool = balanced(10, train, test)
    with (
        within(10),
        pytest.raises(ConfigurationError, match=r"all 100000 clients .*: in \d+ draws \d+ clients"),
    ):
        split(partition, pool)


def as_the_code_splits(mine, test_fraction, stream):
    """Split a client's images as scikit-learn's ``train_test_split`` does: test images are drawn first."""
    order = stream.permutation(len(mine))
    tested = len(mine) - int((1 - test_fraction) * len(mine))
    return [mine[i] for i in order[tested:]], [mine[i] for i in order[:tested]]


def as_the_code_draws(labels, num_clients, alpha, min_size, test_fraction, seed):
    """Train and test images of each client, in the order in which PFLlib's code asks NumPy for numbers."""
    stream = np.random.RandomState(seed)
    held = [[]]
    while min(map(len, held)) < min_size:
        held = [[] for _ in range(num_clients)]
        for c in range(max(labels) + 1):
            images = np.array([i for i, label in enumerate(labels) if label == c])
            stream.shuffle(images)
            p = stream.dirichlet([alpha] * num_clients)
            p = np.array([share * (len(mine) < len(labels) / num_clients) for share, mine in zip(p, held, strict=True)])
            cuts = [int(end * len(images)) for end in np.cumsum(p / p.sum())[:-1]]
            held = [mine + part.tolist() for mine, part in zip(held, np.split(images, cuts), strict=True)]
    return [as_the_code_splits(mine, test_fraction, stream) for mine in held]


@pytest.mark.parametrize(("alpha", "clients", "min_size"), [(0.3, 50, 8), (0.3, 50, 20), (2.0, 7, 60)])
@pytest.mark.parametrize("seed", SEEDS)
def test_dirichlet_pfllib_draws_the_numbers_of_the_code(alpha, clients, min_size, seed):
    partition = DirichletPFLlib(alpha, clients, numpy_seed=seed, min_size=min_size)
    splits = split(partition, CIFAR10_LIKE, seed=7)
    expected = as_the_code_draws(CIFAR10_LIKE.labels.tolist(), clients, alpha, min_size, 0.25, seed)
    for train, test, sides in zip(splits.train, splits.test, expected, strict=True):
        assert train.tolist() == sorted(sides[0])
        assert test.tolist() == sorted(sides[1])


def test_dirichlet_pfllib_at_the_codes_scale():
    """The first clients' counts of pFedPT's CIFAR-10, seed 1; a matter of NumPy's first generator alone."""
    pool = make_pool(np.tile(np.arange(10), 6000).tolist(), [False] * 60_000)
    splits = DirichletPFLlib(0.3, 50).split(pool, np.random.default_rng(0))
    sizes = sorted(map(len, map(np.concatenate, zip(splits.train, splits.test, strict=True))))
    assert (sizes[0], sizes[25], sizes[-1]) == (145, 1211, 3105)
    assert sum(map(len, splits.train)) == 44_984


@pytest.mark.parametrize(
    ("min_size", "said"),
    [
        (
            119,
            r"alpha=0.3 will give all 50 clients min_size=119 images: in \d+ draws 22 clients .*; raise alpha",
        ),
        (60, r"min_size=60 images; in the best of 20 draws one had \d+; raise alpha"),
        (121, r"50 clients with at least min_size=121 images each need 6050 images, the data set has 6000"),
    ],
)
def test_dirichlet_pfllib_gives_up(min_size, said):
    with pytest.raises(ConfigurationError, match=said):
        split(DirichletPFLlib(0.3, 50, min_size=min_size, max_retries=20), CIFAR10_LIKE)


def test_dirichlet_pfllib_refuses_many_clients_soon():
    pool = make_pool(np.tile(np.arange(10), 6000).tolist(), [False] * 60_000)
    with within(5), pytest.raises(ConfigurationError, match=r"all 500 clients .*; raise alpha, use fewer"):
        split(DirichletPFLlib(0.1, 500), pool)


@pytest.mark.parametrize("alpha", [1e-3, 1e-4, 1e-6, 5e-324])
def test_dirichlet_pfllib_of_the_smallest_alpha_gives_each_class_to_one_client(alpha):
    splits = split(DirichletPFLlib(alpha, 10), CIFAR10_LIKE)
    held = [np.concatenate(sides) for sides in zip(splits.train, splits.test, strict=True)]
    classes = [CIFAR10_LIKE.labels.numpy()[rows] for rows in held]
    assert sorted(np.unique(of).tolist() for of in classes) == [[c] for c in range(10)]
    assert {len(rows) for rows in held} == {600}


@pytest.mark.parametrize("alpha", [0.01, 0.3, 2.0])
def test_shares_by_logarithms_are_dirichlets_among_open_clients(alpha):
    """Mean and variance of Dir(alpha) over three of five clients, where NumPy's own draw is no number."""
    stream = np.random.RandomState(0)
    open_ = np.array([True, False, True, True, False])
    numpys = SimpleNamespace(
        dirichlet=lambda of: np.full(len(of), np.nan),
        standard_gamma=stream.standard_gamma,
        random_sample=stream.random_sample,
    )
    shares = np.array([DirichletPFLlib(alpha, 5)._shares(open_, numpys) for _ in range(4000)])
    assert (shares[:, ~open_] == 0).all()
    np.testing.assert_allclose(shares[:, open_].mean(axis=0), 1 / 3, atol=0.025)
    np.testing.assert_allclose(shares[:, open_].var(axis=0), 2 / (9 * (3 * alpha + 1)), rtol=0.08)


def as_the_code_hands_out(labels, num_clients, classes_per_client, seed):
    """Train and test images of each client in PFLlib's pathological form, in the order of its draws."""
    stream, classes = np.random.RandomState(seed), max(labels) + 1
    held, wanted = [[] for _ in range(num_clients)], [classes_per_client] * num_clients
    for c in range(classes):
        images = [i for i, label in enumerate(labels) if label == c]
        takers = [k for k in range(num_clients) if wanted[k] > 0][: int(num_clients / classes * classes_per_client)]
        share = len(images) / len(takers)
        sizes = stream.randint(max(share / 10, 8 / classes), share, len(takers) - 1).tolist()
        for k, size in zip(takers, [*sizes, len(images) - sum(sizes)], strict=True):
            held[k] += images[:size]
            images = images[size:]
            wanted[k] -= 1
    return [as_the_code_splits(mine, 0.25, stream) for mine in held]


@pytest.mark.parametrize(
    ("partition", "pool", "classes"),
    [
        (PathologicalPFLlib(5, 50, numpy_seed=1), CIFAR10_LIKE, 5),
        (PathologicalPFLlib(50, 50, numpy_seed=3), balanced(100, 100, 20), 50),
        (IIDPFLlib(20, numpy_seed=1), CIFAR10_LIKE, 10),
        (IIDPFLlib(7, numpy_seed=2), balanced(3, 100, 5), 3),
    ],
)
def test_the_other_forms_of_pfllib_draw_the_numbers_of_the_code(partition, pool, classes):
    splits = split(partition, pool, seed=7)
    expected = as_the_code_hands_out(pool.labels.tolist(), partition.num_clients, classes, partition.numpy_seed)
    for train, test, sides in zip(splits.train, splits.test, expected, strict=True):
        assert train.tolist() == sorted(sides[0])
        assert test.tolist() == sorted(sides[1])


def test_iid_deals_evenly():
    labels = np.array([0] * 7 + [1] * 6)
    members = [np.flatnonzero(labels == c) for c in (0, 1)]
    dealt = deal_stratified(members, 3, np.random.default_rng(0))
    # 7 cards to clients 0 1 2 0 1 2 0, then 6 to 1 2 0 1 2 0.
    assert [np.bincount(labels[mine]).tolist() for mine in dealt] == [[3, 2], [2, 2], [2, 2]]


def test_disjoint_classes_give_whole_classes():
    counts = class_counts(split(DisjointClasses(2), CIFAR10_LIKE).train, CIFAR10_LIKE)
    assert counts.shape == (5, 10)
    assert (np.sort(counts, axis=1) == [0] * 8 + [500, 500]).all()
    assert (counts.sum(axis=0) == 500).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_pathological_pfllib_makes_two_groups_and_two_giants(seed):
    pool = balanced(10, 5000, 1000)
    splits = split(PathologicalPFLlib(5, 50), pool, seed)
    held = [np.concatenate(sides) for sides in zip(splits.train, splits.test, strict=True)]
    counts = class_counts(held, pool)
    assert (counts[:25, :5] > 0).all()
    assert (counts[:25, 5:] == 0).all()
    assert (counts[25:, :5] == 0).all()
    assert (counts[25:, 5:] > 0).all()
    small = np.delete(counts, [24, 49], axis=0)
    # 6000 / 25 = 240 images are an even share; integers(24, 240) is drawn.
    assert small[small > 0].min() >= 24
    assert small.max() < 240
    # 24 draws with mean 131.5 and standard deviation 62.4 leave 2,844 of 6,000 to the last client of a class.
    share = counts[[24, 49]].sum() / 60_000
    assert 0.44 < share < 0.52
    assert 600 < np.median(counts.sum(axis=1)) < 720


def test_iid_pfllib_gives_all_classes_and_half_of_the_data_to_one():
    pool = balanced(10, 5000, 1000)
    splits = split(IIDPFLlib(50), pool)
    sizes = np.array([len(a) + len(b) for a, b in zip(splits.train, splits.test, strict=True)])
    assert (class_counts(splits.train, pool) > 0).all()
    assert sizes.argmax() == 49
    assert 0.44 < sizes[49] / 60_000 < 0.53


def test_pathological_random_shares_a_class_evenly():
    members = [np.arange(7), np.arange(7, 11)]
    holds = np.array([[True, False], [True, True], [False, True]])
    held = share_evenly(members, holds, np.random.default_rng(0))
    labels = np.array([0] * 7 + [1] * 4)
    assert [np.bincount(labels[mine], minlength=2).tolist() for mine in held] == [[4, 0], [3, 2], [0, 2]]
    counts = class_counts(split(PathologicalRandom(5, 50), CIFAR10_LIKE).train, CIFAR10_LIKE)
    assert ((counts > 0).sum(axis=1) == 5).all()
    assert ((counts > 0).sum(axis=0) > 0).all()
    assert not (counts[:25, :5] > 0).all()


def test_at_most_classes_shares_add_up():
    shares = draw_shares(100, 100, 15, np.random.default_rng(0))
    by_class = {c: [share for mine in shares for k, share in mine if k == c] for c in range(100)}
    assert all(len(mine) == 15 for mine in shares)
    assert all(len(holdings) == 15 for holdings in by_class.values())
    assert all(sum(holdings) == pytest.approx(1) for holdings in by_class.values())
    assert all(0.4 / 9 < share < 0.6 / 6 for mine in shares for _, share in mine)
    # Classes go down in step: at no time is one held twice more often than another.
    taken = np.zeros(100, dtype=int)
    for mine in shares:
        for c, _ in mine:
            taken[c] += 1
            assert np.ptp(taken) <= 1


def test_at_most_classes_hands_out_consecutive_chunks():
    members = [np.arange(10), np.arange(10, 15)]
    shares = [[(0, 0.45), (1, 0.5)], [(0, 0.55), (0, 0.0)]]
    held = hand_out_shares(members, shares, np.random.default_rng(0))
    # int(4.5) = 4 and int(2.5) = 2, then int(5.5) = 5; one image of class 0 and three of class 1 are left.
    assert [len(mine) for mine in held] == [6, 5]
    assert len(np.unique(np.concatenate(held))) == 11
    counts = class_counts(split(AtMostClasses(5, 100), balanced(100, 500, 100)).train, balanced(100, 500, 100))
    assert ((counts > 0).sum(axis=1) <= 5).all()
    assert 480 < counts.sum(axis=1).mean() <= 500


def test_domain_per_client():
    pool = make_pool([0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0, 1], domains=[1, 0, 0, 1, 0, 1])
    splits = split(DomainPerClient(), pool)
    assert [mine.tolist() for mine in splits.train] == [[1, 4], [0]]
    assert [mine.tolist() for mine in splits.test] == [[2], [3, 5]]


class TenClasses(ImageSource):
    class_names = tuple("abcdefghij")
    domain_names = ("photo", "sketch")


def test_clients_are_named_before_images_are_read():
    assert IID(2).client_names(TenClasses()) == ["client 0", "client 1"]
    assert DomainPerClient().client_names(TenClasses()) == ["photo", "sketch"]
    assert DisjointClasses(5).client_names(TenClasses()) == ["client 0", "client 1"]
    with pytest.raises(ConfigurationError, match="classes_per_client=3 does not divide the 10 classes"):
        DisjointClasses(3).client_names(TenClasses())


def test_arguments_are_those_of_the_constructor():
    assert DirichletMerged(0.3, 50).arguments() == {
        "alpha": 0.3,
        "num_clients": 50,
        "min_size": 8,
        "test_fraction": 0.25,
        "max_retries": 10_000,
    }
    assert DisjointClasses(2).arguments() == {"classes_per_client": 2, "num_clients": None}
    assert DomainPerClient().arguments() == {}


# Groups


def grouped(copies):
    """Four classes of 60 groups with ``copies`` images each; the official flags are of no account."""
    labels = np.repeat(np.arange(4), 60 * copies)
    return make_pool(labels.tolist(), [False] * len(labels), group=np.repeat(np.arange(240), copies).tolist())


@pytest.mark.parametrize(
    "partition", [DirichletMerged(0.5, 6), DirichletPFLlib(0.5, 6), PathologicalPFLlib(2, 6), IIDPFLlib(6)], ids=name
)
@pytest.mark.parametrize("copies", [2, 6])
@pytest.mark.parametrize("seed", SEEDS)
def test_merged_forms_keep_groups_whole(partition, copies, seed):
    pool = grouped(copies)
    splits = split(partition, pool, seed)
    group = pool.group.numpy()
    owners = [set(group[mine]) for mine in splits.train + splits.test]
    assert sum(map(len, owners)) == 240  # 240 groups, each at one client and on one side
    assert sum(map(len, splits.train + splits.test)) == len(group)
    assert sum(map(len, splits.test)) / len(group) == pytest.approx(0.25, abs=0.06)


def test_a_group_of_two_labels_trains():
    labels, group = np.array([0, 0, 1, 1, 1]), np.array([7, 3, 3, 9, 9])
    units = units_of(labels, group)
    assert [mine.tolist() for mine in units.members] == [[1], [2], [0], [3, 4]]
    assert units.labels.tolist() == [0, 1, 0, 1]
    assert units.sizes.tolist() == [1, 1, 1, 2]
    assert units.train_only.tolist() == [True, True, False, False]
    for seed in range(10):
        splits = split_units(units, [np.arange(4)], 0.6, np.random.default_rng(seed))
        assert {1, 2} <= set(splits.train[0])
        assert sorted([*splits.train[0], *splits.test[0]]) == [0, 1, 2, 3, 4]


MERGED = [
    DirichletMerged(0.5, 3, min_size=30),
    DirichletPFLlib(0.5, 3, min_size=30),
    PathologicalPFLlib(2, 3),
    IIDPFLlib(3),
]


@pytest.mark.parametrize("partition", MERGED, ids=name)
def test_images_that_train_for_their_groups_classes_are_counted(partition):
    """Tell of the 16 images whose groups have both classes; where all groups have, refuse to test on none."""
    labels, groups = np.arange(240) % 2, np.arange(240) // 4
    labels[16:] = groups[16:] % 2
    pool = make_pool(labels.tolist(), [False] * 240, group=groups.tolist())
    with pytest.warns(UserWarning, match=r"^16 of 240 images are of groups with .* all of these train, and none is"):
        splits = split(partition, pool)
    assert set(range(16)) <= set(np.concatenate(splits.train).tolist())
    mixed = make_pool((np.arange(240) % 2).tolist(), [False] * 240, group=groups.tolist())
    with pytest.raises(ConfigurationError, match=r"3 of 3 clients have no .*: 240 of 240 images are of groups with"):
        split(partition, mixed)


def test_units_are_cut_between_groups():
    units = units_of(np.zeros(7, dtype=np.int64), np.array([0, 0, 0, 1, 2, 2, 3]))
    pieces = units.cut(np.array([0, 1, 2, 3]), np.array([0, 2, 5, 7]))
    # Running sizes 3, 4, 6, 7: nothing is complete at 2, two groups are at 5, all are at 7.
    assert [piece.tolist() for piece in pieces] == [[], [0, 1], [2, 3]]


# Errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IID(0), "num_clients: expected a whole number from 1 to 1,000,000, got 0"),
        (lambda: DirichletMerged(0.0, 5), "alpha: expected a number above 0 and at most 1,000,000, got 0.0"),
        (lambda: DirichletShared(-1.0, 5), "alpha: expected a number above 0 and at most 1,000,000, got -1.0"),
        (lambda: DirichletShared(float("nan"), 5), "alpha: expected a number above 0 and at most 1,000,000, got nan"),
        (
            lambda: DirichletMerged(0.3, 5, test_fraction=1.0),
            "test_fraction: expected a number above 0 and below 1, got 1.0",
        ),
        (
            lambda: DirichletMerged(0.3, 5, max_retries=0),
            "max_retries: expected a whole number from 1 to 1,000,000,000, got 0",
        ),
        (
            lambda: DirichletShared(0.3, 5, min_size=0),
            "min_size: expected a whole number from 1 to 1,000,000,000, got 0",
        ),
        (
            lambda: PathologicalRandom(0, 5),
            "classes_per_client: expected a whole number from 1 to 1,000,000,000, got 0",
        ),
        (lambda: AtMostClasses(0, 5), "classes: expected a whole number from 1 to 1,000,000,000, got 0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        (IID(6001), "num_clients=6001 is more than the 6000 images"),
        (IID(2000), "1000 of 2000 clients have no test images (first: client 1000)"),
        (
            DirichletShared(0.3, 200),
            "200 clients with at least min_size=10 test images each need 2000 test images, the data set has 1000;",
        ),
        (DisjointClasses(3), "classes_per_client=3 does not divide the 10 classes"),
        (DisjointClasses(2, num_clients=4), "num_clients=4, but 10 classes in groups of 2 make 5 clients"),
        (DisjointClasses(11), "classes_per_client=11 is more than the 10 classes"),
        (PathologicalPFLlib(11, 5), "classes_per_client=11 is more than the 10 classes"),
        (PathologicalPFLlib(1, 5), "5 clients with 1 classes each cannot hold all 10 classes"),
        (IIDPFLlib(601), "class 0 has 600 images, too few for 601 clients"),
        (PathologicalRandom(11, 5), "classes_per_client=11 is more than the 10 classes"),
        (PathologicalRandom(1, 9), "9 clients with 1 classes each cannot hold all 10 classes"),
        (AtMostClasses(11, 10), "classes=11 is more than the 10 classes"),
        (AtMostClasses(3, 7), "num_clients=7 times classes=3 is not a multiple of the 10 classes"),
    ],
    ids=lambda case: name(case) if isinstance(case, Partition) else "",
)
def test_arguments_that_do_not_fit_the_data(partition, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        split(partition, CIFAR10_LIKE)


def test_classes_without_a_holder():
    pool = balanced(60, 2, 2)
    with pytest.raises(ConfigurationError, match="no draw of 10000 gave each of 60 classes a holder among 61 clients"):
        split(PathologicalRandom(1, 61), pool)


def test_check_splits_refuses_what_is_broken():
    pool = make_pool([0] * 6, [False] * 6, group=[0, 1, 2, 3, 4, 0])

    def check(train, test):
        check_splits(
            ClientSplits([np.array(x, dtype=int) for x in train], [np.array(x, dtype=int) for x in test]), pool
        )

    check([[0, 1], [1, 2]], [[3], [4]])  # two clients may train on the same image
    for train, test, message in [
        ([[0, 1]], [[3], [4]], "got 1 train lists and 2 test lists"),
        ([[0], []], [[3], [4]], "1 of 2 clients have no train images (first: client 1)"),
        ([[0], [1]], [[], [4]], "1 of 2 clients have no test images (first: client 0)"),
        ([[0], [6]], [[3], [4]], "client 1 has train index 6, the data set has images 0 to 5"),
        ([[0], [1]], [[-1], [4]], "client 0 has test index -1"),
        ([[1, 1], [0]], [[3], [4]], "client 0 holds a train image more than once"),
        ([[0], [4]], [[4], [3]], "1 images are trained on and tested on (first: image 4)"),
        ([[0], [1]], [[3], [5]], "1 groups of images that show the same thing are on both the train and the test side"),
    ]:
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            check(train, test)


@pytest.mark.parametrize("side", ["novel", "val"])
def test_a_further_splits_images_are_not_trained_on_either(side):
    pool = make_pool([0] * 6, [False] * 6, group=[0, 1, 2, 3, 4, 0])

    def check(further):
        check_splits(ClientSplits([np.array([0])], [np.array([3])], {side: [np.array(further)]}), pool)

    check([4])
    with pytest.raises(ConfigurationError, match="1 images are trained on and tested on"):
        check([0, 4])
    with pytest.raises(ConfigurationError, match="1 groups of images that show the same thing"):
        check([5])


def test_official_test_set_that_tears_a_group_is_refused():
    pool = make_pool([0, 0, 0, 0], [0, 0, 1, 1], group=[0, 1, 1, 2])
    with pytest.raises(ConfigurationError, match=r"first: images 1, 2"):
        split(IID(1), pool)


@pytest.mark.parametrize(("made", "named"), [("hard", ()), ("hard", ("easy",)), ("val", ("val",))])
def test_a_further_split_that_is_not_named_is_refused(made, named):
    class Further(IID):
        further_splits = named

        def assign(self, pool, rng):
            splits = super().assign(pool, rng)
            return ClientSplits(splits.train, splits.test, {made: splits.test})

    with pytest.raises(ConfigurationError, match=rf"Further makes the split '{made}'; its further_splits must name it"):
        split(Further(3), CIFAR10_LIKE)


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        (IID(2000), r"\(first: client 1000\); use fewer clients$"),
        (DomainPerClient(), r"\(first: client 0\); give each domain train and test images, or leave the domain out$"),
    ],
    ids=name,
)
def test_clients_without_images_are_answered_by_what_the_partition_takes(partition, said):
    pool = CIFAR10_LIKE if partition.num_clients else make_pool([0, 0, 0], [False, False, True], domains=[0, 1, 1])
    with pytest.raises(ConfigurationError, match=said):
        split(partition, pool)


def test_quantity_skew_draws_sizes_by_dirichlet_and_classes_at_random() -> None:
    pool = balanced(4, 1000, 200)
    splits = split(QuantitySkew(0.3, 8, min_size=2), pool, seed=3)
    shares = np.array([len(rows) for rows in splits.train]) / 4000
    tested = np.array([len(rows) for rows in splits.test]) / 800
    np.testing.assert_allclose(shares, tested, atol=1 / 400)  # one draw cuts both
    assert shares.max() > 3 * shares.min()
    largest = pool.labels.numpy()[splits.train[int(shares.argmax())]]
    counts = np.bincount(largest, minlength=4)
    assert counts.max() < 1.3 * counts.min()  # of about 250 or more each
    spread = [
        np.std([len(rows) for rows in split(QuantitySkew(alpha, 8, min_size=2), pool, seed=3).train])
        for alpha in (0.3, 3.0, 300.0)
    ]
    assert spread[0] > spread[1] > spread[2]
