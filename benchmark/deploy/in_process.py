"""A deployment whose clients are this process: its messages are serialised as for Flower's network, and read again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from flwr.app import Context, Message, RecordDict, UserConfig
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from benchmark.deploy.agreement import Agreement
from benchmark.deploy.flower import client_app

#: The node of client 0; that of the others follow.
FIRST = 100


@dataclass(frozen=True)
class Carried:
    """One exchange.

    Attributes:
        kind: of the message, such as ``train``.
        client: who was asked.
        down: bytes of the message to the client, all that Flower puts on the wire for it.
        up: likewise of the answer.
    """

    kind: str
    client: int
    down: int
    up: int


class InProcess:
    """Carries messages to an app's clients in this process, as Flower's Grid does over a network.

    Args:
        agreement: of the deployment.
        folder: in which clients keep what is their own.

    Attributes:
        nodes: that are connected, one a client.
        node_config: further settings of all nodes.
        carried: all exchanges, in their order.
    """

    def __init__(self, agreement: Agreement, folder: Path) -> None:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # a message needs a sender
        self.app, self.folder = client_app(), folder
        self.config: UserConfig = {"agreement": agreement.text()}
        self.nodes = [FIRST + client for client in range(len(agreement.client_names))]
        self.node_config: dict[str, str] = {}
        self.carried: list[Carried] = []
        #: by node, what Flower keeps of it between messages
        self._states: dict[int, RecordDict] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are connected."""
        return self.nodes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Have the clients answer, the last one first."""
        for message in reversed([*messages]):
            node = message.metadata.dst_node_id
            arrived, down = _over_the_wire(message)
            yield self._answered(node, arrived, down)

    def _answered(self, node: int, message: Message, down: int) -> Message:
        config: UserConfig = {"partition-id": node - FIRST, "state": str(self.folder), **self.node_config}
        context = Context(1, node, config, self._states.setdefault(node, RecordDict()), self.config)
        answer, up = _over_the_wire(self.app(message, context))
        self._states[node] = context.state
        self.carried.append(Carried(message.metadata.message_type, node - FIRST, down, up))
        return answer


def _over_the_wire(message: Message) -> tuple[Message, int]:
    """Return a message as its receiver reads it, and the bytes that travel: Flower sends each of its parts once."""
    contents = {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
    size = sum(map(len, contents.values()))
    return cast(Message, inflate_object_from_contents(message.object_id, contents)), size
