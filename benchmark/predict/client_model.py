"""One client of a finished run, asked about images as an evaluation asks it."""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from benchmark.contract import MiniBatch, Stage
from benchmark.engine.batches.features import encoded
from benchmark.engine.batches.noise import drawn_noise
from benchmark.engine.cohort import Cohort
from benchmark.engine.plan.evaluation_plan import rows_of_a_step
from benchmark.engine.plan.work import Part, Step
from benchmark.engine.roles import overrides
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Terms, Values
from benchmark.masked import IGNORE
from benchmark.method import FederatedMethod
from benchmark.run.federation_file import FederationFacts

Point = Literal["server", "local"]


def fits_a_copy(method: FederatedMethod, client: int, point: Point) -> bool:
    """Return whether an evaluation fits a copy of a client at a point before it scores it.

    Testers, who have test images alone, are scored as they are (``engine.plan.evaluation_plan.evaluated_clients``).
    """
    terms, phases = method.simulation.terms, method.simulation.phases
    if point != "server" or any(client in testers for testers in terms.testers.values()):
        return False
    return bool(phases[Stage.ADAPT if client in terms.new_clients else Stage.FINETUNE])


def _split_of_new(terms: Terms) -> str:
    """Return the split whose classes a new client tells apart: those of training.

    A run without new clients knows no label space of theirs, and one more would be another model to its checkpoint.
    """
    return "train" if "train" in terms.label_spaces and "new" not in terms.label_spaces else "new"


class ClientModel:
    """One client's logits of images, which are those of the run's evaluation after the last round.

    Where the method fits a copy of a client before it is evaluated, that is done here, once.

    Args:
        method: that has joined and holds what was learned.
        facts: of its federation.
        client: its number.
        point: where in a round: ``"server"``, after the aggregation, or ``"local"``, as local training left it.
        fitted: values of the copy, [1, ...] each, where it was fitted before.

    Attributes:
        name: of the client.
        split: whose label space it has.
        space: what the engine calls that label space.
        class_names: in the order of the logits.
        step: images of a step of the run's evaluation.
        autocast: whether steps are in the run's lower precision, where it has one.
        draws: whether logits rest on draws, which are those of the place that an image has among the run's test images.
    """

    def __init__(
        self,
        method: FederatedMethod,
        facts: FederationFacts,
        client: int,
        point: Point,
        fitted: Values | None = None,
    ) -> None:
        simulation = method.simulation
        self.method, self.facts, self.client, self.point = method, facts, client, point
        self.name = facts.client_names[client]
        is_new = client in simulation.terms.new_clients
        tests = (split for split, testers in simulation.terms.testers.items() if client in testers)
        self.split = _split_of_new(simulation.terms) if is_new else next(tests, "test")
        self.class_names = facts.names_for(client, self.split)
        self.space = simulation.terms.space_of(self.split, client)
        batch = simulation.terms.eval_batch_size
        self.step = rows_of_a_step(simulation.terms.held_out_row.get(self.split, 0), batch) or batch
        self.draws = bool(self.noise(0, 1))
        self.autocast = True
        method.eval()
        with self.working():
            simulation.watch.start()
            self.cohort = self._cohort(Stage.ADAPT if is_new else Stage.FINETUNE, method.server.evaluated, fitted)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Compute without gradients, in the run's precision."""
        with torch.no_grad(), self._precision(), ExitStack() as off:
            if not self.autocast:
                for kind in self._kinds_under_autocast():
                    off.enter_context(torch.autocast(kind, enabled=False))
            yield

    def without_autocast(self) -> "ClientModel":
        """Return the model with the same values, whose steps are in their precision; itself where they already are.

        A graph of ``torch.export`` knows no autocast.
        """
        with self._precision():
            if not self._kinds_under_autocast():
                return self
        made, before = copy.copy(self), self.cohort
        made.autocast = False
        with made.working():
            gathered = self.method.simulation.gather(
                before.clients, before.stage, before.round, before.received, before.values, self.split
            )
        kind = self.method.simulation.parameters.first.dtype
        # What a method makes once and keeps may have been made under autocast.
        of_steps = {name: value.to(kind) for name, value in gathered.prepared.items() if value.is_floating_point()}
        made.cohort = replace(gathered, prepared=gathered.prepared | of_steps)
        return made

    def _kinds_under_autocast(self) -> list[str]:
        return [kind for kind in {"cpu", self.method.device.type} if torch.is_autocast_enabled(kind)]

    def _precision(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = cast(Any, self.method.trainer).precision_plugin.forward_context()
        return context

    def _cohort(self, stage: Stage, round: Round, fitted: Values | None) -> Cohort:
        """Gather what the client has at the point, of a fitted copy where the method asks for one."""
        simulation, clients = self.method.simulation, (self.client,)
        received = simulation.received(self.method.server.rule, round, clients)
        if fits_a_copy(self.method, self.client, self.point):
            rule = self.method.server.rule
            values = fitted or self.method.evaluation.fitted(self.client, stage, received, round, rule)
        else:
            part = Part(clients, Stage.EVALUATE, 0, self.point, self.split, range(0))
            values = self.method.evaluation.values(part, received)
        return simulation.gather(clients, Stage.EVALUATE, round, received, values, self.split)

    # ------------------------------------------------------------------ asked

    def logits(self, images: Tensor, number: int = 0) -> Tensor:
        """Return the client's logits, or log-probabilities, of images, [n, C], on the CPU.

        Args:
            images: uint8 [n, 3, H, W], as the run stores its own; at most ``step`` of them where there are draws.
            number: of the step, for draws.

        Raises:
            ConfigurationError: they are no such images, or a logit is not finite.
        """
        height, width = self.facts.image_size
        if images.dtype != torch.uint8 or images.shape[1:] != (3, height, width):
            raise ConfigurationError(
                f"expected images as uint8 [n, 3, {height}, {width}], the size at which the run stored its own; got "
                f"{str(images.dtype).removeprefix('torch.')} {tuple(images.shape)}"
            )
        count, simulation = len(images), self.method.simulation
        if self.draws and count > self.step:
            raise ConfigurationError(
                f"{type(self.method).__name__} draws for each step of its evaluation: ask of {self.step} images at a "
                f"time at most, got {count}"
            )
        if self.draws and count < self.step:  # what is drawn depends on the number of rows
            images = torch.cat([images, images.new_zeros(self.step - count, *images.shape[1:])])
        part = (Stage.EVALUATE, self.space)
        with self.working():
            batch = self._batch(images, count, number)
            made = simulation.clients("client_logits", self.method.client_logits, self.cohort, 1, batch, part=part)
        logits: Tensor = made[0, :count].cpu()
        if not logits.isfinite().all():
            raise ConfigurationError(
                f"{type(self.method).__name__} gives {self.name} logits that are not finite, and so no prediction: its "
                "training has diverged"
            )
        return logits

    def _batch(self, images: Tensor, count: int, number: int) -> MiniBatch:
        simulation = self.method.simulation
        like = simulation.parameters.first
        x = simulation.images.pool.input(images.to(like.device), None, like.dtype)
        features = encoded(self.method, x) if "features" in self.method.inputs else {}
        y = torch.full((1, len(x)), IGNORE, device=like.device)
        mask = torch.arange(len(x), device=like.device).unsqueeze(0) < count
        stacked = {name: value.unsqueeze(0) for name, value in features.items()}
        return MiniBatch(x.unsqueeze(0), y, mask, 0, self.space, self.noise(number, len(x)), stacked)

    def noise(self, number: int, rows: int) -> Values:
        simulation = self.method.simulation
        if not overrides(self.method, "draw_noise"):
            return {}
        step = Step((self.client,), (self.client,), Stage.EVALUATE, number=number, point=self.point, split=self.split)
        return drawn_noise(self.method, simulation.terms.seed, step, rows, simulation.parameters.first)

    def trained(self) -> Values:
        """Return the client's trained parameters by name: what it received, and what is its own."""
        names = self.method.roles.trained
        values = {name: self.method.get_parameter(name).detach() for name in names}
        return values | {name: rows[0].detach() for name, rows in self.cohort.values.items()}

    def probabilities(self, images: Tensor, number: int = 0) -> Tensor:
        """Return the classes' probabilities, [n, C]; arguments as :meth:`logits`."""
        return self.logits(images, number).double().softmax(dim=1)
