"""Scores of every client on its own held-out images, of a fitted copy of it where the method asks for one."""

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmark.contract import Stage
from benchmark.engine.client_state import LAST
from benchmark.engine.cohort import Cohort
from benchmark.engine.device.precision import float32_outside_of_steps
from benchmark.engine.kept_images import KeptImages
from benchmark.engine.plan.evaluation_plan import EvaluationPlan
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.plan.work import CohortWork, Part, Share, Shown
from benchmark.engine.refusals.author_errors import place
from benchmark.engine.refusals.payload_checks import unchanged
from benchmark.engine.scores import ClientScores
from benchmark.engine.simulation import Simulation
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Values
from benchmark.masked import IGNORE
from benchmark.metrics import Metric, keep_images
from benchmark.server import ServerRule


class Evaluation:
    """Scores cohorts.

    Args:
        simulation: whose clients.
        metrics: what they are scored by.
        keeps_images: keep the images with their logits, also where no metric is made of them.
    """

    def __init__(self, simulation: Simulation, metrics: tuple[Metric, ...], keeps_images: bool = False) -> None:
        self.simulation = simulation
        self.metrics = metrics
        self.keeps_images = keeps_images or keep_images(metrics)
        #: per point and split
        self.scores: dict[tuple[str, str], ClientScores] = {}
        #: called after every step, for displays
        self.on_step: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begin a new evaluation of all clients."""
        self.scores = {}
        self.simulation.watch.start()

    def score(self, work: CohortWork, round: Round, rule: ServerRule) -> None:
        """Score the clients of a cohort at each point on each split, fitted copies of them where the method asks."""
        simulation = self.simulation
        simulation.ranks.busy_with = work.clients
        received = simulation.received(rule, round, work.clients)
        fitting = [part for part in work.parts if part.stage is not Stage.EVALUATE]
        scoring = [part for part in work.parts if part.stage is Stage.EVALUATE]
        if fitting:
            self.fit(work, fitting, received, round, rule)
        # Before the first round a client's own state is the server's, which was scored just before.
        untrained = round.number == 0 and not fitting and not self._sent(received, len(work.clients))
        cohort: Cohort | None = None
        for part in scoring:
            if part.point == "local" and untrained:
                self._score_as_server(work, part)
                continue
            # Corrupted images come after the same ones as they are, at the same point on the same split.
            if cohort is None or part.shown is not Shown.CORRUPTED:
                fitted = bool(fitting) and part.point == "server"
                values = simulation.slots.detached() if fitted else self.values(part, received)
                cohort = simulation.gather(work.clients, Stage.EVALUATE, round, received, values, part.split)
            self._score(work, part, cohort)

    def _score(self, work: CohortWork, part: Part, cohort: Cohort) -> None:
        """Score a cohort on the images of a split, and on the stream that they are held against, where there is one."""
        simulation, method = self.simulation, self.simulation.method
        terms = simulation.terms
        classes = len(terms.classes_in(terms.space_of(part.split, part.cohort[0])))
        most = terms.most_classes(part.split)
        for step, batch in simulation.steps(work, part):
            count, of = len(step.clients), (step.stage, batch.split)
            made = simulation.clients(
                "client_logits", method.client_logits, cohort, count, batch, part=of, number=step.number
            )
            if not isinstance(made, Tensor) or made.shape != (*batch.y.shape, classes):
                given = tuple(made.shape[1:]) if isinstance(made, Tensor) else type(made).__name__
                raise ConfigurationError(
                    f"{place(method, 'client_logits')} must return logits [B, C] of the {batch.y.shape[1]} images of a "
                    f"mini-batch and {classes} classes; it returns {given}"
                )
            y = batch.y
            if part.point == "local" and cohort.round.number > 0:
                y = y.masked_fill(~cohort.participated[:count, None], IGNORE)  # who never trained has no local model
            if most > classes:  # other clients tell more classes apart
                made = torch.nn.functional.pad(made, (0, most - classes), value=-torch.inf)
            self._of(part, most).update(made, y, step.clients, step.index, step.shown)
            self._stepped()

    def _score_as_server(self, work: CohortWork, part: Part) -> None:
        """Take the scores of the server's state for the clients' own, which is equal to it."""
        for _ in work.steps(part, self.simulation.device):
            self._stepped()
        if part.shown is Shown.CORRUPTED:
            return  # taken with the others
        server = self.scores["server", part.split]
        own = self._of(part, server.num_classes)
        own.add(work.clients, server.counted(work.clients))
        own.keep(server.kept.of(work.clients))
        if own.stream is not None and server.stream is not None:
            own.stream.add(server.stream.of(work.clients))

    def _stepped(self) -> None:
        for watcher in self.on_step:
            watcher()

    def _of(self, part: Part, classes: int) -> ClientScores:
        """Return the scores at a part's point on its split."""
        key = part.point, part.split
        if key not in self.scores:
            self.scores[key] = self._nothing(classes, part.split)
        return self.scores[key]

    def _nothing(self, classes: int, split: str) -> ClientScores:
        """Return scores of no image."""
        clients, holdings = self.simulation.terms.num_clients, self.simulation.holdings
        versions = holdings.corrupted.versions if split == "test" else ()
        stream, keeps = split in holdings.streams, self.keeps_images
        scores = ClientScores(clients, classes, self.metrics, stream, versions, keeps)
        return scores.to(self.simulation.device)

    def values(self, part: Part, received: Broadcast) -> Values:
        """Return what a part's clients differ in at its point; what all have in common is the method's own."""
        simulation, shared = self.simulation, self.simulation.roles.shared
        own = {name: name for name in simulation.roles.personal}
        if part.point == "local":
            own |= {name: LAST + name for name in shared}
        values = simulation.store.rows_of(own, part.cohort, simulation.device)
        return (self._sent(received, len(part.cohort)) if part.point == "server" else {}) | values

    def _sent(self, received: Broadcast, count: int) -> Values:
        """Return the shared values that clients received, [K, ...] each, but for those that are the method's own."""
        simulation = self.simulation
        sent = {}
        for name in simulation.roles.shared:
            common = received.common.get(name)
            if name in received.own:
                sent[name] = received.own[name]
            elif common is not None and common.data_ptr() != simulation.parameters[name].data_ptr():
                sent[name] = common.expand(count, *common.shape)
        return sent

    def fit(
        self, work: CohortWork, fitting: Sequence[Part], received: Broadcast, round: Round, rule: ServerRule
    ) -> None:
        """Fit copies of a cohort's clients in the slots, before these copies are scored."""
        if torch.is_inference_mode_enabled():
            raise ConfigurationError(
                "fine-tuning before evaluation needs gradients: set trainer.inference_mode to false"
            )
        simulation, stage = self.simulation, fitting[0].stage
        cohort = simulation.begin(work.clients, stage, round, received)
        optimizers = simulation.local_steps.optimizers(simulation.phases[stage])
        for part in fitting:
            optimizer = optimizers[part.phase]
            with torch.enable_grad():
                phase = simulation.start(cohort, part, optimizer)
                for step, batch in simulation.steps(work, part):
                    made = simulation.gradients(cohort, step, batch)
                    simulation.local_steps.take(cohort, step, made, phase, optimizer)
                    self._stepped()
                simulation.finish(cohort, part, optimizer)
            if stage is Stage.ADAPT:
                self._adapt(work.clients, part.phase, round, rule)

    def fitted(self, client: int, stage: Stage, received: Broadcast, round: Round, rule: ServerRule) -> Values:
        """Fit a copy of one client as before its evaluation; return its values, [1, ...] each.

        Args:
            client: its number.
            stage: of the fitting.
            received: what the server has sent it.
            round: of the evaluation.
            rule: of the server.
        """
        simulation = self.simulation
        terms, rows = simulation.terms, simulation.holdings.train_rows
        fitting = RoundPlan((client,), rows, terms, simulation.phases[stage], stage, 1, 0)
        plan = EvaluationPlan((client,), {}, fitting, ("server",), terms.eval_batch_size, 1)
        for work in Share([plan]):
            self.fit(work, work.parts, received, round, rule)
        return {name: value.clone() for name, value in simulation.slots.detached().items()}

    def _adapt(self, clients: tuple[int, ...], phase: int, round: Round, rule: ServerRule) -> None:
        """Let the rule answer the copies of clients that never train, after a phase of their fitting."""
        simulation = self.simulation
        slots, roles = simulation.slots.detached(), simulation.roles
        uploads = {name: slots[name] for name in roles.shared + roles.uploaded}  # what is the client's own stays
        with float32_outside_of_steps(simulation.device), unchanged(uploads, f"{type(rule).__name__}.adapt"):
            answer = rule.adapt(round, clients, phase, uploads)
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
        for key, scores in self.scores.items():
            named |= scores.kept.columns("/".join(("images", *key, ""))) if self.keeps_images else {}
            named |= scores.stream.columns("/".join(("stream", *key, ""))) if scores.stream is not None else {}
        parts = ranks.gather("scores", named)
        self.scores = {}
        for key in dict.fromkeys(key for theirs in everybody for key in theirs):
            classes = next(theirs[key][1] for theirs in everybody if key in theirs)
            whole = self._nothing(classes, key[1])
            for theirs, part in zip(everybody, parts, strict=True):
                if key in theirs:
                    counted = {name: part["/".join((name, *key))] for name in whole.states}
                    whole.add(theirs[key][0], counted)
                    if self.keeps_images:
                        whole.keep(KeptImages.read(part, "/".join(("images", *key, ""))))
                    if whole.stream is not None:
                        whole.stream.add(whole.stream.read(part, "/".join(("stream", *key, ""))))
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
