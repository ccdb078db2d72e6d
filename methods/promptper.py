"""Prompt+PER: the first tokens of the text prompt are shared, the last are each client's own."""

import torch
from torch import Tensor, nn

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from benchmark.ranges import FewOrNone
from methods.text_prompt import TRAINING, TextPromptMethod


class PromptPer(TextPromptMethod):
    """Prompt+PER, baseline of FedPGP (Cui et al., ICML 2024) after FedPer (Arivazhagan et al., arXiv:1912.00818, 2019).

    The context is ``[shared tokens, the client's own tokens]``, trained together; the server averages the shared ones
    weighted with n_k. Message: (L - l) x w numbers each way. Evaluated with the global tokens and the client's own.
    FedPGP does not say how the context is split: half and half, as a published re-implementation does it. With l = 0 it
    is PromptFL, with l = L CoOp.

    Args:
        num_clients: N.
        class_names: names of all classes, in the order of the labels.
        clip: CLIP's towers, frozen.
        num_context: L, tokens of the context.
        num_personal: l of them, the last ones, that are each client's own.
        training: of the context.
        init_words: as ``TextPromptMethod``.

    Raises:
        ConfigurationError: ``num_personal`` not from 0 to ``num_context``.
    """

    personal = ("personal_context",)

    def __init__(
        self,
        num_clients: int,
        class_names: list[str],
        clip: PromptedCLIP,
        num_context: FewOrNone = 16,
        num_personal: FewOrNone = 8,
        training: LocalTraining = TRAINING,
        init_words: str | None = None,
    ) -> None:
        super().__init__(num_clients, class_names, clip, num_context, training, init_words)
        if num_personal > num_context:
            raise ConfigurationError(
                f"num_personal must be from 0 to num_context, {num_context} tokens; got {num_personal}"
            )
        shared, own = self.context.detach().split([num_context - num_personal, num_personal])
        self.context = nn.Parameter(shared.clone())
        self.personal_context = nn.Parameter(own.clone())

    def prompt(self) -> Tensor:
        """Shared and own tokens, [L, w]."""
        return torch.cat([self.context, self.personal_context])
