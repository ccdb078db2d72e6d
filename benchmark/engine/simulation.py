"""The clients of a federation that this process steps: in cohorts, kept between rounds, scored."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from benchmark.contract import ClientMethod, MiniBatch, Phase, Stage
from benchmark.engine.batches.images import ImageFeed
from benchmark.engine.batches.noise import drawn_noise, message_noise
from benchmark.engine.client_state import LAST, PARTICIPATED, momenta_of, own_rows, owners, trained_rows
from benchmark.engine.cohort import Cohort, Slots, apart
from benchmark.engine.device.precision import float32_outside_of_steps
from benchmark.engine.local_training import LocalSteps, Optimizer, schedule_factor
from benchmark.engine.mapping import ClientMap
from benchmark.engine.parameters import Parameters
from benchmark.engine.plan.work import CohortWork, Part, Step
from benchmark.engine.private_step import ClippedSteps, PrivateSteps
from benchmark.engine.ranks.placed_store import PlacedStore
from benchmark.engine.refusals.author_errors import tensors
from benchmark.engine.refusals.finite import finite_rows_and
from benchmark.engine.refusals.payload_checks import (
    check_aggregate,
    check_broadcast,
    check_message,
    check_reported,
    check_taken,
    unchanged,
)
from benchmark.engine.refusals.watch import Watch
from benchmark.engine.repeat.recorded_step import RecordedSteps
from benchmark.engine.reports import Reports
from benchmark.engine.roles import Roles, overrides, phases_of
from benchmark.engine.step_function import AsWritten, StepFunction, WrittenStep
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Federation, Parcel, Round, Values
from benchmark.internals import copy_all
from benchmark.placing import placed
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.server import ServerRule


class Simulation:
    """Runs a method's contract for cohorts of clients.

    Args:
        method: the contract.
        roles: of its parameters.
        slots: the stacked parameters of the cohort that is stepped.
        store: what belongs to the clients between rounds.
        federation: who there is.
        images: mini-batches of steps.
        one_by_one: for a debugger: cohorts hold one client each, whose steps are plain PyTorch.
        privacy: hides single images in local training, where it is given.

    Attributes:
        gradients: how a step comes by its losses and gradients.
    """

    def __init__(
        self,
        method: ClientMethod,
        roles: Roles,
        slots: Slots,
        store: PlacedStore,
        federation: Federation,
        images: ImageFeed,
        one_by_one: bool = False,
        privacy: RecordLevelPrivacy | None = None,
    ) -> None:
        self.method = method
        self.roles = roles
        self.slots = slots
        self.store = store
        self._trained_rows = trained_rows(roles, store.names)
        self.ranks = store.ranks
        self.federation = federation
        self.terms, self.holdings = federation.terms, federation.holdings
        self.images = images
        self.parameters = Parameters(method)
        self._shapes = {name: tuple(self.parameters[name].shape) for name in roles.trained}
        self.watch = Watch(method, (slots, store))
        self.clients = ClientMap(method, roles, self.watch, one_by_one=one_by_one)
        self.local_steps = LocalSteps(method, self.clients, slots)
        self.privacy = privacy
        self.gradients = self.steps_of(self.clients, slots, one_by_one)
        self.reports = Reports(federation.terms.num_clients)
        #: per client that was met so far
        self._constants: dict[int, Values] = {}
        #: rounds of the whole run, for schedules
        self.rounds = 0

    @property
    def device(self) -> torch.device:
        """Return the device that the method lies on."""
        return self.parameters.first.device

    @property
    def uploaded(self) -> tuple[str, ...]:
        """Names of the parameters that clients send."""
        return self.roles.shared + self.roles.uploaded

    def shared(self) -> Values:
        """Return the server's values, by name."""
        return {name: self.parameters[name].detach() for name in self.roles.shared}

    def set_shared(self, rule: ServerRule, values: Values) -> None:
        """Take the new values of some shared parameters that a server's rule made.

        Raises:
            ConfigurationError: see :func:`benchmark.engine.refusals.payload_checks.check_aggregate`.
        """
        check_aggregate(values, f"{rule.title}.aggregate", self.shared())
        if values:
            copy_all([self.parameters[name].data for name in values], [*values.values()])

    def steps_of(self, clients: ClientMap, slots: Slots, always_as_written: bool) -> StepFunction:
        """Return how steps in these slots come by their gradients: recorded and repeated, unless always as written."""

        def taken(steps: WrittenStep) -> StepFunction:
            return steps if always_as_written else RecordedSteps(steps, self.store, lambda: self.rounds)

        as_written = taken(AsWritten(self.method, clients, slots))
        if self.privacy is None:
            return as_written
        of_all = self.privacy, self.terms.batch_size, self.terms.seed
        return PrivateSteps(taken(ClippedSteps(self.method, clients, slots, *of_all)), as_written, *of_all)

    # ------------------------------------------------------------------ a cohort

    def received(self, rule: ServerRule, round: Round, clients: tuple[int, ...]) -> Broadcast:
        """Return what a server's rule sends to these clients, on the device.

        Raises:
            ConfigurationError: see :func:`benchmark.engine.refusals.payload_checks.check_broadcast`.
        """
        shared, title = self.shared(), f"{rule.title}.broadcast"
        with float32_outside_of_steps(self.device), unchanged(shared, title):
            sent = rule.broadcast(round, shared, clients)
        check_broadcast(sent, len(clients), title, self._shapes)
        return sent.to(self.device)

    def begin(self, clients: tuple[int, ...], stage: Stage, round: Round, received: Broadcast) -> Cohort:
        """Put into the slots what each client starts from: what it received, else its own, else the frozen value."""
        start: Values = {}
        for name in self.slots.names:
            if name in self.roles.personal:
                start[name] = self.store.rows(name, clients, self.device)
            elif name in received.own:
                start[name] = received.own[name]
            else:
                value = received.common[name] if name in received.common else self.parameters[name]
                start[name] = value.expand(len(clients), *value.shape)
        self.slots.fill(start)
        return self.gather(clients, stage, round, received, self.slots.all(), "train")

    def gather(
        self, clients: tuple[int, ...], stage: Stage, round: Round, received: Broadcast, values: Values, split: str
    ) -> Cohort:
        """Make a cohort of clients with these parameters, [K, ...] each, and call ``prepare``."""
        own = {name: name if name in self.roles.personal else LAST + name for name in self.roles.remembered}
        asked = "own_images" in self.method.inputs
        known = PARTICIPATED in self.store.names
        took_part = self.store.rows(PARTICIPATED, clients, self.device) if known else torch.zeros(len(clients))
        cohort = Cohort(
            clients,
            stage,
            round,
            values,
            received,
            previous=self.store.rows_of(own, clients, self.device),
            participated=placed(took_part, self.device) > 0,
            class_counts=placed(self.holdings.class_counts[list(clients)], self.device),
            own_images=self.images.own_images(clients) if asked else {},
            constants=self.constants(clients),
        )
        if overrides(self.method, "prepare") and stage is not Stage.MESSAGE:
            # Training asks outside of a step, an evaluation and a measurement of memory within one.
            with torch.no_grad(), float32_outside_of_steps(self.device):
                space = self.terms.space_of(split, clients[0])
                made = self.clients("prepare", lambda c: self.method.prepare(c, stage, space), cohort, len(clients))
            cohort.prepared = apart(tensors(self.method, "prepare", made), values)
        return cohort

    def constants(self, clients: Sequence[int]) -> Values:
        """Return what tells these clients apart, [K, ...] each.

        Raises:
            ConfigurationError: clients have other names or shapes than each other.
        """
        if not overrides(self.method, "client_constants"):
            return {}
        for client in clients:
            if client not in self._constants:
                made = tensors(self.method, "client_constants", self.method.client_constants(client, self.terms))
                self._constants[client] = made
        rows = [self._constants[client] for client in clients]
        shapes = [{name: tuple(value.shape) for name, value in row.items()} for row in rows]
        for client, shape in zip(clients, shapes, strict=True):
            if shape != shapes[0]:
                raise ConfigurationError(
                    f"{type(self.method).__name__}.client_constants gives client {client} {shape} and client "
                    f"{clients[0]} {shapes[0]}; expected the same names and shapes for all"
                )
        return {name: placed(torch.stack([row[name] for row in rows]), self.device) for name in rows[0]}

    # ------------------------------------------------------------------ training

    @cached_property
    def phases(self) -> dict[Stage, list[Phase]]:
        """The phases of local training, and of the fitting of copies."""
        return phases_of(self.method)

    def start(self, cohort: Cohort, part: Part, optimizer: Optimizer) -> Phase:
        """Begin a phase of a cohort; return it."""
        phase = self.phases[part.stage][part.phase]
        factor = schedule_factor(phase, max(cohort.round.number - 1, 0), self.rounds)
        self.local_steps.start(phase, optimizer, factor, self._momenta(cohort, part, phase))
        return phase

    def steps(self, work: CohortWork, part: Part) -> Iterator[tuple[Step, MiniBatch]]:
        """Yield the steps of a part of a cohort's work, with their mini-batches."""
        for some in work.steps(part, self.device):
            self.ranks.look()
            yield from zip(some, self.mini_batches(some), strict=True)

    def finish(self, cohort: Cohort, part: Part, optimizer: Optimizer) -> None:
        """End a phase of a cohort."""
        phase = self.phases[part.stage][part.phase]
        self.local_steps.finish(cohort, part.stage, part.phase, phase, optimizer)

    def _momenta(self, cohort: Cohort, part: Part, phase: Phase) -> Values:
        """Return the momenta that the phase starts with, by parameter name; none for copies."""
        if part.stage is not Stage.TRAIN:
            return {}
        kept = momenta_of(self.method, phase, part.phase)
        return self.store.rows_of(kept, owners(cohort, phase), self.device)

    def mini_batch(self, step: Step) -> MiniBatch:
        """Return the mini-batches of a step's clients, [K, ...] throughout, with their noise."""
        return next(self.mini_batches([step]))

    def mini_batches(self, steps: Sequence[Step]) -> Iterator[MiniBatch]:
        """Yield those of consecutive steps of a cohort, one after the other; where the first has no noise, none has."""
        noisy = True
        for step, batch in zip(steps, self.images.fill_all(steps), strict=True):
            if noisy:
                noise = drawn_noise(self.method, self.terms.seed, step, batch.y.shape[1], self.parameters.first)
                noisy = bool(noise)
            yield replace(batch, noise=noise) if noisy else batch

    def end(self, cohort: Cohort) -> Parcel:
        """Keep what stays with the clients; return what they upload, [K', ...] each.

        A client whose loss or whose values are not finite is left out, and everything of its own stays as it was before
        the round.

        Raises:
            ConfigurationError: see :func:`benchmark.engine.refusals.payload_checks.check_reported`.
        """
        check_reported(cohort.totals, self.method, self.roles)
        values = self.slots.detached()
        reported = {name: cohort.totals[name][0] for name in self.roles.reported if name in cohort.totals}
        losses = [cohort.totals["loss"][0]] if cohort.totals else []
        broken: list[torch.Tensor] = []
        try:
            message, kept_for_answer = self._message(cohort, values)
        except torch.linalg.LinAlgError:  # a decomposition fails for all where one client's values are not finite
            finite, _ = finite_rows_and([*values.values(), *losses], len(cohort.clients), {})
            if all(finite):
                raise
            out = torch.tensor(finite, device=self.device).logical_not()
            for value in values.values():
                value[out] = 0.0
            broken = [torch.where(out, torch.nan, 0.0)]
            message, kept_for_answer = self._message(cohort, values)
        uploads = message | reported
        made = [value for name, value in uploads.items() if value is not values.get(name)]
        numbers = [*values.values(), *made, *losses, *broken]
        finite, totals = finite_rows_and(numbers, len(cohort.clients), cohort.scalars())
        rows = [k for k, of_row in enumerate(finite) if of_row]
        kept = {row: (cohort.clients, values[name]) for row, name in self._trained_rows.items()}
        if PARTICIPATED in self.store.names:
            kept[PARTICIPATED] = (cohort.clients, torch.ones(len(cohort.clients)))
        ended = {name: ([whose[k] for k in rows], value) for name, (whose, value) in (kept | cohort.momenta).items()}
        self.store.write_all(ended if all(finite) else {name: (whose, v[rows]) for name, (whose, v) in ended.items()})
        self.reports.add(cohort, rows, totals)
        # Copies: the slots are the next cohort's soon.
        sent = {name: value.clone() if all(finite) else value[rows] for name, value in uploads.items()}
        waiting = {name: value[rows] for name, value in kept_for_answer.items()}
        began = _begun(cohort.received, sent, rows)
        common = frozenset(began.keys() - cohort.received.own.keys())
        return Parcel(tuple(cohort.clients[k] for k in rows), sent, began, waiting, common)

    def kept_by(self, clients: tuple[int, ...]) -> Parcel:
        """Copy what these clients keep of their own between rounds, by row, [K, ...] each, into host memory."""
        names = own_rows(self.method, self.roles, self.store.names)
        return Parcel(clients, self.store.rows_of({name: name for name in names}, clients, torch.device("cpu")), {}, {})

    def revert(self, before: Parcel, reverted: Collection[int]) -> None:
        """Give those of the parcel's clients that go back what they kept before the round."""
        back = before.of([client for client in before.clients if client in reverted])
        if back.clients:
            self.store.write_all({name: (back.clients, value) for name, value in back.values.items()})

    def _message(self, cohort: Cohort, values: Values) -> tuple[Values, Values]:
        """Return what the clients send of their parameters, and what they keep for the answer, [K, ...] each.

        Raises:
            ConfigurationError: see :func:`benchmark.engine.refusals.payload_checks.check_message`.
        """
        if not overrides(self.method, "message"):
            return {name: values[name] for name in self.uploaded}, {}
        clients = cohort.clients
        noise = message_noise(
            self.method, self.terms.seed, cohort.round.number, clients, self.terms.row, self.parameters.first
        )
        with torch.no_grad():
            made = self.clients("message", self.method.message, cohort, len(clients), noise)
        # Detached: what passes a parameter on is the slot itself, of which a later copy would have a graph.
        message, kept = (
            {name: value.detach() for name, value in tensors(self.method, "message", part).items()}
            for part in (made if type(made) is tuple else (made, {}))
        )
        check_message(message, self.method, self.roles, self._shapes)
        return message, apart(kept, values)

    def answered(self, rule: ServerRule, round: Round, clients: tuple[int, ...]) -> Broadcast:
        """Return what a server's rule sends to these clients at a round's end, on the device.

        Raises:
            ConfigurationError: see :func:`benchmark.engine.refusals.payload_checks.check_broadcast`.
        """
        shared, title = self.shared(), f"{rule.title}.answer"
        with float32_outside_of_steps(self.device), unchanged(shared, title):
            sent = rule.answer(round, shared, clients)
        check_broadcast(sent, len(clients), title, self._shapes)
        return sent.to(self.device)

    def take(self, parcel: Parcel, round: Round, answer: Broadcast) -> None:
        """Have clients take what the server answers their messages into their own parameters.

        Raises:
            ConfigurationError: see :func:`benchmark.engine.refusals.payload_checks.check_taken`.
        """
        own = {name: name for name in self.roles.personal}
        values = self.store.rows_of(own, parcel.clients, self.device)
        cohort = self.gather(parcel.clients, Stage.MESSAGE, round, answer, values, "train")
        with torch.no_grad():
            made = self.clients("take", self.method.take, cohort, len(parcel.clients), parcel.kept)
        taken = tensors(self.method, "take", made)
        check_taken(taken, self.method, {name: self._shapes[name] for name in self.roles.personal})
        self.store.write_all({name: (parcel.clients, value.detach()) for name, value in taken.items()})


def _begun(received: Broadcast, sent: Values, rows: list[int]) -> Values:
    """Return what these rows of a cohort had received of what they send, [K', ...] each."""
    return {
        name: received.own[name][rows]
        if name in received.own
        else received.common[name].expand(len(rows), *received.common[name].shape)
        for name in sent
        if name in received.own or name in received.common
    }
