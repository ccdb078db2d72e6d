"""A manifest as text, made once: what is hashed and what is written are the same lines."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.files import replacing
from benchmark.records.hashes import OF_THE_IMAGES, canonical
from datamodules.partition.client_rows import ClientRows, Indices, class_counts

Manifest = dict[str, Any]

#: Clients that are hashed and written together.
TOGETHER = 1000


@dataclass(frozen=True)
class SplitRecord:
    """What a manifest says, as text: a million clients are a million lines, not tens of millions of Python numbers.

    Attributes:
        fields: of the manifest, as plain JSON values; all but ``clients``.
        clients: JSON of each client in its canonical spelling (:func:`benchmark.records.hashes.canonical`).
    """

    fields: Manifest
    clients: list[str]

    @classmethod
    def of(cls, manifest: Manifest) -> "SplitRecord":
        """Spell out the manifest."""
        fields = {name: value for name, value in manifest.items() if name != "clients"}
        return cls(fields, [canonical(client).decode() for client in manifest["clients"]])

    def with_fields(self, **fields: Any) -> "SplitRecord":
        """The record with more fields, or others."""
        return SplitRecord({**self.fields, **fields}, self.clients)

    @property
    def images_sha256(self) -> str:
        """Of the images' pixels."""
        return str(self.fields[OF_THE_IMAGES])

    @cached_property
    def manifest(self) -> Manifest:
        """All of it, as plain JSON values."""
        return {**self.fields, "clients": json.loads(f"[{','.join(self.clients)}]")}

    @cached_property
    def hash(self) -> str:
        """The split's, that of :func:`benchmark.records.hashes.manifest_hash`."""
        digest, before = hashlib.sha256(), "{"
        for name in sorted({*self.fields, "clients"} - {OF_THE_IMAGES}):
            digest.update(f"{before}{quoted(name)}:".encode())
            if name == "clients":
                digest.update(b"[")
                for part in self._spelled_clients(","):
                    digest.update(part)
                digest.update(b"]")
            else:
                digest.update(canonical(self.fields[name]))
            before = ","
        digest.update(b"}")
        return digest.hexdigest()

    def write(self, path: str | Path) -> None:
        """Write JSON, one client a line, atomically. Missing folders are made."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in self.fields.items())
        with replacing(path) as stream:
            stream.write(f'{{\n{head},\n "clients": [\n  '.encode())
            stream.writelines(self._spelled_clients(",\n  "))
            stream.write(b"\n ]\n}\n")

    def _spelled_clients(self, between: str) -> Iterator[bytes]:
        """Yield all clients' JSON, so many at a time that it stays in the processor's cache."""
        for begin in range(0, len(self.clients), TOGETHER):
            yield (between if begin else "").encode() + between.join(self.clients[begin : begin + TOGETHER]).encode()


def client_lines(
    names: Sequence[str], train: ClientRows, test: ClientRows, labels: Indices, num_classes: int
) -> list[str]:
    """Spell out each client: its name, and of both sides the indices, their sha256, how many, and how many a class."""
    lines: list[str] = []
    for begin in range(0, len(names), TOGETHER):
        part = slice(begin, begin + TOGETHER)
        sides = [zip(*_side(held.part(part), labels, num_classes), strict=True) for held in (test, train)]
        lines += [
            f'{{"name":{quoted(name)},"test":[{test_rows}],"test_classes":[{test_classes}],"test_sha256":"{test_hash}",'
            f'"test_size":{test_size},"train":[{train_rows}],"train_classes":[{train_classes}],'
            f'"train_sha256":"{train_hash}","train_size":{train_size}}}'
            for name, (test_rows, test_classes, test_hash, test_size), (
                train_rows,
                train_classes,
                train_hash,
                train_size,
            ) in zip(names[part], *sides, strict=True)
        ]
    return lines


def _side(held: ClientRows, labels: Indices, num_classes: int) -> tuple[Iterator[str], ...]:
    """Yield per client the text of its rows, of its images by class, of its rows' sha256 and of their number."""
    counts = class_counts(held, labels, num_classes)
    classes = np.full(len(held), num_classes, dtype=np.int64)
    return (
        _spelled(held.rows, held.sizes),
        _spelled(counts.ravel(), classes),
        _hashes(held),
        map(str, held.sizes.tolist()),
    )


def _hashes(held: ClientRows) -> Iterator[str]:
    """Yield the sha256 of each client's rows as little-endian 64-bit integers (hexadecimal)."""
    data, bounds = held.rows.astype("<i8").tobytes(), (8 * held.bounds).tolist()
    sha256 = hashlib.sha256
    for begin, end in itertools.pairwise(bounds):
        yield sha256(data[begin:end]).hexdigest()


def _spelled(numbers: Indices, sizes: Indices) -> Iterator[str]:
    """Yield so many of the numbers, from 0 on, as each client has, in decimal with commas between."""
    ends, powers = np.ones(len(numbers), dtype=np.int64), 10 ** np.arange(1, 19, dtype=np.int64)
    largest = int(numbers.max(initial=0))
    for power in powers[powers <= largest]:
        ends += numbers >= power
    ends = np.cumsum(ends + 1)
    text = np.full(int(ends[-1]) if len(ends) else 0, ord(","), dtype=np.uint8)
    places = ends - 2
    while len(places):
        text[places] = ord("0") + numbers % 10
        longer = np.flatnonzero(numbers >= 10)
        places, numbers = places[longer] - 1, numbers[longer] // 10
    spelled = text.tobytes().decode("ascii")
    bounds = np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(sizes)])].tolist()
    for begin, end in itertools.pairwise(bounds):
        yield spelled[begin : end - 1] if end > begin else ""
