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
import pyarrow as pa
import pyarrow.compute as pc

from benchmark.files import replacing
from benchmark.records.hashes import OF_THE_IMAGES, canonical
from datamodules.partition.client_rows import ClientRows, Indices, class_counts

Manifest = dict[str, Any]

#: Clients that are hashed and written together, and those that are spelled together.
TOGETHER, SPELLED = 1000, 10_000
#: with room for more than 2 GiB
TEXT = pa.large_string()


@dataclass(frozen=True)
class SplitRecord:
    """A manifest as text: a million clients are a million lines, not tens of millions of Python numbers.

    Attributes:
        fields: fields of the manifest except ``clients``, as plain JSON values.
        clients: JSON of each client in its canonical spelling (:func:`benchmark.records.hashes.canonical`).
    """

    fields: Manifest
    clients: list[str]

    @classmethod
    def of(cls, manifest: Manifest) -> "SplitRecord":
        """Convert a manifest."""
        fields = {name: value for name, value in manifest.items() if name != "clients"}
        return cls(fields, [canonical(client).decode() for client in manifest["clients"]])

    def with_fields(self, **fields: Any) -> "SplitRecord":
        """Return the record with these fields added or replaced."""
        return SplitRecord({**self.fields, **fields}, self.clients)

    @property
    def images_sha256(self) -> str:
        """The sha256 of the images' pixels."""
        return str(self.fields[OF_THE_IMAGES])

    @cached_property
    def manifest(self) -> Manifest:
        """The whole manifest, as plain JSON values."""
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
    """Spell out each client: its name, and of both sides the indices, their sha256, how many, and how many a class.

    Raises:
        ValueError: not as many names as clients.
    """
    if not len(names) == len(train) == len(test):
        raise ValueError(f"{len(names)} names of {len(train)} clients that train and {len(test)} that are tested")
    lines: list[str] = []
    for begin in range(0, len(names), SPELLED):
        part = slice(begin, begin + SPELLED)
        test_rows, test_classes, test_hashes, test_sizes = _side(test.part(part), labels, num_classes)
        train_rows, train_classes, train_hashes, train_sizes = _side(train.part(part), labels, num_classes)
        pieces = (
            '{"name":', pa.array(map(quoted, names[part]), TEXT),
            ',"test":[', test_rows, '],"test_classes":[', test_classes,
            '],"test_sha256":"', test_hashes, '","test_size":', test_sizes,
            ',"train":[', train_rows, '],"train_classes":[', train_classes,
            '],"train_sha256":"', train_hashes, '","train_size":', train_sizes,
            "}", "",
        )  # fmt: skip
        joined = (pa.scalar(piece, TEXT) if isinstance(piece, str) else piece for piece in pieces)
        lines += pc.binary_join_element_wise(*joined).to_pylist()
    return lines


def _side(held: ClientRows, labels: Indices, num_classes: int) -> tuple[pa.Array, ...]:
    """Return per client the text of its rows, of its images by class, of its rows' sha256 and of their number."""
    counts = class_counts(held, labels, num_classes)
    return (
        _listed(held.rows, held.bounds),
        _listed(counts.ravel(), np.arange(len(held) + 1) * num_classes),
        _hashes(held),
        pa.array(held.sizes).cast(TEXT),
    )


def _hashes(held: ClientRows) -> pa.LargeStringArray:
    """Return the sha256 of each client's rows as little-endian 64-bit integers (hexadecimal)."""
    data, bounds = held.rows.astype("<i8").tobytes(), (8 * held.bounds).tolist()
    sha256 = hashlib.sha256
    digests = b"".join([sha256(data[begin:end]).digest() for begin, end in itertools.pairwise(bounds)])
    ends = np.arange(0, 64 * len(held) + 1, 64)
    return pa.LargeStringArray.from_buffers(len(held), pa.py_buffer(ends), pa.py_buffer(digests.hex().encode()))


def _listed(numbers: Indices, bounds: Indices) -> pa.LargeStringArray:
    """Spell the numbers of each client in decimal with commas between; client k's are those between two bounds."""
    spelled = pa.array(numbers).cast(TEXT)
    return pc.binary_join(pa.LargeListArray.from_arrays(pa.array(bounds), spelled), pa.scalar(",", TEXT))
