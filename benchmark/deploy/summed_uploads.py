"""The server's part in secure aggregation by Flower's SecAgg+: it gets the sum of uploads, and none by itself.

What is here stands between our rounds and Flower's protocol. All cryptography is Flower's.
"""

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, FitRes, Parameters, Scalar, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server import LegacyContext
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow

from benchmark.deploy.agreement import LARGEST_CHANGE, LEVELS, Agreement
from benchmark.deploy.masked_uploads import MODULUS, numbers_in, terms_of
from benchmark.deploy.messages import fields_of
from benchmark.errors import ConfigurationError

#: Share of a round's clients whose answers unmask the sum. Sites take none of half or less: with such a share a server
#: could have one half unmask one sum and the other half another.
THRESHOLD = 0.67
Send = Callable[[Mapping[int, RecordDict]], Mapping[int, Message]]


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

    def __init__(self, send: Send, contents: Mapping[int, RecordDict], greeting: RecordDict, numbers: int) -> None:
        self.send, self.contents, self.greeting, self.numbers = send, contents, greeting, numbers
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
        found = {node: answer for node, answer in self.send(asked).items() if self._fits(answer, stage)}
        if stage in (Stage.SETUP, Stage.SHARE_KEYS) and len(found) < len(asked):
            raise _GoneError(found)
        if stage == Stage.COLLECT_MASKED_VECTORS:
            self.answers = {node: fields_of(answer) for node, answer in found.items()}
            self.size = sum(len(part) for answer in found.values() for part in _masked(answer))
        return [*found.values()]

    def _fits(self, answer: Message, stage: str) -> bool:
        """Return whether the server side of Flower's secure aggregation can read an answer to this stage."""
        given = answer.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        match stage:
            case Stage.SETUP:
                return all(isinstance(given.get(name), bytes) for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2))
            case Stage.SHARE_KEYS:
                return _pairs(given, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST)
            case Stage.UNMASK:
                asked = {*self.contents}
                return (
                    _pairs(given, Key.NODE_ID_LIST, Key.SHARE_LIST) and {*numbers_in(given, Key.NODE_ID_LIST)} <= asked
                )
        arrays = [_array(part) for part in _masked(answer)]
        shapes = [(1,), (self.numbers,)]
        return [array.shape for array in arrays] == shapes and all(array.dtype == np.int64 for array in arrays)


def _pairs(given: Mapping[str, Any], numbers: str, texts: str) -> bool:
    first, second = given.get(numbers), given.get(texts)
    both = isinstance(first, list) and isinstance(second, list) and len(first) == len(second)
    return both and all(type(n) is int for n in first or ()) and all(isinstance(t, bytes) for t in second or ())


def _masked(answer: Message) -> list[bytes]:
    given = answer.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    found = given.get(Key.MASKED_PARAMETERS)
    return [part for part in found if isinstance(part, bytes)] if isinstance(found, list) else []


def _array(part: bytes) -> np.ndarray:
    try:
        return cast(np.ndarray, np.load(io.BytesIO(part), allow_pickle=False))
    except (ValueError, EOFError, OSError):
        return np.empty(0)


def summed(
    agreement: Agreement,
    number: int,
    contents: Mapping[int, RecordDict],
    greeting: RecordDict,
    numbers: int,
    send: Send,
) -> Summed | None:
    """Run the protocol among the clients of a round.

    Args:
        agreement: of the deployment.
        number: of the round.
        contents: by node, what asks it to train.
        greeting: what goes with all other messages.
        numbers: P, that each uploads.
        send: sends contents to nodes, and returns the answers that are no refusals.

    Returns:
        None where too few clients were there until the end.

    Raises:
        ConfigurationError: a client has answered what cannot be unmasked.
    """
    there = dict(contents)
    while len(there) > 1:
        strategy, grid = _Round(there), _Grid(send, there, greeting, numbers)
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
