"""Products by either library: each row has its best seconds, against the usual library's."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from benchmark.backbones import products as used
from benchmark.speed import products


def test_each_row_is_measured_by_both_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def answer(command: Sequence[str]) -> str:
        assert command[-4:-2] == ["-m", "benchmark.speed.products"]
        asked.append(tuple(command[-2:]))
        turn = asked.count(asked[-1]) - 1  # the second one meets no neighbour
        return json.dumps(len(command[-1]) + [2, 0, 1][turn])

    monkeypatch.setattr(products, "last_line_of", answer)
    title, rows = products.run(Path())
    found = list(rows)
    assert title.startswith("Products")
    assert asked == 3 * [(row, by) for row in (*products.ROWS, products.FEATURES) for by in products.BY]
    assert [row.seconds for row in found] == 5 * [22, 8]
    assert [row.ratio for row in found] == 5 * [1.0, 8 / 22]
    assert found[-1].work == "56 images at 224 px, batches of 16"


def test_making_features_is_timed_without_its_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used, "faster_by_onednn", None)  # is put back afterwards
    now = 0.0

    def encoded(x: float) -> dict[str, Tensor]:
        nonlocal now
        now += x
        return {}

    def trained(method: Any, data: Any, rounds: int) -> None:
        assert (data.cache_features, data.eval_batch_size, rounds) == (True, 16, 1)
        for seconds in (100.0, 2.0, 3.0):
            method.frozen_features(seconds)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(products, "in_vit", lambda kind: lambda clients: SimpleNamespace(frozen_features=encoded))
    monkeypatch.setattr(products, "fit", trained)
    assert products.seconds(products.FEATURES, products.USUAL) == 5.0


@pytest.mark.parametrize(("by", "onednn"), [(products.USUAL, False), (products.ONEDNN, True)])
def test_a_row_takes_the_products_that_it_says(by: str, onednn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(used, "faster_by_onednn", None)  # is put back afterwards

    def measured(title: str) -> dict[str, float]:
        assert title == "FedVPT, all blocks"
        assert used.faster_by_onednn() is onednn
        return {"seconds": 1.5, "memory": 2.0}

    monkeypatch.setattr(products, "measured", measured)
    assert products.seconds("FedVPT, all blocks", by) == 1.5
