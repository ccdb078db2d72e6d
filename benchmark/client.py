"""What a method's client functions are given, and how it says what a client trains."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from benchmark.ranges import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, checked

Schedule = Literal["constant", "cosine"]
OptimizerState = Literal["fresh", "client", "shared"]


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
        schedule: of the learning rates over the rounds: ``"constant"``, or ``"cosine"``, which begins at the given
            rates and would reach 0 after the last round.
        optimizer_state: whose momentum a client's local training starts with: ``"fresh"``, nobody's; ``"client"``, its
            own of the round it last took part in; ``"shared"``, that of whoever trained before it, which needs a cohort
            width of 1. What is fitted to copies of the clients always starts afresh.
    """

    groups: tuple[Group, ...]
    epochs: NonNegativeInt
    optimizer: Literal["sgd", "adam"] = "sgd"
    clip: PositiveFloat | None = None
    steps: PositiveInt | None = None
    schedule: Schedule = "constant"
    optimizer_state: OptimizerState = "fresh"


@checked
@dataclass(frozen=True)
class LocalTraining:
    """How a client trains one set of parameters: what a configuration gives, and ``phase`` makes a phase of.

    Attributes:
        lr: learning rate, from 0 on.
        epochs: E, passes over the client's training images in a round.
        momentum: of SGD, from 0 on and below 1.
        weight_decay: added to the gradient.
        clip: largest gradient norm of one client, above 0, or None.
        optimizer: ``sgd`` or ``adam``.
        steps: at most so many mini-batches, or None for all of the epochs.
        schedule: of the learning rate over the rounds, ``constant`` or ``cosine``.
        optimizer_state: where the momentum starts from: ``fresh``, at zero in every round; ``client``, where the same
            client's last round left it (one optimizer object a client for the whole run); ``shared``, where the client
            before left it (one optimizer object for all clients, an artefact of simulating them one after the other;
            it needs ``data.cohort_width`` 1).
    """

    lr: NonNegativeFloat
    epochs: NonNegativeInt = 5
    momentum: BelowOne = 0.0
    weight_decay: NonNegativeFloat = 0.0
    clip: PositiveFloat | None = None
    optimizer: Literal["sgd", "adam"] = "sgd"
    steps: PositiveInt | None = None
    schedule: Schedule = "constant"
    optimizer_state: OptimizerState = "fresh"

    def group(self, *parameters: str) -> Group:
        """The parameters under these prefixes with this rate, momentum and weight decay."""
        return Group(parameters, self.lr, self.momentum, self.weight_decay)

    def phase(self, *parameters: str) -> Phase:
        """A local phase that trains the parameters under these prefixes."""
        return self.phase_of(self.group(*parameters))

    def phase_of(self, *groups: Group) -> Phase:
        """A local phase of several groups, with this number of epochs, optimizer, clipping and so on."""
        return Phase(groups, self.epochs, self.optimizer, self.clip, self.steps, self.schedule, self.optimizer_state)


@dataclass(frozen=True)
class Client:
    """One client inside a step. Its parameters are the method's own while the step runs; here they are by name.

    Attributes:
        parameters: the shared, disclosed and personal parameters, being trained.
        received: what the server sent this round, without gradient.
        kept: the client's own state that is not trained (see ``kept_state``), without gradient.
        prepared: what ``prepare`` returned for this round or this evaluation, without gradient.
        class_counts: int64 [C], training images of each class that the client holds.
        memory: where the method sets ``needs_memory``, the client's own training images without augmentation, padded to
            the n of the largest client: per name of ``frozen_features`` [n, ...], ``label`` [n] (classes of the data
            set, in every split) and ``mask`` [n], False in padded rows.
    """

    parameters: dict[str, Tensor]
    received: dict[str, Tensor]
    kept: dict[str, Tensor]
    prepared: dict[str, Tensor]
    class_counts: Tensor
    memory: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class MiniBatch:
    """One client's mini-batch.

    Attributes:
        x: images, [B, 3, H, W]; [B, 0] where the method needs ``features`` alone.
        y: labels, [B], -100 in padded rows; counted within the label space of ``split``.
        mask: [B], False in padded rows.
        phase: index into ``local_phases()``.
        noise: what ``draw_noise`` returned for this step.
        features: what ``frozen_features`` returns for these images.
        split: ``"train"``, or the split that is evaluated.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    phase: int = 0
    noise: dict[str, Tensor] = field(default_factory=dict)
    features: dict[str, Tensor] = field(default_factory=dict)
    split: str = "train"
