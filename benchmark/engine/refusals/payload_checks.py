"""Check what travels between clients and a server's rule: broadcasts, uploads, new values, reports."""

import math
import operator
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.delivery import Delivery, Departure, Effect
from benchmark.engine.ranks.ranks import Ranks, fingerprint
from benchmark.engine.refusals.author_errors import place
from benchmark.engine.refusals.finite import finite_rows
from benchmark.engine.roles import Roles, overrides
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Facts, Round, Terms, Uploads, Values
from benchmark.server import Declared, ServerRule, WrappedRule


def own_rule(method: Declared) -> ServerRule:
    """Return the rule that a method brings.

    Raises:
        ConfigurationError: its ``make_server`` returns no object of a rule.
    """
    made: Any = method.make_server()
    if isinstance(made, ServerRule):
        return made
    found = f"the class {made.__name__}: write {made.__name__}()" if isinstance(made, type) else f"{made!r:.80}"
    where = place(method, "make_server") if isinstance(method, nn.Module) else "make_server"
    raise ConfigurationError(f"{where} must return an object of ServerRule or of a class of it; it returns {found}")


def check_rule(rule: object, method: Declared) -> None:
    """Refuse what is no rule, and a method without one of its own whose clients the plain mean would serve.

    Args:
        rule: that the server was given, or has from the method.
        method: whose.

    Raises:
        ConfigurationError: it is so.
    """
    if isinstance(rule, ServerRule) and type(rule) is not ServerRule:
        return
    own_rule(method)  # whose None has become the mean
    if not isinstance(rule, ServerRule):
        found = f"the class {rule.__name__}: write {rule.__name__}()" if isinstance(rule, type) else f"{rule!r:.80}"
        raise ConfigurationError(f"Server takes an object of ServerRule or of a class of it; it was given {found}")


def start(rule: ServerRule, initial: Values, terms: Terms) -> None:
    """Start a rule, and see that it has started its base and the rules inside of it.

    Args:
        rule: the server's.
        initial: see :meth:`benchmark.server.ServerRule.start`.
        terms: of the federation.

    Raises:
        ConfigurationError: its ``start`` calls not that of its base, or not that of a rule that it wraps.
    """
    title = type(rule).__name__
    first = f"{title}.start must call super().start(initial, terms) before anything else"
    try:
        rule.start(initial, terms)
    except AttributeError as error:
        if error.obj is rule and error.name == "terms":
            raise ConfigurationError(first) from error
        raise
    for name, inner in rule.named_modules():
        if isinstance(inner, ServerRule) and "terms" not in vars(inner):
            told = f"{title}.start must call self.{name}.start(initial, terms), or the rule inside never starts"
            raise ConfigurationError(told if name else first)


def check_together(rule: ServerRule, delivery: Delivery) -> None:
    """Refuse a rule around one that has to stand around all others, and a delivery that is not for the rule.

    Raises:
        ConfigurationError: there is one.
    """
    for name, inner in rule.named_modules():
        around = rule.get_submodule(name.rpartition(".")[0])
        if name and isinstance(inner, ServerRule) and inner.outermost and type(around) is not WrappedRule:
            outer, hiding = type(around).__name__, type(inner).__name__
            raise ConfigurationError(
                f"{outer} stands around {hiding} and sees what that one hides; put {hiding} outside: --server {hiding} "
                f"--server.inner {outer}"
            )
    rules = rule.rules
    deliveries = [each for each in delivery.modules() if isinstance(each, Delivery)]
    effects = frozenset[Effect]().union(*(each.effects for each in deliveries))
    sums = next((each for each in rules if not each.takes_updates), None)
    if sums is not None and effects:
        raise ConfigurationError(
            f"{delivery.title} takes what a client sends for what it received and an update, and to {sums.title} "
            "clients send sums over their images; leave compression and repeat_last out, and take policy wait or drop, "
            "and on_invalid drop or raise"
        )
    unfit = next((each for each in rules if not each.takes_stale), None)
    if unfit is not None and "late" in effects:
        raise ConfigurationError(
            f"{delivery.title} hands over uploads of earlier rounds, and to {unfit.title} they mean nothing: what its "
            "clients train or send changes from round to round; take policy wait or drop"
        )
    if unfit is not None and "carried over" in effects:
        raise ConfigurationError(
            f"{delivery.title} adds a part of a client's update to a later one, or sends one again, and to "
            f"{unfit.title} that means nothing: what its clients train or send changes from round to round; set TopK's "
            "error_feedback to false, and take another kind of fault than repeat_last"
        )
    noising = next((each for each in rules if each.noises_uploads), None)
    if noising is not None and "compressed" in effects:
        raise ConfigurationError(
            f"{delivery.title} compresses updates before {type(noising).__name__} noises each of them (noise: local), "
            "and a noised update cannot be sent in fewer bytes; leave the compression out, or set noise to central"
        )
    private = next((type(each).__name__ for each in rules if each.outermost), "")
    for each in deliveries:
        if private and not each.each_by_itself:
            raise ConfigurationError(
                f"what {type(each).__name__} makes of an upload may depend on other clients', for which {private} "
                "cannot account; leave it out, or set what looks at each upload by itself (docs/robustness.md)"
            )


def check_draws(rule: ServerRule, ranks: Ranks) -> None:
    """Refuse draws without a key where several processes have to make the same of the same uploads.

    Raises:
        ConfigurationError: there are some.
    """
    unkeyed = [each for each in rule.rules if each.draws_without_key]
    if unkeyed and ranks.count > 1:
        raise ConfigurationError(
            f"{type(unkeyed[0]).__name__}: noise_seed entropy gives each of {ranks.count} processes another noise; set "
            "noise_seed to run, or trainer.devices to 1"
        )


@contextmanager
def unchanged(values: Values, title: str) -> Iterator[None]:
    """Refuse that a rule writes into tensors that it is given to read.

    Args:
        values: which.
        title: of the rule's function, for messages.

    Raises:
        ConfigurationError: torch has counted an in-place change of one of them meanwhile.
    """
    before = [(name, value, value._version) for name, value in values.items()]
    yield
    for name, value, version in before:
        if value._version != version:
            raise ConfigurationError(
                f"{title} changes {name!r} in place, which it is given to read; make a new tensor and return it"
            )


def selected(rule: ServerRule, number: int) -> list[int]:
    """Ask a rule for the clients of a round, ascending.

    Raises:
        ConfigurationError: it gives no list of numbers, one twice, or one that does not train.
    """
    made: Any = rule.select(number)
    if not overrides(rule, "select"):
        return sorted(made)
    try:
        clients = sorted(map(operator.index, made))
    except TypeError:
        given = " ".join(f"{made!r}".split())[:80]
        raise ConfigurationError(
            f"{type(rule).__name__}.select must return a list of clients' numbers, such as [0, 3]; it returns {given} "
            f"in round {number}"
        ) from None
    else:
        strangers = sorted(set(clients) - set(rule.terms.training_clients))
        twice = [one for one, other in pairwise(clients) if one == other]
        said = f"client {twice[0]} twice" if twice else ""
        said = f"client {strangers[0]}, which does not train," if strangers else said
        if said:
            raise ConfigurationError(
                f"{type(rule).__name__}.select gives {said} in round {number}; expected some of training_clients, each "
                "of them once"
            )
    return clients


def departed(delivery: Delivery, round: Round) -> Departure:
    """Ask a delivery what becomes of the selected clients.

    Raises:
        ConfigurationError: it names others, or one that sends without training, or trains without being reached.
    """
    made, of = delivery.depart(round, round.clients), round.clients
    for name in ("reached", "trained", "sent"):
        clients = getattr(made, name)
        if not {*clients} <= {*of} or sorted({*clients}) != [*clients]:
            raise ConfigurationError(
                f"{delivery.title}.depart gives {name}={clients!r:.60} in round {round.number}; expected some of "
                f"{of!r:.60}, ascending"
            )
        of = clients
    return made


def check_arrived(arrived: Uploads, delivery: Delivery, sent: Uploads, round: Round) -> None:
    """Refuse uploads that a rule could not read.

    Args:
        arrived: what the delivery hands to the rule.
        delivery: that has made it.
        sent: what it was given.
        round: which.

    Raises:
        ConfigurationError: they have other names or shapes than what was sent, not a row for each client, or clients
            that are not ascending; or there are messages that can't be read, and nothing refuses them.
    """
    said = ""
    if isinstance(arrived, Uploads) and arrived.misfits:
        client, message = min(arrived.misfits.items())
        shapes = {name: tuple(value.shape) for name, value in message.items()}
        raise ConfigurationError(
            f"the message of client {client} in round {round.number} can't be read: it holds {shapes!r:.200}; a "
            "delivery that validates refuses such messages: --delivery Validation"
        )
    if not isinstance(arrived, Uploads):
        said = f"returns {type(arrived).__name__}"
    elif list(arrived.clients) != sorted({*arrived.clients}):
        said = f"gives clients {arrived.clients!r:.60}, which do not ascend"
    elif sent.clients and arrived.values.keys() != sent.values.keys():
        said = f"gives {sorted(arrived.values)}, of {sorted(sent.values)}"
    else:
        count = len(arrived.clients)
        rows = {"weights": arrived.weights, **arrived.values}
        given = {"weights": sent.weights, **sent.values}
        for name, value in rows.items():
            if not said and name in given and tuple(value.shape) != (count, *given[name].shape[1:]):
                said = f"gives {name!r} of shape {tuple(value.shape)}; expected {(count, *given[name].shape[1:])}"
    if said:
        raise ConfigurationError(
            f"{delivery.title}.arrive {said} in round {round.number}; expected uploads as they were sent, a row "
            "for each client"
        )


def facts_of(round: Round, num_clients: int, *reporting: ServerRule | Delivery) -> Facts:
    """Return what rules and deliveries report of a round: numbers, and float64 [N] of those that are one a client.

    Raises:
        ConfigurationError: two report the same name, or a number is not finite, or of another shape.
    """
    found: Facts = {}
    for who in reporting:
        made: Any = who.report(round)
        if not isinstance(made, Mapping):
            raise ConfigurationError(
                f"{who.title}.report must return a dict of numbers, {{}} where there are none; it returns {made!r:.80}"
            )
        for name, value in made.items():
            said = "which another one reports, too" if name in found else ""
            if isinstance(value, Tensor) and value.ndim:
                value = value.detach().double().cpu()
                if value.shape != (num_clients,):
                    said = f"of shape {tuple(value.shape)}; expected a number, or {(num_clients,)}: one a client"
            else:
                given = f"{value!s:.60}"
                try:
                    value = float(value)
                except (TypeError, ValueError, OverflowError):
                    value = math.nan
                if not math.isfinite(value):
                    said = f"= {given}; expected a finite number"
            if said:
                raise ConfigurationError(f"{who.title}.report gives {name!r} {said} (round {round.number})")
            found[name] = value
    return found


def check_message(made: Values, method: nn.Module, roles: Roles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what clients may not send.

    Args:
        made: the messages of a cohort, [K, ...] each.
        method: whose.
        roles: of its parameters.
        shapes: of the trained ones.

    Raises:
        ConfigurationError: a message holds what is personal and not named in ``uploads``, or has a name that means
            something else.
    """
    title = f"{type(method).__name__}.message"
    for name, value in made.items():
        if name in roles.reported:
            raise ConfigurationError(f"{title} gives {name!r}, which client_loss reports; take another name")
        if name in roles.personal and name not in roles.uploaded:
            raise ConfigurationError(f"{title} gives {name!r}, which is personal; name it in uploads, or send less")
        if name in shapes and tuple(value.shape[1:]) != shapes[name]:
            raise ConfigurationError(
                f"{title} gives {name!r} of shape {tuple(value.shape[1:])}; expected {shapes[name]}, or another name"
            )


def check_complete(sent: Collection[str], rule: ServerRule, shared: Collection[str], method: nn.Module) -> None:
    """Refuse messages without what a mean is taken of.

    Raises:
        ConfigurationError: the rule averages, and a shared parameter is not sent.
    """
    missing = [name for name in shared if name not in sent]
    if missing and not overrides(rule, "aggregate"):
        raise ConfigurationError(
            f"{type(method).__name__}.message leaves out {missing[0]!r}, of which {rule.title} takes the mean; send "
            "it, or have make_server return a rule that reads what is sent"
        )


def check_taken(made: Values, method: nn.Module, personal: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse new values that are none of a client's own.

    Args:
        made: new values of a cohort, [K, ...] each.
        method: whose ``take`` has made them.
        personal: the shapes of the personal parameters.

    Raises:
        ConfigurationError: another name or shape, or a number that is not finite.
    """
    title = f"{type(method).__name__}.take"
    for name, value in made.items():
        if name not in personal or tuple(value.shape[1:]) != personal[name]:
            expected = personal.get(name, f"some of the personal parameters: {', '.join([*personal][:5])}")
            raise ConfigurationError(f"{title} gives {name!r} of shape {tuple(value.shape[1:])}; expected {expected}")
        if not all(finite_rows([value], len(value))):
            raise ConfigurationError(f"{title} gives {name!r} with numbers that are not finite")


def check_broadcast(sent: Broadcast, count: int, title: str, trained: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a message that its receivers could not read.

    Args:
        sent: what they receive.
        count: how many there are.
        title: who sends it.
        trained: the shapes of those that local training may move.

    Raises:
        ConfigurationError: a value has not the shape of its parameter, or not a row for each client, or a mask is not
            that of a value's rows.
    """
    if not isinstance(sent, Broadcast):
        raise ConfigurationError(
            f"{title} must return a Broadcast of what clients receive; it returns {type(sent).__name__}"
        )
    for values, ahead in ((sent.common, ()), (sent.own, (count,))):
        for name, value in values.items():
            given = f"{title} gives {name!r} of shape {tuple(value.shape)}"
            if name in trained and tuple(value.shape) != ahead + trained[name]:
                raise ConfigurationError(
                    f"{given} to {count} clients; expected {trained[name]} in common, or {(count, *trained[name])} as "
                    "their own"
                )
            if name not in trained and (below := [of for of in trained if of.startswith(f"{name}.")]):
                raise ConfigurationError(f"{title} gives {name!r}; expected the whole name, such as {below[0]!r}")
            if ahead and tuple(value.shape[:1]) != ahead:
                raise ConfigurationError(f"{given} as {count} clients' own; expected a row for each")
    for name, mask in sent.masks.items():
        if name not in sent.own or mask.dtype != torch.bool or mask.shape != sent.own[name].shape[:2]:
            expected = f"bool {tuple(sent.own[name].shape[:2])}" if name in sent.own else f"one of {[*sent.own]}"
            raise ConfigurationError(
                f"{title} gives a mask of {name!r}, {str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}; "
                f"expected {expected}"
            )


def check_aggregate(values: Values, title: str, shared: Values) -> None:
    """Refuse new values that are no shared parameters.

    Args:
        values: what the rule made.
        title: of the rule's function, for messages.
        shared: the old values.

    Raises:
        ConfigurationError: a name that is not shared, or another shape.
    """
    if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
        raise ConfigurationError(
            f"{title} must return new values of shared parameters, a tensor by each one's name; it returns "
            f"{type(values).__name__}"
        )
    for name, value in values.items():
        if name not in shared:
            raise ConfigurationError(
                f"{title} gives {name!r}, which is not shared; expected some of: {', '.join([*shared][:5])}"
            )
        if value.shape != shared[name].shape:
            raise ConfigurationError(
                f"{title} gives {name!r} of shape {tuple(value.shape)}; expected {tuple(shared[name].shape)}"
            )


def check_server_state(rule: ServerRule, delivery: Delivery, round: Round, shared: Values, ranks: Ranks) -> None:
    """Refuse what a rule has made of uploads, which were finite as they left.

    Args:
        rule: with its own state.
        delivery: that has handed the uploads over.
        round: after which.
        shared: the new shared values.
        ranks: the processes, which have made the same.

    Raises:
        ConfigurationError: shared values or the rule's own are not finite, or others on another rank.
    """
    title = type(rule).__name__
    # A mean of finite numbers is finite.
    made = [] if rule.takes_the_mean and delivery.is_plain else [*shared.values()]
    of, advice = "finite uploads", "lower the server's learning rate, or the clients'"
    if not delivery.is_plain:
        of = f"what {delivery.title} hands over"
        advice = f"have a delivery around it that refuses what is not finite (--delivery Validation), or {advice}"
    for values in (made, [*rule.parameters(), *rule.buffers()]):
        if not finite_rows([value.unsqueeze(0) for value in values], 1)[0]:
            raise ConfigurationError(
                f"training diverged: values that {title} made of {of} were not finite in round {round.number}; {advice}"
            )
    if ranks.count > 1:
        ranks.agree(
            f"the server's values after round {round.number}",
            fingerprint(shared, rule.state_dict()),
            f"{title} must make the same of the same uploads; draws have a key of seed and round, and all ranks one "
            "kind of device",
        )


def check_reported(reported: Collection[str], method: nn.Module, roles: Roles) -> None:
    """Refuse a name in ``uploads`` that stands for nothing.

    Args:
        reported: names that the steps of a round have reported; none where there was no step.
        method: that takes them.
        roles: of its parameters.

    Raises:
        ConfigurationError: it is no parameter, and not reported.
    """
    unknown = [name for name in roles.reported if reported and name not in reported]
    if unknown:
        raise ConfigurationError(
            f"{type(method).__name__}: uploads names {unknown[0]!r}, which is no parameter and which client_loss does "
            f"not report; it reports {', '.join(reported)}"
        )
