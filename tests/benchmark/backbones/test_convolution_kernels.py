"""Triton's kernels for convolutions of stacked clients, interpreted on the CPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import conv2d

from benchmark.backbones.client_layers import tf32_is_allowed

pytest.importorskip("triton")

#: clients, images, channels, filters, height, width, side: few and many of each, more than one block of all
SHAPES = ((2, 3, 3, 8, 9, 7, 3), (3, 2, 20, 5, 8, 6, 5), (1, 2, 4, 70, 6, 6, 2), (2, 1, 1, 1, 4, 5, 1))
#: torch's settings that forbid TF32 in convolutions: whole cuDNN, and from torch 2.9 on convolutions alone
FORBID: list[tuple[Any, str, Any]] = [
    (torch.backends.cudnn, "allow_tf32", False),
    *((own, "fp32_precision", "ieee") for own in (getattr(torch.backends.cudnn, "conv", None),) if own is not None),
]
#: instead of the blocks that a GPU has
BLOCKS = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 16, "OWN_ROWS": 16, "OWN_COLUMNS": 32, "OWN_DEPTH": 16, "LEAST": 16}


def compare(shape: tuple[int, ...], programs: int) -> None:
    """Outputs and gradients are those of torch's convolutions, client by client."""
    from benchmark.backbones import convolution_kernels

    clients, batch, channels, filters, height, width, side = shape
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).requires_grad_()

    x, weight = drawn(clients, batch, channels, height, width), drawn(clients, filters, channels, side, side)
    bias = drawn(clients, filters)
    with patch.multiple(convolution_kernels, **BLOCKS, PROGRAMS=programs):
        made = convolution_kernels.KernelConv2d.apply(x, weight, bias, "ieee")
        gradient = torch.randn(made.shape, generator=generator)
        found = torch.autograd.grad(made, (x, weight, bias), gradient)
    each = zip(x.double(), weight.double(), bias.double(), strict=True)
    expected = torch.stack([conv2d(*own) for own in each])
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-4)
    for ours, theirs in zip(found, torch.autograd.grad(expected, (x, weight, bias), gradient.double()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_they_are_torchs_convolutions_client_by_client() -> None:
    """Each gradient of the filters is one sum, or made of parts."""
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{2 * len(SHAPES)} compared\n"), done.stderr


def test_tf32_is_asked_for_in_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    assert tf32_is_allowed()
    for of, name, value in FORBID:
        before = getattr(of, name)
        setattr(of, name, value)
        try:
            assert not tf32_is_allowed()
        finally:
            setattr(of, name, before)
        assert tf32_is_allowed()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert not tf32_is_allowed()


if __name__ == "__main__":
    for one in SHAPES:
        for enough in (1, 40):
            compare(one, enough)
    print(f"{2 * len(SHAPES)} compared")
