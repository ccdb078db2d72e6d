"""Settings of a GPU's kernels, and what a user is told of those that are missing; test_gpu.py runs them."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from federation import CONF
from refusal import refused

from benchmark import fit
from benchmark.engine.device.repeatable import repeatable_kernels
from benchmark.run import cli
from benchmark.run.device_errors import of_device
from methods.fedvpt import FedVPT


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("there", [True, False])
def test_where_there_is_a_gpu_no_operation_takes_a_kernel_that_does_not_repeat(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    repeatable_kernels()
    assert torch.are_deterministic_algorithms_enabled() is there
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    repeatable_kernels()
    assert torch.is_deterministic_algorithms_warn_only_enabled()  # the user's choice
    if there:  # filling it takes a kernel for each tensor
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError(
                "grid_sampler_2d_backward_cuda does not have a deterministic implementation, but you set "
                "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
            ),
            "has no kernel on a GPU that gives the same bits at each call; take another one, or "
            "--trainer.deterministic=false, with which",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"),
            "error: the GPU's memory is full, 2.00 GiB more were asked for; step fewer clients at once",
        ),
    ],
)
def test_what_a_gpu_cannot_do_is_said_in_one_line(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(FedVPT, "client_loss", failing)
    files = [f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'FedVPT.yaml'}"]
    line = refused(capsys, cli.main, ["fit", *files, f"--run_dir={tmp_path}/run"])
    assert words in line
    if "grid" in str(error):
        number = failing.__code__.co_firstlineno + 1
        assert f"error: grid_sampler_2d_backward_cuda (line {number} of {__file__}) has no kernel" in line
    with pytest.raises(type(error)):  # in Python it can be caught as what it is
        fit(*(file.removeprefix("--config=") for file in files), rounds=1)


def test_other_errors_are_left_as_they_are() -> None:
    assert of_device(RuntimeError("CUDA error: an illegal memory access was encountered")) is None
