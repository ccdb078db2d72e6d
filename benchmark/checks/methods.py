"""Check what every method must keep, whatever it learns: each check makes it anew and trains it for a few rounds."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmark.checks.outcome import NotCheckedError, require, require_equal
from benchmark.contract import Stage
from benchmark.engine.cohort import Cohort
from benchmark.engine.plan import round_plan
from benchmark.engine.plan.work import Step, cohorts
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Parcel, Round, Values
from benchmark.method import FederatedMethod
from benchmark.run.checkpoint import AtomicCheckpointIO, round_checkpoint
from benchmark.run.cli import TRAINER_DEFAULTS
from benchmark.run.recorder import Recorder
from benchmark.server import ServerRule
from datamodules.federated import FederatedDataModule

ROUNDS = 3
#: Settings of :func:`run_rounds` for an evaluation before the first round and after each.
EACH_ROUND = {"check_val_every_n_epoch": 1, "num_sanity_val_steps": -1}


@dataclass
class MethodUnderCheck:
    """A method that can be made again and again.

    Attributes:
        make: gives a new method and its data, for options as on the command line, such as ``--data.clients_at_once=3``.
        tolerance: of what may differ with the clients at once, absolute and relative.
    """

    make: Callable[..., tuple[Any, FederatedDataModule]]
    tolerance: float = 2e-5

    def trained(self, *options: str, rounds: int = ROUNDS) -> FederatedMethod:
        """Return a new method after some rounds."""
        method, data = self.make(*options)
        run_rounds(method, data, rounds)
        return method

    @cached_property
    def watched(self) -> "Watched":
        """Two rounds of two clients at a time, whose messages are noted."""
        return Watched(self)

    @cached_property
    def reference(self) -> dict[str, Tensor]:
        """Return what three rounds leave behind, one client after the other."""
        return learned(self.trained("--data.clients_at_once=1"))


def run_rounds(
    method: FederatedMethod,
    data: FederatedDataModule,
    rounds: int,
    callbacks: list[Callback] | None = None,
    ckpt_path: str | None = None,
    save_to: Path | None = None,
    settings: dict[str, Any] | None = None,
    evaluate: bool = True,
) -> Trainer:
    """Run the federation, evaluated after its last round, or not at all; returns the Trainer."""
    callbacks = [Recorder(), *(callbacks or []), *([round_checkpoint(save_to)] if save_to else [])]
    defaults = {**TRAINER_DEFAULTS, "max_epochs": rounds, "accelerator": "cpu", "enable_progress_bar": False}
    defaults["check_val_every_n_epoch"] = max(rounds, 1)
    defaults["num_sanity_val_steps"] = 0 if rounds else -1
    given = {**defaults, **(settings or {})}
    trainer = Trainer(
        **(given if evaluate else {**given, "limit_val_batches": 0}),
        logger=False,
        enable_checkpointing=save_to is not None,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
    )
    trainer.fit(method, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def learned(method: FederatedMethod) -> dict[str, Tensor]:
    """Everything a run leaves behind: shared values, all clients' and the server's state, who trained, all metrics."""
    state = clients_and_server(method)
    state |= {f"server.{n}": v for n, v in _tensors(method.server.state_dict()).items()}
    state["trained"] = torch.tensor([-1 if has is None else has for has in method.server.who_trained() or ()])
    callbacks = method.trainer.callbacks  # type: ignore[attr-defined]
    recorder = next(callback for callback in callbacks if isinstance(callback, Recorder))
    return state | {"metric." + "/".join(map(str, key)): v for key, v in recorder.values.items()}


def clients_and_server(method: FederatedMethod) -> dict[str, Tensor]:
    """The shared values, and the rows of all clients."""
    state = {name: value.clone() for name, value in method.simulation.shared().items()}
    return state | {f"store.{name}": method.store.all_rows(name).clone() for name in method.store.names}


def _tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value.detach().clone()}
    if isinstance(value, dict):
        return {k: t for key, v in value.items() for k, t in _tensors(v, f"{name}.{key}").items()}
    return {}


# --------------------------------------------------------------------------------------------------- the checks


def check_run(subject: MethodUnderCheck) -> None:
    """It trains, is evaluated, and does nothing that cannot be done for many clients at once."""
    run_rounds(*subject.make(), 1, settings=EACH_ROUND)


def check_clients_at_once(subject: MethodUnderCheck) -> None:
    """The number of clients at once changes nothing."""
    require_same_at_width(subject, 3)


def require_same_at_width(subject: MethodUnderCheck, width: int | str, workers: int = 0) -> FederatedMethod:
    """Require what three rounds leave behind to be that of width 1; returns the method."""
    method = subject.trained(f"--data.clients_at_once={width}", f"--data.num_workers={workers}")
    require_equal(
        subject.reference,
        learned(method),
        "a client's step must depend on its own tensors alone: look for values kept on the method between calls",
        subject.tolerance,
    )
    return method


def check_order_of_clients(subject: MethodUnderCheck) -> None:
    """The order of clients changes nothing."""
    with last_client_first():
        found = learned(subject.trained("--data.clients_at_once=1"))
    require_equal(
        subject.reference, found, "clients hand something on to those after them: keep it in personal parameters"
    )


@contextmanager
def last_client_first() -> Iterator[None]:
    """Have the clients of every round train in the opposite order."""
    with patch.object(round_plan, "cohorts", lambda *given: cohorts(*given)[::-1]):
        yield


def check_roles(subject: MethodUnderCheck) -> None:
    """Check that shared and personal parameters are trained, and that frozen parts never move."""
    require_roles(subject)


def require_roles(subject: MethodUnderCheck) -> FederatedMethod:
    """Require it; returns the trained method."""
    watched = subject.watched
    method = watched.method
    for name, value in watched.parameters.items():
        still = name in method.roles.shared or torch.equal(value, method.get_parameter(name))
        require(still, f"{name} is not shared but moved on the server; write into no parameter in a step")
    moved = {n for n, v in clients_and_server(method).items() if not torch.equal(v, watched.start[n])}
    resting = [name for name in method.roles.personal if f"store.{name}" not in moved]
    if method.server.rule.takes_the_mean:
        resting += sorted(set(method.roles.shared) - moved)
    require(not resting, f"{resting[:3]} are never trained; name them in local_phases, or take them out of the roles")
    return method


class Selected(Callback):
    """Notes the clients of every round, which a rule may select by its state."""

    def __init__(self) -> None:
        self.rounds: list[list[int]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note those of the round that begins."""
        self.rounds.append(pl_module.server.next_clients(trainer.current_epoch + 1))  # type: ignore[union-attr, operator]


def check_resting_clients(subject: MethodUnderCheck) -> None:
    """Clients that are not selected keep their state."""
    _, data = subject.make()
    data.setup()
    # All but one: a rule may refuse few uploads.
    most = len(data.federation.terms.training_clients) - 1
    if not most:
        raise NotCheckedError("one client trains, and is always selected")
    method, data = subject.make(f"--data.clients_per_round={most}")
    data.setup()
    data.match(method)
    method.join(data)
    start, selected = clients_and_server(method), Selected()
    try:
        run_rounds(method, data, 1, [selected], evaluate=False)
    except ConfigurationError as refused:
        if method.server.rule.takes_the_mean:
            raise
        raise NotCheckedError(f"with {most} of {most + 1} clients: {refused}") from refused
    resting = sorted(set(range(data.num_clients)) - set(selected.rounds[0]))
    if not resting:
        raise NotCheckedError("the server's rule selects every client in its first round")
    for name, rows in clients_and_server(method).items():
        if name.startswith("store."):
            kept = torch.equal(rows[resting], start[name][resting])
            require(kept, f"{name.removeprefix('store.')} of clients that were not selected moved")


class Wire(Callback):
    """Notes the names and the bytes of everything that is sent."""

    def __init__(self) -> None:
        self.down: list[Values] = []
        self.up: list[Values] = []
        self.answers: list[Values] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen where clients receive something, and where those of a cohort have ended."""
        simulation: Any = pl_module.simulation
        received, end, answered = simulation.received, simulation.end, simulation.answered

        def receive(rule: ServerRule, round: Round, clients: tuple[int, ...]) -> Broadcast:
            sent: Broadcast = received(rule, round, clients)
            self.down += _apart(sent, len(clients)) if round.clients else []
            return sent

        def ended(cohort: Cohort) -> Parcel:
            parcel: Parcel = end(cohort)
            self.up += [{n: rows[k] for n, rows in parcel.values.items()} for k in range(len(parcel.clients))]
            return parcel

        def answer(rule: ServerRule, round: Round, clients: tuple[int, ...]) -> Broadcast:
            sent: Broadcast = answered(rule, round, clients)
            self.answers += _apart(sent, len(clients))
            return sent

        simulation.received, simulation.end, simulation.answered = receive, ended, answer


def _apart(sent: Broadcast, count: int) -> list[Values]:
    """Return what each of so many clients receives; padding stays at home."""
    own = [{name: rows[k] for name, rows in sent.own.items()} for k in range(count)]
    return [
        {**sent.common, **rows, **{name: rows[name][mask[k]] for name, mask in sent.masks.items()}}
        for k, rows in enumerate(own)
    ]


class Watched:
    """A run without evaluations, and what was there before it.

    Args:
        subject: what is trained, two rounds of two clients at a time: to choose a width, messages would be made.

    Attributes:
        method: afterwards.
        parameters: the server's, before.
        start: the shared values and the rows of all clients, before.
        wire: all messages.
        selected: the clients of each round.
    """

    def __init__(self, subject: MethodUnderCheck) -> None:
        self.method, data = subject.make("--data.clients_at_once=2")
        data.setup()
        data.match(self.method)
        self.method.join(data)
        self.parameters = {
            name: value.detach().clone()
            for name, value in self.method.named_parameters()
            if not name.startswith("slots.")
        }
        self.start = clients_and_server(self.method)
        self.wire, self.selected = Wire(), Selected()
        run_rounds(self.method, data, 2, [self.wire, self.selected], evaluate=False)


def check_messages(subject: MethodUnderCheck) -> None:
    """Personal tensors never leave their client, and bytes are counted."""
    watched = subject.watched
    wire, method = watched.wire, watched.method
    counts = [len(clients) for clients in watched.selected.rounds]
    require(len(wire.down) == len(wire.up) == sum(counts), f"{len(wire.up)} uploads in rounds of {counts} clients")
    private = set(method.roles.personal) - set(method.roles.uploaded)
    for message in wire.down + wire.up + wire.answers:
        leaking = sorted(private & set(message))
        require(not leaking, f"{leaking} are personal and are sent; make them shared, or send something else")
    rounds = method.server.traffic.rounds
    found = [[row[0] for row in rounds], sum(row[1] for row in rounds), sum(row[2] for row in rounds)]
    sent = [sum(map(_bytes, messages)) for messages in (wire.down + wire.answers, wire.up)]
    require(found == [counts, *sent], f"{sent} bytes went down and up, {found[1:]} are counted")
    for message in wire.up:
        for name in set(message) & set(method.roles.reported):
            for own in sorted(private):
                rows = method.store.all_rows(own).double().flatten(1)
                sent_row = message[name].double().flatten()
                near = len(sent_row) == rows.shape[1] > 8 and (cosine_similarity(rows, sent_row[None]) > 0.99).any()
                require(not near, f"{name}, which is uploaded, is {own} of a client, which is personal")


def _bytes(message: Values) -> int:
    return sum(value.numel() * value.element_size() for value in message.values())


class SeenImages(Callback):
    """Rows of the pool that took part in a training step."""

    def __init__(self) -> None:
        self.rows: dict[int, set[int]] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at every step."""
        pl_module.simulation.local_steps.on_step.append(self._stepped)  # type: ignore[union-attr, operator]

    def _stepped(self, cohort: Cohort, step: Step) -> None:
        """Note the rows of a training step."""
        assert step.index is not None
        assert step.mask is not None
        for client, rows, mask in zip(step.clients, step.index, step.mask, strict=True):
            if step.stage is Stage.TRAIN:
                self.rows.setdefault(client, set()).update(rows[mask].tolist())


def check_images(subject: MethodUnderCheck) -> None:
    """A test image never trains, and every training image does."""
    seen, selected = SeenImages(), Selected()
    method, data = subject.make("--data.participation=1.0", "--data.clients_per_round=null")
    run_rounds(method, data, 1, [seen, selected], evaluate=False)
    # Phases of so many steps, whole batches alone and Poisson lots need not come to all images.
    partial = data.drop_last or method.simulation.terms.poisson_lots
    whole = not partial and any(phase.epochs and phase.steps is None for phase in method.local_phases())
    for client, rows in data.train_indices.items():
        own, trained = set(rows.tolist()), seen.rows.get(client, set())
        # A rule may select fewer clients.
        expected = own if whole and client in selected.rounds[0] else own & trained
        wrong = len(expected ^ trained)
        require(not wrong, f"client {client}: {wrong} images train that should not, or the other way round")
    idle = set(seen.rows) - set(selected.rounds[0])
    require(not idle, f"clients {sorted(idle)[:3]} train and were not selected")
    tested = set().union(*(set(rows.tolist()) for rows in data.splits.test))
    require(not set().union(*seen.rows.values()) & tested, "test images train")


def check_resume(subject: MethodUnderCheck) -> None:
    """A resumed run ends bit for bit like an uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        method, data = subject.make("--data.clients_at_once=1")
        run_rounds(method, data, 1, save_to=Path(folder))
        resumed, data = subject.make("--data.clients_at_once=1")
        torch.rand(5)  # the global generator is somewhere else now
        last = Path(folder) / "checkpoints" / "last.ckpt"
        before = {"num_sanity_val_steps": -1}
        trainer = run_rounds(resumed, data, ROUNDS, ckpt_path=str(last), settings=before)
        held = torch.load(last, weights_only=True)["state_dict"]
    require(trainer.num_sanity_val_steps == 0, "the round it resumes from is evaluated again")
    # An evaluation after round 1 lies in between: what training reports has been averaged over fewer rounds since.
    expected, found = (
        {n: v for n, v in of.items() if not (n.startswith("metric.1/") or "/train/" in n)}
        for of in (subject.reference, learned(resumed))
    )
    advice = (
        "something that lasts between rounds is not in the checkpoint: keep it in parameters or in a rule's buffers, "
        "and draw from a generator with a key (benchmark.seeds)"
    )
    require_equal(expected, found, advice)
    names = {n for n in held if not n.startswith("store.")}
    require(names == set(method.roles.trained), f"the checkpoint holds {sorted(names ^ set(method.roles.trained))[:3]}")


CHECKS = (
    check_roles,
    check_messages,
    check_images,
    check_resting_clients,
    check_clients_at_once,
    check_order_of_clients,
    check_resume,
)
