"""The server of a deployment: a rule's rounds over whatever carries its messages."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from flwr.app import Message, MessageType, RecordDict

from benchmark.delivery import Delivery
from benchmark.deploy.agreement import Agreement, run_name, versions
from benchmark.deploy.messages import RECORD, TAKE, content, fields_of, line, size_of, to_client, unpacked
from benchmark.deploy.scores import held_out_of, reported, scores_of, why_no_scores
from benchmark.deploy.summed_uploads import summed
from benchmark.engine.communication import Traffic
from benchmark.engine.communication import size_of as counted
from benchmark.engine.refusals.payload_checks import (
    check_aggregate,
    check_complete,
    check_together,
    facts_of,
    selected,
    start,
    unchanged,
)
from benchmark.engine.roles import overrides
from benchmark.engine.rounds import VOID
from benchmark.errors import ConfigurationError
from benchmark.faults.validation import fault_of
from benchmark.federation import Broadcast, Parcel, Round, Uploads, Values
from benchmark.live import message_form
from benchmark.own_metrics import chosen_metrics
from benchmark.predict.loaded import known_federation

if TYPE_CHECKING:  # it needs this module
    from benchmark.deploy.outcome import RunFolder

log = logging.getLogger("benchmark.deploy")

#: Names of what clients say of their training, all clients together.
MOST_REPORTED = 50
#: Attributes of a server that are plain values, kept as they are.
PLAIN = (
    *("finished", "evaluated", "metrics", "refused", "sizes", "held_out", "facts", "seconds"),
    *("bytes_down", "bytes_up"),
)


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
        name: of the deployment, under which clients keep what is their own.

    Attributes:
        shared: the shared values.
        finished: the last round that is done.
        evaluated: the last one that was scored; -1 before any.
        metrics: rows of round, client, point, split, metric and value.
        refused: lines about clients whose messages were refused.
        sizes: by client, its number of training images.
        held_out: by client and split, its number of held-out images.
        facts: per name that the rule reports, by round.
        traffic: bytes and numbers of tensors, counted as a simulation counts them.
        bytes_down: of tensors sent to clients, with their names, evaluations too.
        bytes_up: of uploads that were taken, likewise.
        seconds: of training and of evaluations.
    """

    def __init__(self, agreement: Agreement, grid: Carrier, timeout: float, name: str) -> None:
        self.method, self.rule, transform = agreement.constructed()
        self.name = run_name(name)
        method = self.method
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
        self._initial = initial
        #: what is uploaded in a round, by which phases the round has
        self._forms: dict[tuple[bool, ...], Values] = {}
        check_complete(self._expected(1), self.rule, method.roles.shared, method)
        for first in {phase.first_round for phase in method.local_phases()}:
            self._expected(first)  # what cannot be sent ends the server before anybody trains
        self._grid, self._timeout = grid, timeout
        #: by node, its client
        self.clients: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.held_out: dict[int, dict[str, int]] = {}
        self.metrics: list[tuple[int, int, str, str, str, float]] = []
        self.refused: list[str] = []
        self.facts: dict[str, dict[int, float]] = {}
        self.traffic = Traffic()
        self.seconds = {"training": 0.0, "evaluation": 0.0}
        self.bytes_down = self.bytes_up = 0
        self.finished, self.evaluated = 0, -1
        given = agreement.config["data"]
        metrics = chosen_metrics(given.get("metrics") or "basic", given.get("min_support", 1))
        #: what clients score themselves by
        self._scored = {metric.name: metric for metric in metrics}
        #: of what clients say of their training
        self._names = {"local/train/loss"}
        #: per name that the rule reports as one number a client, those of the last round
        self._client_facts: Values = {}
        #: by client what it said of its last training, since the last evaluation
        self._reported: dict[int, dict[str, float]] = {}

    def _expected(self, number: int) -> Values:
        """Return an upload of a round, of the right names, shapes and types."""
        if not self.method.sends_of_its_own and not self.method.roles.reported:
            return self._initial
        has = tuple(phase.is_in(number) for phase in self.method.local_phases())
        if has not in self._forms:
            made = self.agreement.constructed()
            self._forms[has] = message_form(*made, self.terms, self.agreement.image_size, number)
        return self._forms[has]

    # ------------------------------------------------------------------ who is there

    def meet(self) -> None:
        """Ask nodes that are new who they are, and forget those that are gone."""
        nodes = {*self._grid.get_node_ids()}
        self.clients = {node: client for node, client in self.clients.items() if node in nodes}
        new = sorted(nodes - self.clients.keys())
        for node, fields in sorted(self._ask(MessageType.QUERY, {node: self._content() for node in new}).items()):
            if why := self._stranger(fields):
                self._refuse(f"node {node}: {why}")
            else:
                self.clients[node] = fields["client"]
                self.sizes[fields["client"]] = fields["images"]
                self.held_out[fields["client"]] = held_out_of(fields) or {}

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
        if held_out_of(fields) is None:
            return f"{self._who(client)} says how many held-out images it has in another form"
        if fields.get("versions") != versions():
            return f"{self._who(client)} has {line(fields.get('versions'))}; the server {versions()}"
        if fields.get("frozen") != self.frozen:
            return f"{self._who(client)} has other frozen weights than the server"
        return ""

    def _who(self, client: int) -> str:
        name = line(self.agreement.client_names[client])
        return name if name.startswith("client") else f"client {name}"

    def _refuse(self, said: str) -> None:
        if said not in self.refused:  # nodes that are refused are asked again in the next round
            self.refused.append(said)
            log.warning("refused: %s", said)

    # ------------------------------------------------------------------ messages

    def _content(self, **fields: Any) -> RecordDict:
        return content(run=self.name, **fields)

    def _answers(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, Message]:
        """Send to nodes; return the answers that are none of an error or a refusal, by node."""
        asked = [
            Message(content=each, dst_node_id=node, message_type=kind, ttl=self._timeout)
            for node, each in contents.items()
        ]
        found: dict[int, Message] = {}
        for answer in self._grid.send_and_receive(asked, timeout=self._timeout) if asked else ():
            node = answer.metadata.src_node_id
            who = self._who(self.clients[node]) if node in self.clients else f"node {node}"
            try:
                if answer.has_error():
                    raise ConfigurationError(f"no answer ({line(answer.error.reason)})")
                if RECORD in answer.content and "refused" in (fields := fields_of(answer)):
                    raise ConfigurationError(line(fields["refused"]))
                if node not in contents or node in found:
                    raise ConfigurationError("an answer that nobody has asked for")
                found[node] = answer
            except ConfigurationError as error:
                self._refuse(f"{who}: {error}")
        for node in sorted(contents.keys() - found.keys()):
            log.info("no answer of node %s can be used", node)
        return found

    def _ask(self, kind: str, contents: Mapping[int, RecordDict]) -> dict[int, Mapping[str, Any]]:
        """Send to nodes; return what those answer that have something to say, by node."""
        found: dict[int, Mapping[str, Any]] = {}
        for node, answer in self._answers(kind, contents).items():
            try:
                found[node] = fields_of(answer)
            except ConfigurationError as error:
                self._refuse(f"node {node}: {error}")
        return found

    def _contents(self, round: Round, clients: tuple[int, ...], sent: Broadcast) -> dict[int, RecordDict]:
        """Return what clients are sent of a broadcast, by node."""
        nodes = {client: node for node, client in self.clients.items()}
        contents = {}
        for place, client in enumerate(clients):
            tensors = to_client(sent, place)
            self.bytes_down += len(tensors)
            of_round = {"clients": list(round.clients)} if round.clients else {}
            contents[nodes[client]] = self._content(tensors=tensors, round=round.number, **of_round)
        return contents

    def _send(self, kind: str, round: Round, clients: tuple[int, ...], sent: Broadcast) -> dict[int, Mapping[str, Any]]:
        """Send clients their parts of a broadcast; return what they answer, by client, ascending."""
        answers = self._ask(kind, self._contents(round, clients, sent))
        return dict(sorted((self.clients[node], fields) for node, fields in answers.items()))

    # ------------------------------------------------------------------ rounds

    def round(self, number: int) -> None:
        """Train for a round with those of its clients who are there."""
        began = time.perf_counter()
        round = Round(number, tuple(selected(self.rule, number)), self.terms.seed)
        there = tuple(client for client in round.clients if client in self.clients.values())
        with unchanged(self.shared, f"{self.rule.title}.broadcast"):
            sent = self.rule.broadcast(round, dict(self.shared), there) if there else Broadcast()
        self.traffic.start_round()
        for place in range(len(there)):
            self.traffic.down(1, sent.message(place))
        uploads_of = self._sum if self.agreement.secure_aggregation else self._uploads
        parcels = []
        for client, values in uploads_of(round, there, sent).items():
            place = there.index(client)
            known = sent.common | {name: rows[place] for name, rows in sent.own.items()}
            began_with = {name: known[name].unsqueeze(0) for name in values if name in known}
            common = frozenset(began_with.keys() - sent.own.keys())
            parcels.append(Parcel((client,), {n: v.unsqueeze(0) for n, v in values.items()}, began_with, {}, common))
        uploads = Uploads.gathered(parcels, self.sizes, number) if parcels else Uploads.nobody(self._expected(number))
        if parcels or self.rule.empty_rounds == "aggregate":
            self._aggregate(round, uploads)
            if overrides(self.method, "take"):
                self._answer(round, uploads.clients)
        else:
            log.warning("round %s is void: nothing has arrived; the server's values stay as they were", number)
            self.facts.setdefault(VOID, {})[number] = 1.0
        self._take_facts(round)
        self.finished = number
        self.seconds["training"] += (seconds := time.perf_counter() - began)
        facts = {name: of[number] for name, of in self.facts.items() if number in of and name != VOID}
        told = "".join(f", {name} {value:.4g}" for name, value in facts.items())
        done, of = f"{number} of {self.terms.rounds}", f"{len(parcels)} of {len(round.clients)} clients"
        log.info("round %s: %s, %.1f s%s", done, of, seconds, told)

    def _aggregate(self, round: Round, uploads: Uploads) -> None:
        with unchanged(self.shared, f"{self.rule.title}.aggregate"):
            new = self.rule.aggregate(round, self.shared, replace(uploads, now=self.shared))
        check_aggregate(new, f"{self.rule.title}.aggregate", self.shared)
        if spoiled := [name for name, value in new.items() if not value.isfinite().all()]:
            raise ConfigurationError(f"{self.rule.title} has made {spoiled[0]} of round {round.number} not finite")
        self.shared |= new

    def _take_facts(self, round: Round) -> None:
        """Take what the rule reports of a round, as a simulation does; each client's goes to the next scores."""
        found = facts_of(round, self.terms.num_clients, self.rule)
        self._client_facts = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                self.facts.setdefault(name, {})[round.number] = value

    def _answer(self, round: Round, clients: tuple[int, ...]) -> None:
        """Have those whose message has come take what the rule answers."""
        with unchanged(self.shared, f"{self.rule.title}.answer"):
            answer = self.rule.answer(round, dict(self.shared), clients)
        sizes = [counted(answer.message(place)) for place in range(len(clients))]
        self.traffic.answered(sum(size for size, _ in sizes), sum(numbers for _, numbers in sizes))
        self._send(TAKE, round, clients, answer)

    def _uploads(self, round: Round, clients: tuple[int, ...], sent: Broadcast) -> dict[int, Values]:
        """Have clients train; return what they upload, by client, ascending."""
        found = {}
        for client, fields in self._send(MessageType.TRAIN, round, clients, sent).items():
            if (values := self._upload(client, round.number, fields)) is not None:
                found[client] = values
                self._note(client, fields)
        return found

    def _sum(self, round: Round, clients: tuple[int, ...], sent: Broadcast) -> dict[int, Values]:
        """Have clients train; return for each the mean of what they upload, of which no single one is seen."""
        shapes = {name: self.shared[name] for name in sorted(self.shared)}
        numbers = sum(value.numel() for value in shapes.values())
        contents = self._contents(round, clients, sent)
        try:
            made = summed(
                self.agreement,
                round.number,
                contents,
                self._content(),
                numbers,
                partial(self._answers, MessageType.TRAIN),
                lambda node, why: self._refuse(f"round {round.number}: {self._who(self.clients[node])} sends {why}"),
            )
        except ConfigurationError as error:
            self._refuse(f"round {round.number}: {error}")
            return {}
        if made is None:
            log.warning("round %s: too few clients were there until the end to unmask their sum", round.number)
            return {}
        self.bytes_up += made.size
        parts = torch.from_numpy(made.change).split([value.numel() for value in shapes.values()])
        mean = {
            name: (sent.common[name].double() + part.view(value.shape)).to(value.dtype)
            for (name, value), part in zip(shapes.items(), parts, strict=True)
        }
        found = {}
        for client, fields in sorted((self.clients[node], fields) for node, fields in made.answers.items()):
            found[client] = mean
            self.traffic.up(1, [*mean.values()])
            self._note(client, fields)
        return found

    def _upload(self, client: int, number: int, fields: Mapping[str, Any]) -> Values | None:
        """Return a client's upload, or None if it is refused."""
        expected = self._expected(number)
        try:
            values = unpacked(fields.get("tensors"), size_of(expected))
            fault = fault_of(values, expected)
        except ConfigurationError as error:
            fault = str(error)
        if fault is not None:
            self._refuse(f"round {number}: the upload of {self._who(client)}: {line(fault)}")
            return None
        self.bytes_up += len(fields["tensors"])
        self.traffic.up(1, [*values.values()])
        return values

    def _note(self, client: int, fields: Mapping[str, Any]) -> None:
        """Note what a client says of its training, such as its loss."""
        means, why = reported(fields)
        if why:
            self._refuse(f"what {self._who(client)} says of its training: {why}")
        for name in sorted(means.keys() - self._names):
            if len(self._names) < MOST_REPORTED:
                self._names.add(name)
            else:
                del means[name]
                self._refuse(f"{self._who(client)} reports {line(name)}, one name more than {MOST_REPORTED}")
        self._reported[client] = means

    def unscored(self) -> tuple[int, ...]:
        """Return the clients that are there and have no scores of the last evaluation."""
        scored = {
            client for number, client, _, split, *_ in self.metrics if number == self.evaluated and split != "train"
        }
        return tuple(sorted({*self.clients.values()} - scored))

    def evaluate(self, number: int, clients: tuple[int, ...] | None = None) -> None:
        """Have clients score themselves after a round, by default all that are there."""
        began = time.perf_counter()
        if clients is None:
            clients = tuple(sorted(self.clients.values()))
        round = Round(number, (), self.terms.seed)
        sent = self.rule.broadcast(round, dict(self.shared), clients) if clients else Broadcast()
        for client, fields in self._send(MessageType.EVALUATE, round, clients, sent).items():
            held_out = self.held_out[client]
            scores = scores_of(fields, held_out)
            if why := why_no_scores(scores, [split for split, n in held_out.items() if n], self._scored):
                self._refuse(f"round {number}: the scores of {self._who(client)}: {why}")
            else:
                self._add(number, client, scores)
        for client, means in sorted(self._reported.items()):
            self._add(number, client, means)
        for name, values in self._client_facts.items():
            self.metrics += [(number, n, "server", "train", name, value) for n, value in enumerate(values.tolist())]
        self._reported, self._client_facts, self.evaluated = {}, {}, number
        self.seconds["evaluation"] += time.perf_counter() - began
        found = [row[5] for row in self.metrics if row[0] == number and row[2:5] == ("server", "test", "accuracy")]
        if found:
            log.info("round %s: test accuracy %.2f %% on average over clients", number, 100 * sum(found) / len(found))

    def _add(self, number: int, client: int, fields: Mapping[str, Any]) -> None:
        for name, value in fields.items():
            point, split, metric = name.split("/")
            self.metrics.append((number, client, point, split, metric, value))

    # ------------------------------------------------------------------ going on

    def state(self) -> dict[str, Any]:
        """Return what a server that is started again goes on from: tensors and plain values."""
        return {
            "agreement": self.agreement.digest,
            "shared": self.shared,
            "rule": self.rule.state_dict(),
            "traffic": self.traffic.state_dict(),
            "reported": self._reported,
            "client_facts": self._client_facts,
            **{name: getattr(self, name) for name in PLAIN},
        }

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned.

        Raises:
            ConfigurationError: it is of another deployment.
        """
        if state.get("agreement") != self.agreement.digest:
            raise ConfigurationError(f"{self.name} names another deployment; give this one a new name (run)")
        self.shared = dict(state["shared"])
        self.rule.load_state_dict(state["rule"])
        self.traffic.load_state_dict(state["traffic"])
        self._reported = state["reported"]
        self._client_facts = dict(state.get("client_facts", {}))  # older states have none
        for name in PLAIN:
            setattr(self, name, state[name])
        self._names |= {name for of_client in self._reported.values() for name in of_client}
        told = {row[2:5] for row in self.metrics if row[2:4] == ("local", "train")}
        self._names |= {"/".join(name) for name in told}


def run(
    server: LiveServer, outcome: "RunFolder", min_clients: int, wait: float, pause: Callable[[float], None]
) -> None:
    """Run all rounds of a deployment, or those that are left of it.

    Args:
        server: of it.
        outcome: keeps what there is after each round, and writes what has come of all.
        min_clients: without which no round begins.
        wait: seconds to wait for clients at the start of a round.
        pause: of this many seconds, a function.

    Raises:
        ConfigurationError: fewer clients than ``min_clients`` have come, the state to go on from is another's, or
            another server of this deployment runs.
    """
    with outcome.held():
        _run(server, outcome, min_clients, wait, pause)


def _run(
    server: LiveServer, outcome: "RunFolder", min_clients: int, wait: float, pause: Callable[[float], None]
) -> None:
    """Run all rounds, in a folder that nobody else writes to."""
    outcome.take_up(server)
    trainer, rounds = server.agreement.config["trainer"], server.terms.rounds
    every = trainer.get("check_val_every_n_epoch") or rounds
    first = 0 if trainer.get("num_sanity_val_steps") else 1
    wanted = len(server.terms.training_clients)
    if server.evaluated == rounds:  # started again after its end: for those who were away then
        _gather(server, wanted, wait, pause)
        server.evaluate(rounds, server.unscored())
        outcome.keep(server)
    while server.finished < rounds or server.evaluated < rounds:
        _gather(server, wanted, wait, pause)
        wanted = min_clients  # it is waited for all when the server starts
        if len(server.clients) < min_clients:
            raise ConfigurationError(
                f"round {server.finished + 1}: {len(server.clients)} clients are connected, and the deployment needs "
                f"{min_clients} (min-clients); see what the log says of those that were refused"
            )
        last = server.finished
        if last > server.evaluated and last >= first and (last % every == 0 or last == rounds):
            server.evaluate(last)
        else:
            server.round(last + 1)
        outcome.keep(server)
    outcome.write(server)


def _gather(server: LiveServer, wanted: int, wait: float, pause: Callable[[float], None]) -> None:
    """Meet the clients that are there; wait for so many."""
    waited = 0.0
    server.meet()
    while len(server.clients) < wanted and waited < wait:
        pause(2.0)
        waited += 2.0
        server.meet()
