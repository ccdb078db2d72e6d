"""Parts in a tower: each row has the best seconds and the least peak memory of its processes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmark.speed import parts
from benchmark.speed.measure import peak_memory


def test_each_row_is_measured_in_turns_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(command: Sequence[str]) -> str:
        assert command[-3:-1] == ["-m", "benchmark.speed.parts"]
        asked.append(command[-1])
        turn = asked.count(command[-1]) - 1  # the second one meets no neighbour
        return json.dumps({"seconds": len(command[-1]) + [2, 0, 1][turn], "memory": 1000 + [2, 1, 0][turn]})

    monkeypatch.setattr(parts, "last_line_of", answer)
    title, rows = parts.run(Path())
    found = list(rows)
    of_vit, of_clip = [*parts.of_vit()], [*parts.of_clip()]
    assert title.startswith("Parts in a frozen tower")
    assert asked == 3 * of_vit + 3 * of_clip
    assert [row.seconds for row in found] == [len(each) for each in (*of_vit, *of_clip)]
    assert {row.memory for row in found} == {1000}
    assert found[0].ratio == found[len(of_vit)].ratio == 1.0
    assert found[1].ratio == len(of_vit[1]) / len(of_vit[0])
    assert found[len(of_vit) + 1].ratio == len(of_clip[1]) / len(of_clip[0]), "against PromptFL's"
    assert found[0].note.startswith("times FedVPT's in every row; MB of")
    assert not found[1].note


def test_a_row_trains_its_method_and_reads_the_peak() -> None:
    before = peak_memory()
    found = parts.measured("FedPartCLIP (norms), text, micro_clip")
    assert found["seconds"] > 0
    assert before <= found["memory"] <= peak_memory()
