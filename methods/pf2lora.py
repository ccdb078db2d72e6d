"""PF2LoRA: shared low-rank factors, and lighter ones of each client's own that are fitted to them first."""

from dataclasses import replace
from typing import Any, Literal

from benchmark.backbones.parts import LowRank, TowerPart
from benchmark.contract import LocalTraining, Phase
from benchmark.ranges import FewOrNone, NonNegativeInt, PositiveFloat
from methods.fedlora import FedLoRA

#: Adam with 1e-3 and weight decay 1e-4 on what is shared are those of a published port.
SHARED_TRAINING = LocalTraining(lr=1e-3, weight_decay=1e-4, optimizer="adam")


class PF2LoRA(FedLoRA):
    """PF2LoRA (Hao et al., "Personalized Federated Fine-tuning for Heterogeneous Data: An Automatic Rank Learning
    Approach via Two-Level LoRA", ICLR 2026).

    ``W = W0 + (alpha / r) B A + (alpha_p / r_p) D_k C_k``: A, B and the head are shared, C and D stay with their
    client. Two levels: a client first fits C and D while the rest rests, then A, B and the head while C and D rest.
    Both have the same objective, so that at the lower level's optimum what the upper gradient leaves out is 0. The rank
    of the sum lies between |r - r_p| and r + r_p. Evaluated with the new A and B and the client's own C and D.

    Readings: only the abstract and a port were at hand. ``order="joint"`` is the port's: everything at once. The port
    has r_p = 16 above r = 8, the abstract "fewer parameters"; its pruning is ``PF2LoRAPruned``. Further arguments as
    ``FedLoRA``.

    Args:
        own_rank: r_p; 0 is FedAvg-LoRA with a shared head.
        own_alpha: of the scale alpha_p / r_p; None is 2 r_p.
        order: see above.
        own_epochs: of the first phase.
        head: whose it is.
        training: of A, B and the head; C and D have its rate and no weight decay.
    """

    shared = ("lora",)
    personal: tuple[str, ...] = ("own_lora", "head")
    per_example = True
    factors: type[LowRank] = LowRank  #: the class of C and D

    def __init__(
        self,
        *arguments: Any,
        own_rank: FewOrNone = 2,
        own_alpha: PositiveFloat | None = None,
        order: Literal["alternate", "joint"] = "alternate",
        own_epochs: NonNegativeInt = 1,
        head: Literal["personal", "shared"] = "shared",
        training: LocalTraining = SHARED_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, head=head, training=training, **settings)
        of, alpha = self.lora, 2.0 * max(own_rank, 1) if own_alpha is None else own_alpha
        self.own_lora = self.factors(own_rank, alpha, of.targets, of.first_block, key="own").fit(self.backbone.tower)
        self.order, self.own_epochs = order, own_epochs

    def parts(self) -> tuple[TowerPart, ...]:
        """Return the shared factors and the client's own."""
        return (self.lora, self.own_lora)

    def local_phases(self) -> list[Phase]:
        """Fit the own factors, then the shared ones and the head; or all at once."""
        training = self.training_settings
        own = replace(training.group("own_lora.a", "own_lora.b"), weight_decay=0.0)
        rest = training.group("lora", "head")
        if self.order == "joint" or not self.own_lora.rank:
            return [training.phase_of(own, rest)]
        return [replace(training.phase_of(own), epochs=self.own_epochs), training.phase_of(rest)]
