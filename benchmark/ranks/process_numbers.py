"""The numbers that launchers and schedulers give to processes: which process this is, and what is no such number."""

import os

from benchmark.errors import ConfigurationError

#: What schedulers and launchers call the number of a process, from 0.
PROCESS_NUMBERS = ("RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
#: Further ones that Lightning reads.
ALSO_READ = ("SLURM_LOCALID", "SLURM_NODEID", "JSM_NAMESPACE_RANK")


def is_first_process() -> bool:
    """Return whether this process is the one that writes and prints; works also before a Trainer exists."""
    return all(os.environ.get(name, "0") == "0" for name in PROCESS_NUMBERS)


def check_numbers() -> None:
    """Refuse numbers of this process that are none; Lightning reads them while it is imported.

    Raises:
        ConfigurationError: a variable of the environment is not a whole number from 0.
    """
    for name in (*PROCESS_NUMBERS, *ALSO_READ):
        _check(name, 0, None, "the number of this process")


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
            "Trainer's options are those of one: unset it, or give trainer.devices and trainer.num_nodes"
        )


def check_started(several: bool) -> None:
    """Refuse to run a whole federation in each of several processes that were started.

    Args:
        several: whether the Trainer's options ask for several devices.

    Raises:
        ConfigurationError: they do not, and there are other processes; or the environment has no number of them, or no
            port, where several would meet.
    """
    if several:
        _check("WORLD_SIZE", 1, None, "the number of processes")
        _check("MASTER_PORT", 1, 65535, "the port of the first process")
        return
    torchrun = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    for what, count in (("torchrun", torchrun), ("srun", os.environ.get("SLURM_STEP_NUM_TASKS", "1"))):
        if count != "1":
            raise ConfigurationError(
                f"{what} has started {count} processes, and the Trainer's options are those of one: give "
                "trainer.devices, the processes of a machine, and trainer.num_nodes, the machines"
            )


def check_range(local_rank: int, devices: int, node_rank: int, num_nodes: int) -> None:
    """Refuse a process that the Trainer's options have no place for.

    Raises:
        ConfigurationError: there are not as many devices, or machines.
    """
    for number, count, what, setting in (
        (local_rank, devices, "LOCAL_RANK (of Slurm SLURM_LOCALID)", "trainer.devices"),
        (node_rank, num_nodes, "NODE_RANK (of torchrun GROUP_RANK, of Slurm SLURM_NODEID)", "trainer.num_nodes"),
    ):
        if number >= count:
            raise ConfigurationError(
                f"{what} is {number} in the environment, and {setting} is {count}: expected 0 to {count - 1}"
            )


def _check(name: str, least: int, most: int | None, what: str) -> None:
    given = os.environ.get(name)
    if given is None or (given.isdecimal() and least <= int(given) <= (int(given) if most is None else most)):
        return
    expected = f"a whole number from {least}" + ("" if most is None else f" to {most}")
    raise ConfigurationError(f"{name}={given!r} in the environment: {what} is {expected}; correct it, or unset it")
