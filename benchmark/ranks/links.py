"""The connections over which ranks hand each other tensors: sockets of one machine, or ``torch.distributed``."""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Transfer(Protocol):
    """An operation that has been started, such as the ``Work`` of ``torch.distributed``."""

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""

    def wait(self) -> Any:
        """Wait until the operation has ended.

        Raises:
            RuntimeError: a connection broke.
        """


class Links:
    """Links between ranks by ``torch.distributed``, in its default process group."""

    def all_gather(self, parts: list[Tensor], mine: Tensor) -> Transfer:
        """Begin to fill ``parts``, of one shape, with what each rank gives."""
        return cast(Transfer, dist.all_gather(parts, mine, async_op=True))

    def all_to_all(self, arrived: Tensor, sizes: list[int], sent: Sequence[Tensor]) -> Transfer:
        """Begin to fill ``arrived`` with what each rank sends to this one: so many bytes of each, in host memory."""
        # Not by isend, whose end can't be asked for without waiting for it.
        lengths = [len(part) for part in sent]
        return cast(Transfer, dist.all_to_all_single(arrived, torch.cat([*sent]), sizes, lengths, async_op=True))

    def close(self, together: bool) -> None:
        """End the connections.

        Args:
            together: whether all ranks do so; else others may be gone, and nothing is waited for.
        """
        if together:
            dist.destroy_process_group()


class SocketLinks(Links):
    """A socket to each other rank of this machine, which no one else can have; what lies on GPUs goes by nccl.

    Args:
        sockets: connected, by rank.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = sockets
        self._threads = ThreadPoolExecutor(2 * len(sockets), thread_name_prefix="links")

    def all_gather(self, parts: list[Tensor], mine: Tensor) -> Transfer:
        """Begin to fill ``parts`` with what each other rank gives."""
        if mine.device.type != "cpu":
            return super().all_gather(parts, mine)
        return self._swap(parts, [mine] * len(parts))

    def all_to_all(self, arrived: Tensor, sizes: list[int], sent: Sequence[Tensor]) -> Transfer:
        """Begin to fill ``arrived`` with what each other rank sends."""
        return self._swap(arrived.split(sizes), sent)

    def _swap(self, arrived: Sequence[Tensor], sent: Sequence[Tensor]) -> Transfer:
        """Send and receive at the same time; both ends know how many bytes these are."""
        begun = []
        for rank, link in self._sockets.items():
            begun.append(self._threads.submit(link.sendall, _bytes(sent[rank])))
            begun.append(self._threads.submit(_receive, link, _bytes(arrived[rank])))
        return _Begun(begun)

    def close(self, together: bool) -> None:
        """Close the sockets, and wake up who waits at them."""
        for link in self._sockets.values():
            with suppress(OSError):  # the other end is gone
                link.shutdown(socket.SHUT_RDWR)
            link.close()
        self._threads.shutdown(wait=False)
        if dist.is_initialized():
            super().close(together)


class _Begun:
    """Sending and receiving by threads."""

    def __init__(self, begun: Sequence["Future[None]"]) -> None:
        self._begun = begun

    def is_completed(self) -> bool:
        ended = [each for each in self._begun if each.done()]
        return len(ended) == len(self._begun) or any(each.exception() for each in ended)

    def wait(self) -> None:
        for each in self._begun:
            if each.done() and (error := each.exception()) is not None:
                raise RuntimeError(str(error)) from error


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def _receive(link: socket.socket, room: memoryview) -> None:
    while len(room):
        count = link.recv_into(room)
        if not count:
            raise ConnectionError("its other end is closed")
        room = room[count:]
