"""The line on cells that other code than the present one has made."""

from dataclasses import replace

import pytest
from recorded_results import record_of

from benchmark.cells import outcome
from benchmark.cells.outcome import said_of_code
from benchmark.records.record import RunRecord


def test_methods_with_the_same_changed_files_stand_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a method are those of all its seeds, each once."""
    monkeypatch.setattr(outcome, "changed_files", lambda code: sorted(code))

    def made(method: str, *files: str) -> RunRecord:
        return replace(record_of(), method=method, code=dict.fromkeys(files, "0"))

    records = [
        made("FedVPT", "a.py", "b.py"),
        made("FedVPT", "a.py"),
        made("PFedPG", "b.py", "a.py"),
        made("CoOp", "c.py"),
    ]
    (line,) = said_of_code([*records, made("FedAvg")])
    which = "FedVPT, PFedPG: a.py, b.py changed; CoOp: c.py changed"
    assert line == f"4 of 5 cells were made by other code ({which}); make them again with --rerun-changed"
