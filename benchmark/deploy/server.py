"""The server of a deployment: a rule's rounds over whatever carries its messages."""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from flwr.app import Message, MessageType, RecordDict

from benchmark.delivery import Delivery
from benchmark.deploy.agreement import Agreement, versions
from benchmark.deploy.messages import content, fields_of, line, packed, size_of, to_client, unpacked
from benchmark.engine.refusals.payload_checks import check_aggregate, check_together, selected, start, unchanged
from benchmark.errors import ConfigurationError
from benchmark.faults.validation import fault_of
from benchmark.federation import Broadcast, Parcel, Round, Uploads, Values
from benchmark.files import make_folder, write_bytes, write_text
from benchmark.predict.loaded import known_federation

log = logging.getLogger("benchmark.deploy")

#: Metrics that a client may send at a time.
MOST_METRICS = 1000
#: Its name: point, split and metric.
METRIC = re.compile(r"(server|local)/[a-z0-9_]{1,100}/[a-z0-9_]{1,100}", re.ASCII)


class Carrier(Protocol):
    """Carries messages, as Flower's Grid does."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the answers that come in time."""


class LiveServer:
    """Runs a rule over clients of elsewhere.

    Args:
        agreement: of the deployment.
        grid: carries the messages.
        timeout: seconds that clients may take for an answer.

    Attributes:
        shared: the shared values.
        metrics: rows of round, client, point, split, metric and value.
        refused: lines about clients whose messages were refused.
    """

    def __init__(self, agreement: Agreement, grid: Carrier, timeout: float) -> None:
        method, self.rule, transform = agreement.constructed()
        agreement.check(method, self.rule)
        self.agreement, self.terms = agreement, agreement.terms
        evaluate_local = agreement.config["data"].get("evaluate_local")
        method.join(known_federation(agreement.facts, None, transform, evaluate_local), clients=[])
        if refusal := self.rule.accept(method):
            raise ConfigurationError(f"{self.rule.title} cannot serve {type(method).__name__}: {refusal}")
        check_together(self.rule, Delivery())
        initial = method.initial_values()
        start(self.rule, dict(initial), self.terms)
        self.shared = {name: initial[name] for name in method.roles.shared}
        self.frozen = method.frozen_hash
        self._expected = initial
        self._grid, self._timeout = grid, timeout
        #: by node, its client; and by client, its number of training images
        self.clients: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.metrics: list[tuple[int, str, str, str, str, float]] = []
        self.refused: list[str] = []
        self.bytes_down = self.bytes_up = 0

    # ------------------------------------------------------------------ who is there

    def meet(self) -> None:
        """Ask nodes that are new who they are, and forget those that are gone."""
        nodes = {*self._grid.get_node_ids()}
        self.clients = {node: client for node, client in self.clients.items() if node in nodes}
        new = sorted(nodes - self.clients.keys())
        for node, fields in sorted(self._ask(MessageType.QUERY, {node: content() for node in new}).items()):
            if why := self._stranger(fields):
                self._refuse(f"node {node}: {why}")
            else:
                self.clients[node] = fields["client"]
                self.sizes[fields["client"]] = fields["images"]

    def _stranger(self, fields: Mapping[str, Any]) -> str:
        """Return why a node cannot take part, or nothing."""
        client, images = fields.get("client"), fields.get("images")
        if type(client) is not int or client not in self.terms.training_clients:
            return f"says that it is client {line(client)}, which this federation has not"
        if client in self.clients.values():
            return f"{self._who(client)} is connected by another node already"
        if type(images) is not int or not 1 <= images <= self.terms.own_row:
            return f"{self._who(client)} says it has {line(images)} images; expected 1 to {self.terms.own_row}"
        if images != self.sizes.get(client, images):
            return f"{self._who(client)} had {self.sizes[client]} images before, and has {images} now"
        if fields.get("versions") != versions():
            return f"{self._who(client)} has {line(fields.get('versions'))}; the server {versions()}"
        if fields.get("frozen") != self.frozen:
            return f"{self._who(client)} has other frozen weights than the server"
        return ""

    def _name(self, client: int) -> str:
        return line(self.agreement.client_names[client])

    def _who(self, client: int) -> str:
        name = self._name(client)
        return name if name.startswith("client") else f"client {name}"

    def _refuse(self, said: str) -> None:
        if said not in self.refused:  # nodes that are refused are asked again in the next round
            self.refused.append(said)
            log.warning("refused: %s", said)

    # ------------------------------------------------------------------ messages

    def _ask(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, Mapping[str, Any]]:
        """Send to nodes; return what those answer that have something to say, by node."""
        asked = [
            Message(content=each, dst_node_id=node, message_type=kind, ttl=self._timeout)
            for node, each in contents.items()
        ]
        found: dict[int, Mapping[str, Any]] = {}
        for answer in self._grid.send_and_receive(asked, timeout=self._timeout) if asked else ():
            node = answer.metadata.src_node_id
            who = self._who(self.clients[node]) if node in self.clients else f"node {node}"
            try:
                if answer.has_error():
                    raise ConfigurationError(f"no answer ({line(answer.error.reason)})")
                fields = fields_of(answer)
                if "refused" in fields:
                    raise ConfigurationError(line(fields["refused"]))
                if node not in contents or node in found:
                    raise ConfigurationError("an answer that nobody has asked for")
                found[node] = fields
            except ConfigurationError as error:
                self._refuse(f"{who}: {error}")
        for node in sorted(contents.keys() - found.keys()):
            log.info("nothing to go on with from node %s", node)
        return found

    def _send(self, kind: str, round: Round, clients: tuple[int, ...], sent: Broadcast) -> dict[int, Mapping[str, Any]]:
        """Send clients their parts of a broadcast; return what they answer, by client, ascending."""
        nodes = {client: node for node, client in self.clients.items()}
        contents = {}
        for place, client in enumerate(clients):
            tensors = to_client(sent, place)
            self.bytes_down += len(tensors)
            of_round = {"clients": list(round.clients)} if round.clients else {}
            contents[nodes[client]] = content(tensors=tensors, round=round.number, **of_round)
        answers = self._ask(kind, contents)
        return dict(sorted((self.clients[node], fields) for node, fields in answers.items()))

    # ------------------------------------------------------------------ rounds

    def round(self, number: int) -> None:
        """Train for a round with those of its clients who are there."""
        round = Round(number, tuple(selected(self.rule, number)), self.terms.seed)
        there = tuple(client for client in round.clients if client in self.clients.values())
        with unchanged(self.shared, f"{self.rule.title}.broadcast"):
            sent = self.rule.broadcast(round, dict(self.shared), there)
        parcels = []
        for client, fields in self._send(MessageType.TRAIN, round, there, sent).items():
            if (values := self._upload(client, number, fields)) is not None:
                place = there.index(client)
                known = sent.common | {name: rows[place] for name, rows in sent.own.items()}
                began = {name: known[name].unsqueeze(0) for name in values if name in known}
                parcels.append(Parcel((client,), {n: v.unsqueeze(0) for n, v in values.items()}, began, {}))
        uploads = Uploads.gathered(parcels, self.sizes, number) if parcels else Uploads.nobody(self._expected)
        if not parcels and self.rule.empty_rounds == "void":
            log.warning("round %s is void: nothing has arrived; the server's values stay as they were", number)
            return
        with unchanged(self.shared, f"{self.rule.title}.aggregate"):
            new = self.rule.aggregate(round, self.shared, replace(uploads, now=self.shared))
        check_aggregate(new, f"{self.rule.title}.aggregate", self.shared)
        if spoiled := [name for name, value in new.items() if not value.isfinite().all()]:
            raise ConfigurationError(f"{self.rule.title} has made {spoiled[0]} of round {number} not finite")
        self.shared |= new
        facts = {name: value for name, value in self.rule.report(round).items() if isinstance(value, float)}
        told = "".join(f", {name} {value:.4g}" for name, value in facts.items())
        log.info("round %s: %s of %s clients%s", number, len(parcels), len(round.clients), told)

    def _upload(self, client: int, number: int, fields: Mapping[str, Any]) -> Values | None:
        """Return a client's upload, or None if it is refused."""
        try:
            values = unpacked(fields.get("tensors"), size_of(self._expected))
            fault = fault_of(values, self._expected)
        except ConfigurationError as error:
            fault = str(error)
        if fault is not None:
            self._refuse(f"round {number}: the upload of {self._who(client)}: {line(fault)}")
            return None
        self.bytes_up += len(fields["tensors"])
        return values

    def evaluate(self, number: int) -> None:
        """Have the clients that are there score themselves after a round."""
        clients = tuple(sorted(self.clients.values()))
        if not clients:
            return
        round = Round(number, (), self.terms.seed)
        sent = self.rule.broadcast(round, dict(self.shared), clients)
        for client, fields in self._send(MessageType.EVALUATE, round, clients, sent).items():
            if len(fields) > MOST_METRICS or not all(
                type(value) is float and METRIC.fullmatch(name) for name, value in fields.items()
            ):
                self._refuse(f"round {number}: the scores of {self._who(client)} are no metrics")
                continue
            for name, value in fields.items():
                point, split, metric = name.split("/")
                self.metrics.append((number, self._name(client), point, split, metric, value))

    def write(self, folder: Path) -> None:
        """Write the shared values, the clients' metrics and what was refused."""
        make_folder(folder)
        write_bytes(folder / "shared.safetensors", packed(self.shared))
        heads = ["round", "client", "point", "split", "metric", "value"]
        write_text(folder / "metrics.csv", pd.DataFrame(self.metrics, columns=heads).to_csv(index=False))
        told = {
            "refused": self.refused,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "privacy": self.rule.guarantee(),
        }
        write_text(folder / "deployed.json", json.dumps(told, indent=1) + "\n")


def run(server: LiveServer, folder: Path, min_clients: int, wait: float, pause: Any) -> None:
    """Run all rounds of a deployment.

    Args:
        server: of it.
        folder: to write into after each evaluation.
        min_clients: without which no round begins.
        wait: seconds to wait for clients at the start of a round.
        pause: of this many seconds, a function.

    Raises:
        ConfigurationError: fewer clients than ``min_clients`` have come.
    """
    rounds = server.terms.rounds
    every = server.agreement.config["trainer"].get("check_val_every_n_epoch") or rounds
    wanted = len(server.terms.training_clients)
    for number in range(1, rounds + 1):
        waited = 0.0
        server.meet()
        while len(server.clients) < (wanted if number == 1 else min_clients) and waited < wait:
            pause(2.0)
            waited += 2.0
            server.meet()
        if len(server.clients) < min_clients:
            raise ConfigurationError(
                f"round {number}: {len(server.clients)} clients are connected, and the deployment needs "
                f"{min_clients} (min-clients); see what the log says of those that were refused"
            )
        server.round(number)
        if number % every == 0 or number == rounds:
            server.evaluate(number)
            server.write(folder)
