"""A strategy of Lightning's that deals the clients of a round to processes, and never averages gradients."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from benchmark.engine.ranks.ranks import Ranks
from benchmark.engine.refusals.trainer_settings import RANKS
from benchmark.errors import ConfigurationError, causes
from benchmark.ranges import PositiveFloat
from benchmark.ranks.meeting import Arrival, Member, OneFolder, OnePort, while_looking
from benchmark.ranks.process_numbers import check_range
from benchmark.ranks.processes import ProcessRanks
from benchmark.ranks.pulse import BEAT, OtherRankError, Pulse
from benchmark.signals import interrupting_signal

T = TypeVar("T")

#: Seconds that the others are given to end after one has.
GRACE = 10.0

#: Return whether this process has others to talk to.
_connected = False


def are_connected() -> bool:
    """Return whether this process is connected to other ranks."""
    return _connected


class RanksStrategy(Strategy):
    """One federation over several processes, with a device each: started by Lightning, by torchrun or by Slurm.

    Lightning's Trainer runs in each of them as if it were alone; the engine talks to the others by ``ranks``.

    Args:
        timeout: seconds without a sign of life after which a process counts as gone, and the run ends.
    """

    def __init__(self, timeout: PositiveFloat = 60.0) -> None:
        super().__init__()
        self.timeout = timeout
        self.cluster_environment: ClusterEnvironment | None = None
        self.parallel_devices: list[torch.device] = []
        self.num_nodes = 1
        #: the command of the other processes, where this one starts them
        self.command: Sequence[str] = ()
        #: of the engine
        self.ranks: Ranks = Ranks()
        #: where all ranks are processes of this machine, which one of them has started
        self.folder = OneFolder.given()
        self._ended = False

    # ------------------------------------------------------------------ which process this is

    @property
    def environment(self) -> ClusterEnvironment:
        """Return what has started the processes, from Lightning."""
        assert self.cluster_environment is not None
        return self.cluster_environment

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self.parallel_devices) * self.num_nodes

    @property
    def global_rank(self) -> int:
        """Number of this process, from 0."""
        return self.environment.global_rank()

    @property
    def local_rank(self) -> int:
        """Number of this process on its machine, from 0."""
        return self.environment.local_rank()

    @property
    def is_global_zero(self) -> bool:
        """Return whether this process writes and prints."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.parallel_devices[self.local_rank]

    def set_world_ranks(self) -> None:
        """Number the processes; the Trainer asks for it."""
        environment = self.environment
        check_range(environment.local_rank(), len(self.parallel_devices), environment.node_rank(), self.num_nodes)
        environment.set_global_rank(environment.node_rank() * len(self.parallel_devices) + environment.local_rank())
        environment.set_world_size(self.count)
        cast(Any, rank_zero_only).rank = self.global_rank

    def _configure_launcher(self) -> None:
        self._launcher: Any = _Launcher(self) if self.count > 1 else None

    # ------------------------------------------------------------------ beginning and end

    def setup_environment(self) -> None:
        """Wait for the other processes, and connect them."""
        super().setup_environment()
        if self.count == 1 or self.ranks.count > 1:
            return
        global _connected
        way = self.folder or OnePort(self.environment.main_address, self.environment.main_port)
        member = Member(self.global_rank, self.count, self.root_device)
        store = Arrival(way, member, self.local_rank == 0, self._look_at_started).wait()
        pulse = Pulse(store.clone(), member.rank, member.count, self.timeout, self._is_left)
        pulse.start()
        links = while_looking(lambda given_up: way.links(member, store), pulse.look)
        self.ranks = ProcessRanks(self.root_device, pulse, links)
        _connected = True
        self.ranks.everybody("the beginning", member.rank)

    def _is_left(self) -> bool:
        return self.folder is not None and self.folder.is_left()

    def _look_at_started(self) -> None:
        """Raise if a process of this machine that has not come yet has ended.

        Raises:
            OtherRankError: which.
        """
        if self.launcher is not None:
            self._launcher.check()
        if self._is_left():
            message = "the process that has started this one ended before the first round"
            raise OtherRankError(message, 1, told_here=self.local_rank <= 1)

    def on_exception(self, exception: BaseException) -> None:
        """Let the other processes know why this one ends."""
        self._ended = True
        if isinstance(self.ranks, ProcessRanks) and not isinstance(exception, OtherRankError):
            clients = ", ".join(map(str, self.ranks.busy_with[:5])) + ("..." if len(self.ranks.busy_with) > 5 else "")
            where = f"rank {self.ranks.rank}" + (f", clients {clients}" if clients else "")
            number = interrupting_signal(exception)
            told = next((each for each in causes(exception) if isinstance(each, ConfigurationError)), None)
            if number is not None:
                self.ranks.pulse.tell(f"rank {self.ranks.rank} was stopped by {number.name}", 128 + number)
            elif told is not None:
                self.ranks.pulse.tell(f"{where}: {told}", 2)
            else:
                said = (str(exception).strip().splitlines() or [""])[0]
                self.ranks.pulse.tell(f"{where}: {type(exception).__name__}: {said}", 1)

    def teardown(self) -> None:
        """Leave together, where nothing has failed."""
        global _connected
        if isinstance(self.ranks, ProcessRanks):
            if not self._ended:
                self.ranks.everybody("the end", None)
                _connected = False
            self.ranks.links.close(together=not self._ended)
            self.ranks.pulse.stop()
            self.ranks = Ranks()
        if self._is_left() and self.folder is not None:
            self.folder.remove()
        super().teardown()

    def model_to_device(self) -> None:
        """Put the method on this process's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    # ------------------------------------------------------------------ what Lightning and its callbacks ask for

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        self.ranks.everybody(f"barrier {name}", None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return an object of one process."""
        return self.ranks.everybody("broadcast", obj)[src]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return a tensor of all processes, [count, ...]."""
        parts = self.ranks.gather("all_gather", {"tensor": tensor})
        return torch.stack([part["tensor"].to(tensor.device) for part in parts])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or the sum, of a tensor over all processes, taken in their order."""
        if not isinstance(tensor, Tensor) or self.ranks.count == 1:
            return tensor
        gathered = self.all_gather(tensor)
        return gathered.float().mean(0) if str(reduce_op).lower() in ("mean", "avg") else gathered.sum(0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Say whether all, or any, of the processes decide so."""
        given = self.ranks.everybody("decision", bool(decision))
        return False not in given if all else True in given


StrategyRegistry.register(RANKS, RanksStrategy, description="One federation over several devices")


class _Launcher:
    """Starts the other processes of this machine, unless a cluster has.

    Args:
        strategy: knows how many, and their command.
    """

    is_interactive_compatible = False

    def __init__(self, strategy: RanksStrategy) -> None:
        self.strategy = strategy
        self.processes: list[subprocess.Popen[bytes]] = []
        #: that this process has made for them
        self.folder: OneFolder | None = None

    def launch(self, function: Callable[..., T], *args: Any, trainer: Any = None, **kwargs: Any) -> T:
        """Start them and call what the Trainer does; they end with it."""
        strategy = self.strategy
        devices = len(strategy.parallel_devices)
        try:
            strategy.environment.validate_settings(num_devices=devices, num_nodes=strategy.num_nodes)
        except ValueError as error:
            raise ConfigurationError(f"trainer: {' '.join(str(error).split())}") from error
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
        try:
            if not strategy.environment.creates_processes_externally:
                self._start(devices)
            made = function(*args, **kwargs)
        except BaseException:
            if not self.processes:  # those of a cluster hear why from this one, if it is the first
                time.sleep(3 * BEAT)
            self._end(GRACE)
            raise
        self._end(strategy.timeout)
        return made

    def _start(self, devices: int) -> None:
        strategy = self.strategy
        if not strategy.command:
            raise ConfigurationError(
                f"trainer.devices={devices}: from Python one process runs a federation; use lightning-cli fit, or "
                "start the processes yourself (torchrun)"
            )
        shared = {"NODE_RANK": str(strategy.environment.node_rank()), "WORLD_SIZE": str(strategy.count)}
        if strategy.num_nodes == 1:
            strategy.folder = self.folder = OneFolder.new()
            shared |= self.folder.environment
        else:
            shared["MASTER_ADDR"] = strategy.environment.main_address
            shared["MASTER_PORT"] = str(strategy.environment.main_port)
        for local_rank in range(1, devices):
            environment = os.environ | shared | {"LOCAL_RANK": str(local_rank)}
            self.processes.append(subprocess.Popen(strategy.command, env=environment))

    def check(self) -> None:
        """Raise if one that has not come yet has ended.

        Raises:
            OtherRankError: which, and with what status; it has said why.
        """
        for number, process in enumerate(self.processes, start=1):
            if process.poll():
                message = f"rank {number} ended before the first round, with status {process.returncode}"
                raise OtherRankError(message, 1, told_here=True)

    def kill(self, number: int) -> None:
        """Send all of them a signal."""
        for process in self.processes:
            process.send_signal(number)

    def _end(self, seconds: float) -> None:
        """Wait until they have ended, and end those that have not."""
        end = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self.folder is not None:
            self.folder.remove()
