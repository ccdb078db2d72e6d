"""The command-line options that choose where cells run."""

import argparse
from typing import Any

from benchmark.cells.ray_tasks import Ray
from benchmark.cells.slurm_jobs import Slurm
from benchmark.cells.this_machine import THIS_MACHINE
from benchmark.cells.work import Place
from benchmark.errors import ConfigurationError

#: Options besides --engine and --jobs: which engines have it, its least value, and by which name a place knows it.
OPTIONS: dict[str, tuple[tuple[str, ...], float | None, str]] = {
    "partition": (("slurm",), None, "partition"),
    "time": (("slurm",), 1, "minutes"),
    "gpus": (("slurm", "ray"), 0, "gpus"),
    "cpus": (("slurm", "ray"), 1, "cpus"),
    "address": (("ray",), None, "address"),
}


def add_place(entry: argparse.ArgumentParser) -> None:
    """Add the options that say where runs are done, and how many at a time."""
    entry.add_argument(
        "--engine",
        choices=("local", "slurm", "ray"),
        default="local",
        help="runs are processes of this machine, jobs of Slurm or tasks of Ray; default %(default)s",
    )
    entry.add_argument(
        "--jobs",
        type=int,
        help="runs at a time, each on the GPU with the fewest; default one a GPU, without GPU one a core up to 4, with "
        "slurm and ray all",
    )
    entry.add_argument("--partition", help="of Slurm; default the cluster's")
    entry.add_argument("--time", type=int, help=f"slurm: minutes of a job; default {Slurm.minutes}")
    entry.add_argument(
        "--gpus",
        type=float,
        help=f"of a job or task, with ray 0.5 and the like too; default with slurm {Slurm.gpus}, with ray 1 where the "
        "cluster has GPUs",
    )
    entry.add_argument(
        "--cpus", type=int, help=f"of a job or task; default with slurm {Slurm.cpus}, with ray {Ray.cpus}"
    )
    entry.add_argument(
        "--address", help="ray: ray://HOST:PORT, or auto on a machine of the cluster; default one started here"
    )


def chosen_place(arguments: argparse.Namespace) -> Place:
    """The place that options of :func:`add_place` name.

    Raises:
        ConfigurationError: an option that this place does not have, or a value out of range.
    """
    engine = arguments.engine
    given: dict[str, Any] = {}
    for option, (engines, least, name) in OPTIONS.items():
        value = getattr(arguments, option)
        if value is None:
            continue
        if engine not in engines:
            raise ConfigurationError(
                f"--{option} is an option of --engine {' and '.join(engines)}, and does nothing with --engine {engine}"
            )
        if least is not None and not value >= least:
            raise ConfigurationError(f"--{option} is {value:g}, expected at least {least:g}")
        given[name] = value
    gpus = given.get("gpus", 1)
    if gpus % 1 and (engine == "slurm" or gpus > 1):
        raise ConfigurationError(f"--gpus is {gpus:g}, expected a whole number, or with --engine ray one below 1")
    if engine == "ray":
        return Ray(**given)
    if engine == "slurm":
        return Slurm(**given | {"gpus": int(gpus)})
    return THIS_MACHINE
