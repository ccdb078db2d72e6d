"""A strategy of Lightning's that deals the clients of a round to processes, and never averages gradients."""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from benchmark.engine.ranks import Ranks
from benchmark.engine.settings import RANKS
from benchmark.errors import ConfigurationError, causes
from benchmark.ranges import PositiveFloat
from benchmark.run.processes import ProcessRanks
from benchmark.run.pulse import BEAT, OtherRankError, Pulse
from benchmark.run.signals import interrupting_signal

T = TypeVar("T")

#: Seconds in which all processes of a run must have come: each reads the data, and the weights, by itself.
ARRIVAL = 1800.0
#: Seconds that the others are given to end after one has.
GRACE = 10.0
#: Waits are ended by ``Pulse`` alone: a rank may have more to do than the others for as long as it lives.
FOREVER = timedelta(days=365)


#: What schedulers and launchers call the number of a process, from 0.
PROCESS_NUMBERS = ("RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK")


def is_first_process() -> bool:
    """Whether this process is the one that writes and prints, before and after there is a Trainer."""
    return all(os.environ.get(name, "0") == "0" for name in PROCESS_NUMBERS)


def are_connected() -> bool:
    """Whether this process has others to talk to."""
    return dist.is_available() and dist.is_initialized()


def check_first(several: bool) -> None:
    """Refuse a run of one device in a process that is not the first of several: it would neither lock nor say anything.

    Args:
        several: as for ``check_started``.

    Raises:
        ConfigurationError: the environment, perhaps a scheduler's, gives it another number.
    """
    one_of = next((name for name in PROCESS_NUMBERS if os.environ.get(name, "0") != "0"), None)
    if not several and one_of is not None:
        raise ConfigurationError(
            f"{one_of}={os.environ[one_of]} in the environment says that this is one of several processes, and the "
            "Trainer's settings are those of one: unset it, or give trainer.devices and trainer.num_nodes"
        )


def check_started(several: bool) -> None:
    """Refuse to run a whole federation in each of several processes that were started.

    Args:
        several: whether the Trainer's settings ask for several devices.

    Raises:
        ConfigurationError: they do not, and there are other processes.
    """
    torchrun = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    for what, count in (("torchrun", torchrun), ("srun", os.environ.get("SLURM_STEP_NUM_TASKS", "1"))):
        if not several and count != "1":
            raise ConfigurationError(
                f"{what} has started {count} processes, and the Trainer's settings are those of one: give "
                "trainer.devices, the processes of a machine, and trainer.num_nodes, the machines"
            )


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
        self._ended = False

    # ------------------------------------------------------------------ which process this is

    @property
    def environment(self) -> ClusterEnvironment:
        """What has started the processes, from Lightning."""
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
        """Whether this process writes and prints."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.parallel_devices[self.local_rank]

    def set_world_ranks(self) -> None:
        """Number the processes; the Trainer asks for it."""
        environment = self.environment
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
        rank, count = self.global_rank, self.count
        store = self._store(rank)
        if not dist.is_initialized():
            cuda = self.root_device.type == "cuda"
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            group = dist.PrefixStore("group", store)
            dist.init_process_group(backend, store=group, rank=rank, world_size=count, timeout=FOREVER)
        pulse = Pulse(store.clone(), rank, count, self.timeout)
        self.ranks = ProcessRanks(self.root_device, pulse)
        self.ranks.everybody("the beginning", rank)
        pulse.start()

    def _store(self, rank: int) -> dist.Store:
        """Connect to the store of all processes, and wait until they have come.

        Raises:
            ConfigurationError: they have not.
        """
        address, port = self.environment.main_address, self.environment.main_port
        end = time.monotonic() + ARRIVAL
        here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store: dist.Store | None = None
        while store is None:
            try:
                wait = timedelta(seconds=GRACE)
                store = dist.TCPStore(address, port, None, here, wait, wait_for_workers=False, multi_tenant=True)
            except RuntimeError as error:
                if time.monotonic() > end or here:
                    raise ConfigurationError(
                        f"rank {rank} can't reach the others at {address}:{port}: {str(error).splitlines()[0]}; give "
                        "the first machine's address as MASTER_ADDR, and a free port as MASTER_PORT"
                    ) from error
        store = dist.PrefixStore(f"ranks{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", store)
        store.add("arrived", 1)
        while (arrived := store.add("arrived", 0)) < self.count:
            if self.launcher is not None:
                self._launcher.check()
            if time.monotonic() > end:
                raise ConfigurationError(
                    f"{arrived} of {self.count} processes have come within {ARRIVAL:.0f} s; is trainer.devices, times "
                    "trainer.num_nodes, the number of processes that were started?"
                )
            time.sleep(0.01)
        return store

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
        if isinstance(self.ranks, ProcessRanks):
            if not self._ended:
                self.ranks.everybody("the end", None)
                dist.destroy_process_group()
            self.ranks.pulse.stop()
            self.ranks = Ranks()
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
        if not strategy.environment.creates_processes_externally:
            self._start(devices)
        try:
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
        shared = {
            "MASTER_ADDR": strategy.environment.main_address,
            "MASTER_PORT": str(strategy.environment.main_port),
            "NODE_RANK": str(strategy.environment.node_rank()),
            "WORLD_SIZE": str(strategy.count),
        }
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
