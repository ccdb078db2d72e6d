import numpy as np
import pytest
import torch
import yaml

from benchmark.errors import ConfigurationError
from benchmark.seeds import numpy_generator
from benchmark.tables.print_cell import cell_configuration
from datamodules.digits import DigitDomains
from datamodules.manifest import FromManifest, make_manifest, write_manifest
from datamodules.partition import DomainPerClient
from datamodules.partition_domains import DomainsPerClient, LeaveOneDomainOut, SkewedDomains
from datamodules.source import ImagePool, ImageSource

CLASSES, DOMAINS, TRAIN, TEST = 3, 4, 26, 9  # images of each class and domain


class FourDomains(ImageSource):
    class_names = ("wren", "owl", "kite")
    domain_names = ("photo", "sketch", "oil", "toy")


def make_pool(group=None):
    labels, domains, sides = np.indices((CLASSES, DOMAINS, TRAIN + TEST)).reshape(3, -1)
    n = len(labels)
    return ImagePool(
        images=torch.zeros(n, 3, 1, 1, dtype=torch.uint8),
        labels=torch.from_numpy(labels),
        test=torch.from_numpy(sides >= TRAIN),
        domains=torch.from_numpy(domains),
        group=torch.arange(n) if group is None else group,
    )


POOL = make_pool()


def split(partition, pool=POOL, seed=0):
    return partition.split(pool, numpy_generator(seed, "partition"))


def table(held):
    """[client, domain, class] counts."""
    domains, labels = POOL.domains.numpy(), POOL.labels.numpy()
    return np.array([np.bincount(domains[rows] * CLASSES + labels[rows], minlength=12).reshape(4, 3) for rows in held])


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_domains_are_dealt_evenly_to_m_holders(m, random, seed):
    splits = split(DomainsPerClient(m, random), seed=seed)
    for held, images in ((splits.train, TRAIN), (splits.test, TEST)):
        counts = table(held)
        np.testing.assert_array_equal(counts.sum(axis=0), images)  # all images, each once
        np.testing.assert_array_equal((counts.sum(axis=2) > 0).sum(axis=1), m)
        np.testing.assert_array_equal((counts.sum(axis=2) > 0).sum(axis=0), m)
        assert [len(rows) for rows in held] == [CLASSES * images] * DOMAINS  # as many for every m
        held_counts = counts[counts.sum(axis=2) > 0]
        assert held_counts.min() >= images // m
        assert held_counts.max() <= -(-images // m)
    holders = table(splits.train).sum(axis=2) > 0
    np.testing.assert_array_equal(holders, table(splits.test).sum(axis=2) > 0)
    if not random:
        expected = [[(domain - client) % DOMAINS < m for domain in range(DOMAINS)] for client in range(DOMAINS)]
        np.testing.assert_array_equal(holders, expected)


def test_random_domains_depend_on_the_generator_alone():
    drawn = {str(table(split(DomainsPerClient(2, random=True), seed=seed).train).sum(axis=2) > 0) for seed in range(8)}
    assert len(drawn) > 1
    first, again = (split(DomainsPerClient(3, random=True), seed=5) for _ in range(2))
    for one, other in zip(first.train + first.test, again.train + again.test, strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_domain_each_is_domain_per_client():
    mine, theirs = split(DomainsPerClient(1)), split(DomainPerClient())
    for one, other in zip(mine.train + mine.test, theirs.train + theirs.test, strict=True):
        np.testing.assert_array_equal(one, other)


def test_names():
    source = FourDomains()
    assert DomainsPerClient(1).client_names(source) == ["photo", "sketch", "oil", "toy"]
    assert DomainsPerClient(1, random=True).client_names(source) == [f"client {client}" for client in range(4)]
    assert DomainsPerClient(2).client_names(source) == [f"client {client}" for client in range(4)]
    assert LeaveOneDomainOut(1).client_names(source) == ["photo", "oil", "toy"]


@pytest.mark.parametrize("target", range(DOMAINS))
def test_the_target_is_tested_whole_and_trains_nowhere(target):
    splits = split(LeaveOneDomainOut(target))
    domains = POOL.domains.numpy()
    assert len(splits.train) == DOMAINS - 1
    for rows in splits.test:
        np.testing.assert_array_equal(rows, np.flatnonzero(domains == target))
    sources = [domain for domain in range(DOMAINS) if domain != target]
    for domain, rows in zip(sources, splits.train, strict=True):
        np.testing.assert_array_equal(rows, np.flatnonzero((domains == domain) & ~POOL.test.numpy()))


def test_few_images_of_each_domain_that_trains():
    whole, few = split(LeaveOneDomainOut(0)), split(LeaveOneDomainOut(0, source_shots=2))
    labels = POOL.labels.numpy()
    for all_of_it, drawn in zip(whole.train, few.train, strict=True):
        assert set(drawn) < set(all_of_it)
        assert np.bincount(labels[drawn]).tolist() == np.minimum(np.bincount(labels[all_of_it]), 2).tolist()
    assert [rows.tolist() for rows in few.test] == [rows.tolist() for rows in whole.test]
    other = split(LeaveOneDomainOut(0, source_shots=2), seed=1)
    assert [rows.tolist() for rows in other.train] != [rows.tolist() for rows in few.train]
    assert LeaveOneDomainOut(0).arguments() == {"target": 0}
    assert LeaveOneDomainOut(0, 2).arguments() == {"target": 0, "source_shots": 2}


def test_few_images_of_a_suite_are_not_those_of_a_domain_left_out():
    """A class in another's place takes over the arguments that both have, and the suite has ``shots: 16``."""
    made = yaml.safe_load(cell_configuration("office_home_lodo", "demo", "TRIP", "digits_office_home_lodo"))
    assert made["data"]["partition"]["init_args"] == {"target": 3, "source_shots": None}


def test_what_shows_a_target_image_does_not_train():
    group = torch.arange(len(POOL.labels))
    train = [np.flatnonzero((POOL.domains.numpy() == domain) & ~POOL.test.numpy()) for domain in range(DOMAINS)]
    group[train[2][4]] = group[train[0][7]]
    pool = make_pool(group)
    splits = split(LeaveOneDomainOut(0), pool)
    assert train[2][4] not in splits.train[1]
    assert [len(rows) for rows in splits.train] == [78, 77, 78]
    assert [len(rows) for rows in split(LeaveOneDomainOut(1), pool).train] == [78, 78, 78]


@pytest.mark.parametrize("partition", [DomainsPerClient(2), DomainsPerClient(3, random=True), LeaveOneDomainOut(2)])
def test_read_back_from_a_manifest(tmp_path, partition):
    splits = split(partition)
    manifest = make_manifest(partition, POOL, splits, FourDomains(), 0)
    assert manifest["arguments"] == partition.arguments()
    write_manifest(tmp_path / "split.json", manifest)
    loaded = FromManifest(str(tmp_path / "split.json"))
    again = split(loaded)
    for one, other in zip(splits.train + splits.test, again.train + again.test, strict=True):
        np.testing.assert_array_equal(one, other)
    assert loaded.client_names(FourDomains()) == partition.client_names(FourDomains())


def test_on_the_digits_whose_test_images_are_in_every_domain():
    pool = DigitDomains().load()
    for partition in (DomainsPerClient(2), DomainsPerClient(6, random=True), LeaveOneDomainOut(5)):
        splits = split(partition, pool)
        assert len(splits.train) == (5 if isinstance(partition, LeaveOneDomainOut) else 6)


def test_what_the_data_do_not_allow():
    with pytest.raises(ConfigurationError, match="domains: expected a whole number from 1 to 1,000,000,000, got 0"):
        DomainsPerClient(0)
    with pytest.raises(ConfigurationError, match="domains=5 is more than the 4 domains of the data set"):
        DomainsPerClient(5).client_names(FourDomains())
    with pytest.raises(ConfigurationError, match="domains=5 is more than the 4 domains of the data set"):
        split(DomainsPerClient(5))
    with pytest.raises(ConfigurationError, match="target: expected a whole number from 0 to 1,000,000,000, got -1"):
        LeaveOneDomainOut(-1)
    with pytest.raises(ConfigurationError, match=r"target=4 is no domain .* has 0 photo, 1 sketch, 2 oil, 3 toy"):
        LeaveOneDomainOut(4).client_names(FourDomains())
    with pytest.raises(ConfigurationError, match="target=4 is no domain"):
        split(LeaveOneDomainOut(4))
    FourDomains.domain_names, names = ("photo",), FourDomains.domain_names
    try:
        with pytest.raises(ConfigurationError, match="needs a data set of at least two domains"):
            LeaveOneDomainOut(0).client_names(FourDomains())
    finally:
        FourDomains.domain_names = names


def test_one_client_a_domain_without_skew_is_one_domain_a_client():
    ours, known = split(SkewedDomains()), split(DomainPerClient())
    assert all(np.array_equal(a, b) for a, b in zip(ours.train + ours.test, known.train + known.test, strict=True))
    assert SkewedDomains().client_names(FourDomains()) == ["photo", "sketch", "oil", "toy"]
    assert SkewedDomains(2).client_names(FourDomains())[:3] == ["photo 0", "photo 1", "sketch 0"]


def test_alike_clients_share_a_domain_evenly_and_keep_few_images():
    labels = POOL.labels.numpy()
    whole, few = split(SkewedDomains(2)), split(SkewedDomains(2, shots=4))
    for client in range(2 * DOMAINS):
        assert set(POOL.domains.numpy()[whole.train[client]]) == {client // 2}
        assert np.bincount(labels[whole.train[client]]).tolist() == [TRAIN // 2] * CLASSES
        assert np.bincount(labels[few.train[client]]).tolist() == [4] * CLASSES
        assert set(few.train[client]) <= set(whole.train[client])
        assert np.array_equal(few.test[client], whole.test[client])
    assert sorted(np.concatenate(whole.train)) == np.flatnonzero(~POOL.test.numpy()).tolist()
    assert sorted(np.concatenate(whole.test)) == np.flatnonzero(POOL.test.numpy()).tolist()


def test_skew_inside_a_domain_is_the_same_in_training_and_test():
    labels = POOL.labels.numpy()
    splits = split(SkewedDomains(2, alpha=0.5))
    assert sorted(np.concatenate(splits.train)) == np.flatnonzero(~POOL.test.numpy()).tolist()
    counts = np.array(
        [[np.bincount(labels[r], minlength=CLASSES) for r in held] for held in (splits.train, splits.test)]
    )
    assert counts.min(axis=(0, 2)).max() < TRAIN // 4, "nobody is skewed"
    assert (np.abs(counts[0] / TRAIN - counts[1] / TEST) <= 1 / TRAIN + 1 / TEST).all()
    assert counts.sum(axis=2).min() >= 5
    few = split(SkewedDomains(2, alpha=0.5, shots=3))
    expected = np.minimum(counts[0], 3)
    assert np.array_equal([np.bincount(labels[r], minlength=CLASSES) for r in few.train], expected)


def test_skew_needs_every_class_on_both_sides():
    pool = make_pool()
    gone = pool.test & (pool.domains == 2) & (pool.labels == 1)
    changed = ImagePool(pool.images, pool.labels, pool.test & ~gone, pool.domains, pool.group)
    with pytest.raises(ConfigurationError, match="every class of a domain on both sides"):
        split(SkewedDomains(2, alpha=0.5), changed)
