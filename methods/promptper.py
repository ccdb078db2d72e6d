"""Prompt+PER: the first tokens of the text prompt are shared, the last are each client's own."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmark.errors import ConfigurationError
from benchmark.ranges import FewOrNone
from methods.text_prompt import TextPromptMethod


class PromptPer(TextPromptMethod):
    """Prompt+PER, baseline of FedPGP (Cui et al., ICML 2024) after FedPer (Arivazhagan et al., arXiv:1912.00818, 2019).

    The context is ``[shared tokens, the client's own tokens]``, trained together; the server averages the shared ones
    weighted with n_k. Message: (L - l) x w numbers each way. Evaluated with the global tokens and the client's own.
    FedPGP does not say how the context is split: half and half, as a published re-implementation does it. With l = 0 it
    is PromptFL, with l = L CoOp. Further arguments as ``TextPromptMethod``.

    Args:
        num_personal: l of them, the last ones, that are each client's own.

    Raises:
        ConfigurationError: ``num_personal`` not from 0 to ``num_context``.
    """

    personal = ("personal_context",)
    per_example = True

    def __init__(self, *arguments: Any, num_personal: FewOrNone = 8, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        num_context = self.num_context
        if num_personal > num_context:
            raise ConfigurationError(
                f"num_personal must be from 0 to num_context, {num_context} tokens; got {num_personal}"
            )
        shared, own = self.context.detach().split([num_context - num_personal, num_personal])
        self.context = nn.Parameter(shared.clone())
        self.personal_context = nn.Parameter(own.clone())

    def prompt(self) -> Tensor:
        """Return shared and own tokens, [L, w]."""
        return torch.cat([self.context, self.personal_context])
