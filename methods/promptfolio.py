"""PromptFolio: a shared and a personal text prompt, whose text features are mixed in fixed shares."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.ranges import UnitInterval
from benchmark.seeds import keyed_initialization
from methods.text_prompt import TextPromptMethod


class PromptFolio(TextPromptMethod):
    """PromptFolio (Pan et al., "Federated Learning from Vision-Language Foundation Models: Theoretical Analysis and
    Method", NeurIPS 2024).

    A client has two contexts, p_G, which is shared, and p_L, its own. An image is compared with
    ``W = (1 - theta) W(p_G) + theta W(p_L)``, where the rows of each W(p), one for each class, have length 1 and those
    of the mixture have not: a class whose two features differ has smaller logits. Objective: cross-entropy, over both
    contexts together. The server averages p_G weighted with n_k; p_L never leaves. Evaluated with the new p_G and the
    client's own p_L, the initial one if it was never selected. Message: p_G alone, L x w numbers each way. With
    ``theta=0`` it is PromptFL, with ``theta=1`` CoOp.

    Readings: formulas are the code's, as the paper could not be read. theta is its code's; its CLIP data sets have
    8 tokens there, here the family's 16. In the code the weights n_k go to the wrong clients, and one optimizer and
    one cosine serve all clients. All clients start with the same p_L, drawn independently of p_G, which alone starts
    at ``init_words``.

    Further arguments as ``TextPromptMethod``.

    Args:
        theta: share of the client's own text features, from 0 to 1.
        renormalize: give the mixture's rows length 1, which the code does not.
    """

    personal = ("own_context",)
    per_example = True

    def __init__(self, *arguments: Any, theta: UnitInterval = 0.4, renormalize: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.theta, self.renormalize = theta, renormalize
        with keyed_initialization("own context"):
            self.own_context = nn.Parameter(0.02 * torch.randn(self.context.shape))

    def mixed(self, shared: Tensor, own: Tensor) -> Tensor:
        """Return the mixture W of the text features under the two contexts, [C, e] each."""
        made = (1 - self.theta) * shared + self.theta * own
        return F.normalize(made, dim=-1) if self.renormalize else made

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's mixture of the features of a split's classes, [C, e]."""
        prompts = self.class_prompts(split)
        # One pass for each: so the shared one's bits are PromptFL's.
        return self.mixed(*(self.clip.text_features(prompts, context) for context in (self.context, self.own_context)))
