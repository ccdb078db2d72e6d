"""The LightningModule of every method: the contract of one client, run by the engine under the Trainer."""

import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from benchmark.contract import ClientMethod, Stage
from benchmark.engine import saved_state
from benchmark.engine.batches.images import ImageFeed
from benchmark.engine.batches.pool import Pool
from benchmark.engine.client_state import initial_rows
from benchmark.engine.cohort import Slots
from benchmark.engine.data import FederatedData
from benchmark.engine.evaluation import Evaluation
from benchmark.engine.frozen import check_modes, frozen_parts
from benchmark.engine.plan.evaluation_plan import homes
from benchmark.engine.plan.work import CohortWork
from benchmark.engine.ranks.placed_store import PlacedStore
from benchmark.engine.ranks.ranks import Ranks
from benchmark.engine.refusals.author_errors import authors_line, place
from benchmark.engine.refusals.part_checks import check_parts
from benchmark.engine.refusals.privacy_checks import check_private
from benchmark.engine.roles import Roles, overrides, read_roles, untrained
from benchmark.engine.rounds import Server
from benchmark.engine.simulation import Simulation
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.internals import present_hook
from benchmark.own_metrics import chosen_metrics
from benchmark.ranges import Checked, NumClients
from benchmark.server import ServerRule

#: Why a step may not look at the clock, and what does.
ASK_PREPARE = (
    "in a step, which is recorded and repeated in later rounds: have prepare return what follows from "
    "client.round.number"
)


class FederatedMethod(Checked, ClientMethod, LightningModule):
    """Base of all methods: what a method writes stands in ``benchmark.contract.ClientMethod``.

    Args:
        num_clients: N; the command line takes it from the data.

    Attributes:
        paper_names: what the papers' tables call the method, each where it is not the class's name; a class that
            derives from it has its own.
        paper_arguments: arguments with the values that the papers' tables are of: with another value a run stands
            beside no published number.
        paper_point: where in a round the paper reads it: ``"server"``, or ``"local"``, as training left its clients.
    """

    paper_names: ClassVar[tuple[str, ...]] = ()
    paper_arguments: ClassVar[Mapping[str, Any]] = {}
    paper_point: ClassVar[Literal["server", "local"]] = "server"
    simulation: Simulation
    #: the server that it has joined last
    served: Server | None = None
    roles: Roles

    def __init__(self, num_clients: NumClients) -> None:
        super().__init__()
        self.num_clients = num_clients
        #: of torch's generator, from which the first values are drawn
        self.drawn_with = torch.initial_seed()
        self.automatic_optimization = False
        self.strict_loading = False
        self._frozen_parts: list[nn.Module] = []

    def __setattr__(self, name: str, value: Any) -> None:
        """Set as usual.

        Raises:
            ConfigurationError: in a constructor that has not called its base's, or to a server's rule, whose values
                would be the clients' then.
        """
        if name in self.__dict__ and (value is None or isinstance(value, str)):
            self.__dict__[name] = value  # Lightning says twice in every hook which one it is in
            return
        if isinstance(value, ServerRule):
            raise ConfigurationError(
                f"{type(self).__name__} keeps a {type(value).__name__} as {name!r}, as if it were part of the clients' "
                "model; make it in make_server, anew in each call"
            )
        if isinstance(value, Tensor | nn.Module) and "_modules" not in self.__dict__:
            at = authors_line([(frame.filename, frame.lineno or 0) for frame in traceback.extract_stack()])
            where = place(self, "__init__", at=at)
            raise ConfigurationError(f"{where} sets {name!r} before super().__init__(num_clients); call that first")
        super().__setattr__(name, value)

    def log(self, *args: Any, **named: Any) -> None:
        """Log as Lightning does, but not in a step, where it would meet the tensors of many clients at once.

        Raises:
            MisconfigurationException: it is called in a step.
        """
        self._refuse_in_a_step("self.log in a step; return named tensors beside the loss")
        super().log(*args, **named)

    @property
    def sends_of_its_own(self) -> bool:
        """Return whether ``message`` is the method's own."""
        return overrides(self, "message")

    @property
    def current_epoch(self) -> int:
        """Return the number of finished rounds; not in a step, which is recorded and would go on with that of then.

        Raises:
            MisconfigurationException: it is asked for in a step.
        """
        self._refuse_in_a_step(f"self.current_epoch {ASK_PREPARE}")
        return super().current_epoch

    @property
    def global_step(self) -> int:
        """Return Lightning's count of optimizer steps; not in a step, as ``current_epoch``.

        Raises:
            MisconfigurationException: it is asked for in a step.
        """
        self._refuse_in_a_step(f"self.global_step {ASK_PREPARE}")
        return super().global_step

    def _refuse_in_a_step(self, why: str) -> None:
        if present_hook(self) in ("training_step", "validation_step", "test_step"):
            raise MisconfigurationException(why)

    # ------------------------------------------------------------------ before training

    def configure_callbacks(self) -> list[Callback]:
        """Bring the server that has trained the method, or its own, unless the Trainer was given one."""
        callbacks = cast(Any, self.trainer).callbacks
        if any(isinstance(callback, Server) for callback in callbacks):
            return []
        return [self.served or Server(self.make_server())]

    def join(self, data: FederatedData, ranks: Ranks | None = None, clients: Sequence[int] | None = None) -> Simulation:
        """Take part in a federation: freeze the parameters, and make the slots and the clients' state.

        Args:
            data: set up.
            ranks: the processes that simulate it; this one alone by default.
            clients: those whose state lies here, in a deployment; all by default.

        Raises:
            ConfigurationError: the method is for another federation, or its roles, phases or modules make no sense.
        """
        federation, title, ranks = data.federation, type(self).__name__, ranks or Ranks()
        terms = federation.terms
        if not isinstance(self.training, bool):
            raise ConfigurationError(
                f"{title}.training is torch's own flag of a module, and {type(self.training).__name__} was put there; "
                "keep it under another name, such as self.training_settings"
            )
        if terms.num_clients != self.num_clients:
            raise ConfigurationError(
                f"the method is for {self.num_clients} clients, the partition has {terms.num_clients}; set "
                "model.num_clients to the partition's number"
            )
        if terms.label_spaces and not self.open_vocabulary:
            raise ConfigurationError(
                f"{title} classifies among all classes, but the partition gives the splits "
                f"{', '.join(dict.fromkeys(space.partition('/')[0] for space in terms.label_spaces))} label spaces of "
                "their own; take a method of the CLIP family; FOCoOp needs class_specific=false"
            )
        self.set_label_spaces(dict(terms.label_spaces))
        own = self.__dict__.setdefault("_own_evaluate_local", self.evaluate_local)
        self.evaluate_local = own if data.evaluate_local is None else data.evaluate_local
        if self.evaluate_local and overrides(self, "take"):
            raise ConfigurationError(
                f"{title}.take changes personal parameters after the aggregation, so clients are not scored as local "
                "training left them; set data.evaluate_local to false"
            )
        self.roles = read_roles(self)
        check_parts(self)
        # A method that makes its message itself may send parameters that no phase trains.
        if (idle := untrained(self, self.roles)) and not self.sends_of_its_own:
            warnings.warn(
                f"{title} names {idle[0]} in shared or personal, and none of its phases trains it; name it in "
                "local_phases, or take it out",
                stacklevel=1,
            )
        if data.record_privacy is not None:
            check_private(self, self.roles, federation)
        self._frozen_parts = frozen_parts(self, self.roles)
        check_modes(self, self._frozen_parts)
        if any(p.optimizer_state == "shared" for p in self.local_phases()):
            said = (
                "training.optimizer_state 'shared' hands one momentum from client to client, so they train one after "
                "the other:"
            )
            if data.clients_at_once != 1:
                raise ConfigurationError(f"{said} data.clients_at_once must be 1, got {data.clients_at_once}")
            if ranks.count > 1:
                raise ConfigurationError(f"{said} trainer.devices must be 1, got {ranks.count} in all")
        self.requires_grad_(False)
        self.slots = Slots({name: self.get_parameter(name) for name in self.roles.slots})
        places = homes(self, self.roles, federation, ranks.count, data.one_by_one)
        if clients is not None:
            places = [0 if client in clients else -1 for client in range(terms.num_clients)]
        self.store = PlacedStore(initial_rows(self, self.roles), places, ranks)
        pool = Pool(data.pool.images, data.pool.labels, data.transform)
        images = ImageFeed(self, pool, federation, ranks, data.cache_features, data.others)
        self.simulation = Simulation(
            self, self.roles, self.slots, self.store, federation, images, data.one_by_one, data.record_privacy
        )
        metrics = chosen_metrics(data.metrics, data.min_support)
        self.evaluation = Evaluation(self.simulation, metrics, data.keeps_images)
        self.train(self.training)
        return self.simulation

    def initial_values(self) -> Values:
        """Return copies of what the server may see: the shared parameters and those that clients upload as well."""
        names = self.roles.shared + self.roles.uploaded
        return {name: self.get_parameter(name).detach().clone() for name in names}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Make one optimizer a local phase."""
        return self.simulation.local_steps.optimizers(self.simulation.phases[Stage.TRAIN])

    def train(self, mode: bool = True) -> Self:
        """Switch what is trained as usual; frozen parts stay in evaluation mode."""
        super().train(mode)
        for part in self._frozen_parts:
            part.eval()
        return self

    # ------------------------------------------------------------------ steps

    def training_step(self, work: CohortWork, batch_idx: int) -> None:
        """Train the clients of a cohort for a round: each phase's steps, one after the other."""
        if not work.clients:
            return
        simulation, given = self.simulation, cast(Any, self.optimizers())
        optimizers = given if isinstance(given, list) else [given]
        cohort = self.server.send(simulation, work.clients)
        for part in work.parts:
            optimizer = optimizers[part.phase]
            phase = simulation.start(cohort, part, optimizer)
            for step, batch in simulation.steps(work, part):
                made = simulation.gradients(cohort, step, batch)
                simulation.local_steps.take(cohort, step, made, phase, optimizer)
            simulation.finish(cohort, part, optimizer)
        self.server.collect(simulation, cohort)

    def on_validation_epoch_start(self) -> None:
        """Begin an evaluation of all clients."""
        self.server.loaders.begin(self.server.loaders.scored)
        self.evaluation.start()

    def validation_step(self, work: CohortWork, batch_idx: int) -> None:
        """Score the clients of a cohort."""
        if work.clients:
            self.evaluation.score(work, self.server.evaluated, self.server.rule)
        if work.last:
            self.evaluation.gather()

    def on_validation_epoch_end(self) -> None:
        """End the evaluation."""
        self.evaluation.finish(self.server.evaluated, self.server.on_divergence)

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    @property
    def server(self) -> Server:
        """The server of this run."""
        return next(callback for callback in cast(Any, self.trainer).callbacks if isinstance(callback, Server))

    # ------------------------------------------------------------------ checkpoints

    @cached_property
    def frozen_hash(self) -> str:
        """Hash of the backbone this run is made with."""
        return saved_state.frozen_hash(self, self.roles)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what was learned."""
        rows = {f"store.{key}": value for key, value in self.store.whole().items()}
        checkpoint["state_dict"] = saved_state.learned(checkpoint["state_dict"], self.roles) | rows
        checkpoint["format"] = saved_state.FORMAT
        checkpoint["frozen_hash"] = self.frozen_hash
        saved_state.without_momenta(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of something else."""
        rows = {f"store.{key}": value for key, value in self.store.shapes().items()}
        saved_state.check(checkpoint, self, saved_state.learned(self.state_dict(), self.roles) | rows, self.frozen_hash)
