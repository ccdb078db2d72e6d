"""PromptFL+FT: PromptFL, and every client fine-tunes a copy of the global prompt before it is evaluated."""

from dataclasses import replace

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining, Phase
from benchmark.ranges import FewOrNone, NonNegativeInt
from methods.promptfl import PromptFL
from methods.text_prompt import TRAINING


class PromptFLFT(PromptFL):
    """PromptFL with local fine-tuning (Cheng et al., "Fine-tuning is fine in federated learning", 2021).

    Training and messages are PromptFL's. Before an evaluation a copy of the global context is trained on the client's
    training images with the same optimizer; the copy is thrown away. With no epochs it is PromptFL.

    Args:
        num_clients: N.
        class_names: names of all classes, in the order of the labels.
        clip: CLIP's towers, frozen.
        num_context: L, tokens of the context.
        training: of the context.
        init_words: as ``TextPromptMethod``.
        finetune_epochs: epochs of the copy, at the rate of the first round; unstated in FedPGP, by default its E.
    """

    def __init__(
        self,
        num_clients: int,
        class_names: list[str],
        clip: PromptedCLIP,
        num_context: FewOrNone = 16,
        training: LocalTraining = TRAINING,
        init_words: str | None = None,
        finetune_epochs: NonNegativeInt = 2,
    ) -> None:
        super().__init__(num_clients, class_names, clip, num_context, training, init_words)
        self.finetuning = replace(training, epochs=finetune_epochs, steps=None, schedule="constant")

    def finetune_phases(self, new: bool) -> list[Phase]:
        """The context."""
        return [self.finetuning.phase("context")]
