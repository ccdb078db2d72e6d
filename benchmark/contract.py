"""The contract of a method: what ONE client does with ONE mini-batch, in ordinary PyTorch.

A method names its parameters' roles, writes ``forward`` and, where cross-entropy is not all, ``client_loss``, and says
what is trained. The engine runs that for a cohort of clients at once, in a simulation; a deployment for its one client.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor, nn

from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Terms, Values
from benchmark.masked import cross_entropy
from benchmark.ranges import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked
from benchmark.server import ServerRule

Loss = Tensor | tuple[Tensor, Values]
Message = Values | tuple[Values, Values]
Input = Literal["images", "features", "own_images"]


class Stage(StrEnum):
    """The purpose for which a client's parameters are stepped, or read."""

    TRAIN = "train"  #: local training
    FINETUNE = "finetune"  #: the fitting of a throw-away copy, before it is evaluated
    ADAPT = "adapt"  #: the same of a client that never trains
    EVALUATE = "evaluate"  #: scores
    MESSAGE = "message"  #: what is sent at a round's end, which draws noise of its own


@dataclass(frozen=True)
class Group:
    """Parameters trained with the same settings.

    Attributes:
        parameters: prefixes of parameter names, for example ``("prompt", "head")``.
        lr: learning rate, from 0 on.
        momentum: of SGD, from 0 on and below 1; ignored by Adam.
        weight_decay: added to the gradient, as ``torch.optim.SGD`` does.
    """

    parameters: tuple[str, ...]
    lr: NonNegativeFloat
    momentum: BelowOne = 0.0
    weight_decay: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class Phase:
    """A part of a client's local training with its own parameters and optimizer; the others rest meanwhile.

    Attributes:
        groups: what is trained, and how.
        epochs: passes over the client's training images.
        optimizer: ``"sgd"`` or ``"adam"``.
        clip: largest gradient norm of one client over all trained parameters, or None.
        steps: at most so many mini-batches of these passes, or None for all.
        schedule: of the rates over the rounds: ``"constant"``, or ``"cosine"``, which would be 0 after the last round.
        optimizer_state: momentum that a client starts with: ``"fresh"``, none; ``"client"``, its own of the round it
            last took part in; ``"shared"``, that of the client that trained before it (``clients_at_once: 1``). Copies
            start afresh.
        transform: ONE client's ``(client, update) -> update``: what is added to the parameters that it names in place
            of an optimizer's step, for example its projection; the others take the step. None: all do.
        restart: personal parameters of the phase begin at their initial values in every round.
        first_round: the first round that has the phase, from 1; the fitting of copies knows no rounds.
        last_round: the last one; None for all from the first on.
        every: rounds from one with the phase to the next; 2 has phases alternate.
    """

    groups: tuple[Group, ...]
    epochs: NonNegativeInt
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip: PositiveFloat | None = None
    steps: PositiveInt | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    optimizer_state: Literal["fresh", "client", "shared"] = "fresh"
    transform: "Callable[[Client, Values], Values] | None" = None
    restart: bool = False
    first_round: PositiveInt = 1
    last_round: PositiveInt | None = None
    every: PositiveInt = 1

    def is_in(self, round: int) -> bool:
        """Return whether a round has the phase; 0 is no round, but the fitting of copies."""
        between = self.first_round <= round <= (self.last_round or round)
        return not round or (between and (round - self.first_round) % self.every == 0)


@checked
@dataclass(frozen=True)
class LocalTraining:
    """Settings of a local phase, as a configuration gives them; attributes as ``Group`` and ``Phase`` have them."""

    lr: NonNegativeFloat
    epochs: NonNegativeInt = 5
    momentum: BelowOne = 0.0
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    steps: PositiveInt | None = None
    schedule: Literal["constant", "cosine"] = "constant"
    optimizer_state: Literal["fresh", "client", "shared"] = "fresh"

    def group(self, *parameters: str) -> Group:
        """The parameters under these prefixes with this rate, momentum and weight decay."""
        return Group(parameters, self.lr, self.momentum, self.weight_decay)

    def phase(self, *parameters: str) -> Phase:
        """A local phase that trains the parameters under these prefixes."""
        return self.phase_of(self.group(*parameters))

    def phase_of(self, *groups: Group) -> Phase:
        """A local phase of these groups, with this optimizer, number of epochs and clip."""
        return Phase(groups, self.epochs, self.optimizer, self.clip, self.steps, self.schedule, self.optimizer_state)


@dataclass(frozen=True)
class Client:
    """One client inside a step. Its parameters are the method's own while the step runs; here they are by name.

    Attributes:
        parameters: the shared and personal parameters, being trained.
        received: what the server sent this round, without gradient.
        class_counts: int64 [C], training images of each class that the client holds.
        round: number and seed of the round; in an evaluation those of the last one.
        participated: bool scalar, whether it has taken part before; False where nothing of a client is ever kept.
        previous: what the method ``remembers``, as it was at the end of that round; the initial values before it.
            Without gradient.
        prepared: what ``prepare`` returned for this round or this evaluation, without gradient.
        own_images: where ``inputs`` has ``"own_images"``: the client's own training images without augmentation, padded
            to the n of the largest client: per name of ``frozen_features`` [n, ...], ``label`` [n] (classes of the data
            set, in every split) and ``mask`` [n], False in padded rows.
        constants: what ``client_constants`` returned for this client.
    """

    parameters: Values
    received: Values
    class_counts: Tensor
    round: Round
    participated: Tensor = field(default_factory=lambda: torch.tensor(False))
    previous: Values = field(default_factory=dict)
    prepared: Values = field(default_factory=dict)
    own_images: Values = field(default_factory=dict)
    constants: Values = field(default_factory=dict)


@dataclass(frozen=True)
class MiniBatch:
    """One client's mini-batch; the engine holds those of K clients in one, with a leading K.

    Attributes:
        x: images, [B, 3, H, W]; [B, 0] where ``inputs`` does not name them.
        y: labels, [B], -100 in padded rows; counted within the label space of ``split``.
        mask: [B], False in padded rows.
        phase: index into ``local_phases()``.
        split: ``"train"``, or the split that is evaluated; where clients have label spaces of their own, with the
            number of theirs: ``"train/0"``. It is a key of ``set_label_spaces``.
        noise: what ``draw_noise`` returned for this step.
        features: what ``frozen_features`` returns for these images.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    phase: int = 0
    split: str = "train"
    noise: Values = field(default_factory=dict)
    features: Values = field(default_factory=dict)


class ClientMethod(nn.Module):
    """The functions and attributes that a method writes; all have defaults but ``forward`` and what is trained.

    Attributes:
        shared: prefixes of the parameters that the server sends, that are trained, and that go back.
        personal: prefixes of the parameters that are trained and stay with their client.
        uploads: what of its own a client lets the server see as well: prefixes of personal parameters, or names that
            ``client_loss`` reports, whose sums over the round are sent.
        remembers: prefixes of parameters that ``client.previous`` holds.
        inputs: what the steps use: ``"images"``, the ``"features"`` that frozen parts make of them, the client's
            ``"own_images"``; without ``"images"`` these are not touched where features are kept.
        evaluate_local: also score every client as its last local training left it (point ``"local"``; in round 0 as it
            begins, and after that only once it has trained), besides after the aggregation (point ``"server"``);
            ``data.evaluate_local`` can say otherwise.
        open_vocabulary: the method classifies among any class names, so that splits may have label spaces of their own.
        per_example: ``client_loss`` is the mean of a loss of each image by itself, plus ``regulariser``; and nothing
            else that is trained or sent is made of images, labels or counts of them. What is random may differ between
            images only as ``draw_noise`` has it. Record-level privacy takes no other method. A class that writes
            functions of its own says it again.
        training_settings: of local training, for a method that trains everything together; set in the constructor.
    """

    training_settings: LocalTraining
    shared: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    remembers: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ("images",)
    evaluate_local: bool = False
    open_vocabulary: bool = False
    per_example: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Classify images [B, 3, H, W]: logits [B, C]."""
        raise ConfigurationError(f"{type(self).__name__} must define forward: images [B, 3, H, W] to logits [B, C]")

    def client_loss(self, client: Client, batch: MiniBatch) -> Loss:
        """Return the objective on a mini-batch, a scalar; cross-entropy of ``forward`` by default.

        It may come with named tensors: ``(loss, {name: tensor})``. Scalars among them are recorded as means over the
        client's steps of the round; what ``uploads`` names is sent as a sum over them.
        """
        return cross_entropy(self(batch.x), batch.y, batch.mask)

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the part of ``client_loss`` that reads no image, label or count of them, a scalar; none by default.

        ``client_loss`` holds it already. Record-level privacy asks for it, as it needs neither clipping nor noise.
        """
        return None

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits, or log-probabilities, [B, C], to evaluate; ``forward`` by default."""
        return self(batch.x)

    def local_phases(self) -> list[Phase]:
        """List what a client trains in a round, in order; by default all at once, with ``training_settings``."""
        if not hasattr(self, "training_settings"):
            raise ConfigurationError(f"{type(self).__name__} must define local_phases: what a client trains in a round")
        return [self.training_settings.phase(*self.shared, *self.personal)]

    def finetune_phases(self, new: bool) -> list[Phase]:
        """List what a throw-away copy of a client is trained with before it is evaluated; nothing by default.

        ``new``: of a client that never trains. Frozen parameters may be trained as well: it is a copy. Rates are
        constant, since an evaluation is of no round.
        """
        return []

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return what the steps need and do not change; called once a round, fitting or evaluated split.

        ``split`` as in the mini-batches.
        """
        return {}

    def frozen_features(self, x: Tensor) -> Values:
        """Return tensors [B, ...] that depend on images [B, 3, H, W] and on frozen parts alone; kept where possible."""
        return {}

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> Values:
        """Draw the random tensors of one step from ``generator`` alone, in all steps of a stage; nothing by default."""
        return {}

    def client_constants(self, number: int, terms: Terms) -> Values:
        """Return what tells a client from others and never changes, such as its prompt's length; nothing by default.

        Asked once for each client; of every client the same names and shapes. The client has it from the start, so
        nothing is sent. Draws have a key: ``benchmark.seeds.torch_generator(terms.seed, "a name", number)``.
        """
        return {}

    def message(self, client: Client, noise: Values) -> Message:
        """Return what a client sends after its last step: by default what is shared, and what ``uploads`` names.

        Parts of a parameter and compressed forms have names of their own, which a rule of the method's reads. What
        ``uploads`` names of the reported tensors goes with it. ``noise``: of ``draw_noise`` in ``Stage.MESSAGE``.
        It may come with what the client keeps of it until ``take``: ``(message, kept)``.
        """
        prefixes = (*self.shared, *self.uploads)
        return {n: v for n, v in client.parameters.items() if any(n == p or n.startswith(f"{p}.") for p in prefixes)}

    def take(self, client: Client, kept: Values) -> Values:
        """Return new values of personal parameters after the aggregation, of a client whose message has left.

        ``client.received`` is what the rule's ``answer`` holds for it, ``client.parameters`` its personal ones alone,
        and ``kept`` what its message came with. By default nothing changes, and the rule is not asked.
        """
        return {}

    def set_label_spaces(self, label_spaces: dict[str, tuple[int, ...]]) -> None:
        """Take the classes of every split that has a label space of its own; called once, before anything else.

        Where clients have spaces of their own, each of these has a name: ``"train/0"``, ``"train/1"``, ...
        """
        self.label_spaces = label_spaces

    def make_server(self) -> ServerRule:
        """Return the server's rule; the weighted mean by default."""
        return ServerRule()
