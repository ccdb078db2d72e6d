"""A finished run's method and data once more, from its directory alone; and the data of a configuration."""

import argparse
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError
from benchmark.run.command import resolved
from benchmark.run.data_folder import moved
from benchmark.run.phases import quiet
from benchmark.run.resume import config_of
from benchmark.run.run_directory import last_checkpoint
from benchmark.yaml_files import read_mapping

if TYPE_CHECKING:  # slow to import
    from benchmark.method import FederatedMethod
    from benchmark.run.cli import FederatedCLI
    from benchmark.run.parser import FederatedParser
    from datamodules.federated import FederatedDataModule


def restore(run_dir: str | Path, data_dir: str | Path | None = None) -> "tuple[FederatedMethod, FederatedDataModule]":
    """The method of a run as it was after its last round, in evaluation mode on the CPU, and the run's data, set up.

    Shared parameters hold the server's values; what is each client's own lies in the method's store, from where
    :func:`become_client` takes it.

    Args:
        run_dir: holds ``config.yaml`` and ``checkpoints/last.ckpt``.
        data_dir: of the data sets, for a run that was made elsewhere.

    Raises:
        ConfigurationError: no checkpoint was kept, it is not one of this configuration, the data are missing or
            another split, or the method's server sends every client something else (which no checkpoint of the method
            holds).
    """
    from benchmark.engine.batches.loaders import Loaders
    from benchmark.engine.refusals.payload_checks import start
    from benchmark.federation import Round
    from benchmark.run.checkpoint import read_checkpoint

    folder = Path(run_dir)
    config = read_mapping(config_of(folder))
    checkpoint = last_checkpoint(folder)
    if not checkpoint.is_file():
        raise ConfigurationError(
            f"{folder} has kept no checkpoints/last.ckpt, which is needed here; run its configuration again, or give "
            "another run"
        )
    content = read_checkpoint(checkpoint)
    made = _built({n: config[n] for n in ("seed_everything", "model", "server", "data") if n in config}, data_dir)
    method, data = made.model, made.datamodule
    data.setup()
    data.match(method)
    simulation = method.join(data)
    rule, shared = made.rule or method.make_server(), simulation.shared()
    start(rule, method.initial_values(), simulation.terms)
    rule.load_state_dict(content["callbacks"]["server"]["rule"])
    if rule.broadcast(Round(0, (), data.seed), shared, (0,)).own:
        raise ConfigurationError(
            f"{folder}: the server of {type(method).__name__} sends every client something of its own, which cannot be "
            f"had from the checkpoint alone; `lightning-cli test --run_dir={folder}` scores the run"
        )
    data.loaders = Loaders(simulation, data.cohort_width, data.num_workers, rule, rule.select)
    if type(data).__qualname__ in content:
        data.load_state_dict(content[type(data).__qualname__])
    method.on_load_checkpoint(content)
    method.load_state_dict(content["state_dict"], strict=False)  # frozen weights are not in it
    return method.eval(), data


def become_client(method: "FederatedMethod", client: int) -> None:
    """Put what is this client's own into the method's parameters, so that plain calls of it are this client's.

    Args:
        method: from :func:`restore`; changed in place.
        client: its index.

    Raises:
        ConfigurationError: there is no such client.
    """
    for name in method.roles.personal:
        rows = method.store.all_rows(name)
        if client not in range(len(rows)):
            raise ConfigurationError(f"there is no client {client!r}: the run has {len(rows)}, 0 to {len(rows) - 1}")
        method.get_parameter(name).data.copy_(rows[client])


def _built(config: dict[str, Any], data_dir: str | Path | None) -> "FederatedCLI":
    """Method, server and data as the command line makes them, with the links between them."""
    from benchmark.run.cli import FederatedCLI

    for option, value in moved(config, data_dir).items():
        *path, last = option.split(".")
        reduce(dict.__getitem__, path, config)[last] = value
    config["trainer"] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
    }
    with quiet():
        return FederatedCLI(config, run=False)


def configured_data(paths: Sequence[Path], overrides: Sequence[str]) -> "FederatedDataModule":
    """The data of configurations such as those in ``configs/sources`` and ``configs/partitions``, set up.

    Args:
        paths: of the YAML files, later ones win.
        overrides: as on the command line without the leading dashes: ``source.root=/data``.

    Raises:
        ConfigurationError: no such file, not a data configuration, or data that are missing.
    """
    for path in paths:
        if not path.is_file():
            raise ConfigurationError(
                f"no manifest or data configuration at {path}; give a run's manifest.json or a YAML"
            )
    parser = _data_parser()
    try:
        settings = parser.parse_args(
            [*(f"--config={path}" for path in paths), *(f"--{override}" for override in overrides)]
        )
    except argparse.ArgumentError as error:
        named = " with ".join(map(str, paths))
        raise ConfigurationError(f"{named} is no data configuration: {error}") from error
    return _set_up(parser, settings)


def data_of_run(arguments: Sequence[str]) -> "FederatedDataModule":
    """The data of a run of ``lightning-cli fit`` with these arguments, set up; no method is made.

    Raises:
        ConfigurationError: the arguments are no configuration of a run, or data are missing.
    """
    parser = _data_parser()
    return _set_up(parser, parser.parse_object(resolved(arguments)["data"]))


def _data_parser() -> "FederatedParser":
    """What reads the arguments of the datamodule alone."""
    from jsonargparse import ActionConfigFile

    import datamodules  # noqa: F401  (makes sources and partitions known by their short names)
    from benchmark.run.parser import FederatedParser
    from datamodules.federated import FederatedDataModule

    parser = FederatedParser(exit_on_error=False)
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_class_arguments(FederatedDataModule)
    return parser


def _set_up(parser: "FederatedParser", settings: Any) -> "FederatedDataModule":
    from datamodules.federated import FederatedDataModule

    given = parser.instantiate_classes(settings).as_dict()
    given.pop("config", None)
    data = FederatedDataModule(**given)
    data.setup()
    return data
