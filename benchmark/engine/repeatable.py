"""Kernels that give the same bits each time, so that a resumed run on a GPU ends as an uninterrupted one."""

import os

import torch


def repeatable_kernels() -> None:
    """Choose repeatable kernels of cuDNN and cuBLAS; called before the first use of a GPU.

    cuDNN's fastest convolutions add in an order that changes from call to call, and cuBLAS may do so where it has
    several workspaces. What the user has set in ``CUBLAS_WORKSPACE_CONFIG`` stays. Nothing changes on a CPU.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
