"""Rendezvous of the processes of one run: in the user's own folder on one machine, at a port on several."""

import itertools
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from threading import Event, Thread
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from benchmark.errors import ConfigurationError
from benchmark.ranks.links import Links, SocketLinks

T = TypeVar("T")

#: Environment variable of processes that another one has started: its process number, a colon, their folder.
STARTED = "FEDPROMPT_RANKS"
#: Seconds in which all processes of a run must have come: each reads the data, and the weights, by itself.
ARRIVAL = 1800.0
#: Seconds of waiting after which a line says so; then at each doubling.
SILENCE = 20.0
#: Seconds between two looks at who has come.
LOOK = 0.02
#: Seconds for one attempt to connect, and for one answer of a port.
ANSWER = 10.0
#: Waits are ended by ``Pulse`` alone: a rank may have more to do than the others for as long as it lives.
FOREVER = timedelta(days=365)
#: Longest path of a socket in a folder, on all systems.
PATH = 80

#: A process may be part of several runs, one after the other; what is stored of one is not the next one's.
_numbers = itertools.count()


@dataclass(frozen=True)
class Member:
    """One process among those of a run.

    Attributes:
        rank: its number.
        count: of all of them.
        device: of this process.
    """

    rank: int
    count: int
    device: torch.device


class Way(Protocol):
    """A way to find each other."""

    @property
    def place(self) -> str:
        """The place of the meeting, for messages."""

    def store(self, member: Member, given_up: Event) -> dist.Store:
        """Return the store of all processes, as soon as it can be reached.

        Raises:
            ConfigurationError: it can't.
        """

    def links(self, member: Member, store: dist.Store) -> Links:
        """Connect this process with all others, which have come."""


@dataclass
class OneFolder:
    """A folder that only its user may enter; no port is open. A process that can write there has that user's rights.

    Attributes:
        folder: there.
        starter: number of the process that started this one; None of the one that started the others.
    """

    folder: Path
    starter: int | None = None
    _listener: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX), init=False, repr=False)

    @classmethod
    def new(cls) -> "OneFolder":
        """Make a folder."""
        base = tempfile.gettempdir()
        return cls(Path(tempfile.mkdtemp(prefix="ranks-", dir=base if len(base) < PATH else "/tmp")))

    @classmethod
    def given(cls) -> "OneFolder | None":
        """Return that of the process that started this one, if one has."""
        starter, _, folder = os.environ.get(STARTED, "").partition(":")
        return cls(Path(folder), int(starter)) if folder else None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which this process tells those that it starts where to meet."""
        return {STARTED: f"{os.getpid()}:{self.folder}"}

    @property
    def place(self) -> str:
        """The place of the meeting, for messages."""
        return "on this machine"

    def is_left(self) -> bool:
        """Return whether the process that started this one has ended."""
        return self.starter is not None and os.getppid() != self.starter

    def store(self, member: Member, given_up: Event) -> dist.Store:
        """Return a store in a file, and listen for the others.

        Raises:
            ConfigurationError: a process of this rank has done so.
        """
        try:
            self._listener.bind(str(self.folder / str(member.rank)))
        except OSError as error:
            raise ConfigurationError(f"rank {member.rank} of {self.folder} can't be had: {error.strerror}") from error
        self._listener.listen(member.count)
        return dist.FileStore(str(self.folder / "store"), -1)

    def links(self, member: Member, store: dist.Store) -> Links:
        """Connect to each lower rank, and be connected to by each higher one."""
        sockets = {}
        for rank in range(member.rank):
            sockets[rank] = socket.socket(socket.AF_UNIX)
            sockets[rank].connect(str(self.folder / str(rank)))
            sockets[rank].sendall(member.rank.to_bytes(4, "big"))
        for _ in range(member.rank + 1, member.count):
            link, _ = self._listener.accept()
            sockets[int.from_bytes(link.recv(4, socket.MSG_WAITALL), "big")] = link
        self._listener.close()
        if member.device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", _loopback())
            _join_group("nccl", member, store)
        return SocketLinks(sockets)

    def remove(self) -> None:
        """Remove the folder, which is not needed any more."""
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class OnePort:
    """A port of the first process, which launchers and schedulers give; who reaches it is not asked for a name.

    Attributes:
        address: of the first machine.
        port: there.
    """

    address: str
    port: int

    @property
    def place(self) -> str:
        """The place of the meeting, for messages."""
        return f"at {self.address}:{self.port}"

    def store(self, member: Member, given_up: Event) -> dist.Store:
        """Listen as the first process, unless torchrun does; reach it as another one."""
        listens = member.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        descriptor = None
        try:
            if listens and _is_loopback(self.address):  # others are on this machine, too: nobody else is to come
                descriptor = socket.create_server((self.address, self.port), family=self._family()).detach()
            elif not listens:
                self._wait_for_answer(given_up)
            store: dist.Store = dist.TCPStore(
                self.address,
                self.port,
                None,
                listens,
                timedelta(seconds=ANSWER),
                wait_for_workers=False,
                multi_tenant=descriptor is None,
                master_listen_fd=descriptor,
            )
        except (OSError, RuntimeError) as error:
            said = str(error).splitlines()[0]
            raise ConfigurationError(
                f"rank {member.rank} can't {'listen' if listens else 'reach the others'} {self.place}: {said}; give "
                "the first machine's address as MASTER_ADDR, and a free port as MASTER_PORT"
            ) from error
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        return dist.PrefixStore(f"ranks{restart}/{next(_numbers)}", store)

    def _family(self) -> socket.AddressFamily:
        return socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)[0][0]

    def _wait_for_answer(self, given_up: Event) -> None:
        """Wait until a process listens at the port; torch would wait too, but prints much meanwhile."""
        while True:
            try:
                socket.create_connection((self.address, self.port), ANSWER).close()
            except OSError:
                if given_up.wait(10 * LOOK):
                    raise
            else:
                return

    def links(self, member: Member, store: dist.Store) -> Links:
        """Make them the default process group."""
        if not dist.is_initialized():
            if _is_loopback(self.address):
                os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
            _join_group("cpu:gloo,cuda:nccl" if member.device.type == "cuda" else "gloo", member, store)
        return Links()


def _join_group(backend: str, member: Member, store: dist.Store) -> None:
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=member.rank, world_size=member.count, timeout=FOREVER)


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def _loopback() -> str:
    """The name of the network interface of this machine alone."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def while_looking(work: Callable[[Event], T], look: Callable[[], None]) -> T:
    """Have a thread do what may block outside of Python, and look meanwhile.

    Args:
        work: what is to be done; the event is set once nobody waits for it any more.
        look: raises if there is no use in waiting.
    """
    made: Future[T] = Future()
    given_up = Event()

    def run() -> None:
        try:
            made.set_result(work(given_up))
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, daemon=True, name="meeting").start()
    try:
        while not made.done():
            look()
            wait([made], LOOK)
    finally:
        given_up.set()
    return made.result()


class Arrival:
    """Waits for the processes of a run, and says so where it takes long.

    Args:
        way: by which they find each other.
        member: this one.
        speaks: whether it is this one that says so.
        look: raises if one of them has ended.
    """

    def __init__(self, way: Way, member: Member, speaks: bool, look: Callable[[], None]) -> None:
        self.way = way
        self.member = member
        self.speaks = speaks
        self.look = look
        self._began = time.monotonic()
        self._next = SILENCE
        #: those that have come; None while that can't be asked
        self._here: set[int] | None = None

    def wait(self) -> dist.Store:
        """Return the store of all processes, once all have come.

        Raises:
            ConfigurationError: they have not, or one has come twice.
        """
        return while_looking(self._arrive, self._look)

    def _arrive(self, given_up: Event) -> dist.Store:
        rank, count = self.member.rank, self.member.count
        store = self.way.store(self.member, given_up)
        if store.add(f"arrived/{rank}", 1) > 1:
            raise ConfigurationError(
                f"two processes have come {self.way.place} as rank {rank} of {count}: give each its own number "
                "(LOCAL_RANK, NODE_RANK), and each run a port of its own (MASTER_PORT)"
            )
        here: set[int] = set()
        while len(here) < count and not given_up.is_set():
            here |= {other for other in range(count) if other not in here and store.check([f"arrived/{other}"])}
            self._here = here
            time.sleep(LOOK)
        return store

    def _look(self) -> None:
        self.look()
        waited = time.monotonic() - self._began
        if waited > ARRIVAL:
            raise ConfigurationError(
                f"{self._missing()} did not come {self.way.place} within {ARRIVAL:.0f} s; is trainer.devices, times "
                "trainer.num_nodes, the number of processes that were started, and can each reach the first?"
            )
        if waited > self._next:
            self._next *= 2
            if self.speaks:
                print(f"waiting for {self._missing()} {self.way.place}", file=sys.stderr, flush=True)

    def _missing(self) -> str:
        count = self.member.count
        return f"{'the first' if self._here is None else count - len(self._here)} of {count} processes"
