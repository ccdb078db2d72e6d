"""The processor, in the words of a list as Linux has it, or else of the system."""

from pathlib import Path
from typing import Any

import pytest

from benchmark.processor import described

LISTED = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9575F: 64 cores

processor\t: 1
vendor_id\t: B
"""


def test_the_first_processor_of_the_list_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, errors: {"/proc/cpuinfo": LISTED}[str(path)])
    monkeypatch.setattr("platform.processor", lambda: "x86")
    assert described("vendor_id") == "AuthenticAMD"
    assert described("model name") == "AMD EPYC 9575F: 64 cores"
    assert described("colour") == "x86"


def test_a_system_without_a_list_is_asked_for_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("platform.processor", lambda: "AMD64 Family 25, AuthenticAMD")
    assert described("vendor_id") == "AMD64 Family 25, AuthenticAMD"
