"""Kernels that give the same bits each time, so that a resumed run on a GPU ends as an uninterrupted one."""

import os

import torch


def repeatable_kernels() -> None:
    """Choose repeatable kernels on a GPU; called before its first use.

    cuDNN's fastest convolutions and fused attention add in an order that changes from call to call, and cuBLAS may do
    so where it has several workspaces. Where there is a GPU, torch refuses operations that have no repeatable kernel on
    it from then on, in all of this process, until it is told otherwise (``--trainer.deterministic=false``). What the
    user has set in ``CUBLAS_WORKSPACE_CONFIG`` or of torch's deterministic mode stays. Nothing changes where there is
    none.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    if torch.cuda.is_available() and not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it takes a kernel
