"""``benchmark check``: what must hold of anybody's method, server rule, partition, source or metric, a line each."""

import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchmetrics import Metric

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.backbones.vit import PromptedViT
from benchmark.checks import methods, metrics, partitions, privacy, sources
from benchmark.checks.outcome import FailedCheck, own_errors, printed
from benchmark.config.choices import NOT_GIVEN, constructor_parameters
from benchmark.config.files import read_layers
from benchmark.errors import ConfigurationError
from benchmark.method import FederatedMethod
from benchmark.own_metrics import chosen_metrics, declared
from benchmark.run.cli import FederatedCLI, prepare_process, reported
from benchmark.run.command import resolved
from benchmark.run.phases import quiet
from benchmark.server import ServerRule
from datamodules.digits import DigitDomains
from datamodules.federated import FederatedDataModule
from datamodules.partition import Partition
from datamodules.source import ImageSource

#: Tiny frozen backbones for constructors that ask for one, by the type of their argument.
BACKBONES = {
    PromptedViT: "{class_path: benchmark.backbones.vit.TimmViT, init_args: {name: micro_vit, weights: embedded}}",
    PromptedCLIP: "{class_path: benchmark.backbones.prompted_clip.PromptedCLIP, init_args: {name: micro_clip}}",
}
#: What a rule is checked with.
AVERAGED = "methods.FedVPT"


class FewDigits(DigitDomains):
    """Every sixteenth of the embedded digits, in six styles."""

    def _rows(self, labels: NDArray[np.int64]) -> list[tuple[int, int, bool]]:
        """Choose them; every check makes its data anew, and the others need not be rendered for that."""
        return super()._rows(labels)[::16]


def check(target: str, files: Sequence[Path]) -> bool:
    """Run the checks of a class and print a line for each; returns whether all hold.

    Args:
        target: dotted path of a class that derives from ``FederatedMethod``, ``ServerRule``, ``Partition``,
            ``ImageSource`` or ``torchmetrics.Metric``, or of a function that is a metric.
        files: configuration files of the run that it is checked in; without, the method's defaults on tiny data.

    Raises:
        ConfigurationError: no such class, or its configuration is refused.
    """
    sys.path.insert(0, os.getcwd())
    prepare_process()
    try:
        with quiet(), own_errors():
            return _check(target, files)
    except FailedCheck as failed:
        print(f"FAILED  It can be made and checked: {failed}", flush=True)
        return False


def _check(target: str, files: Sequence[Path]) -> bool:
    kind = _class_of(target)
    if not inspect.isclass(kind) or issubclass(kind, Metric):
        return _check_metric(target, files)
    options = [f"--config={path}" for path in files]
    if issubclass(kind, ImageSource):
        return _check_source(kind, target, options)
    if not files:
        options += [f"--data.source={__name__}.FewDigits", "--data.partition=datamodules.DomainPerClient"]
        options += ["--data.batch_size=8"]
    if issubclass(kind, Partition):
        model = [] if files else [f"--model={AVERAGED}", *_backbone(_class_of(AVERAGED))]
        required = [p.name for p in constructor_parameters(kind) if p.default is p.empty]
        few = ["--data.partition.init_args.num_clients=4"] if not files and "num_clients" in required else []
        data = _made([*options, f"--data.partition={target}", *few, *model])[1]
        data.setup()
        subject = partitions.PartitionUnderCheck(data.partition, data.pool, data.source)
        return printed(partitions.CHECKS, subject)
    if issubclass(kind, ServerRule):
        model = [] if files else [f"--model={AVERAGED}", *_backbone(_class_of(AVERAGED))]
        options += [f"--server={target}", *model]
    else:
        options += [f"--model={target}", *([] if files else _backbone(kind))]
    made = methods.MethodUnderCheck(lambda *more: _made([*options, *more]))
    made.make()
    return printed((methods.check_run,), made) and printed((*methods.CHECKS, privacy.check_single_images), made)


def _check_source(kind: type[ImageSource], target: str, files: list[str]) -> bool:
    """The same of a source, with the arguments that the files give it."""
    model = [] if files else [f"--model={AVERAGED}", *_backbone(_class_of(AVERAGED))]
    deal = "--data.partition={class_path: datamodules.IID, init_args: {num_clients: 2}}"
    made = resolved([*model, *files, deal, f"--data.source={target}"])["data"]["source"]
    arguments = made.get("init_args", {})
    parameters = [p for p in constructor_parameters(kind) if p.kind is p.POSITIONAL_OR_KEYWORD]
    missing = [p.name for p in parameters if p.default is p.empty and arguments.get(p.name) is None]
    if missing:
        raise ConfigurationError(
            f"{target} must be given {', '.join(missing)}: check it with --config and a file that has "
            f"data.source.init_args.{missing[0]}"
        )
    subject = sources.SourceUnderCheck(kind, arguments)
    return printed((sources.check_load,), subject) and printed(sources.CHECKS, subject)


def _check_metric(target: str, files: Sequence[Path]) -> bool:
    """The same of a metric, as the files declare it where they do."""
    given = [own for file in read_layers(files) for own in declared(file.options.get("data", {}).get("metrics"))]
    found = [asdict(own) for own in given if own.class_path == target]
    return printed(metrics.CHECKS, chosen_metrics([{"class_path": target, "higher_is_better": True}, *found][-1])[-1])


def _made(options: list[str]) -> tuple[FederatedMethod, FederatedDataModule]:
    try:
        cli = FederatedCLI([*options, "--trainer.accelerator=cpu", "--trainer.logger=false"], run=False)
    except Exception as error:
        told = reported(error)
        if told is None:
            raise
        more = ": check it with --config and a file that has it" if str(told).endswith(NOT_GIVEN) else ""
        raise ConfigurationError(f"{told}{more}") from error
    rule = cli.rule
    if rule is not None:
        cli.model.make_server = lambda: rule  # type: ignore[method-assign]
    return cli.model, cli.datamodule


def _class_of(target: str) -> Any:
    try:
        found: Any = locate(target)
    except ErrorDuringImport as error:
        raise ConfigurationError(f"{target} cannot be imported: {error.value}") from error
    except SystemExit as error:
        raise ConfigurationError(f"{target} cannot be imported: its module calls sys.exit({error.code})") from error
    kinds = (FederatedMethod, ServerRule, Partition, ImageSource, Metric)
    if inspect.isfunction(found):
        return found
    if not inspect.isclass(found):
        raise ConfigurationError(
            f"there is no class {target!r}; give the dotted path of one, such as my_module.MyMethod"
        )
    if not issubclass(found, kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigurationError(f"{target} derives from none of {names}; there is nothing to check of it")
    return found


def _backbone(kind: type) -> list[str]:
    """The options that give a constructor the tiny backbone that it asks for."""
    return [
        f"--model.init_args.{parameter.name}={BACKBONES[parameter.annotation]}"
        for parameter in constructor_parameters(kind)
        if parameter.annotation in BACKBONES and parameter.default is parameter.empty
    ]
