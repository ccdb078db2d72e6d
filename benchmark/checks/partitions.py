"""Check what every partition must keep, on any pool of images."""

import random
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmark.checks.outcome import require
from benchmark.records.hashes import manifest_hash
from benchmark.seeds import global_states
from datamodules.manifest import FromManifest, make_manifest, read_manifest, write_manifest
from datamodules.partition import ClientSplits, Partition
from datamodules.source import ImagePool, ImageSource


@dataclass(frozen=True)
class PartitionUnderCheck:
    """A partition, the images that it divides, and the source that names them."""

    partition: Partition
    pool: ImagePool
    source: ImageSource

    def split(self, seed: int = 3) -> ClientSplits:
        """Divide the images."""
        return self.partition.split(self.pool, np.random.default_rng(seed))


def require_same(left: ClientSplits, right: ClientSplits, otherwise: str) -> None:
    """Require that the same clients hold the same images on every side, told apart among the same classes.

    Raises:
        FailedCheck: they do not.
    """
    require(left.label_spaces == right.label_spaces and left.others.keys() == right.others.keys(), otherwise)
    for mine, theirs in [(left.train, right.train), (left.test, right.test)] + [
        (held, right.others[name]) for name, held in left.others.items()
    ]:
        require(len(mine) == len(theirs), otherwise)
        for rows, others in zip(mine, theirs, strict=True):
            require(np.array_equal(rows, others) and rows.dtype == others.dtype == np.int64, otherwise)


def check_seed(subject: PartitionUnderCheck) -> None:
    """A split depends on pool and seed alone."""
    first, pool = subject.split(), subject.pool
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    torch.manual_seed(1)
    states = global_states(torch.device("cpu"))
    advice = "draw from the generator that assign is given, and from nothing else"
    require_same(subject.split(), first, f"the same seed gives another partition; {advice}")
    # What the images look like has no say, and neither has where they lie.
    other = replace(pool, images=255 - pool.images, labels=torch.cat([pool.labels, pool.labels])[: len(pool.labels)])
    looks = replace(subject, pool=other).split()
    require_same(looks, first, "other pixels give another partition; divide by labels, domains and groups")
    require(global_states(torch.device("cpu")) == states, f"it draws from a global generator; {advice}")


def check_arguments(subject: PartitionUnderCheck) -> None:
    """The arguments in a record make the same split."""
    made = subject.partition
    again = type(made)(**made.arguments())
    require(again.description == made.description, f"made again it is {again.description}, not {made.description}")
    require(again.arguments() == made.arguments(), "keep each argument as an attribute of its name")
    require_same(replace(subject, partition=again).split(), subject.split(), "made again from arguments() it differs")


def check_sides(subject: PartitionUnderCheck) -> None:
    """Nothing that is trained on is tested on, and an image trains at one client."""
    pool = subject.pool
    for seed in range(3):
        splits = subject.split(seed)
        held = [splits.train, splits.test, *splits.others.values()]
        require(len({len(rows) for rows in held}) == 1, "its sides have different numbers of clients")
        full = all(len(rows) or splits.testers for side in held for rows in side)
        ascending = all(np.all(np.diff(rows) > 0) for side in held for rows in side)
        require(full and ascending, "a client has none, or its images are not ascending")
        groups = pool.group.numpy()
        trained = np.concatenate([np.unique(groups[rows]) for rows in splits.train])
        tested = np.unique(groups[np.concatenate([rows for side in held[1:] for rows in side])])
        both = np.intersect1d(trained, tested).size
        require(not both, f"{both} groups of images that show the same thing are on both sides")
        images = np.concatenate(splits.train)
        require(len(np.unique(images)) == len(images), "an image trains at several clients")
        for name, space in splits.label_spaces.items():
            side = {"train": splits.train, "test": splits.test, **splits.others}[name]
            spaces = [space] * len(side) if isinstance(space, tuple) else space
            for classes, rows in zip(spaces, side, strict=True):
                outside = set(pool.labels[rows].tolist()) - set(classes)
                require(not outside, f"split {name} holds classes {sorted(outside)}, which its label space does not")


def check_names(subject: PartitionUnderCheck) -> None:
    """Clients have names before the images are read."""
    names = subject.partition.client_names(subject.source)
    clients = len(subject.split().train)
    require(len(names) == clients, f"client_names gives {len(names)} names, assign makes {clients} clients")
    require(len(set(names)) == len(names), "two clients have one name")
    count = subject.partition.num_clients
    require(count in (None, len(names)), f"num_clients is {count}, and there are {len(names)} clients")
    testers, made = subject.partition.testers(subject.source), subject.split().testers
    require(testers == made, f"testers gives {testers}, assign makes {made}")
    require(all(isinstance(name, str) and name for name in names), "a name is no text, or empty")


def check_manifest(subject: PartitionUnderCheck) -> None:
    """A manifest gives the split back."""
    made, pool, source, splits = subject.partition, subject.pool, subject.source, subject.split()
    manifest = make_manifest(made, pool, splits, source, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.json"
        write_manifest(path, manifest)
        same = manifest_hash(read_manifest(path)) == manifest_hash(manifest)
        require(same, "the manifest that is read is another than was written")
        read = replace(subject, partition=FromManifest(str(path)))
        require_same(read.split(9), splits, "its manifest gives another partition")
        require(read.partition.client_names(source) == made.client_names(source), "its manifest names other clients")
        again = make_manifest(read.partition, pool, read.split(), source, 9)
        require(again == manifest, "the manifest of its manifest is another one")


CHECKS = (check_seed, check_arguments, check_sides, check_names, check_manifest)
