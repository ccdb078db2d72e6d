"""A finished run's method and data once more, from its directory alone; and the data of a configuration."""

import argparse
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from benchmark.config.yaml_files import read_mapping
from benchmark.errors import ConfigurationError
from benchmark.run.command import resolved
from benchmark.run.data_folder import moved
from benchmark.run.phases import quiet
from benchmark.run.resume import config_of
from benchmark.run.run_directory import last_checkpoint

if TYPE_CHECKING:  # slow to import
    import torch
    from torch import Tensor

    from benchmark.config.parser import FederatedParser
    from benchmark.engine.data import FederatedData
    from benchmark.federation import Values
    from benchmark.method import FederatedMethod
    from benchmark.run.cli import FederatedCLI
    from datamodules.federated import FederatedDataModule


def restore(
    run_dir: str | Path, data_dir: str | Path | None = None, device: "torch.device | None" = None
) -> "tuple[FederatedMethod, FederatedDataModule]":
    """The method of a run as it was after its last round, in evaluation mode on the CPU, and the run's data, set up.

    Shared parameters hold the server's values. What is each client's own lies in the method's store and in the
    server's rule, ``method.server.rule``; :func:`become_client` takes it from there.

    Args:
        run_dir: holds ``config.yaml`` and ``checkpoints/last.ckpt``.
        data_dir: of the data sets, for a run that was made elsewhere.
        device: in whose precision it shall work, where it is moved to one that is no CPU.

    Raises:
        ConfigurationError: no checkpoint was kept, it is not one of this configuration, or the data are missing or
            another split.
    """
    folder = Path(run_dir)
    made = _built(read_mapping(config_of(folder)), data_dir, device)
    method, data = made.model, made.datamodule
    data.setup()
    data.match(method)
    join(method, data, made.trainer)
    content = last_round(folder, method)
    if content is not None and type(data).__qualname__ in content:
        data.load_state_dict(content[type(data).__qualname__])
    load(method, content)
    return method, data


def last_round(run_dir: Path, method: "FederatedMethod") -> dict[str, Any] | None:
    """The content of a run's last checkpoint; None where a method that learns nothing has left none.

    Args:
        run_dir: of the run.
        method: the run's, which has joined.

    Raises:
        ConfigurationError: none was kept, or it cannot be read.
    """
    from benchmark.run.checkpoint import read_checkpoint

    checkpoint = last_checkpoint(run_dir)
    if not checkpoint.is_file():
        if not method.roles.trained:
            return None
        raise ConfigurationError(
            f"{run_dir} has no checkpoints/last.ckpt, which is needed here; run its configuration again, or give "
            "another run"
        )
    return read_checkpoint(checkpoint)


def join(method: "FederatedMethod", data: "FederatedData", trainer: Any) -> None:
    """Have a method and its server's rule join a federation, as the Trainer has them before it scores.

    Args:
        method: as constructed.
        data: set up.
        trainer: with the run's server among its callbacks, or none where the method brings it.
    """
    from benchmark.engine.rounds import Server

    if not any(isinstance(callback, Server) for callback in trainer.callbacks):
        trainer.callbacks.append(Server(method.make_server()))
    trainer.datamodule, method.trainer = data, trainer
    method.server.setup(trainer, method, "test")


def load(method: "FederatedMethod", content: dict[str, Any] | None) -> None:
    """Take what a checkpoint holds of the server, the clients and the method, which has joined; then only evaluate.

    None is that of a method that learns nothing.

    Raises:
        ConfigurationError: the checkpoint is not one of this method, its rule, its clients and its frozen weights.
    """
    if content is not None:
        method.on_load_checkpoint(content)
        method.server.load_state_dict(content["callbacks"]["server"])
        method.load_state_dict(content["state_dict"], strict=False)  # frozen weights are not in it
    method.eval()


#: What the server holds of methods in whose parameters a client's values were put.
_SERVERS_VALUES: "WeakKeyDictionary[FederatedMethod, Values]" = WeakKeyDictionary()


def become_client(method: "FederatedMethod", client: int, point: Literal["server", "local"] = "server") -> None:
    """Put a client's values into the method's parameters, so that plain calls of it are this client's.

    Args:
        method: from :func:`restore`; changed in place.
        client: its index.
        point: ``"server"``, what the server's rule sends it after the last round; ``"local"``, as its last local
            training left it. What is the client's own is the same at both.

    Raises:
        ConfigurationError: there is no such client, or nothing is kept of it at the point ``"local"``.
    """
    held = method.simulation.shared()
    served = _SERVERS_VALUES.setdefault(method, {name: value.clone() for name, value in held.items()})
    for name, value in served.items():
        held[name].copy_(value)
    for name, value in client_values(method, client, point).items():
        method.get_parameter(name).data.copy_(value)


def client_values(
    method: "FederatedMethod", client: int, point: Literal["server", "local"] = "server"
) -> dict[str, "Tensor"]:
    """Copies of the trained parameters of one client; arguments and errors as :func:`become_client`."""
    from benchmark.engine.client_state import LAST, PARTICIPATED

    simulation, store, roles, server = method.simulation, method.store, method.roles, method.server
    count = simulation.terms.num_clients
    if client not in range(count):
        raise ConfigurationError(f"there is no client {client!r}: the run has {count}, 0 to {count - 1}")
    if client not in store.held:
        raise ConfigurationError(f"client {client} lies with another rank of the run; train on one device to ask")
    kept = {name: name for name in roles.personal}
    values = simulation.shared()
    if point == "local":
        if roles.shared and not method.evaluate_local:
            raise ConfigurationError(
                "the run has not kept its clients as local training left them; ask for the point 'server', or run it "
                "with data.evaluate_local=true"
            )
        if not store.rows(PARTICIPATED, (client,), simulation.device).item():
            raise ConfigurationError(f"client {client} has never trained; ask for the point 'server'")
        kept |= {name: LAST + name for name in roles.shared}
    else:
        sent = simulation.received(server.rule, server.evaluated, (client,))
        values |= sent.common | {name: rows[0] for name, rows in sent.own.items()}
    own = {name: rows[0] for name, rows in store.rows_of(kept, (client,), simulation.device).items()}
    values |= own
    return {name: values[name].detach().clone() for name in roles.trained}


def _built(config: dict[str, Any], data_dir: str | Path | None, device: "torch.device | None" = None) -> "FederatedCLI":
    """Method, server, data and a Trainer as the command line makes them, with the links between them."""
    from benchmark.run.cli import FederatedCLI

    names: tuple[str, ...] = ("seed_everything", "model", "server", "delivery", "data")
    given: dict[str, Any] = {n: config[n] for n in names if n in config}
    for option, value in moved(config, data_dir).items():
        *path, last = option.split(".")
        reduce(dict.__getitem__, path, given)[last] = value
    given["trainer"] = trainer_settings(config, device)
    with quiet():
        return FederatedCLI(given, run=False)


def trainer_settings(config: Mapping[str, Any], device: "torch.device | None" = None) -> dict[str, Any]:
    """Settings of a Trainer that scores on a device: the run's rounds and precision, and its server if it names one."""
    from benchmark.engine.rounds import Server

    settings = config.get("trainer") or {}
    callbacks = settings.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    return {
        **(
            {"accelerator": "gpu", "devices": [device.index or 0]}
            if device is not None and device.type == "cuda"
            else {"accelerator": "cpu"}
        ),
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "callbacks": [each for each in callbacks if _is_a(each, Server)],
        **{name: settings[name] for name in ("max_epochs", "precision") if settings.get(name) is not None},
    }


def _is_a(entry: Any, kind: type) -> bool:
    """Return whether an entry of a configuration names a class of this kind."""
    named = locate(str(entry["class_path"] if isinstance(entry, dict) else entry))
    return isinstance(named, type) and issubclass(named, kind)


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
    return data_of(resolved(arguments)["data"])


def data_of(settings: Mapping[str, Any]) -> "FederatedDataModule":
    """The data of a resolved configuration, its key ``data``, set up.

    Raises:
        ConfigurationError: the settings are none of data, or data are missing.
    """
    parser = _data_parser()
    return _set_up(parser, parser.parse_object(dict(settings)))


def _data_parser() -> "FederatedParser":
    """Return a parser of the datamodule's arguments alone."""
    from jsonargparse import ActionConfigFile

    import datamodules  # noqa: F401  (makes sources and partitions known by their short names)
    from benchmark.config.parser import FederatedParser
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
