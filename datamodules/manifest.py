"""The record of a partition: enough to check it, to compare it and to run on it again."""

import hashlib
import operator
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.files import parse_json, read_regular
from benchmark.records.hashes import OF_THE_IMAGES
from datamodules.partition import ClientSplits, Indices, LabelSpace, Partition
from datamodules.partition.client_rows import ClientRows
from datamodules.source import ImagePool, ImageSource
from datamodules.split_record import Manifest, SplitRecord, client_lines

FORMAT = 1
MOST_BYTES = 2**28

#: What a manifest says of foreign images that held-out ones are held against, where there are any.
OF_THE_STREAM = "ood"

FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": int,
    "algorithm": str,
    "arguments": dict,
    "seed": int,
    "class_names": list,
    "domain_names": list,
    "images": int,
    "labels_sha256": str,
    "test_sha256": str,
    "domains_sha256": str,
    "clients": list,
}
CLIENT_FIELDS: dict[str, type] = {
    "name": str,
    "train_sha256": str,
    "test_sha256": str,
    "train": list,
    "test": list,
    "train_size": int,
    "test_size": int,
    "train_classes": list,
    "test_classes": list,
}


def record_split(
    partition: Partition, pool: ImagePool, splits: ClientSplits, source: ImageSource, seed: int
) -> SplitRecord:
    """The record of ``splits``.

    A partition that was itself read from a manifest keeps that manifest, algorithm, seed and all, so that
    both runs name the same split; only the images' sha256 and the stream of foreign images are this run's own. Where
    that sha256 differs from the recorded one, a warning says so.

    Args:
        partition: what made the splits.
        pool: the images that the indices count.
        splits: the outcome.
        source: gives the order of classes and domains; label c is ``class_names[c]``.
        seed: data seed that the splits were drawn from.

    Raises:
        ConfigurationError: a loaded manifest has other class or domain names, or another order of them.
    """
    if isinstance(partition, FromManifest):
        partition.check_names(source)
        recorded = {name: value for name, value in partition.manifest.items() if name != OF_THE_STREAM}
        images = images_sha256(pool)
        if recorded.get(OF_THE_IMAGES, images) != images:  # none in older manifests
            warnings.warn(
                f"{partition.path} was made from other images: their number, labels and sides are those of the data "
                f"set, their pixels are not (sha256 {images[:12]}..., recorded {recorded[OF_THE_IMAGES][:12]}...); "
                "where they have another size or are decoded otherwise that is meant, else use the images it was "
                "made from",
                stacklevel=2,
            )
        return SplitRecord.of({**recorded, OF_THE_IMAGES: images})
    fields = {
        "format": FORMAT,
        "algorithm": type(partition).__name__,
        "arguments": partition.arguments(),
        "seed": seed,
        "class_names": list(source.class_names),
        "domain_names": list(source.domain_names),
        "images": len(pool.labels),
        **pool_sha256(pool),
        OF_THE_IMAGES: images_sha256(pool),
        **_further_splits(splits),
    }
    train, test = ClientRows.of(splits.train), ClientRows.of(splits.test)
    names = partition.client_names(source)
    return SplitRecord(fields, client_lines(names, train, test, pool.labels.numpy(), len(source.class_names)))


def make_manifest(
    partition: Partition, pool: ImagePool, splits: ClientSplits, source: ImageSource, seed: int
) -> Manifest:
    """The manifest of ``splits``, as plain JSON values; see :func:`record_split`."""
    return record_split(partition, pool, splits, source, seed).manifest


def _further_splits(splits: ClientSplits) -> Manifest:
    """The test sets besides a client's own, and the label spaces; nothing where there are none.

    Where all clients share one test set, it is written once.
    """
    further: Manifest = {}
    if splits.others:
        further["others"] = {
            name: held[0].tolist()
            if all(np.array_equal(held[0], rows) for rows in held)
            else [r.tolist() for r in held]
            for name, held in splits.others.items()
        }
        further["others_sha256"] = {name: indices_sha256(np.concatenate(held)) for name, held in splits.others.items()}
    if splits.label_spaces:
        further["label_spaces"] = {
            name: list(space) if isinstance(space, tuple) else [list(classes) for classes in space]
            for name, space in splits.label_spaces.items()
        }
    if splits.testers:
        further["testers"] = splits.testers
    return further


def _read_further(manifest: Manifest, path: str | Path) -> tuple[dict[str, list[Indices]], dict[str, LabelSpace], int]:
    """The inverse of ``_further_splits``.

    Raises:
        ConfigurationError: not of that form, or changed after it was written.
    """
    count = len(manifest["clients"])
    try:
        spaces = {str(name): _read_space(space) for name, space in manifest.get("label_spaces", {}).items()}
        testers = operator.index(manifest.get("testers", 0))
        others = {}
        for name, held in manifest.get("others", {}).items():
            lists = held if held and isinstance(held[0], list) else [held] * count
            others[str(name)] = [np.array(rows, dtype=np.int64) for rows in lists]
            if indices_sha256(np.concatenate(others[name])) != manifest["others_sha256"][name] or len(lists) != count:
                raise ConfigurationError(
                    f"{path}: the indices of split {name!r} do not have the recorded sha256; the file was changed "
                    "after it was written. Get it again from where it was made"
                )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a partition manifest: {type(error).__name__}: {error}") from error
    known = range(len(manifest["class_names"]))
    for name, space in spaces.items():
        for classes in [space] if isinstance(space, tuple) else space:
            if name not in ("train", "test", *others) or len({*classes}) < len(classes) or not {*classes} <= {*known}:
                raise ConfigurationError(
                    f"{path}: the label space of {name!r} must name classes from 0 to {len(known) - 1}, each once, of "
                    "a split that there is; the file was changed after it was written. Get it again from where it was "
                    "made"
                )
    if not 0 <= testers < count:
        raise ConfigurationError(
            f"{path}: of {count} clients, testers must be 0 to {count - 1}, got {testers}; the file was changed after "
            "it was written. Get it again from where it was made"
        )
    return others, spaces, testers


def _read_space(space: list[int] | list[list[int]]) -> LabelSpace:
    """Return the label space of all clients, or those of each."""
    if space and all(isinstance(classes, list) for classes in space):
        return [tuple(operator.index(label) for label in classes) for classes in cast(list[list[int]], space)]
    return tuple(operator.index(label) for label in cast(list[int], space))


def write_manifest(path: str | Path, manifest: Manifest) -> None:
    """Write JSON, one client a line, atomically. Missing folders are made."""
    SplitRecord.of(manifest).write(path)


def read_manifest(path: str | Path) -> Manifest:
    """Read a manifest and check its form and the hashes of its indices.

    Raises:
        ConfigurationError: the file is missing, is no manifest, was changed after it was written, or has no clients or
            two of one name.
    """
    try:
        manifest = parse_json(read_regular(path, MOST_BYTES, links=True))
    except OSError as error:
        raise ConfigurationError(f"cannot read the partition manifest {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not a partition manifest: it is not JSON ({error})") from error
    if not isinstance(manifest, dict):
        raise ConfigurationError(f"{path} is not a partition manifest: expected a JSON object")
    for field, kind in FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            raise ConfigurationError(
                f"{path} is not a partition manifest: field {field!r} is missing or of a wrong type"
            )
    if manifest["format"] != FORMAT:
        raise ConfigurationError(f"{path} has manifest format {manifest['format']}, this version reads format {FORMAT}")
    for field in ("class_names", "domain_names"):
        if not manifest[field] or any(not isinstance(name, str) for name in manifest[field]):
            raise ConfigurationError(f"{path} is not a partition manifest: field {field!r} must be a list of names")
    if not isinstance(manifest.get("images_sha256", ""), str):
        raise ConfigurationError(f"{path} is not a partition manifest: field 'images_sha256' is of a wrong type")
    if not manifest["clients"]:
        raise ConfigurationError(f"{path}: field 'clients' is empty; a partition has at least one client")
    numbered: dict[str, int] = {}
    for number, client in enumerate(manifest["clients"]):
        if not isinstance(client, dict) or any(field not in client for field in CLIENT_FIELDS):
            raise ConfigurationError(f"{path}: client {number} needs the fields {', '.join(CLIENT_FIELDS)}")
        for field, kind in CLIENT_FIELDS.items():
            if type(client[field]) is not kind and field not in ("train", "test"):
                raise ConfigurationError(f"{path}: {field!r} of client {number} must be of type {kind.__name__}")
        if numbered.setdefault(client["name"], number) != number:
            raise ConfigurationError(
                f"{path}: clients {numbered[client['name']]} and {number} are both called {client['name']!r}; give "
                "each a name of its own"
            )
        for side in ("train", "test"):
            indices = client[side]
            if not isinstance(indices, list) or any(type(index) is not int for index in indices):
                raise ConfigurationError(f"{path}: the {side} indices of client {number} must be a list of integers")
            if any(not 0 <= index < manifest["images"] for index in indices):
                raise ConfigurationError(
                    f"{path}: a {side} index of client {number} is outside of the {manifest['images']} images"
                )
            if indices_sha256(np.array(indices, dtype=np.int64)) != client[f"{side}_sha256"]:
                raise ConfigurationError(
                    f"{path}: the {side} indices of client {number} do not have the recorded sha256; the file was "
                    "changed after it was written. Get it again from where it was made"
                )
            _check_counts(client, side, len(manifest["class_names"]), f"{path}: client {number}")
    _read_further(manifest, path)
    return manifest


def _check_counts(client: dict[str, Any], side: str, classes: int, which: str) -> None:
    """Refuse sizes and class counts that do not follow from the client's images, as far as labels are not needed."""
    size, counts = len(client[side]), client[f"{side}_classes"]
    if client[f"{side}_size"] != size:
        raise ConfigurationError(f"{which} has {side}_size {client[f'{side}_size']}, but {size} {side} indices")
    if len(counts) != classes or any(type(count) is not int or count < 0 for count in counts) or sum(counts) != size:
        raise ConfigurationError(
            f"{which}: {side}_classes must be {classes} numbers of images, one a class, {size} in all; the file was "
            "changed after it was written. Get it again from where it was made"
        )


class FromManifest(Partition):
    """The partition that a manifest records, so that two groups run on the same split.

    Args:
        path: a manifest written by ``write_manifest``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self.num_clients: int = len(self.manifest["clients"])
        self.further_splits = tuple(self.manifest.get("others", {}))

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        """Take the recorded indices; nothing is drawn.

        Raises:
            ConfigurationError: the manifest was made from other data.
        """
        n = len(pool.labels)
        if n != self.manifest["images"]:
            raise ConfigurationError(
                f"{self.path} was made from {self.manifest['images']} images, the data set has {n}; "
                "use the data set it was made from"
            )
        for field, value in pool_sha256(pool).items():
            if value != self.manifest[field]:
                what = {"labels_sha256": "labels", "test_sha256": "train/test flags", "domains_sha256": "domains"}[
                    field
                ]
                raise ConfigurationError(
                    f"{self.path} was made from other data: the {what} of the images differ (sha256 {value[:12]}..., "
                    f"recorded {self.manifest[field][:12]}...); use the data set it was made from"
                )
        clients = self.manifest["clients"]
        labels, classes = pool.labels.numpy(), len(self.manifest["class_names"])
        for number, client in enumerate(clients):
            for side in ("train", "test"):
                counts = np.bincount(labels[client[side]], minlength=classes).tolist()
                if counts != client[f"{side}_classes"]:
                    raise ConfigurationError(
                        f"{self.path}: {side}_classes of client {number} are not those of its images; the file was "
                        "changed after it was written. Get it again from where it was made"
                    )
        return ClientSplits(
            [np.array(client["train"], dtype=np.int64) for client in clients],
            [np.array(client["test"], dtype=np.int64) for client in clients],
            *_read_further(self.manifest, self.path),
        )

    def client_names(self, source: ImageSource) -> list[str]:
        """The recorded names."""
        return [str(client["name"]) for client in self.manifest["clients"]]

    def testers(self, source: ImageSource) -> int:
        """The recorded number."""
        return _read_further(self.manifest, self.path)[2]

    def check_names(self, source: ImageSource) -> None:
        """Refuse a data set that names its classes or domains otherwise, or in another order.

        Raises:
            ConfigurationError: at the first name that differs.
        """
        for what, names in (("class", source.class_names), ("domain", source.domain_names)):
            recorded = self.manifest[f"{what}_names"]
            if list(names) == recorded:
                continue
            at = next((i for i, (a, b) in enumerate(zip(names, recorded, strict=False)) if a != b), None)
            first = "" if at is None else f"; {what} {at} is {names[at]!r}, recorded is {recorded[at]!r}"
            raise ConfigurationError(
                f"{self.path} was made with another order of {what} names: the data set has {len(names)}, "
                f"the manifest {len(recorded)}{first}"
            )


def indices_sha256(indices: Indices) -> str:
    """sha256 of indices as little-endian 64-bit integers (hexadecimal)."""
    return hashlib.sha256(np.ascontiguousarray(indices, dtype="<i8").tobytes()).hexdigest()


def images_sha256(pool: ImagePool) -> str:
    """sha256 of a pool's images, see :func:`pixels_sha256`."""
    return pixels_sha256(pool.images)


def pixels_sha256(images: Tensor) -> str:
    """sha256 of shape and pixels of images, uint8 (hexadecimal): 1.3 GB/s, so a quarter of a second for CIFAR-100."""
    digest = hashlib.sha256(str(tuple(images.shape)).encode())
    for rows in images.split(1024):  # what is not contiguous is copied, some rows at a time
        digest.update(rows.contiguous().numpy().data)
    return digest.hexdigest()


def pool_sha256(pool: ImagePool) -> dict[str, str]:
    """sha256 of a pool's labels, test flags and domains, by manifest field."""
    return {
        "labels_sha256": indices_sha256(pool.labels.numpy()),
        "test_sha256": indices_sha256(pool.test.numpy()),
        "domains_sha256": indices_sha256(pool.domains.numpy()),
    }
