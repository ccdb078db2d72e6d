"""A finished run's method, made again from its directory: with the training data, without, or with a client more."""

import copy
from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from pydoc import locate
from typing import Any, Literal

import numpy as np
import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from benchmark.config.choices import LINKED, constructor_parameters
from benchmark.config.parser import FederatedParser
from benchmark.config.yaml_files import read_mapping
from benchmark.delivery import Delivery
from benchmark.engine.batches.loaders import Loaders
from benchmark.engine.batches.pool import Images, Transform
from benchmark.engine.plan.work import Shown
from benchmark.engine.refusals.payload_checks import own_rule
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Federation
from benchmark.method import FederatedMethod
from benchmark.predict.site import SiteModel
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.records.record_file import is_finished, read_record
from benchmark.run.cli import reported
from benchmark.run.data_folder import moved
from benchmark.run.federation_file import FederationFacts
from benchmark.run.phases import quiet
from benchmark.run.reload import join, last_round, load, restore, trainer_settings
from benchmark.run.resume import config_of
from benchmark.server import ServerRule
from datamodules.transform import ImageTransform


@dataclass(frozen=True)
class LabelledImages:
    """Images of one client that was no part of the run.

    Attributes:
        name: of the client.
        images: uint8 [n, 3, H, W], as the run stores its own.
        labels: int64 [n], in the order in which the client counts the classes.
    """

    name: str
    images: Tensor
    labels: Tensor


@dataclass(frozen=True)
class _Images:
    images: Tensor
    labels: Tensor


@dataclass
class KnownFederation:
    """Stands in for the data of a run: its facts, and no images but those of a new client."""

    federation: Federation
    pool: _Images
    transform: Transform
    evaluate_local: bool | None
    clients_at_once: int | Literal["auto"] = 1
    cache_features: bool | str = False
    metrics: list[str | dict[str, Any]] | dict[str, Any] | str | None = None
    min_support: int = 1
    keeps_images: bool = False
    on_divergence: Literal["drop", "raise"] = "drop"
    one_by_one: bool = False
    record_privacy: RecordLevelPrivacy | None = None
    others: Mapping[Shown, Images] = field(default_factory=dict)
    num_workers: int = 0
    loaders: Loaders | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RunDirectory:
    """A finished run's directory, and where the data are now.

    Attributes:
        folder: with ``config.yaml`` and ``checkpoints/last.ckpt``.
        data_dir: of the data sets, for a run that was made elsewhere.
        device: where the method shall lie.
    """

    folder: Path
    data_dir: str | Path | None
    device: torch.device

    @property
    def facts(self) -> FederationFacts | None:
        """Return what the run has left of its federation; None in runs of older versions."""
        return FederationFacts.read(self.folder)

    @cached_property
    def site(self) -> SiteModel | None:
        """Return the model of the site of a deployment whose folder it is; None of a run's directory."""
        return SiteModel.read(self.folder)

    @property
    def recorded_device(self) -> str | None:
        """Return what the run was made on: ``cpu``, or a GPU's name; None of a run without a record."""
        return read_record(self.folder).device if is_finished(self.folder) else None

    def described(self) -> dict[str, Any]:
        """Return what names the run: its folder, and of its record what tells it from others."""
        found: dict[str, Any] = {"folder": self.folder.resolve().name}
        if is_finished(self.folder):
            record = read_record(self.folder)
            found |= {"dataset": record.dataset, "seed": record.seed, "config_hash": record.config_hash}
        return found

    def with_data(self) -> tuple[FederatedMethod, FederationFacts]:
        """Make the method with the run's data.

        Raises:
            ConfigurationError: see :func:`benchmark.run.reload.restore`; or it is a site's, whose images are not named.
        """
        if self.site is not None:
            raise ConfigurationError(
                f"{self.folder} is a site's of a deployment, whose training images it does not name"
            )
        with isolate_rng(), _one_line():
            method, data = restore(self.folder, self.data_dir, self.device)
        return method.to(self.device), FederationFacts.of(data)

    def without_data(self, facts: FederationFacts, new: LabelledImages | None = None) -> FederatedMethod:
        """Make the method from the run's directory alone.

        Args:
            facts: of the run, with those of a new client where there is one.
            new: the last of the clients, with images to be fitted on.

        Raises:
            ConfigurationError: there is no checkpoint, or it is not one of this configuration.
        """
        config = read_mapping(config_of(self.folder))
        with isolate_rng(), _one_line(), quiet():
            seed_everything(config["seed_everything"], workers=True)
            made = constructed(config, facts, self.data_dir)
            method, transform = made.model, made.transform or ImageTransform()
            servers = _servers(made, method) if self.site is None else [self.site.server()]
            trainer = Trainer(**trainer_settings(config, self.device) | {"callbacks": servers})
            data = known_federation(facts, new, transform.for_method(method), config["data"].get("evaluate_local"))
            join(method, data, trainer)
            if self.site is not None:
                self.site.load(method)
                return method.to(self.device)
            content = last_round(self.folder, method)
            if new is not None and content is not None:
                _add_a_client(content, method)
            load(method, content)
        return method.to(self.device)


def constructed(config: Mapping[str, Any], facts: FederationFacts, data_dir: str | Path | None) -> Namespace:
    """Make the parts of a run that are not its data: model, server, delivery, transform, and servers as callbacks."""
    given: dict[str, Any] = {name: copy.deepcopy(config.get(name)) for name in ("model", "server", "delivery")}
    for option, value in moved(config, data_dir).items():
        *path, last = option.split(".")
        if path[0] == "model":
            reduce(dict.__getitem__, path, given)[last] = value
    model = given["model"] if isinstance(given["model"], dict) else {"class_path": given["model"]}
    known = {
        "num_classes": len(facts.class_names),
        "num_clients": facts.terms.num_clients,
        "class_names": list(facts.class_names),
        "class_templates": list(facts.class_templates) or None,
    }
    kind = locate(str(model["class_path"]))
    taken = {each.name for each in constructor_parameters(kind)} if isinstance(kind, type) else set()
    model["init_args"] = (model.get("init_args") or {}) | {name: known[name] for name in LINKED if name in taken}
    parser = FederatedParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedMethod, "model", fail_untyped=False, required=True)
    parser.add_argument("--server", type=ServerRule | None)
    parser.add_argument("--delivery", type=Delivery | None)
    parser.add_argument("--transform", type=ImageTransform | None)
    parser.add_argument("--callbacks", type=list[Callback] | None)
    parts = given | {
        "model": model,
        "transform": config["data"].get("transform"),
        "callbacks": trainer_settings(config)["callbacks"] or None,
    }
    return parser.instantiate_classes(parser.parse_object(parts))


def _servers(made: Namespace, method: FederatedMethod) -> list[Callback]:
    """The server of a run as a callback, as the command line gives it to the Trainer."""
    if made.callbacks:
        return list(made.callbacks)
    return [Server(made.server or own_rule(method), made.delivery)]


def known_federation(
    facts: FederationFacts, new: LabelledImages | None, transform: Transform, evaluate_local: bool | None
) -> KnownFederation:
    """Return the data of a federation of which no images are known but those of a new client."""
    if new is None:
        pool = _Images(torch.zeros(0, 3, *facts.image_size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
        return KnownFederation(facts.federation(), pool, transform, evaluate_local)
    rows = {facts.terms.num_clients - 1: np.arange(len(new.labels))}
    return KnownFederation(facts.federation(rows), _Images(new.images, new.labels), transform, evaluate_local)


def _add_a_client(content: dict[str, Any], method: FederatedMethod) -> None:
    """Give the state of a checkpoint a last client, which is as all clients are at the start.

    Args:
        content: of the checkpoint, changed in place.
        method: of one client more, which has joined; its rule has started.
    """
    server = method.server
    for held, own in (
        (content["state_dict"], {f"store.{name}": rows for name, rows in method.store.state_dict().items()}),
        (content["callbacks"]["server"]["rule"], server.rule.state_dict()),
        (content["callbacks"]["server"].get("delivery", {}), server.delivery.state_dict()),
    ):
        for name, rows in own.items():
            before = held.get(name)
            if not isinstance(before, Tensor) or before.shape == rows.shape or not before.ndim:
                continue
            if before.shape == (len(rows) - 1, *rows.shape[1:]):
                held[name] = torch.cat([before, rows[-1:].to(before)])


@contextmanager
def _one_line() -> Iterator[None]:
    """Raise errors about bad input unwrapped, in one line, whichever library wrapped them."""
    try:
        yield
    except Exception as error:
        told = reported(error)
        if isinstance(error, ArgumentError):
            told = told or ConfigurationError(f"the run's configuration is not taken any more: {error}")
        if told is None or told is error:
            raise
        raise ConfigurationError(str(told)) from error
