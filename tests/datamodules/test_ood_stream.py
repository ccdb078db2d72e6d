"""Foreign images that clients' held-out images are held against: which they are, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import ForeignImages, Ragged, TinyImages

from benchmark.engine.plan.work import Shown
from benchmark.errors import ConfigurationError
from benchmark.records.hashes import config_hash, manifest_hash
from datamodules.dtd import DTD
from datamodules.federated import FederatedDataModule
from datamodules.manifest import FromManifest, pixels_sha256
from datamodules.ood_stream import OODStream
from datamodules.partition import Partition
from datamodules.source import ImagePool, ImageSource


def data_of(stream: OODStream | None, partition: Partition | None = None, **settings: Any) -> FederatedDataModule:
    """The tiny federation, read."""
    data = FederatedDataModule(TinyImages(), partition or Ragged(), ood=stream, **settings)
    data.setup()
    return data


def foreign_of(data: FederatedDataModule) -> torch.Tensor:
    """The images of its stream."""
    return data.others[Shown.FOREIGN].images


class Cats(ForeignImages):
    """Foreign images, some of which are called as the federation's."""

    class_names = ("Class3", "standing")


class Nothing(ImageSource):
    """A data set without images."""

    class_names = ("nothing",)

    def load(self) -> ImagePool:
        """No image."""
        none = torch.zeros(0, dtype=torch.int64)
        return ImagePool(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), none, none.bool(), none, none)


def test_the_stream_is_drawn_once_and_has_the_size_of_the_federations_images() -> None:
    data = data_of(OODStream(ForeignImages(), images=10))
    assert foreign_of(data).shape == (10, 3, 32, 32)
    assert foreign_of(data).dtype == torch.uint8
    assert len(torch.unique(foreign_of(data).flatten(1), dim=0)) == 10
    # Neither seed, nor partition, nor method matter.
    for other in ({"seed": 5, "partition_seed": 7}, {"partition": Ragged(4)}):
        assert torch.equal(foreign_of(data_of(OODStream(ForeignImages(), images=10), **other)), foreign_of(data))
    streams = data.federation.holdings.streams
    assert {split: rows.tolist() for split, rows in streams.items()} == {"test": [*range(10)]}


def test_images_of_the_federations_size_stay_as_they_are() -> None:
    pool = replace(TinyImages(24).load())
    drawn = OODStream(ForeignImages(), images=24).read(pool, ["test"])
    foreign = ForeignImages().load()
    assert torch.equal(drawn.images, foreign.images)
    some = OODStream(ForeignImages(), images=6, exclude=["standing"]).read(pool, ["test"])
    lying = foreign.images[foreign.labels == 0]
    assert all((lying == image).flatten(1).all(1).any() for image in some.images)


def test_split_val_is_held_against_other_images() -> None:
    data = data_of(OODStream(ForeignImages(), images=10), Ragged(2), val_fraction=0.3, new_clients=0.5)
    streams = data.federation.holdings.streams
    assert streams["test"].tolist() == streams["new"].tolist() == [*range(10)]
    assert streams["val"].tolist() == [*range(10, 20)]
    assert len(torch.unique(foreign_of(data).flatten(1), dim=0)) == 20
    assert torch.equal(foreign_of(data)[:10], foreign_of(data_of(OODStream(ForeignImages(), images=10))))
    fewer = data_of(OODStream(ForeignImages(), images=20), val_fraction=0.3, partition=Ragged(1))
    assert fewer.federation.holdings.streams["val"].tolist() == [20, 21, 22, 23]


def test_the_manifest_names_the_stream_and_without_one_it_is_as_before(tmp_path: Path) -> None:
    data, without = data_of(OODStream(ForeignImages(), images=10)), data_of(None)
    said = {"source": "ForeignImages", "images": 10, "sha256": pixels_sha256(foreign_of(data))}
    assert data.manifest == without.manifest | {"ood": said}
    assert data.split_record.hash == manifest_hash(data.manifest) != without.split_record.hash
    state = data.state_dict()
    with pytest.raises(ConfigurationError, match="another data set or partition"):
        data_of(OODStream(ForeignImages(), images=9)).load_state_dict(state)
    # A split that is used again has this run's stream.
    data.split_record.write(tmp_path / "manifest.json")
    again = data_of(None, FromManifest(str(tmp_path / "manifest.json")))
    assert again.split_record.hash == without.split_record.hash


def test_a_configuration_without_a_stream_has_the_hash_that_it_had() -> None:
    config = {"data": {"source": "federation.TinyImages"}}
    assert config_hash({"data": config["data"] | {"ood": None}}) == config_hash(config)
    given = [{"source": "a.B", "images": images} for images in (5, 6)]
    assert len({config_hash({"data": config["data"] | {"ood": each}}) for each in (None, *given)}) == 3


@pytest.mark.parametrize(
    ("stream", "settings", "said"),
    [
        (OODStream(ForeignImages(), 25), {}, r"images=25, but ForeignImages has 24 images; give at most 24$"),
        (OODStream(ForeignImages(), 13, ["lying"]), {}, r"has 12 images without the 1 excluded classes; give at most"),
        (OODStream(ForeignImages(), 1, ["lying", "standing"]), {}, r"has 0 images .*; give a data.ood.source with im"),
        (
            OODStream(Nothing()),
            {},
            r"Nothing.load gives no images, expected at least one: see that it reads the right folder",
        ),
        (OODStream(ForeignImages(), 3, ["flying"]), {}, r"ForeignImages has no class 'flying'; its classes are lying,"),
        (
            OODStream(Cats(), 3),
            {},
            r"Cats has 1 of the federation's classes \(Class3\).*data.ood.exclude=\[Class3\]$",
        ),
        (OODStream(ForeignImages(), 24), {"val_fraction": 0.5, "partition": Ragged(1)}, r"for example .*images=12$"),
    ],
)
def test_a_stream_that_says_nothing_is_refused_before_training(
    stream: OODStream, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        data_of(stream, **settings)


def test_names_that_sound_alike_are_one_class() -> None:
    own = ForeignImages()
    own.class_names = ("sea lion", "walrus")
    foreign = ForeignImages()
    foreign.class_names = ("Sea_Lion", "wal-rus")
    with pytest.raises(ConfigurationError, match=r"has 1 of the federation's classes \(Sea_Lion\)"):
        OODStream(foreign).check_classes(own)
    OODStream(foreign, exclude=["Sea_Lion"]).check_classes(own)


@pytest.mark.parametrize("images", [0, -3, 1.5])
def test_a_number_of_images_is_positive(images: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"OODStream: images: expected a whole number from 1"):
        OODStream(ForeignImages(), images)


def test_missing_data_name_the_streams_own_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"DTD is not in .*data\.ood\.source\.init_args\.root"):
        data_of(OODStream(DTD(root=str(tmp_path))))


class OwnOnes(TinyImages):
    """The federation's images under other names."""

    class_names = tuple(f"other {name}" for name in TinyImages.class_names)


def test_images_of_the_federation_under_other_names_are_refused() -> None:
    said = r"data\.ood: 10 of the 10 drawn images of OwnOnes have the pixels of an image of the federation .*: other "
    with pytest.raises(ConfigurationError, match=said):
        data_of(OODStream(OwnOnes(), images=10))


def test_no_client_trains_on_the_stream() -> None:
    data = data_of(OODStream(ForeignImages(), images=10))
    without = data_of(None)
    assert torch.equal(data.pool.images, without.pool.images)
    held, before = data.federation.holdings, without.federation.holdings
    assert all(np.array_equal(held.train_rows[client], before.train_rows[client]) for client in range(11))
