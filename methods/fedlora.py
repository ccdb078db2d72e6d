"""FedAvg-LoRA: FedAvg of low-rank factors in a frozen ViT, with a head of each client's own or a shared one."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from benchmark.backbones.parts import LowRank, Target, TowerPart
from benchmark.contract import LocalTraining
from benchmark.ranges import Few, FewOrNone, PositiveFloat
from methods.vit_prompt import ViTPromptMethod

#: The rate is a choice; momentum and weight decay are those of FedPGP's code, as for every method of its comparison.
LORA_TRAINING = LocalTraining(lr=0.01, momentum=0.9, weight_decay=5e-4)


class FedLoRA(ViTPromptMethod):
    """FedAvg-LoRA (FedIT, Zhang et al., ICASSP 2024) on a ViT: A and B are averaged, each by itself.

    ``W = W0 + (alpha / r) B A`` at chosen projections of every block (Hu et al., ICLR 2022), A Kaiming-uniform, B = 0.
    Objective ``CE(H_k(F(x)), y)``; the server averages A and B weighted with n_k. The product of the means is not the
    mean of the products: ``FFALoRA``, ``FLoRA`` and ``LoRAFAIR`` deal with that, ``FedSALoRA`` keeps B at home.
    Message: r (in + out) numbers for each projection each way, and the head where it is shared.

    Readings: it was published for language models; here queries and values of a ViT's attention are adapted, without
    dropout, and the head stays with its client as in this suite's other methods. Further arguments as
    ``ViTPromptMethod``.

    Args:
        rank: r; 0 trains the head alone.
        alpha: of the scale alpha / r.
        targets: adapted projections.
        first_block: the first adapted block, counted from 1.
        head: whose it is.
        training: of factors and head together.
    """

    shared: tuple[str, ...] = ("lora",)
    personal: tuple[str, ...] = ("head",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        rank: FewOrNone = 8,
        alpha: PositiveFloat = 16.0,
        targets: list[Target] = ["q", "v"],  # noqa: B006 (it is not changed)
        first_block: Few = 1,
        head: Literal["personal", "shared"] = "personal",
        training: LocalTraining = LORA_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        self.begin_at(first_block)
        self.lora = LowRank(rank, alpha, targets, first_block).fit(self.backbone.tower)
        self.head = self.new_head()
        if head == "shared":
            self.shared = (*self.shared, "head")
            self.personal = tuple(name for name in self.personal if name != "head")

    def parts(self) -> Sequence[TowerPart | Tensor]:
        """Return the factors."""
        return (self.lora,)
