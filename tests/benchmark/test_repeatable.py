"""Settings of a GPU's kernels; what they do there has not been seen on one."""

import os

import pytest
import torch

from benchmark.engine.repeatable import repeatable_kernels


def test_kernels_are_repeatable_and_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    repeatable_kernels()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    repeatable_kernels()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
