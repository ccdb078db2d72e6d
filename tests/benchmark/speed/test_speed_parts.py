"""Parts in a tower: each row has the seconds and the peak memory of a process of its own."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmark.speed import parts
from benchmark.speed.measure import peak_memory


def test_each_row_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(command: Sequence[str]) -> str:
        asked.append(command[-3:])
        return json.dumps({"seconds": float(len(asked)), "memory": 1000 + len(asked)})

    monkeypatch.setattr(parts, "last_line_of", answer)
    title, rows = parts.run(Path())
    found = list(rows)
    of_vit, of_clip = parts.of_vit(), parts.of_clip()
    assert title.startswith("Parts in a frozen tower")
    assert asked == [["-m", "benchmark.speed.parts", row] for row in (*of_vit, *of_clip)]
    assert [row.memory for row in found] == [1001 + place for place in range(len(asked))]
    assert found[0].ratio == found[len(of_vit)].ratio == 1.0
    assert found[1].ratio == 2.0
    assert found[len(of_vit) + 1].ratio == (len(of_vit) + 2) / (len(of_vit) + 1), "against PromptFL's"
    assert found[0].note.startswith("times FedVPT's in every row; MB of")
    assert not found[1].note


def test_a_row_trains_its_method_and_reads_the_peak() -> None:
    before = peak_memory()
    found = parts.measured("FedPartCLIP (norms), text, micro_clip")
    assert found["seconds"] > 0
    assert before <= found["memory"] <= peak_memory()
