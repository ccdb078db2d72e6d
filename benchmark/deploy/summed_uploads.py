"""The server's part in secure aggregation by Flower's SecAgg+: it gets the sum of uploads, and none by itself.

What is here stands between our rounds and Flower's protocol. All cryptography is Flower's.
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import recorddict_to_fitres
from flwr.server import LegacyContext
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, generate_key_pairs, private_key_to_bytes

from benchmark.deploy.agreement import LARGEST_CHANGE, LEVELS, Agreement
from benchmark.deploy.masked_uploads import MODULUS, numbers_in, terms_of
from benchmark.deploy.messages import RECORD, fields_of
from benchmark.errors import ConfigurationError

#: Share of a round's clients whose answers unmask the sum. Sites take none of half or less: with such a share a server
#: could have one half unmask one sum and the other half another.
THRESHOLD = 0.67
#: Bytes of a share of a mask's seed, of 32 bytes, and of a private key: a number, and blocks of 16 bytes.
SEED_SHARE, KEY_SHARE = (4 + 16 * (size // 16 + 1) for size in (32, len(private_key_to_bytes(generate_key_pairs()[0]))))
Send = Callable[[Mapping[int, RecordDict]], Mapping[int, Message]]
Refuse = Callable[[int, str], None]


@dataclass(frozen=True)
class Summed:
    """Hold what the server learns of a round's uploads.

    Attributes:
        change: weighted mean of how far clients have moved what they received, float64 [P], names sorted.
        answers: of those whose uploads are in it, by node: what else they say.
        size: bytes of all masked uploads.
    """

    change: np.ndarray
    answers: dict[int, Mapping[str, Any]]
    size: int


class _Node:
    """Stands for a client in Flower's workflow, which reads its number alone."""

    def __init__(self, node_id: int) -> None:
        self.node_id = node_id


class _Round(FedAvg):
    """Hands Flower's workflow the clients of a round, and takes what it makes of their uploads."""

    def __init__(self, nodes: Iterable[int]) -> None:
        super().__init__()
        self.nodes = [*nodes]
        self.summed: np.ndarray | None = None

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Name the clients; what they receive is added where messages leave."""
        nothing = Parameters([], "")
        return [(cast(ClientProxy, _Node(node)), FitIns(nothing, {})) for node in self.nodes]

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]], failures: Any
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Take the sum, which the workflow gives as the upload of each."""
        if results:
            (self.summed,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


class _GoneError(Exception):
    """Some clients are gone before anybody has sent an upload, so that the protocol can begin again without them.

    Attributes:
        there: nodes of the others.
    """

    def __init__(self, there: Iterable[int]) -> None:
        self.there = {*there}


class _Grid:
    """Carries the protocol's messages: adds what a site needs, and lets answers of the right form through."""

    def __init__(
        self, send: Send, refuse: Refuse, contents: Mapping[int, RecordDict], greeting: RecordDict, numbers: int
    ) -> None:
        self.send, self.refuse, self.contents, self.greeting, self.numbers = send, refuse, contents, greeting, numbers
        self.answers: dict[int, Mapping[str, Any]] = {}
        self.size = 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages of one stage; return the answers that belong to it.

        Raises:
            _GoneError: a client has not given its keys; Flower's server would ask the others for shares of them.
        """
        asked, stage = {}, ""
        for message in messages:
            node, stage = message.metadata.dst_node_id, str(message.content.config_records[RECORD_KEY_CONFIGS]["stage"])
            ours = self.contents[node] if stage == Stage.COLLECT_MASKED_VECTORS else self.greeting
            asked[node] = RecordDict({**message.content, **ours})
        found: dict[int, Message] = {}
        answers = self.send(asked)
        keys = Counter(key for answer in answers.values() for key in _keys(answer) if isinstance(key, bytes))
        for node, answer in answers.items():
            why = self._why_not(node, answer, stage, _configs(asked[node]))
            if not why and any(isinstance(key, bytes) and keys[key] > 1 for key in _keys(answer)):
                why = "keys that another client sends, too"
            if why:
                self.refuse(node, why)
            else:
                found[node] = answer
        if stage in (Stage.SETUP, Stage.SHARE_KEYS) and len(found) < len(asked):
            raise _GoneError(found)
        if stage == Stage.COLLECT_MASKED_VECTORS:
            self.answers = {node: fields_of(answer) for node, answer in found.items()}
            self.size = sum(len(part) for answer in found.values() for part in _masked(answer))
        return [*found.values()]

    def _why_not(self, node: int, answer: Message, stage: str, asked: Mapping[str, Any]) -> str:
        """Return why the server side of Flower's secure aggregation cannot read an answer to a stage, or nothing."""
        given = _configs(answer.content)
        match stage:
            case Stage.SETUP:
                first, second = _keys(answer)
                return "" if first != second and _is_key(first) and _is_key(second) else "no two public keys"
            case Stage.SHARE_KEYS:
                others = {*self.contents} - {node}
                fits = _pairs(given, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, others)
                return "" if fits else "no shares for each other client"
            case Stage.UNMASK:
                active, dead = (numbers_in(asked, name) for name in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST))
                if not _pairs(given, Key.NODE_ID_LIST, Key.SHARE_LIST, {*active, *dead}):
                    return "no share of each secret that was asked for"
                shares = zip(numbers_in(given, Key.NODE_ID_LIST), given[Key.SHARE_LIST], strict=True)
                sizes = dict.fromkeys(dead, KEY_SHARE)
                fits = all(_is_share(share, sizes.get(n, SEED_SHARE), len(self.contents)) for n, share in shares)
                return "" if fits else "shares of another form"
        if not isinstance(answer.content.get(RECORD), ConfigRecord):
            return "nothing of its training"
        try:
            recorddict_to_fitres(answer.content, keep_input=True)
        except Exception as error:  # whatever Flower raises of an answer
            return f"an upload without Flower's own fields ({type(error).__name__})"
        parts, shapes = _masked(answer), [(1,), (self.numbers,)]
        fits = len(parts) == len(shapes) and all(map(_is_vector, parts, shapes))
        return "" if fits else "no masked numbers, one for each that was asked for"


def _configs(content: RecordDict) -> Mapping[str, Any]:
    return content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())


def _keys(answer: Message) -> tuple[Any, Any]:
    """Return both public keys of a client's first answer, each None in its others."""
    given = _configs(answer.content)
    return given.get(Key.PUBLIC_KEY_1), given.get(Key.PUBLIC_KEY_2)


def _is_key(given: object) -> bool:
    """Return whether bytes are a public key of the curve on which Flower's clients agree on secrets."""
    try:
        key = bytes_to_public_key(given) if isinstance(given, bytes) else None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP384R1)


def _is_share(given: bytes, size: int, clients: int) -> bool:
    """Return whether bytes can be a share: its number, and as many bytes as all of this kind have."""
    return len(given) == size and 1 <= int.from_bytes(given[:4], "little") <= clients


def _pairs(given: Mapping[str, Any], numbers: str, texts: str, expected: set[int]) -> bool:
    """Return whether there is one text for each of the expected numbers."""
    first, second = numbers_in(given, numbers), given.get(texts)
    if not isinstance(second, list) or not len(first) == len(second) == len(expected):
        return False
    return {*first} == expected and all(isinstance(text, bytes) for text in second)


def _masked(answer: Message) -> list[bytes]:
    found = _configs(answer.content).get(Key.MASKED_PARAMETERS)
    return [part for part in found if isinstance(part, bytes)] if isinstance(found, list) else []


def _is_vector(part: bytes, shape: tuple[int, ...]) -> bool:
    """Return whether bytes are an array of int64, by its header: a shape of others' is no reason to take memory."""
    stream = io.BytesIO(part)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            return False
        found, _, kind = np.lib.format.read_array_header_1_0(stream)
    except (ValueError, TypeError, KeyError, MemoryError, RecursionError):
        return False
    return kind == np.int64 and found == shape and len(part) == stream.tell() + 8 * math.prod(shape)


def summed(
    agreement: Agreement,
    number: int,
    contents: Mapping[int, RecordDict],
    greeting: RecordDict,
    numbers: int,
    send: Send,
    refuse: Refuse,
) -> Summed | None:
    """Run the protocol among the clients of a round.

    Args:
        agreement: of the deployment.
        number: of the round.
        contents: by node, what asks it to train.
        greeting: what goes with all other messages.
        numbers: P, that each uploads.
        send: sends contents to nodes, and returns the answers that are no refusals.
        refuse: is told of a node whose answer cannot be used, and what it is instead.

    Returns:
        None where too few clients were there until the end.

    Raises:
        ConfigurationError: a client has answered what cannot be unmasked.
    """
    there = dict(contents)
    while len(there) > 1:
        strategy, grid = _Round(there), _Grid(send, refuse, there, greeting, numbers)
        state = RecordDict({"config": ConfigRecord({"current_round": number}), "parameters": ArrayRecord()})
        context = LegacyContext(Context(0, 0, {}, state, {}), strategy=strategy)
        try:
            _workflow(agreement)(cast(Any, grid), context)
        except _GoneError as gone:
            there = {node: asked for node, asked in there.items() if node in gone.there}
            continue
        except Exception as error:  # whatever Flower raises of answers of others
            raise ConfigurationError(f"secure aggregation has failed: {type(error).__name__} ({error})") from error
        return None if strategy.summed is None else Summed(strategy.summed, grid.answers, grid.size)
    return None


def _workflow(agreement: Agreement) -> SecAggPlusWorkflow:
    agreed = terms_of(agreement)
    return SecAggPlusWorkflow(
        1.0,
        THRESHOLD,
        max_weight=agreed[Key.MAX_WEIGHT],
        clipping_range=LARGEST_CHANGE,
        quantization_range=LEVELS,
        modulus_range=MODULUS,
    )
