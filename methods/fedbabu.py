"""FedBABU: the body is trained under a head that never moves; before testing, a copy is fine-tuned."""

from typing import Any, Literal

from benchmark.contract import LocalTraining, Phase
from methods.fedavg import FedAvg


class FedBABU(FedAvg):
    """FedBABU (Oh, Kim, Yun, ICLR 2022).

    The head keeps its common random values during the federated training and is never sent; the server averages the
    body. At every evaluation a copy of each client is fine-tuned first, so that the federated state does not change.

    Deviation: the server weights with n_k like everywhere here; the authors' code takes the plain mean. Reading:
    pFedPT's one fine-tuning step is one epoch over body and head at the training's rate; its code leaves the head out
    by mistake. A prompt on the pixels rests while the copy is fine-tuned. Further arguments as ``FedAvg``, with
    ``training`` of the body.

    Args:
        finetuning: of the copy before it is evaluated.
        finetuned: what of the copy is fine-tuned: body and head (``all``) or the ``head``.
    """

    shared = ("backbone",)

    def __init__(
        self,
        *arguments: Any,
        finetuning: LocalTraining = LocalTraining(lr=0.005, epochs=1),
        finetuned: Literal["all", "head"] = "all",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.finetuning = finetuning
        self.finetuned = finetuned

    def model_phases(self) -> list[Phase]:
        """Train the body alone."""
        return [self.training_settings.phase("backbone")]

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fine-tune body and head, or the head alone."""
        return [self.finetuning.phase(*(("backbone", "head") if self.finetuned == "all" else ("head",)))]
