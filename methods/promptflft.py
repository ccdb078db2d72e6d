"""PromptFL+FT: PromptFL, and every client fine-tunes a copy of the global prompt before it is evaluated."""

from dataclasses import replace
from typing import Any

from benchmark.contract import Phase
from benchmark.ranges import NonNegativeInt
from methods.promptfl import PromptFL


class PromptFLFT(PromptFL):
    """PromptFL with local fine-tuning (Cheng et al., "Fine-tuning is fine in federated learning", 2021).

    Training and messages are PromptFL's. Before an evaluation a copy of the global context is trained on the client's
    training images with the same optimizer; the copy is thrown away. With no epochs it is PromptFL.

    Further arguments as ``PromptFL``.

    Args:
        finetune_epochs: epochs of the copy, at the rate of the first round; unstated in FedPGP, by default its E.
    """

    def __init__(self, *arguments: Any, finetune_epochs: NonNegativeInt = 2, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.finetuning = replace(self.training_settings, epochs=finetune_epochs, steps=None, schedule="constant")

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fine-tune the context."""
        return [self.finetuning.phase("context")]
