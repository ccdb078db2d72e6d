"""The rounds of a simulated federation, as a callback of the Trainer."""

import warnings
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmark.contract import Stage
from benchmark.delivery import Delivery, Departure
from benchmark.engine.accounts import record_account
from benchmark.engine.arrivals import Arrivals
from benchmark.engine.batches.loaders import Loaders
from benchmark.engine.cohort import Cohort
from benchmark.engine.communication import Traffic, size_of
from benchmark.engine.data import FederatedData, Member
from benchmark.engine.device.precision import float32_outside_of_steps
from benchmark.engine.plan.work import CohortWork
from benchmark.engine.ranks.ranks import Ranks
from benchmark.engine.refusals.payload_checks import (
    check_complete,
    check_draws,
    check_rule,
    check_server_state,
    check_together,
    departed,
    facts_of,
    own_rule,
    selected,
    start,
)
from benchmark.engine.refusals.trainer_callbacks import check_callbacks
from benchmark.engine.refusals.trainer_settings import (
    ask_once_a_round,
    check_precision,
    check_strategy,
    check_whole_rounds,
    count_alike,
)
from benchmark.engine.roles import overrides, tell_unreached
from benchmark.engine.simulation import Simulation
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Values
from benchmark.internals import train_at_least
from benchmark.privacy.record_level import RecordAccount
from benchmark.server import ServerRule

#: The fact of a round from which nothing was made.
VOID = "void"


class Server(Callback):
    """Runs a server's rule: selects, broadcasts, collects and aggregates, one Trainer epoch a round.

    A method brings its rule by ``make_server``; a server given to the Trainer wins.

    Args:
        rule: the weighted mean by default.
        delivery: what lies between clients and rule; everything arrives by default.

    Attributes:
        facts: per name that the rule or the delivery reports as one number, and ``void``, by round.
        client_facts: per name reported as one number a client, float64 [N], of the last round.
    """

    def __init__(self, rule: ServerRule | None = None, delivery: Delivery | None = None) -> None:
        self.rule = ServerRule() if rule is None else rule
        self.delivery = Delivery() if delivery is None else delivery
        self.facts: dict[str, dict[int, float]] = {}
        self.client_facts: Values = {}
        self.traffic = Traffic()
        self.finished_rounds = 0
        self.inside_round = False
        #: of record-level privacy
        self.account: RecordAccount | None = None
        #: rounds of each client whose values were not finite, so that they were left out
        self.dropped: dict[int, int] = {}
        #: clients that have trained and kept what came of it; None where a checkpoint did not know it
        self.trained: set[int] | None = set()
        self._round = Round(0, (), 0)
        self._arrivals = Arrivals()
        #: of the round that was last asked for
        self._selected = Round(0, (), 0)
        self._departure = Departure((), (), ())
        #: of the present round
        self._going = self._departure
        self._data: FederatedData | None = None
        #: rounds that a method was trained for whose clients' own values began anew
        self._lost = 0

    @property
    def state_key(self) -> str:
        """One server a run, whatever its rule."""
        return "server"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the method and the rule join the federation.

        Raises:
            ConfigurationError: a Trainer setting that would couple clients or break exact resume, or a method that is
                for another federation.
        """
        check_strategy(trainer)
        check_precision(trainer.precision)
        check_callbacks(cast(Any, trainer).callbacks)
        if stage == "fit":
            check_whole_rounds(trainer)
        method, data = cast(Member, pl_module), cast(FederatedData, cast(Any, trainer).datamodule)
        ranks: Ranks = getattr(trainer.strategy, "ranks", None) or Ranks()
        if ranks.count > 1:
            ask_once_a_round(cast(Any, trainer).callbacks)
        if stage != "fit" and self._goes_on(method, data, ranks):
            simulation = method.simulation
        else:
            simulation = self._join(method, data, ranks, trainer, stage)
        simulation.images.precision = trainer.precision_plugin.forward_context
        self._selected = Round(0, (), 0)
        self.loaders = data.loaders = Loaders(
            simulation,
            data.clients_at_once,
            data.num_workers,
            self.rule,
            self.next_clients,
            lambda: stage == "test" or self.finished_rounds >= simulation.rounds,
        )
        self.on_divergence = data.on_divergence

    def _goes_on(self, method: Member, data: FederatedData, ranks: Ranks) -> bool:
        """Return whether what was learned is still there: of this method, of these data and over the same ranks."""
        if method.served is not self or self._lost or not self.finished_rounds or self._data is not data:
            return False
        return method.simulation.ranks is ranks or method.simulation.ranks.count == ranks.count == 1

    def _join(self, method: Member, data: FederatedData, ranks: Ranks, trainer: Trainer, stage: str) -> Simulation:
        """Have the method join, and start rule and delivery; clients' own values begin anew."""
        before = method.served
        self._lost = 0 if before is None else before.finished_rounds or before._lost
        simulation = method.join(data, ranks)
        simulation.rounds = trainer.max_epochs or 0
        # With 64-true the Trainer converts it too, but after it has loaded a checkpoint, whose numbers it would round.
        trainer.precision_plugin.convert_module(cast(LightningModule, method))
        check_rule(self.rule, method)
        self.rule.complete(lambda: own_rule(method))
        if refusal := self.rule.accept(method):
            raise ConfigurationError(f"{self.rule.title} cannot serve {type(method).__name__}: {refusal}")
        check_together(self.rule, self.delivery)
        check_draws(self.rule, ranks)
        terms = replace(simulation.terms, rounds=simulation.rounds)
        start(self.rule, method.initial_values(), terms)
        if stage == "fit":
            tell_unreached(type(method).__name__, simulation.phases[Stage.TRAIN], simulation.rounds)
            self.account = record_account(simulation, self.rule, str(trainer.precision))
        self.delivery.start(terms)
        method.served, self._data = self, data
        return simulation

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to train from the start what was trained.

        Raises:
            ConfigurationError: the method was, and no checkpoint is gone on from.
        """
        if self._lost:
            raise ConfigurationError(
                f"this {type(pl_module).__name__} was trained for {self._lost} rounds; make a new one for a new run, "
                "or go on from a checkpoint (ckpt_path)"
            )

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse to score a method whose clients have lost what they learned.

        Raises:
            ConfigurationError: they have, and no checkpoint was given.
        """
        if self._lost:
            raise ConfigurationError(
                f"this {type(pl_module).__name__} was trained for {self._lost} rounds, by another server, on other "
                "data or over other ranks, and what its clients learned is not here; give the checkpoint (ckpt_path)"
            )

    on_validation_start = on_test_start

    def next_clients(self, number: int) -> list[int]:
        """Return the clients that train in a round, ascending: those selected, less whom the delivery loses."""
        if self._selected.number != number:
            self._selected = Round(number, tuple(selected(self.rule, number)), self.rule.terms.seed)
            self._departure = departed(self.delivery, self._selected)
        return list(self._departure.trained)

    @property
    def evaluated(self) -> Round:
        """The round that an evaluation is of: the last finished one."""
        return Round(self.finished_rounds, (), self.rule.terms.seed)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a round; whatever asks to stop inside it (a callback, ``max_time``) is heard at its end."""
        number = trainer.current_epoch + 1
        train_at_least(trainer, number)
        self.next_clients(number)
        self._round, self._going = self._selected, self._departure
        self.inside_round = True
        self._arrivals = Arrivals()
        self.traffic.start_round()
        self._send_in_vain(cast(Member, pl_module).simulation)
        self.loaders.begin(self.loaders.trained)
        cast(Member, pl_module).simulation.watch.start()

    def _send_in_vain(self, simulation: Simulation) -> None:
        """Count what those receive who do not train."""
        idle = tuple(client for client in self._going.reached if client not in {*self._going.trained})
        if idle and simulation.ranks.rank == 0:
            self._count_down(simulation.received(self.rule, self._round, idle), len(idle))

    def _count_down(self, received: Broadcast, count: int) -> None:
        if received.masks:
            for place in range(count):
                self.traffic.down(1, received.message(place))
        else:
            self.traffic.down(count, received.message())

    def send(self, simulation: Simulation, clients: tuple[int, ...]) -> Cohort:
        """Broadcast to the clients of a cohort, and begin it."""
        simulation.ranks.look()
        simulation.ranks.busy_with = clients
        with float32_outside_of_steps(simulation.device):
            received = simulation.received(self.rule, self._round, clients)
            self._count_down(received, len(clients))
            return simulation.begin(clients, Stage.TRAIN, self._round, received)

    def collect(self, simulation: Simulation, cohort: Cohort) -> None:
        """End a cohort, and take what its clients send.

        Raises:
            ConfigurationError: training diverged; the last round's checkpoint is as it was.
        """
        if self.delivery.may_revert:
            self._arrivals.before.append(simulation.kept_by(cohort.clients))
        with float32_outside_of_steps(simulation.device):
            parcel = simulation.end(cohort)
        check_complete(parcel.values, self.rule, simulation.roles.shared, simulation.method)
        left = self._arrivals.add(cohort.clients, parcel, self._going.sent)
        one = {name: value[:1] for name, value in left.values.items()}
        size = self.delivery.upload_size(one, frozenset(left.received)) if left.clients else None
        self.traffic.up(len(left.clients), [*one.values()], size)
        if self._arrivals.missing and self.on_divergence == "raise":
            raise ConfigurationError(self._diverged(", or set data.on_divergence to drop"))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: CohortWork, batch_idx: int
    ) -> None:
        """Aggregate after the last cohort of the round."""
        if batch.last:
            simulation = cast(Member, pl_module).simulation
            self._finish(simulation)
            count_alike(trainer, simulation.ranks)

    def _finish(self, simulation: Simulation) -> None:
        simulation.ranks.busy_with = ()
        self._arrivals.share(self._round, simulation.ranks, self.traffic, simulation.reports)
        if self._arrivals.missing and len(self._arrivals.missing) == len(self._going.trained):
            raise ConfigurationError(self._diverged())
        new = self._arrivals.aggregate(self.rule, self.delivery, self._round, simulation)
        simulation.set_shared(self.rule, new)
        void = self._take_facts(simulation.terms.num_clients)
        check_server_state(self.rule, self.delivery, self._round, simulation.shared(), simulation.ranks)
        if not void and overrides(simulation.method, "take"):
            self._answer(simulation)
        reverted = self.delivery.reverted
        for before in self._arrivals.before:
            simulation.revert(before, reverted)
        self.delivery.close(self._round, void, reverted)
        self._count_missing(simulation)
        if self.trained is not None:
            self.trained |= {*self._going.trained} - {*self._arrivals.missing} - reverted
        simulation.store.send_home()
        self._arrivals = Arrivals()
        if self.account is not None:
            self.account.count(self._going.trained)
        self.finished_rounds = self._round.number
        self.inside_round = False

    def _answer(self, simulation: Simulation) -> None:
        """Have those whose message has left take what the rule answers."""
        size = numbers = 0
        for parcel in self._arrivals.sent:
            if parcel.clients:
                answer = simulation.answered(self.rule, self._round, parcel.clients)
                for place in range(len(parcel.clients)):
                    more = size_of(answer.message(place))
                    size, numbers = size + more[0], numbers + more[1]
                simulation.take(parcel, self._round, answer)
        sizes = simulation.ranks.everybody("bytes of answers", [size, numbers])
        self.traffic.answered(sum(size for size, _ in sizes), sum(numbers for _, numbers in sizes))

    def _take_facts(self, num_clients: int) -> bool:
        """Take what the rule and the delivery report of the round; say, and return, whether it is void."""
        number = self._round.number
        found = facts_of(self._round, num_clients, self.rule, self.delivery)
        if self._arrivals.void:
            found[VOID] = 1.0
            why = "nothing has arrived" if self._going.trained else "no client trains"
            warnings.warn(f"round {number} is void: {why}; the server's values stay as they were", stacklevel=1)
        self.client_facts = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        for name, value in found.items():
            if not isinstance(value, Tensor):
                self.facts.setdefault(name, {})[number] = value
        return bool(found.get(VOID))

    def _diverged(self, choice: str = "") -> str:
        """Say who came to values that are not finite, and what to do."""
        missing = sorted(self._arrivals.missing)
        return (
            f"training diverged: losses or values of {len(missing)} of {len(missing) + self._arrivals.count} clients "
            f"were not finite in round {self._round.number} (clients {missing[:5]}); lower the learning "
            f"rate, clip gradients or look at these clients' images{choice}"
        )

    def _count_missing(self, simulation: Simulation) -> None:
        """Note whose uploads the round went without, as a client metric of training, and say so at their first time."""
        missing = self._arrivals.missing
        if new := sorted(set(missing) - set(self.dropped)):
            warnings.warn(
                f"losses or values of {len(new)} clients were not finite in round {self._round.number} (clients "
                f"{new[:5]}): the round goes without them, and they keep what they had before; so it will be in later "
                "rounds, counted as train/dropped",
                stacklevel=1,
            )
        for client in missing:
            self.dropped[client] = self.dropped.get(client, 0) + 1
        if self.dropped:
            counts = torch.zeros(simulation.terms.num_clients, dtype=torch.float64)
            counts[list(self.dropped)] = torch.tensor(list(self.dropped.values()), dtype=torch.float64)
            simulation.reports.put("dropped", counts)

    def who_trained(self) -> tuple[bool | None, ...] | None:
        """Say of each client whether it has trained, None of one that never can; None where it is not known."""
        if self.trained is None:
            return None
        found: list[bool | None] = [None] * self.rule.terms.num_clients
        for client in self.rule.terms.training_clients:
            found[client] = client in self.trained
        return tuple(found)

    def guarantee(self) -> dict[str, object] | None:
        """Return what the run promises of privacy; nothing by default."""
        return self.rule.guarantee() if self.account is None else self.account.guarantee(self.rule.terms.num_clients)

    def state_dict(self) -> dict[str, Any]:
        """Return counters and the rule's state."""
        return {
            "finished_rounds": self.finished_rounds,
            "inside_round": self.inside_round,
            "traffic": self.traffic.state_dict(),
            "dropped": dict(self.dropped),
            "trained": None if self.trained is None else sorted(self.trained),
            "rule": dict(self.rule.state_dict()),
            "delivery": dict(self.delivery.state_dict()),
            "account": {} if self.account is None else self.account.state_dict(),
            "facts": {name: dict(values) for name, values in self.facts.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave.

        Raises:
            ConfigurationError: the checkpoint was saved inside a round, or holds no state of this run's rule.
        """
        if state_dict["inside_round"]:
            raise ConfigurationError(
                f"the checkpoint was saved inside round {state_dict['finished_rounds'] + 1}, which can't be resumed "
                "exactly; use one saved at the end of a round (checkpoints/last.ckpt of the run's directory)"
            )
        self.finished_rounds, self._lost = state_dict["finished_rounds"], 0
        self.traffic.load_state_dict(state_dict["traffic"])
        self.dropped = dict(state_dict["dropped"])
        trained = state_dict.get("trained")  # not in older checkpoints
        self.trained = None if trained is None else set(trained)
        try:
            self.rule.load_state_dict(state_dict["rule"])
            self.delivery.load_state_dict(state_dict.get("delivery", {}))  # none in older checkpoints
            if self.account is not None:
                self.account.load_state_dict(state_dict["account"])
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise ConfigurationError(
                f"the checkpoint holds no state of the server {self.rule.title} ({said}); take an unchanged "
                "copy, or start without --ckpt_path"
            ) from error
        self.facts = {name: dict(values) for name, values in state_dict.get("facts", {}).items()}
