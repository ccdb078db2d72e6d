"""The client of a deployment: trains and scores on its own images; what is personal stays on its disk."""

import json
import warnings
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

from benchmark.deploy.agreement import Agreement, check_no_validation, run_name, state_folder, versions
from benchmark.deploy.masked_uploads import to_be_masked
from benchmark.deploy.messages import content, fields_of, from_server, packed
from benchmark.engine.batches.pool import Transform
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Parcel, Round, Values
from benchmark.files import make_folder, write_bytes
from benchmark.live import LocalClient, OwnImages
from benchmark.paths import user_path
from benchmark.predict.new_client import labelled_images
from benchmark.predict.site import SiteModel
from benchmark.run.data_folder import ROOT
from benchmark.run.reload import data_of
from datamodules.federated import FederatedDataModule
from datamodules.folders import no_copies
from datamodules.source import ImagePool
from datamodules.splitting import equal_images

T = TypeVar("T")

#: Bytes that a server may send to a client at a time.
MOST = 2**32
#: The setting of a node that takes part in secure aggregation alone.
ONLY_SECURE = "secure-aggregation"
#: Clients of this process: in a simulation of Flower's one process plays several, one message after the other.
_HERE: "dict[tuple[Path, int], Site]" = {}


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
            client.restore(self._kept(self._file))
            self._restored = last
        return client

    @property
    def name(self) -> str:
        """Return the client's name as part of a file's."""
        return f"client{self.number}"

    @cached_property
    def _made(self) -> LocalClient:
        method, rule, transform = self.agreement.constructed()
        self.agreement.check(method, rule)
        own = self._own_images(transform)
        client = LocalClient(method, self.number, own, self.agreement.terms, self.agreement.terms.rounds)
        self.images, self.held_out = len(own.train), {split: len(rows) for split, rows in own.held_out.items()}
        self._first = client.state()
        self._facts = self.agreement.facts.of_one(self.number, own.pool.labels[torch.from_numpy(own.train)])
        return client

    def hello(self, fields: Mapping[str, Any]) -> RecordDict:
        """Say who is here, how many images it has, and on what its results depend."""
        frozen = self.client.method.frozen_hash
        held_out = {f"held_out/{split}": count for split, count in self.held_out.items()}
        return content(client=self.number, images=self.images, frozen=frozen, versions=versions(), **held_out)

    def train(self, fields: Mapping[str, Any]) -> RecordDict:
        """Train for a round, and keep what is the client's own.

        The last round may be asked for again, by a server that was started again: it begins where it began before. With
        secure aggregation it is refused, since the sums over two groups of clients would tell a single upload.

        Raises:
            ConfigurationError: a later round was trained already, or the message is none of a round.
        """
        client, round = self.client, self._round(fields)
        if round.number < 1:
            raise ConfigurationError(f"the server has round {round.number} trained; the first one is 1")
        if round.number < self._restored:
            raise ConfigurationError(f"round {round.number} was trained before (the last one was {self._restored})")
        if round.number == self._restored and self.agreement.secure_aggregation:
            raise ConfigurationError(f"it answers once in a round that is summed, and has trained in {round.number}")
        if round.number == self._restored:
            client.restore(self._kept(self._before) if self._before.exists() else self._first)
        elif self._file.exists():
            write_bytes(self._before, self._file.read_bytes())
        received = self._received(fields)
        parcel, reported = client.train(round, received)
        if parcel.kept:
            self._write(self._waiting, parcel.kept, round.number)
        self._keep(client.state(), round.number)
        if not parcel.clients:
            raise ConfigurationError("its loss or values were not finite; it keeps what it had before")
        means = {f"local/train/{name}": value for name, value in reported.items()}
        values = {name: rows[0] for name, rows in parcel.values.items()}
        if self.agreement.secure_aggregation:
            return to_be_masked(values, received.common, self.images, means)
        return content(tensors=packed(values), **means)

    def take(self, fields: Mapping[str, Any]) -> RecordDict:
        """Take what the server answers to the message of the last round, and keep what is the client's own.

        Raises:
            ConfigurationError: no message of this round waits for an answer.
        """
        client, round = self.client, self._round(fields)
        waits = self._restored == round.number and self._waiting.exists()
        if not waits or self._told(self._waiting) != round.number:
            raise ConfigurationError(f"no message of round {round.number} waits for an answer")
        parcel = Parcel((self.number,), {}, {}, self._kept(self._waiting))
        client.take(round, parcel, self._received(fields))
        self._keep(client.state(), round.number)
        self._waiting.unlink()
        return content()

    def evaluate(self, fields: Mapping[str, Any]) -> RecordDict:
        """Score the client on its held-out images; after the last round, keep the model to use it."""
        client, round, received = self.client, self._round(fields), self._received(fields)
        scores = client.evaluate(round.number, received)
        if round.number == self.agreement.terms.rounds:
            fitted, frozen = client.fitted(round.number, received), client.method.frozen_hash
            model = SiteModel(self.number, round.number, received, client.state(), frozen, fitted)
            model.write(self.folder / self.name, self.agreement.config, self._facts)
        found = {
            f"{point}/{split}/{metric}": values[self.number].item()
            for (point, split), of in scores.items()
            for metric, values in of.compute().items()
        }
        return content(**found)

    def _round(self, fields: Mapping[str, Any]) -> Round:
        number, clients = fields.get("round"), fields.get("clients", [])
        whole = isinstance(clients, list) and all(type(each) is int for each in clients)
        if type(number) is not int or not 0 <= number <= self.agreement.terms.rounds or not whole:
            raise ConfigurationError(f"the server asks for round {number!r:.40}, of {self.agreement.terms.rounds}")
        return Round(number, tuple(clients), self.agreement.terms.seed)

    def _received(self, fields: Mapping[str, Any]) -> Broadcast:
        """Return what the server has sent; parameters have the method's types, and their shapes are checked by it."""
        received = from_server(fields.get("tensors"), MOST)
        types = {name: value.dtype for name, value in self.client.method.named_parameters()}
        for name, value in {**received.common, **received.own}.items():
            if value.dtype != types.get(name, value.dtype):
                raise ConfigurationError(f"the server sends {name!r:.100} as {value.dtype}; expected {types[name]}")
        return received

    # ------------------------------------------------------------------ on this machine

    def _own_images(self, transform: Transform) -> OwnImages:
        settings = self.agreement.config["data"]
        chosen = {name: settings[name] for name in ("evaluate_local", "metrics", "cache_features")}
        chosen["min_support"] = settings.get("min_support", 1)  # older agreements have none
        if "data" in self.settings:
            check_no_validation(settings)
            root = user_path(str(self.settings["data"]))
            parts = [labelled_images(root / split, self.agreement.facts, self.number) for split in ("train", "test")]
            images = torch.cat([part.images for part in parts])
            labels = torch.cat([part.labels for part in parts])
            rows = np.split(np.arange(len(labels)), [len(parts[0].labels)])
            rows[0] = _without_copies(images, *rows)
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
        """The state after the last round."""
        return self.folder / f"{self.name}.safetensors"

    @property
    def _before(self) -> Path:
        """The state with which the last round began; no file in a client's first round."""
        return self.folder / f"{self.name}.before.safetensors"

    @property
    def _waiting(self) -> Path:
        """Return the file of what is needed to take the server's answer to the last message."""
        return self.folder / f"{self.name}.waiting.safetensors"

    def _keep(self, state: Values, number: int) -> None:
        self._write(self._file, state, number)
        self._restored = number

    def _write(self, path: Path, values: Values, number: int) -> None:
        make_folder(self.folder)
        told = {"round": str(number), "agreement": self.agreement.digest}
        write_bytes(path, save({name: value.contiguous() for name, value in values.items()}, told))

    def _last_round(self) -> int:
        """Return the round after which its state was kept; 0 before any.

        Raises:
            ConfigurationError: the state is damaged, or of another deployment of the same name.
        """
        return self._told(self._file) if self._file.exists() else 0

    def _told(self, path: Path) -> int:
        """Return of which round a file is."""
        told = self._of_file(path, lambda file: file.metadata())
        if told["agreement"] != self.agreement.digest:
            raise ConfigurationError(f"{path} is of another deployment of this name; give this one a new name")
        return int(told["round"])

    def _kept(self, path: Path) -> Values:
        return self._of_file(path, lambda file: {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def _of_file(self, path: Path, read: Callable[[Any], T]) -> T:
        try:
            with safe_open(str(path), "pt") as file:
                return read(file)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path} is no state that a client has stored: {error}") from error


def _without_copies(images: torch.Tensor, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Return the training images that are no copies of test images, and say how many are.

    Args:
        images: uint8 [n, 3, H, W].
        train: rows.
        test: rows.

    Raises:
        ConfigurationError: all of them are.
    """
    left = train[no_copies(equal_images(images.numpy()), np.isin(np.arange(len(images)), test))[train]]
    if copies := len(train) - len(left):
        if not len(left):
            raise ConfigurationError("all training images of this site are copies of its test images")
        warnings.warn(f"{copies} training images are copies of test images and do not train", stacklevel=1)
    return left


@lru_cache(maxsize=1)
def _data(settings: str) -> FederatedDataModule:
    """Read a configured data set once for all clients that this process plays."""
    return data_of(json.loads(settings))


def site_of(context: Context, fields: Mapping[str, Any]) -> Site:
    """Return the client that a node plays.

    Args:
        context: of the node and of the app.
        fields: of the message, which says how the deployment is called.

    Raises:
        ConfigurationError: the node says not which, or one that there is not; the name is no folder's; or the node
            takes part in secure aggregation alone, and the app has none.
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
    if node.get(ONLY_SECURE) and not agreement.secure_aggregation:
        raise ConfigurationError("this site takes part in secure aggregation alone, which the app has not")
    folder = state_folder(node.get("state")) / run_name(fields.get("run"))
    if (folder, number) not in _HERE:
        _HERE[folder, number] = Site(agreement, number, dict(node), folder)
    return _HERE[folder, number]


def answered(does: Callable[[Site, Mapping[str, Any]], RecordDict], message: Message, context: Context) -> Message:
    """Answer a message of the server; what is refused is answered by one line."""
    try:
        fields = fields_of(message)
        made = does(site_of(context, fields), fields)
    except ConfigurationError as error:
        made = content(refused=str(error))
    return Message(made, reply_to=message)
