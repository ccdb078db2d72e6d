"""The callbacks that make the Trainer's epochs rounds, and which server may be among them."""

from typing import Any

from lightning.pytorch.callbacks import Callback, ProgressBar

from benchmark.delivery import Delivery
from benchmark.engine.device.allocator import NoSearchForGarbage
from benchmark.engine.refusals.author_errors import check_constructed
from benchmark.engine.refusals.trainer_callbacks import given_callbacks
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.method import FederatedMethod
from benchmark.ranks.process_numbers import is_first_process
from benchmark.run.progress import RoundProgress
from benchmark.run.recorder import Recorder
from benchmark.server import ServerRule


def round_callbacks(
    recorder: Recorder, method: FederatedMethod, rule: ServerRule | None, delivery: Delivery | None, settings: Any
) -> list[Callback]:
    """Return the callbacks of a recorded federation: recorder, server where one is given, progress.

    A progress bar among the callbacks that are given takes the place of the display of rounds.

    Args:
        recorder: of the run.
        method: the run's; it brings a server where none is given.
        rule: the server that is given.
        delivery: what lies between clients and server, where something is given.
        settings: the Trainer's arguments, by name.

    Raises:
        ConfigurationError: see :func:`check_replaceable` and :func:`check_constructed`.
    """
    check_constructed(method, "num_clients")
    callbacks: list[Callback] = [recorder, NoSearchForGarbage()]
    if rule is not None:
        check_constructed(rule)
        check_replaceable(method, rule, settings.callbacks)
    if delivery is not None:
        check_constructed(delivery)
    if rule is not None or delivery is not None:
        callbacks.append(Server(method.make_server() if rule is None else rule, delivery))
    shown = settings.enable_progress_bar is not False and is_first_process() and not has_progress_bar(settings)
    return [*callbacks, RoundProgress()] if shown else callbacks


def has_progress_bar(settings: Any) -> bool:
    """Say whether the Trainer's arguments, by name, bring a progress bar of their own."""
    return any(isinstance(callback, ProgressBar) for callback in given_callbacks(settings.callbacks))


def check_replaceable(method: FederatedMethod, rule: ServerRule, callbacks: Any) -> None:
    """Refuse a server given for a method whose own server does more than average, or beside another server.

    Args:
        method: the run's.
        rule: the server that is given.
        callbacks: those given to the Trainer: one, a list, or None.

    Raises:
        ConfigurationError: the method's own server does something else, the method shares nothing, or there is a server
            among the callbacks.
    """
    title, own = type(method).__name__, type(method.make_server())
    if own is not ServerRule and not rule.around_any:
        raise ConfigurationError(f"server: {title} has a server of its own, {own.__name__}; leave server out")
    if not method.shared and not rule.around_any:
        raise ConfigurationError(f"server: {title} shares nothing that a server could make anew; leave server out")
    if any(isinstance(callback, Server) for callback in given_callbacks(callbacks)):
        raise ConfigurationError("server: trainer.callbacks holds a Server as well; leave one of the two out")
