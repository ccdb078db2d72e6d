"""A pretended GPU, for a machine without one: tensors that say they lie on a device, with their numbers on the CPU.

Such a tensor is a wrapper on torch's device type for backends of others (PrivateUse1), with ``is_cuda`` true, so that
the paths taken are those of a GPU. Every operation on one goes through ``_run``, which
 * computes it on the CPU, so that results are the CPU's up to the other paths' order of summation;
 * refuses what CUDA refuses: tensors of two devices in one operation (a number of no dimension may come from the host);
 * notes what the host must wait for: reading a value, a copy to the host, a copy to the device from pageable memory,
   and operations whose result's shape depends on values (``nonzero``, a boolean index).
Autograd, vmap, functional_call, optimizers and a whole Trainer work on it. What it cannot show: kernels of a GPU, its
autocast, its memory, its speed. ``with PretendedGPU() as gpu:`` switches it on; what waited is in ``gpu.waits``.
It needs a process of its own: torch knows one kind of accelerator in a process, and fake CUDA tensors, of which
``torch.compile`` makes some, are another.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from benchmark.seeds import derived_seed


class _Backend(_DummyBackendModule):
    """The functions that torch needs of a backend."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the data types of its autocast, which is never switched on here."""
        return [torch.bfloat16]


def register() -> None:
    """Make the device known to torch, once in a process, before anything asks for the process's accelerator."""
    _setup_privateuseone_for_python_backend("pretended", backend_module=_Backend())


DEVICE = torch.device("privateuseone", 0)  # named "pretended" once it is registered

#: Operations whose result the host must see before it can go on.
WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount", "_unique2"}
WAITING |= {"unique_dim", "unique_consecutive", "repeat_interleave", "_linalg_svd", "_linalg_eigh"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
#: The project's own folders, in which the place of a wait is named.
OWN = tuple(f"{Path(__file__).parents[1] / folder}/" for folder in ("benchmark", "methods", "datamodules"))


class PretendedTensor(torch.Tensor):
    """A tensor on the pretended GPU; ``host`` are its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "PretendedTensor":
        """Wrap a tensor of the host."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=DEVICE,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, PretendedTensor):
            raise RuntimeError(f"Attempted to set .data of a tensor on {DEVICE} to one on {value.device}")
        torch.Tensor.data.__set__(self, value)
        self.host = value.host

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        _note("tolist")
        return self.host.tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    def __repr__(self, **kwargs: Any) -> str:
        return f"PretendedTensor({self.host})"


switched_on: "list[PretendedGPU]" = []


class PretendedGPU(TorchDispatchMode):
    """While it is on, tensors can be made on, and moved to, the pretended device.

    Attributes:
        waits: what the host waited for, and where, in order.
        kernels: operations that the device carried out; views take none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.kernels = 0
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Switch it on."""
        lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) makes it on the host and moves it
        self._patches.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        on_device = property(lambda tensor: tensor.device.type == DEVICE.type)
        self._patches.enter_context(patch.object(torch.Tensor, "is_cuda", on_device))
        self._patches.enter_context(patch("benchmark.engine.batches.noise.torch_generator", _generator))
        switched_on.append(self)
        self._patches.callback(switched_on.pop)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Switch it off."""
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PretendedAccelerator(CPUAccelerator):
    """Lightning's CPU, but for a device that is not one."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing is to be set up."""


def trainer_settings() -> dict[str, Any]:
    """Settings of a Trainer that runs on the pretended GPU."""
    return {"accelerator": PretendedAccelerator(), "strategy": SingleDeviceStrategy(device=DEVICE)}


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with their numbers where they really are; nothing waits."""
    return {name: t.host if isinstance(t, PretendedTensor) else t for name, t in tensors.items()}


class _Generator(torch.Generator):
    """Draws on the CPU, for the pretended GPU."""

    device = DEVICE


def _generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A stand-in for ``torch_generator``."""
    made = _Generator() if torch.device(device) == DEVICE else torch.Generator(device)
    return made.manual_seed(derived_seed(*key))


def _note(what: str) -> None:
    """Write down a wait, with the innermost place in the project's own code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    for gpu in switched_on:
        gpu.waits.append(f"{what} at {frame.f_code.co_filename}:{frame.f_lineno}")


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == DEVICE.type
    return isinstance(value, str) and value.split(":")[0] == DEVICE.type


def _to_host(value: Any, seen: list[torch.Tensor]) -> Any:
    """An argument of an operation as the host takes it; its tensors, as they were given, go to ``seen``."""
    if isinstance(value, PretendedTensor):
        seen.append(value)
        return value.host
    if isinstance(value, torch.Tensor):
        seen.append(value)
    elif isinstance(value, list | tuple):
        return [_to_host(part, seen) for part in value]
    elif _is_device(value):
        return torch.device("cpu")
    return value


def _to_device(value: Any) -> Any:
    """Put the result that an operation returned on the host onto the pretended GPU."""
    if isinstance(value, torch.Tensor):
        return PretendedTensor(value)
    return [_to_device(part) for part in value] if isinstance(value, list | tuple) else value


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute an operation on the host, as the pretended GPU would."""
    name = func.overloadpacket.__name__
    seen: list[torch.Tensor] = []
    host_args = [_to_host(value, seen) for value in args]
    host_kwargs = {key: _to_host(value, seen) for key, value in kwargs.items()}
    elsewhere = [value for value in seen if not isinstance(value, PretendedTensor)]
    asked = any(map(_is_device, (*args, *kwargs.values())))
    if len(elsewhere) == len(seen) and not asked:
        return func(*args, **kwargs)
    if name in ("_to_copy", "copy_"):
        return _copied(func, args, host_args, kwargs, host_kwargs)
    if name in INDEXING:
        _check_indexing(name, args)
    elif any(value.ndim for value in elsewhere):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"({func}, shapes {[tuple(value.shape) for value in elsewhere]})"
        )
    if name in WAITING:
        _note(name)
    made = func(*host_args, **host_kwargs)
    returned = func._schema.returns
    if not returned or returned[0].alias_info is None or returned[0].alias_info.is_write:
        for gpu in switched_on:
            gpu.kernels += 1
    if name.endswith("_") and func._schema.is_mutable:
        return None if name.startswith("_foreach") else args[0]
    return _to_device(made)


def _copied(func: Any, args: Any, host_args: Any, kwargs: Any, host_kwargs: Any) -> Any:
    """A copy within a device or between two, for which the host waits unless it is told not to."""
    new = func.overloadpacket.__name__ == "_to_copy"
    target = kwargs.get("device") if new else None
    to_device = isinstance(args[0], PretendedTensor) if target is None else _is_device(target)
    from_device = isinstance(args[0 if new else 1], PretendedTensor)
    made = func(*host_args, **host_kwargs)
    if from_device and not to_device:
        _note("a copy to the host")
    elif to_device and not from_device and not kwargs.get("non_blocking"):
        _note("a copy to the device")
    if not new:
        return args[0]
    return PretendedTensor(made) if to_device else made


def _check_indexing(name: str, args: Any) -> None:
    """Check an index as CUDA does: it takes its own tensors, copies those of the host, and waits for a mask."""
    if not isinstance(args[0], PretendedTensor):
        raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
    for index in args[1]:
        if index is None:
            continue
        if not isinstance(index, PretendedTensor):
            _note("a copy to the device of an index")
        if index.dtype in (torch.bool, torch.uint8):
            _note("a boolean index")
    if "put" in name and not isinstance(args[2], PretendedTensor) and args[2].ndim:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, the values are on the cpu")
