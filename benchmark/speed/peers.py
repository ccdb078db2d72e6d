"""pfl-research's CIFAR-10 setting in this engine, in pfl and in Flower, on one machine in one run.

The setting is in ``peer_scripts/cifar10_setting.py``; all programs have its images, its network and as many processor
cores. A round is timed whole: selection, local training, aggregation and whatever the framework does between rounds.
The central evaluation is apart. Excluded are imports, the making of the images, Ray's start and the first round.

The peers need environments of their own, since what they pin conflicts with what this project needs::

    python3 -m venv peers/pfl
    peers/pfl/bin/pip install 'pfl[pytorch]==0.6.0'
    python3 -m venv peers/flower
    peers/flower/bin/pip install 'flwr[simulation]==1.41.0' torch
    PFL_PYTHON=peers/pfl/bin/python FLOWER_PYTHON=peers/flower/bin/python python -m benchmark.speed peers

Take the torch of this project's environment in both (``pip install torch==VERSION``). Each is used as its own guide
says for one machine: pfl with its native data sets in memory, in one process, and on a CPU also in a process a core;
Flower with a process a core (on a GPU, ten that share it). The engine has one process with a thread a core, and on a
CPU also a process a core, as ``--trainer.devices`` starts them.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from benchmark.ranks.process_numbers import is_first_process
from benchmark.ranks.strategy import RanksStrategy
from benchmark.speed.measure import Timing, device, fit
from benchmark.speed.peer_scripts.cifar10_setting import (
    BATCH,
    CLASSES,
    EVALUATION_BATCH,
    LR,
    Measured,
    Setting,
    make_images,
    read_setting,
)
from benchmark.speed.simple_cnn import SimpleCNN
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.source import ImagePool, ImageSource
from datamodules.transform import ImageTransform
from methods.fedavg import FedAvg

SCRIPTS = Path(__file__).parent / "peer_scripts"
#: Environment variable that names a peer's interpreter.
VARIABLES = {"pfl": "PFL_PYTHON", "Flower": "FLOWER_PYTHON"}
#: Rounds from one evaluation to the next in the published setting.
PUBLISHED_CADENCE = 10
#: Seconds that a peer may take in all.
PATIENCE = 1800
#: Measures the engine in a process a core; it takes a peer's arguments.
OVER_PROCESSES = [sys.executable, "-m", "benchmark.speed.peers"]
#: Nothing is sent to the peers' makers.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class SettingImages(ImageSource):
    """The images that all programs train on."""

    class_names = tuple(str(number) for number in range(CLASSES))

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def load(self) -> ImagePool:
        """The pool: training images first."""
        images, labels = make_images(self.setting)
        n = len(labels)
        test = torch.arange(n) >= self.setting.clients * self.setting.images
        return ImagePool(images, labels, test, torch.zeros(n, dtype=torch.int64), torch.arange(n))


def measure_engine(setting: Setting, width: int, processes: int = 1) -> Measured:
    """The setting in this engine: the test images are dealt over the clients and evaluated by client.

    Args:
        setting: the work.
        width: clients stepped together.
        processes: that train at the same time; with several, this one starts the others.
    """
    torch.manual_seed(0)
    settings: dict[str, Any] = {}
    if processes > 1:
        strategy = RanksStrategy()
        strategy.command = [*OVER_PROCESSES, *setting.arguments(), f"--cores={processes}"]
        settings = {"devices": processes, "strategy": strategy}
    data = FederatedDataModule(
        SettingImages(setting),
        IID(setting.clients),
        ImageTransform(normalize="half"),
        batch_size=BATCH,
        clients_per_round=setting.cohort,
        clients_at_once=width,
        eval_batch_size=EVALUATION_BATCH if device() == "cpu" else setting.test,  # a GPU takes all at once
    )
    method = FedAvg(CLASSES, setting.clients, SimpleCNN(), training=LocalTraining(lr=LR, epochs=1))
    laps = fit(method, data, setting.rounds, setting.evaluate_every, settings=settings)
    return Measured(
        rounds=laps.rounds,
        evaluations=laps.evaluations,
        losses=laps.losses,
        steps=laps.steps_of_all,
        parameters=sum(method.get_parameter(name).numel() for name in method.roles.trained),
        accuracy=method.evaluation.scores["server", "test"].compute()["accuracy"].mean().item(),
        processes=processes,
        threads=torch.get_num_threads(),
        versions={"torch": torch.__version__},
    )


def printed_by(command: list[str], arguments: list[str], cores: int) -> dict[str, Any]:
    """Run a peer's script and read the line of JSON that it prints.

    Args:
        command: interpreter and script.
        arguments: the work.
        cores: processor cores that it may use.

    Raises:
        ConfigurationError: it failed, printed something else, or took longer than PATIENCE.
    """
    with subprocess.Popen(
        [*command, *arguments, f"--cores={cores}"],
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(
                f"{' '.join(command)} took longer than {PATIENCE} seconds; try again on an idle machine"
            ) from error
        finally:
            if process.poll() is None:  # with the processes that it started
                os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        last = " / ".join(errors.strip().splitlines()[-3:])
        raise ConfigurationError(
            f"{' '.join(command)} ended with status {process.returncode} and without a result: {last}; make its "
            "environment as benchmark/speed/peers.py says"
        )
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def measure_peer(command: list[str], setting: Setting, cores: int) -> Measured:
    """Run a peer's script with a setting and so many processor cores, and read what it measured."""
    found = printed_by(command, setting.arguments(), cores)
    return Measured(**{field.name: found[field.name] for field in fields(Measured)})


def peer_commands(cores: int) -> dict[str, list[str]]:
    """Per row the command that runs a peer; a peer whose variable is unset is left out with a printed note."""
    commands: dict[str, list[str]] = {}
    for peer, variable in VARIABLES.items():
        python = os.environ.get(variable)
        if not python:
            print(f"{peer} is left out: {variable} is not set; benchmark/speed/peers.py says how to make it")
            continue
        script = str(SCRIPTS / f"{peer.lower()}_cifar10.py")
        commands[peer] = [python, script]
        # pfl's processes need a GPU each, so several of them are for processors alone.
        if peer == "pfl" and device() == "cpu" and cores > 1:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cores}"]
            commands[f"pfl, {cores} processes"] = [python, *launch, script]
    return commands


def rows_of(measured: dict[str, Measured], setting: Setting) -> list[Timing]:
    """Three rows a program, against the first one's: a round, an evaluation, and both as often as published."""
    reference = next(iter(measured.values()))
    rows = []
    for name, found in measured.items():
        work = f"{setting.cohort} of {setting.clients} clients: {found.steps} steps of {BATCH} images"
        details = [
            f"mean {found.mean:.3g} s",
            f"loss {found.losses[0]:.3f} to {found.losses[-1]:.3f}",
            f"{found.parameters:,} parameters",
            f"{found.processes} x {found.threads} threads",
            *(f"{package} {version}" for package, version in found.versions.items()),
        ]
        rows.append(Timing(f"{name}: round", work, found.best, found.best / reference.best, note=", ".join(details)))
    for name, found in measured.items():
        fastest = min(found.evaluations)
        rows.append(
            Timing(
                f"{name}: evaluation",
                f"{setting.test:,} images",
                fastest,
                fastest / min(reference.evaluations),
                note=f"accuracy {found.accuracy:.3f}",
            )
        )

    def together(found: Measured) -> float:
        return PUBLISHED_CADENCE * found.best + min(found.evaluations)

    work = f"{PUBLISHED_CADENCE} rounds and an evaluation"
    return rows + [
        Timing(f"{name}: as published", work, together(found), together(found) / together(reference))
        for name, found in measured.items()
    ]


def compare(setting: Setting, widths: tuple[int, ...]) -> list[Timing]:
    """All programs, one after the other."""
    cores = torch.get_num_threads()
    measured: dict[str, Measured] = {}
    if device() == "cpu" and cores > 1:
        measured[f"engine, {cores} processes"] = measure_peer(OVER_PROCESSES, setting, cores)
    measured |= {f"engine, width {width}": measure_engine(setting, width) for width in widths}
    measured |= {name: measure_peer(command, setting, cores) for name, command in peer_commands(cores).items()}
    return rows_of(measured, setting)


def run(folder: Path) -> tuple[str, list[Timing]]:
    """The setting as published, at three widths."""
    title = "pfl-research's CIFAR-10 setting (synthetic images, no dropout): this engine, pfl and Flower"
    return title, compare(Setting(), (50, 10, 1))


if __name__ == "__main__":
    setting, cores = read_setting()
    torch.set_num_threads(1)
    found = measure_engine(setting, -(-setting.cohort // cores), cores)
    if is_first_process():
        print(json.dumps(asdict(found)))
