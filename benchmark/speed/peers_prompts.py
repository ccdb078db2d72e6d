"""FedVPT and PromptFL in this engine and in Flower, on one machine in one run.

The setting is in ``peer_scripts/prompt_setting.py``; all programs have its images, its networks with the same initial
values, and as many processor cores. Flower's app is written as its own examples are, with two clients at a time on two
cores. A round is timed whole: selection, local training, aggregation and whatever the framework does between rounds.
Excluded are imports, the making of the images, Ray's start and the first round, in which the engine encodes images
once with frozen parts; its seconds are in the note of a row. Flower's environment: ``benchmark/speed/peers.py``, with
``pip install timm open_clip_torch`` beside it; without FLOWER_PYTHON it is this one, if it has Flower and Ray.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.backbones.vit import TimmViT
from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from benchmark.method import FederatedMethod
from benchmark.ranks.process_numbers import is_first_process
from benchmark.ranks.strategy import RanksStrategy
from benchmark.speed.measure import Timing, fit
from benchmark.speed.peer_scripts.prompt_setting import (
    BATCH,
    CLASSES,
    CLIP,
    CONTEXT,
    NAMES,
    PROMPTS,
    RATES,
    VIT,
    PromptMeasured,
    PromptSetting,
    make_prompt_images,
    read_prompt_setting,
)
from benchmark.speed.peers import SCRIPTS, VARIABLES, printed_by
from datamodules.federated import FederatedDataModule
from datamodules.partition import IID
from datamodules.source import ImagePool, ImageSource
from datamodules.transform import ImageTransform
from methods.fedvpt import FedVPT
from methods.promptfl import PromptFL

#: Measures the engine in so many processes; it takes a peer's arguments.
ENGINE = [sys.executable, "-m", "benchmark.speed.peers_prompts"]
#: The last round's losses may differ by this share: clients hold other images, and see them in another order.
ALIKE = 0.1


class PromptImages(ImageSource):
    """The images that all programs train on, and one test image that nobody looks at."""

    class_names = tuple(NAMES)

    def __init__(self, setting: PromptSetting) -> None:
        self.setting = setting

    def load(self) -> ImagePool:
        """The pool: training images, and the first of them again, once for each client."""
        images, labels = make_prompt_images(self.setting)
        images, labels = (torch.cat([value, value[: self.setting.clients]]) for value in (images, labels))
        n = len(labels)
        test = torch.arange(n) >= n - self.setting.clients
        return ImagePool(images, labels, test, torch.zeros(n, dtype=torch.int64), torch.arange(n))


def make_method(setting: PromptSetting) -> FederatedMethod:
    """Return the method, untrained; the same at every call."""
    torch.manual_seed(0)
    training = LocalTraining(lr=RATES[setting.model], epochs=1)
    if setting.model == "clip":
        clip = PromptedCLIP(CLIP, "random")
        return PromptFL(setting.clients, list(NAMES), clip, num_context=CONTEXT, training=training)
    vit = TimmViT(VIT, "random", image_size=setting.size)
    settings: dict[str, Any] = {"num_prompts": PROMPTS, "first_block": setting.first_block, "training": training}
    return FedVPT(CLASSES, setting.clients, vit, **settings)


def write_weights(setting: PromptSetting, path: Path) -> None:
    """Write what a method starts from, for the other programs."""
    method: Any = make_method(setting)
    if setting.model == "clip":
        values = {"frozen": method.clip.model.state_dict(), "context": method.context.detach()}
    else:
        head = {name.split(".")[-1]: value for name, value in method.head.state_dict().items()}
        values = {"frozen": method.backbone.vit.state_dict(), "prompt": method.prompt.tokens.detach(), "head": head}
    torch.save(values, path)


def measure_engine(setting: PromptSetting, processes: int = 1) -> PromptMeasured:
    """Train in this engine and measure; with several processes, this one starts the others."""
    settings: dict[str, Any] = {}
    if processes > 1:
        strategy = RanksStrategy()
        strategy.command = [*ENGINE, *setting.arguments(), f"--cores={processes}"]
        settings = {"devices": processes, "strategy": strategy}
    data = FederatedDataModule(
        PromptImages(setting),
        IID(setting.clients),
        ImageTransform(normalize="half"),
        batch_size=BATCH,
        clients_at_once=-(-setting.clients // 2),
    )
    method = make_method(setting)
    laps = fit(method, data, setting.rounds, settings=settings)
    return PromptMeasured(
        rounds=laps.rounds,
        losses=laps.losses,
        steps=laps.steps_of_all,
        parameters=sum(method.get_parameter(name).numel() for name in method.roles.trained),
        building=0.0,
        processes=processes,
        threads=torch.get_num_threads(),
        versions={"torch": torch.__version__},
    )


def flower() -> str | None:
    """Return the interpreter that has Flower: FLOWER_PYTHON, or this one; None where there is none."""
    here = all(find_spec(package) for package in ("flwr", "ray"))
    return os.environ.get(VARIABLES["Flower"]) or (sys.executable if here else None)


def measure_all(setting: PromptSetting, cores: int) -> dict[str, PromptMeasured]:
    """Measure the programs one after the other, first the engine in this process."""
    found = {"engine, 1 process": measure_engine(setting)}
    others = {f"engine, {cores} processes": ENGINE} if cores > 1 else {}
    if python := flower():
        others["Flower"] = [python, str(SCRIPTS / "flower_prompts.py")]
    else:
        print("Flower is left out: FLOWER_PYTHON is not set; benchmark/speed/peers.py says how to make it")
    for name, command in others.items():
        found[name] = PromptMeasured(**printed_by(command, setting.arguments(), cores))
    return found


def rows_of(title: str, setting: PromptSetting, measured: dict[str, PromptMeasured]) -> list[Timing]:
    """Return a row for each program, against the first.

    Raises:
        ConfigurationError: they did not train the same: other steps, other numbers of parameters, or other losses.
    """
    first = next(iter(measured.values()))
    peer = measured.get("Flower")
    steps = setting.steps // setting.clients
    work = f"{setting.clients} clients x {steps} steps of {BATCH} images at {setting.size} px"
    rows = []
    for name, found in measured.items():
        same = (found.steps, found.parameters) == (first.steps, first.parameters)
        if not same or abs(found.losses[-1] / first.losses[-1] - 1) > ALIKE:
            told = [(each.steps, each.parameters, each.losses[-1]) for each in (first, found)]
            raise ConfigurationError(
                f"{title}: steps, trained parameters and last loss are {told[0]}, and {told[1]} in {name}; the "
                "programs are to do the same work: make their networks and rates alike again"
            )
        of_peer = [f"{found.best / peer.best:.2f} of Flower's"] if peer is not None and found is not peer else []
        building = [f"{found.building:.1f} s of all its clients' is building the model"] if found.building else []
        details = [
            *of_peer,
            f"{found.parameters:,} trained parameters",
            f"loss {found.losses[0]:.3f} to {found.losses[-1]:.3f}",
            f"first round {found.rounds[0]:.1f} s",
            *building,
            f"{found.processes} x {found.threads} threads",
            *(f"{package} {version}" for package, version in found.versions.items()),
        ]
        rows.append(Timing(f"{title}: {name}", work, found.best, found.best / first.best, note=", ".join(details)))
    return rows


def compare(cases: dict[str, PromptSetting], cores: int) -> Iterable[Timing]:
    """Yield the rows of each case, the programs of one measured one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        for title, given in cases.items():
            setting = replace(given, weights=str(Path(folder, "weights.pt")))
            write_weights(setting, Path(setting.weights))
            yield from rows_of(title, setting, measure_all(setting, cores))


def run(folder: Path) -> tuple[str, Iterable[Timing]]:
    """FedVPT in all blocks and in the last four, and PromptFL."""
    cases = {
        "FedVPT, all blocks": PromptSetting(),
        "FedVPT, from block 9 on": PromptSetting(first_block=9),
        "PromptFL": PromptSetting(model="clip"),
    }
    return "Prompt learning: this engine and Flower", compare(cases, torch.get_num_threads())


if __name__ == "__main__":
    setting, cores = read_prompt_setting()
    torch.set_num_threads(1)
    found = measure_engine(setting, cores)
    if is_first_process():
        print(json.dumps(asdict(found)))
