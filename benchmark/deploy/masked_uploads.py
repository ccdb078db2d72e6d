"""A site's part in secure aggregation by Flower's SecAgg+, whose server sees the sum of uploads and none by itself.

What is here stands between Flower's protocol and our clients. All cryptography is Flower's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from cryptography.fernet import InvalidToken
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from benchmark.deploy.agreement import LARGEST_CHANGE, LEVELS, MOST_SUMMED, Agreement
from benchmark.deploy.messages import content, fields_of
from benchmark.errors import ConfigurationError
from benchmark.federation import Values

#: Masks and masked numbers are below it; the levels of all clients together are, too.
MODULUS = 2 * MOST_SUMMED * LEVELS
Next = Callable[[Message, Context], Message]


def secured(message: Message, context: Context, call_next: Next) -> Message:
    """Answer a message about training within the protocol, if the federation has agreed on it.

    A message out of the protocol is refused in a line: nothing leaves in the clear.
    """
    agreement = Agreement.read(context.run_config.get("agreement"))
    if not agreement.secure_aggregation:
        return call_next(message, context)

    def trained(message: Message, context: Context) -> Message:
        answer = call_next(message, context)
        if "refused" in (said := fields_of(answer)):
            raise ConfigurationError(str(said["refused"]))
        return answer

    try:
        _check_asked(message, agreement, context)
        return secaggplus_mod(message, context, trained)
    except ConfigurationError as error:
        why = str(error)
    except InvalidToken:
        why = "secure aggregation: another client's shares cannot be read"
    except (KeyError, TypeError, ValueError) as error:
        why = f"secure aggregation: {error}"
    return Message(content(refused=why), reply_to=message)


def _check_asked(message: Message, agreement: Agreement, context: Context) -> None:
    """Refuse what the server must not ask for.

    Raises:
        ConfigurationError: no part of the protocol, other terms than those agreed on, a sum over fewer clients than two
            or than were announced, or both secrets of one client.
    """
    asked = message.content.config_records.get(RECORD_KEY_CONFIGS)
    if asked is None:
        raise ConfigurationError("the server asks for an upload in the clear, and secure aggregation was agreed on")
    if asked.get(Key.STAGE) == Stage.SETUP:
        agreed = terms_of(agreement)
        if other := [name for name, value in agreed.items() if asked.get(name) != value]:
            raise ConfigurationError(
                f"secure aggregation with {other[0]} {asked.get(other[0])!r}; agreed on {agreed[other[0]]!r}"
            )
        clients, shares, threshold = (asked.get(n) for n in (Key.SAMPLE_NUMBER, Key.SHARE_NUMBER, Key.THRESHOLD))
        if (
            not isinstance(clients, int)
            or not isinstance(threshold, int)
            or clients < 2
            or shares != clients
            or not clients < 2 * threshold <= 2 * clients
        ):
            raise ConfigurationError(
                f"secure aggregation among {clients!r} clients, with {shares!r} shares of which {threshold!r} unmask; "
                "expected a share for each, and more than half, among two clients or more"
            )
    if asked.get(Key.STAGE) == Stage.SHARE_KEYS:
        announced = context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord()).get("sample_num")
        if (found := len({int(name) for name in asked if name != Key.STAGE})) != announced:  # Flower compares the keys
            raise ConfigurationError(f"the server has announced {announced!r} clients, and sends the keys of {found}")
    if asked.get(Key.STAGE) == Stage.UNMASK:
        active, dead = (numbers_in(asked, name) for name in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST))
        if {*active} & {*dead}:
            raise ConfigurationError("the server asks for both secrets of a client, which would unmask its upload")
        if len({*active}) < len(active):
            raise ConfigurationError(
                "the server counts a client twice, so that fewer than agreed on would unmask a sum"
            )


def terms_of(agreement: Agreement) -> dict[str, int | float]:
    """Return the protocol's terms that follow from an agreement, as Flower names them."""
    return {
        Key.CLIPPING_RANGE: LARGEST_CHANGE,
        Key.TARGET_RANGE: LEVELS,
        Key.MOD_RANGE: MODULUS,
        Key.MAX_WEIGHT: float(agreement.terms.own_row),
    }


def numbers_in(asked: Mapping[str, Any], name: str) -> list[int]:
    """Return a field that is a list, empty where it is none."""
    found = asked.get(name)
    return found if isinstance(found, list) else []


def to_be_masked(values: Values, received: Values, images: int, means: Mapping[str, float]) -> RecordDict:
    """Return an upload as Flower's client part takes it: how far the client has moved what it received, as one vector.

    Args:
        values: what it would send, by name.
        received: what the server had sent of these names.
        images: of the client, the weight of its upload.
        means: what it says of its training, which the server sees.

    Raises:
        ConfigurationError: a number has moved further than can be summed.
    """
    parts = [(values[name].double() - received[name].double()).flatten().cpu() for name in sorted(values)]
    change = torch.cat(parts).numpy()
    if (furthest := float(np.abs(change).max(initial=0.0))) > LARGEST_CHANGE:
        raise ConfigurationError(
            f"a number has moved by {furthest:.3g} in this round, and secure aggregation takes at most "
            f"{LARGEST_CHANGE:g}; train with a lower rate"
        )
    answer = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([change]), images, {})
    made = fitres_to_recorddict(answer, keep_input=False)
    return RecordDict({**made, **content(**means)})
