"""FedAvg+FT: FedAvg, and every client fine-tunes a copy of the global model before it is evaluated."""

from typing import Any, Literal

from benchmark.contract import LocalTraining, Phase
from benchmark.errors import ConfigurationError
from methods.fedavg import FedAvg

PARTS = {"all": ("backbone", "head"), "head": ("head",), "prompt": ("visual_prompt",)}


class FedAvgFT(FedAvg):
    """FedAvg with local fine-tuning (Cheng et al., "Fine-tuning is fine in federated learning", 2021).

    Training and messages are FedAvg's. At every evaluation a copy of each client, also of one that never trains, is
    fine-tuned on its training images and then thrown away, so that the federated state does not change. With a prompt
    on the pixels the federation is pFedPT's. Further arguments as ``FedAvg``.

    Args:
        finetuning: of the copy before it is evaluated.
        finetuned: what of the copy is fine-tuned: body and head (``all``), the ``head``, or the ``prompt`` on the
            pixels; the rest of it rests.

    Raises:
        ConfigurationError: the prompt is to be fine-tuned, and there is none.
    """

    def __init__(
        self,
        *arguments: Any,
        finetuning: LocalTraining = LocalTraining(lr=0.005, epochs=1),
        finetuned: Literal["all", "head", "prompt"] = "all",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        if finetuned == "prompt" and self.visual_prompt is None:
            raise ConfigurationError(
                f"{type(self).__name__}: finetuned=prompt needs a prompt on the pixels, which is not there; give "
                "visual_prompt, or fine-tune all or head"
            )
        self.finetuning = finetuning
        self.finetuned = finetuned

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fine-tune the chosen part."""
        return [self.finetuning.phase(*PARTS[self.finetuned])]
