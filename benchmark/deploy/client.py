"""The client of a deployment: trains and scores on its own images; what is personal stays on its disk."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from benchmark.deploy.agreement import Agreement, state_folder, versions
from benchmark.deploy.messages import content, fields_of, from_server, packed
from benchmark.engine.batches.pool import Transform
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Values
from benchmark.files import make_folder, write_bytes
from benchmark.live import LocalClient, OwnImages
from benchmark.paths import user_path
from benchmark.predict.new_client import labelled_images
from benchmark.run.data_folder import ROOT
from benchmark.run.reload import data_of
from datamodules.federated import FederatedDataModule
from datamodules.source import ImagePool

T = TypeVar("T")

#: Bytes that a server may send to a client at a time.
MOST = 2**32
#: Clients of this process: in a simulation of Flower's one process plays several, one message after the other.
_HERE: "dict[tuple[int, int], Site]" = {}


@dataclass
class Site:
    """One client on its machine.

    Args:
        agreement: of the deployment.
        number: the client's.
        settings: of its node: ``data``, a folder of its own images; ``data-dir``, where the configured data set lies.
        folder: in which it keeps what is its own.
    """

    agreement: Agreement
    number: int
    settings: Mapping[str, Any]
    folder: Path
    #: the round after which its state was kept that it now has
    _restored: int = 0

    @property
    def client(self) -> LocalClient:
        """The client, as its last training has left it, in this process or another."""
        client, last = self._made, self._last_round()
        if last != self._restored:
            client.restore(self._kept())
            self._restored = last
        return client

    @cached_property
    def _made(self) -> LocalClient:
        method, rule, transform = self.agreement.constructed()
        self.agreement.check(method, rule)
        own = self._own_images(transform)
        client = LocalClient(method, self.number, own, self.agreement.terms, self.agreement.terms.rounds)
        self.images = len(own.train)
        return client

    def hello(self, fields: Mapping[str, Any]) -> RecordDict:
        """Say who is here, and on what its results depend."""
        frozen = self.client.method.frozen_hash
        return content(client=self.number, images=self.images, frozen=frozen, versions=versions())

    def train(self, fields: Mapping[str, Any]) -> RecordDict:
        """Train for a round, and keep what is the client's own.

        Raises:
            ConfigurationError: it has trained in this round already, or the message is none of a round.
        """
        client, round = self.client, self._round(fields)
        if round.number <= self._restored:
            raise ConfigurationError(f"round {round.number} was trained before (the last one was {self._restored})")
        parcel, _ = client.train(round, from_server(fields.get("tensors"), MOST))
        self._keep(client.state(), round.number)
        if not parcel.clients:
            raise ConfigurationError("its loss or values were not finite; it keeps what it had before")
        return content(tensors=packed({name: rows[0] for name, rows in parcel.values.items()}))

    def evaluate(self, fields: Mapping[str, Any]) -> RecordDict:
        """Score the client on its held-out images."""
        scores = self.client.evaluate(self._round(fields).number, from_server(fields.get("tensors"), MOST))
        found = {
            f"{point}/{split}/{metric}": values[self.number].item()
            for (point, split), of in scores.items()
            for metric, values in of.compute().items()
        }
        return content(**found)

    def _round(self, fields: Mapping[str, Any]) -> Round:
        number, clients = fields.get("round"), fields.get("clients", [])
        if type(number) is not int or not 0 <= number <= self.agreement.terms.rounds or not isinstance(clients, list):
            raise ConfigurationError(f"the server asks for round {number!r:.40}, of {self.agreement.terms.rounds}")
        return Round(number, tuple(clients), self.agreement.terms.seed)

    # ------------------------------------------------------------------ on this machine

    def _own_images(self, transform: Transform) -> OwnImages:
        settings = self.agreement.config["data"]
        chosen = {name: settings[name] for name in ("evaluate_local", "metrics", "cache_features")}
        if "data" in self.settings:
            root = user_path(str(self.settings["data"]))
            parts = [labelled_images(root / split, self.agreement.facts, self.number) for split in ("train", "test")]
            images = torch.cat([part.images for part in parts])
            labels = torch.cat([part.labels for part in parts])
            rows = np.split(np.arange(len(labels)), [len(parts[0].labels)])
            held = {"test": rows[1]}
        else:
            data = _data(json.dumps(self._configured(settings), sort_keys=True))
            held = {split: of[self.number] for split, of in data.held_out.items() if self.number in of}
            lists = [data.train_indices[self.number], *held.values()]
            chosen_rows = np.concatenate(lists)
            images, labels = data.pool.images[chosen_rows], data.pool.labels[chosen_rows]
            rows = np.split(np.arange(len(labels)), np.cumsum([*map(len, lists)])[:-1])
            held = dict(zip(held, rows[1:], strict=True))
        no, none = torch.zeros(len(labels), dtype=torch.bool), torch.zeros(len(labels), dtype=torch.int64)
        pool = ImagePool(images, labels, no, none, torch.arange(len(labels)))
        return OwnImages(pool, transform, rows[0], held, **chosen)

    def _configured(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of the data, read from where this node says."""
        made = {**settings, "seed": self.agreement.config["seed_everything"]}
        if "data-dir" in self.settings:
            source = settings["source"]
            arguments = (source.get("init_args") or {}) | {ROOT.rsplit(".", 1)[-1]: str(self.settings["data-dir"])}
            made["source"] = {**source, "init_args": arguments}
        return made

    @property
    def _file(self) -> Path:
        return self.folder / f"client{self.number}.safetensors"

    def _keep(self, state: Values, number: int) -> None:
        make_folder(self.folder)
        values = {name: value.contiguous() for name, value in state.items()}
        write_bytes(self._file, save(values, {"round": str(number)}))
        self._restored = number

    def _last_round(self) -> int:
        """Return the round after which its state was kept; 0 before any."""
        return int(self._of_file(lambda file: file.metadata()["round"])) if self._file.exists() else 0

    def _kept(self) -> Values:
        return self._of_file(lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def _of_file(self, read: Callable[[Any], T]) -> T:
        try:
            with safe_open(str(self._file), "pt") as file:
                return read(file)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{self._file} is no state that a client has kept: {error}") from error


@lru_cache(maxsize=1)
def _data(settings: str) -> FederatedDataModule:
    """Read a configured data set once for all clients that this process plays."""
    return data_of(json.loads(settings))


def site_of(context: Context) -> Site:
    """Return the client that a node plays.

    Raises:
        ConfigurationError: the node says not which, or one that there is not.
    """
    agreement, node = Agreement.read(context.run_config.get("agreement")), context.node_config
    name, number = node.get("client"), node.get("partition-id")
    if isinstance(name, str) and name in agreement.client_names:
        number = agreement.client_names.index(name)
    elif name is not None or type(number) is not int or number not in range(len(agreement.client_names)):
        raise ConfigurationError(
            f"this node is client {(number if name is None else name)!r}; expected --node-config "
            f"'client=\"{agreement.client_names[0]}\"', or another of {', '.join(agreement.client_names)}"
        )
    folder = state_folder(node.get("state", context.run_config.get("state"))) / str(context.run_id)
    if (context.run_id, number) not in _HERE:
        _HERE[context.run_id, number] = Site(agreement, number, dict(node), folder)
    return _HERE[context.run_id, number]


def answered(does: Callable[[Site, Mapping[str, Any]], RecordDict], message: Message, context: Context) -> Message:
    """Answer a message of the server; what is refused is answered by one line."""
    try:
        made = does(site_of(context), fields_of(message))
    except ConfigurationError as error:
        made = content(refused=str(error))
    return Message(made, reply_to=message)
