from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import SIZES, Ragged, TinyImages, build, first_step, fit

from benchmark.engine.plan import evaluation_plan
from benchmark.errors import ConfigurationError
from benchmark.robust import Byzantine
from datamodules.federated import FederatedDataModule
from datamodules.manifest import FromManifest, write_manifest
from datamodules.partition import IID, ClientSplits
from datamodules.partition_few_shot import BaseToNovel, NonOverlapping
from datamodules.source import ImagePool


def made(**arguments: Any) -> FederatedDataModule:
    data = FederatedDataModule(TinyImages(), arguments.pop("partition", None) or Ragged(), **arguments)
    data.setup()
    return data


def test_sizes_names_and_participants() -> None:
    data = made(participation=0.3)
    assert (data.num_clients, data.num_classes, data.participants) == (11, 8, 3)
    assert data.class_names == [f"class{c}" for c in range(8)]
    assert data.train_sizes == dict(enumerate(SIZES))
    assert made(participation=0.01).participants == 1
    assert made(clients_per_round=5, participation=0.1).participants == 5


def test_validation_images_come_from_the_clients_own_training_images() -> None:
    data = made(partition=IID(3), val_fraction=0.25)
    for client in range(3):
        train, val = data.train_indices[client], data.held_out["val"][client]
        assert sorted([*train, *val]) == data.splits.train[client].tolist()
        assert len(val) == round(0.25 * len(data.splits.train[client]))
        labels = data.pool.labels.numpy()
        assert set(labels[val]) == set(range(8))
        assert not set(val) & set(data.held_out["test"][client])
    again = made(partition=IID(3), val_fraction=0.25)
    assert all((again.held_out["val"][c] == data.held_out["val"][c]).all() for c in range(3))


def test_class_counts_are_of_the_images_that_train() -> None:
    data = made(partition=IID(3), val_fraction=0.25)
    for client, rows in data.train_indices.items():
        expected = [int((data.pool.labels[rows] == label).sum()) for label in range(8)]
        assert data.class_counts[client].tolist() == expected
    assert data.class_counts.sum(1).tolist() == list(data.train_sizes.values())


def test_images_that_show_the_same_thing_stay_on_one_side_of_the_validation_cut() -> None:
    class Pairs(TinyImages):
        def load(self) -> ImagePool:
            pool = super().load()
            pairs = torch.arange(len(pool.labels)) // 16 * 8 + pool.labels
            return ImagePool(pool.images, pool.labels, pool.test & False | (pairs >= 64), pool.domains, pairs)

    data = FederatedDataModule(Pairs(), IID(2), val_fraction=0.3)
    data.setup()
    for client in range(2):
        groups = [
            set(data.pool.group[rows].tolist()) for rows in (data.train_indices[client], data.held_out["val"][client])
        ]
        assert not groups[0] & groups[1]


def test_what_several_clients_show_is_held_out_at_all_of_them_or_at_none() -> None:
    class Patients(TinyImages):
        def load(self) -> ImagePool:
            pool = super().load()
            patients = torch.arange(len(pool.labels)) % 24
            return ImagePool(pool.images, pool.labels, pool.test & False | (patients >= 20), pool.domains, patients)

    data = FederatedDataModule(Patients(), IID(3), val_fraction=0.25)
    data.setup()
    group = data.pool.group.numpy()
    trained, held = (
        set(group[np.concatenate(list(rows.values()))].tolist()) for rows in (data.train_indices, data.held_out["val"])
    )
    assert not trained & held
    assert trained | held == set(range(20))
    for client in range(3):
        train, val = data.train_indices[client], data.held_out["val"][client]
        assert sorted([*train, *val]) == data.splits.train[client].tolist()
        assert 0.1 < len(val) / (len(train) + len(val)) < 0.4

    first, second = 9, 4

    class Two(Ragged):
        sizes = (first, second)

    class Shared(TinyImages):
        def load(self) -> ImagePool:
            pool = super().load()
            patients = torch.arange(len(pool.labels)) + 10
            patients[:first] = torch.arange(first) % 10
            patients[first : first + second] = torch.arange(second) % 2  # two of the first client's ten
            return ImagePool(pool.images, pool.labels, pool.test, pool.domains, patients)

    with pytest.raises(ConfigurationError, match=r"holds none of client 1's images out, as what they show trains at"):
        FederatedDataModule(Shared(), Two(2), val_fraction=0.2).setup()


def test_a_manifest_of_conflicting_clients_asks_for_the_conflict(tmp_path: Path) -> None:
    data = made(partition=IID(5), label_orders=2)
    write_manifest(tmp_path / "manifest.json", data.manifest)
    again = made(partition=FromManifest(str(tmp_path / "manifest.json")), label_orders=2)
    assert torch.equal(again.pool.labels, data.pool.labels)
    assert again.split_record.hash == data.split_record.hash
    with pytest.raises(ConfigurationError, match=r"is of data with labels in 2 orders; give data.label_orders=2, w"):
        made(partition=FromManifest(str(tmp_path / "manifest.json")))


def test_a_client_too_small_to_hold_anything_out_is_named() -> None:
    with pytest.raises(ConfigurationError, match="client 8 has too few training images"):
        made(val_fraction=0.5)


def test_a_checkpoint_is_bound_to_the_images() -> None:
    class Changed(TinyImages):
        def load(self) -> ImagePool:
            pool = super().load()
            pool.images[170, 2, 31, 31] ^= 1
            return pool

    state = made().state_dict()
    made().load_state_dict(state)
    changed = FederatedDataModule(Changed(), Ragged())
    changed.setup()
    with pytest.raises(ConfigurationError, match="the pixels are not; give the images it was made with"):
        changed.load_state_dict(state)


def test_validation_and_test_are_scored_apart() -> None:
    method, data = build(
        "FedVPT",
        "--data.val_fraction=0.25",
        "--data.partition=IID",
        "--data.partition.num_clients=3",
        "--data.clients_per_round=3",
    )
    fit(method, data, 1)
    assert set(method.evaluation.scores) == {
        (point, split) for point in ("server", "local") for split in ("test", "val")
    }
    assert int(method.evaluation.scores["server", "val"].counts[..., 2].sum()) == sum(
        map(len, data.held_out["val"].values())
    )


def test_clients_own_parameters_limit_how_many_are_tested_together(monkeypatch: pytest.MonkeyPatch) -> None:
    widths, scores = [], []
    own = 4 * (8 * 64 + 8 + 3 * 64)  # a head, and the prompt after local training
    for room in (evaluation_plan.EVALUATED_STATE, 2 * own + 1, 1):
        monkeypatch.setattr(evaluation_plan, "EVALUATED_STATE", room)
        method, data = build("FedVPT", "--data.eval_batch_size=66")
        fit(method, data, 1)
        assert (
            sum(method.get_parameter(name).numel() for name in method.roles.personal + method.roles.shared) == own / 4
        )
        widths.append(max(len(work.clients) for work in data.val_dataloader()))
        scores.append(method.evaluation.scores["server", "test"].compute()["accuracy"])
    assert widths == [11, 2, 1]
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], equal_nan=True)


def test_a_gathered_batch_holds_the_images_and_labels_of_its_rows() -> None:
    method, data = build("FedVPT", "--data.eval_batch_size=10000")
    fit(method, data, 0)
    batch = first_step(data.val_dataloader())
    full = method.simulation.images.fill(batch)
    k, b = 1, 2
    row = batch.index[k, b]
    torch.testing.assert_close(full.x[k, b], data.transform(data.pool.images[row : row + 1], None)[0])
    assert (full.y[~batch.mask] == -100).all()
    assert (full.y[batch.mask] == data.pool.labels[batch.index[batch.mask]]).all()
    assert torch.equal(full.mask, batch.mask)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected a whole number from 1 to 1,000,000,000, got 0"),
        ({"eval_batch_size": -1}, "eval_batch_size: expected a whole number from 1 to 1,000,000,000, got -1"),
        ({"participation": 1.5}, "participation: expected a number above 0 and at most 1, got 1.5"),
        ({"val_fraction": 1.0}, "val_fraction: expected a number from 0 on and below 1, got 1.0"),
        ({"clients_per_round": 0}, "clients_per_round: expected a whole number from 1 to 1,000,000,000 or null, got 0"),
    ],
)
def test_arguments_out_of_range(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(**arguments)


def test_the_seed_zero_is_a_seed_and_the_partition_has_its_own() -> None:
    splits = [made(partition=IID(4), seed=s, partition_seed=p).splits.train[0] for s, p in ((0, 0), (1, 0), (1, None))]
    assert np.array_equal(splits[0], splits[1])
    assert not np.array_equal(splits[0], splits[2])


def test_conflicting_clients_count_the_classes_in_orders_of_their_own() -> None:
    plain, data = made(partition=IID(5)), made(partition=IID(5), label_orders=3, val_fraction=0.2, new_clients=0.2)
    for client in range(5):
        rows = [plain.splits.train[client], plain.splits.test[client]]
        # eight classes in three orders: each begins two classes after the one before
        expected = (plain.pool.labels[np.concatenate(rows)] + client % 3 * 2) % 8
        assert torch.equal(data.pool.labels[np.concatenate(rows)], expected)
    assert data.manifest["label_orders"] == 3
    assert {k: v for k, v in data.manifest.items() if k != "label_orders"} == plain.manifest
    assert torch.equal(data.class_counts[4], torch.bincount(data.pool.labels[data.train_indices[4]], minlength=8))
    assert torch.equal(made(partition=IID(5), label_orders=1).pool.labels, plain.pool.labels)


def test_conflicts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="label_orders=9 is more than the 8 classes"):
        made(label_orders=9)
    with pytest.raises(ConfigurationError, match="client 0 shares images with clients that count the classes"):
        made(partition=NonOverlapping(3), label_orders=2)
    with pytest.raises(ConfigurationError, match="label spaces of their own"):
        made(partition=BaseToNovel(2), label_orders=2)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"metrics": "clinical"}, "metrics"),
        ({"metrics": "own_measures.MeanRank"}, "metrics"),
        ({"keep_predictions": "last"}, "keep_predictions"),
    ],
)
def test_what_compares_classes_is_refused_where_labels_are_in_orders(given: dict, what: str) -> None:
    with pytest.raises(ConfigurationError, match=f"data.{what} compares classes .* data.label_orders=2 a label is an"):
        made(partition=IID(5), label_orders=2, **given)
    made(partition=IID(5), label_orders=2, keep_predictions="none")


def test_hostile_clients_flip_the_labels_that_they_train_on_alone() -> None:
    plain = made(partition=IID(10), val_fraction=0.2, new_clients=0.2)
    data = made(partition=IID(10), val_fraction=0.2, new_clients=0.2, label_flipping=0.3)
    attack = Byzantine("zero", 0.3)
    attack.start(data.federation.terms)
    assert data.flipped_clients == attack.hostile
    assert len(data.flipped_clients) == 2  # of eight that train
    before, labels = plain.pool.labels, data.pool.labels
    expected = before.clone()
    for client in data.flipped_clients:
        rows = torch.from_numpy(np.asarray(data.train_indices[client]))
        expected[rows] = 7 - before[rows]
        assert torch.equal(data.class_counts[client], plain.class_counts[client].flip(0))
        for held in ("val", "test"):
            assert np.array_equal(data.held_out[held][client], plain.held_out[held][client])
    assert torch.equal(labels, expected)
    assert not torch.equal(labels, before)
    assert data.manifest == plain.manifest
    with pytest.raises(ConfigurationError, match="made with labels of other clients flipped"):
        data.load_state_dict(plain.state_dict())
    assert made(partition=IID(10), label_flipping=0.3, seed=5).flipped_clients != data.flipped_clients


def test_flips_of_labels_that_others_need_are_refused() -> None:
    class Together(Ragged):
        def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
            splits = super().assign(pool, rng)
            return ClientSplits([np.arange(4)] * self.num_clients, splits.test)

    with pytest.raises(ConfigurationError, match=r"hostile client \d+ shares training images with honest clients"):
        made(partition=Together(), label_flipping=0.4)
    data, labels = made(partition=Together(), label_flipping=1.0), made(partition=Together()).pool.labels
    assert torch.equal(data.pool.labels[:4], 7 - labels[:4])
    assert torch.equal(data.pool.labels[4:], labels[4:])
    with pytest.raises(ConfigurationError, match="label_flipping does not go with a partition whose splits have"):
        made(partition=BaseToNovel(2), label_flipping=0.5)


@pytest.mark.parametrize(("given", "width"), [("2", 2), ("auto", 3)])
def test_a_width_that_is_given_counts_when_a_run_goes_on(given: str, width: int) -> None:
    _, data = build("FedAvg", f"--data.clients_at_once={given}")
    data.setup()
    method, _ = build("FedAvg")
    fit(method, data, 1)
    state = data.state_dict() | {"width": 3}
    data.load_state_dict(state)
    assert data.loaders is not None
    assert data.loaders.width == width


@pytest.mark.parametrize(
    ("clients", "option", "said"),
    [
        (
            5,
            {"new_clients": 0.1},
            r"data\.new_clients=0\.1 of 5 clients is no client, .*; give more, for example 0\.2,",
        ),
        (1, {"new_clients": 0.9}, r"data\.new_clients=0\.9 of 1 client is no client, .*; leave it out$"),
        (3, {"label_flipping": 0.3}, r"data\.label_flipping=0\.3 of 3 clients is no client, .*, for example 0\.34, or"),
    ],
)
def test_a_share_that_is_none_of_the_clients_is_refused(clients: int, option: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        made(partition=IID(clients), **option)
    (name,) = option
    assert made(partition=IID(5), **{name: 0.2}).num_clients == 5
