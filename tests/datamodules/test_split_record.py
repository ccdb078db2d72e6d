"""The images of all clients in one array, and their record as text, against one client at a time."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.records.hashes import canonical, manifest_hash
from datamodules import split_record
from datamodules.manifest import read_manifest
from datamodules.partition.client_rows import ByClient, ClientRows, class_counts
from datamodules.split_record import SplitRecord, client_lines

TRAIN = [np.array([12, 0, 9]), np.array([10]), np.array([999_999, 100, 99, 1_000_000])]
TEST = [np.array([7]), np.array([1, 2]), np.array([8])]
NAMES = ['client "0"', "Klinik Süd", "back\\slash, and },{"]
LABELS = np.arange(1_000_001) % 11
FIELDS: dict[str, Any] = {"seed": 3, "algorithm": "ByHand", "arguments": {"alpha": 1e-05}, "others": {"base": [4, 5]}}


def by_hand() -> list[dict[str, Any]]:
    """The clients, one at a time."""

    def side(name: str, rows: np.ndarray) -> dict[str, Any]:
        data = b"".join(int(row).to_bytes(8, "little") for row in rows)
        return {
            name: [int(row) for row in rows],
            f"{name}_classes": [sum(int(LABELS[row]) == c for row in rows) for c in range(11)],
            f"{name}_sha256": hashlib.sha256(data).hexdigest(),
            f"{name}_size": len(rows),
        }

    return [
        {"name": name, **side("train", train), **side("test", test)}
        for name, train, test in zip(NAMES, TRAIN, TEST, strict=True)
    ]


def test_a_client_is_a_line_in_the_canonical_spelling() -> None:
    lines = client_lines(NAMES, ClientRows.of(TRAIN), ClientRows.of(TEST), LABELS, 11)
    assert [line.encode() for line in lines] == [canonical(client) for client in by_hand()]


def test_the_record_is_the_manifests_with_its_hash(tmp_path: Path) -> None:
    lines = client_lines(NAMES, ClientRows.of(TRAIN), ClientRows.of(TEST), LABELS, 11)
    record, manifest = SplitRecord(FIELDS | {"images_sha256": "ab"}, lines), {**FIELDS, "clients": by_hand()}
    assert record.manifest == manifest | {"images_sha256": "ab"}
    assert record.images_sha256 == "ab"
    assert record.hash == manifest_hash(manifest) == SplitRecord.of(manifest).hash
    further = record.with_fields(label_orders=2)
    assert further.hash == manifest_hash(manifest | {"label_orders": 2}) != record.hash
    record.write(tmp_path / "made" / "split.json")
    assert json.loads((tmp_path / "made" / "split.json").read_text()) == record.manifest


def test_every_client_has_a_name() -> None:
    with pytest.raises(ValueError, match="2 names of 3 clients that train and 3 that are tested"):
        client_lines(NAMES[:2], ClientRows.of(TRAIN), ClientRows.of(TEST), LABELS, 11)


@pytest.mark.parametrize("together", [1, 2, 3])
def test_how_many_clients_are_spelled_together_changes_nothing(
    together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_record, "TOGETHER", together)
    monkeypatch.setattr(split_record, "SPELLED", together)
    lines = client_lines(NAMES, ClientRows.of(TRAIN), ClientRows.of(TEST), LABELS, 11)
    assert [json.loads(line) for line in lines] == by_hand()
    record = SplitRecord(FIELDS, lines)
    assert record.hash == manifest_hash({**FIELDS, "clients": by_hand()})
    record.write(tmp_path / "split.json")
    assert json.loads((tmp_path / "split.json").read_text()) == {**FIELDS, "clients": by_hand()}


def test_a_run_writes_what_it_hashed(tmp_path: Path) -> None:
    from federation import build

    _, data = build("FedAvg")
    data.split_record.write(tmp_path / "split.json")
    read = read_manifest(tmp_path / "split.json")
    assert read == data.manifest
    assert manifest_hash(read) == data.split_record.hash == data.state_dict()["manifest"]


def test_rows_read_as_a_list_of_one_array_a_client() -> None:
    held = ClientRows.of(TRAIN)
    assert len(held) == 3
    assert ClientRows.of(held) is held
    assert held.sizes.tolist() == [3, 1, 4]
    assert held.owners.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert [rows.tolist() for rows in held] == [rows.tolist() for rows in TRAIN]
    assert [held[k].tolist() for k in (0, 1, 2, -1, -3)] == [TRAIN[k].tolist() for k in (0, 1, 2, -1, -3)]
    assert [rows.tolist() for rows in held[1:]] == [rows.tolist() for rows in TRAIN[1:]]
    for client in (3, -4):
        with pytest.raises(IndexError, match=f"client {client} of 3"):
            held[client]
    assert [rows.tolist() for rows in held + TEST] == [rows.tolist() for rows in TRAIN + TEST]
    assert np.concatenate(held).tolist() == np.concatenate(TRAIN).tolist()


def test_rows_read_as_a_mapping_from_the_clients_number() -> None:
    held = ByClient(ClientRows.of(TRAIN))
    assert list(held) == [0, 1, 2]
    assert {client: rows.tolist() for client, rows in held.items()} == {k: TRAIN[k].tolist() for k in range(3)}
    assert [rows.tolist() for rows in held.values()] == [rows.tolist() for rows in TRAIN]
    assert 2 in held
    assert held == held
    assert held != ByClient(ClientRows.of(TRAIN))
    assert "client 2" not in held
    for client in (-1, 3):
        assert client not in held
        with pytest.raises(KeyError, match=str(client)):
            held[client]


def test_rows_ascend_within_each_client() -> None:
    rng = np.random.default_rng(0)
    held = [rng.permutation(50)[: rng.integers(0, 6)] for _ in range(40)]
    ascending = ClientRows.of(held).ascending()
    assert [rows.tolist() for rows in ascending] == [sorted(rows.tolist()) for rows in held]
    counts = class_counts(held, np.arange(50) % 3, 3)
    assert counts.tolist() == [[sum(int(row) % 3 == c for row in rows) for c in range(3)] for rows in held]
    assert len(ClientRows.of([]).ascending()) == 0
    assert ClientRows.of([np.array([3, 1], dtype=np.int32)]).ascending()[0].dtype == np.int64
