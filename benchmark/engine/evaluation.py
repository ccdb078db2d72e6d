"""Scores of every client on its own held-out images, of a fitted copy of it where the method asks for one."""

import warnings

import torch
from torch import Tensor

from benchmark.contract import Stage
from benchmark.engine.cohort import Cohort
from benchmark.engine.kept_rows import LAST
from benchmark.engine.messages import unchanged
from benchmark.engine.mistakes import place
from benchmark.engine.plan import Step
from benchmark.engine.precision import float32_outside_of_steps
from benchmark.engine.scores import ClientScores
from benchmark.engine.simulation import Simulation
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Values
from benchmark.masked import IGNORE
from benchmark.server import ServerRule


class Evaluation:
    """Scores cohorts, step by step.

    Args:
        simulation: whose clients.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        #: per point and split
        self.scores: dict[tuple[str, str], ClientScores] = {}
        self._cohort: Cohort | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._received = Broadcast()
        self._fitted = False
        self._untrained = False

    def start(self) -> None:
        """Begin a new evaluation of all clients."""
        self.scores = {}
        self.simulation.watch.start()

    def step(self, step: Step, round: Round, rule: ServerRule) -> None:
        """Fit a copy of each client by a step, or score a mini-batch of each."""
        if step.first:
            self.simulation.ranks.busy_with = step.cohort
            self._received = self.simulation.received(rule, round, step.cohort)
            own = bool(self._sent(len(step.cohort)))
            # Before the first round a client's own state is the server's, whose steps come just before.
            self._untrained = step.point == "local" and round.number == 0 and not own and not self._fitted
            self._fitted = False
        if self._untrained:
            self._score_as_server(step)
        elif step.stage is Stage.EVALUATE:
            self._score(step, round)
        else:
            self._fit(step, round, rule)

    def _score(self, step: Step, round: Round) -> None:
        simulation = self.simulation
        if step.number == 0 or self._cohort is None:
            values = simulation.slots.detached() if self._fitted else self._values(step)
            self._cohort = simulation.gather(step.cohort, Stage.EVALUATE, round, self._received, values, step.split)
        method, batch = simulation.method, simulation.mini_batch(step)
        count, part = len(step.clients), (step.stage, step.split)
        made = simulation.clients(
            "client_logits", method.client_logits, self._cohort, count, batch, part=part, number=step.number
        )
        classes = simulation.terms.classes_of(step.split)
        if not isinstance(made, Tensor) or made.shape != (*batch.y.shape, classes):
            given = tuple(made.shape[1:]) if isinstance(made, Tensor) else type(made).__name__
            raise ConfigurationError(
                f"{place(method, 'client_logits')} must return logits [B, C] of the {batch.y.shape[1]} images of a "
                f"mini-batch and {classes} classes; it returns {given}"
            )
        y = batch.y
        if step.point == "local" and round.number > 0:
            y = y.masked_fill(~self._cohort.participated[:count, None], IGNORE)  # who never trained has no local model
        self._of(step, made.shape[-1]).update(made, y, step.clients)

    def _score_as_server(self, step: Step) -> None:
        """Take the scores of the server's state for the clients' own, which is equal to it."""
        if step.number == 0:
            server = self.scores["server", step.split]
            self._of(step, server.num_classes).add(step.clients, server.counted(step.clients))

    def _of(self, step: Step, classes: int) -> ClientScores:
        """Return the scores at a step's point on its split."""
        key, simulation = (step.point, step.split), self.simulation
        if key not in self.scores:
            self.scores[key] = ClientScores(simulation.terms.num_clients, classes).to(simulation.device)
        return self.scores[key]

    def _values(self, step: Step) -> Values:
        """Return what clients differ in; what all have in common is the method's own."""
        simulation, shared = self.simulation, self.simulation.roles.shared
        own = {name: name for name in simulation.roles.personal}
        if step.point == "local":
            own |= {name: LAST + name for name in shared}
        values = simulation.store.rows_of(own, step.cohort, simulation.device)
        return (self._sent(len(step.cohort)) if step.point == "server" else {}) | values

    def _sent(self, count: int) -> Values:
        """Return the shared values that clients received, [K, ...] each, but for those that are the method's own."""
        simulation, received = self.simulation, self._received
        sent = {}
        for name in simulation.roles.shared:
            common = received.common.get(name)
            if name in received.own:
                sent[name] = received.own[name]
            elif common is not None and common.data_ptr() != simulation.parameters[name].data_ptr():
                sent[name] = common.expand(count, *common.shape)
        return sent

    def _fit(self, step: Step, round: Round, rule: ServerRule) -> None:
        """Take a step on copies of the clients, before these copies are scored."""
        if torch.is_inference_mode_enabled():
            raise ConfigurationError(
                "fine-tuning before evaluation needs gradients: set trainer.inference_mode to false"
            )
        simulation = self.simulation
        if not self._fitted or self._cohort is None:
            self._cohort = simulation.begin(step.cohort, step.stage, round, self._received)
            self._optimizers = simulation.local_steps.optimizers(simulation.phases[step.stage])
            self._fitted = True
        with torch.enable_grad():
            simulation.train(self._cohort, step, self._optimizers[step.phase], simulation.mini_batch(step))
        if step.stage is Stage.ADAPT and step.phase_end:
            slots, roles = simulation.slots.detached(), simulation.roles
            uploads = {name: slots[name] for name in roles.shared + roles.uploaded}  # what is the client's own stays
            with float32_outside_of_steps(simulation.device), unchanged(uploads, f"{type(rule).__name__}.adapt"):
                answer = rule.adapt(round, step.cohort, step.phase, uploads)
            for name, value in answer.items():
                simulation.slots.of(name).data.copy_(value)

    def gather(self) -> None:
        """Put the scores of all ranks together, and what callbacks have reported of some clients; all ranks are here.

        Each client is scored by one rank; the numbers of the others are zeros, which change no bit of its own.
        """
        simulation, ranks = self.simulation, self.simulation.ranks
        simulation.store.dismiss()
        ranks.busy_with = ()
        if ranks.count == 1:
            return
        own = {key: scores.scored() for key, scores in self.scores.items()}
        mine = {key: (clients, self.scores[key].num_classes) for key, clients in own.items()}
        everybody = ranks.everybody("the end of an evaluation", mine)
        named = {
            "/".join((name, *key)): values
            for key, clients in own.items()
            for name, values in self.scores[key].counted(clients).items()
        }
        parts = ranks.gather("scores", named)
        self.scores = {}
        for key in dict.fromkeys(key for theirs in everybody for key in theirs):
            classes = next(theirs[key][1] for theirs in everybody if key in theirs)
            whole = ClientScores(simulation.terms.num_clients, classes).to(simulation.device)
            for theirs, part in zip(everybody, parts, strict=True):
                if key in theirs:
                    counted = {kind.name: part["/".join((kind.name, *key))] for kind in whole.kinds}
                    whole.add(theirs[key][0], counted)
            self.scores[key] = whole
        whole_federation = range(simulation.terms.num_clients)
        for numbers in ranks.everybody("reports", simulation.reports.of(whole_federation)):
            simulation.reports.take_in(whole_federation, numbers)

    def finish(self, round: Round, on_divergence: str) -> None:
        """Say whose images got no prediction, since their logits were not finite; they count as wrong.

        Raises:
            ConfigurationError: nobody's got one, or ``on_divergence`` is ``"raise"``.
        """
        for (point, split), scores in self.scores.items():
            images, without = scores.images(), scores.without_prediction()
            clients = without.nonzero().flatten().tolist()
            if not clients:
                continue
            said = (
                f"the logits of {int(without.sum())} of {int(images.sum())} images of split {split!r} at point "
                f"{point!r} are not finite (clients {clients[:5]})"
            )
            if torch.equal(without, images) or on_divergence == "raise":
                raise ConfigurationError(
                    f"nothing to evaluate after round {round.number}: {said}; lower the learning rate, or look at the "
                    "images and at the frozen weights"
                )
            warnings.warn(f"{said}; they count as wrong", stacklevel=1)
