"""FedOTP: a shared and a personal text prompt, which share out an image's regions by optimal transport."""

from typing import Any

import torch
from torch import Tensor, nn

from benchmark.ranges import AboveZero
from benchmark.seeds import keyed_initialization
from methods.transport import TransportMethod


class FedOTP(TransportMethod):
    """FedOTP (Li et al., "Global and Local Prompts Cooperation via Optimal Transport for Federated ...", CVPR 2024).

    A client has two contexts, p_G, which is shared, and p_L, its own. A class is scored by what its J = 2 text features
    w_jc have in common with the M patch features F_m of an image, matched by a plan T (``transport_plan``) of that
    image and class: ``logit_c = s sum_mj T_mj F_m . w_jc``. Objective: cross-entropy, over both contexts together; T
    has no gradient. The server averages p_G weighted with n_k; p_L never leaves. Evaluated with the new p_G and the
    client's own p_L, the initial one if it was never selected. Message: p_G alone, L x w numbers each way.

    Patches are all output tokens of the image tower but the class token, normed and projected like it (for a ResNet the
    attention pool's outputs at each position); the pooled feature is not used. They are kept where images are not
    augmented: M x e numbers an image. Readings: the paper's score ``1 - <T, 1 - s>`` differs from this one by the same
    number for every class. The code stops at a mean change over the whole batch, so that an image's score depends on
    its neighbours; here the number of iterations is fixed (after 100 the error of a logit is below 1e-3 at ``eps=0.01``
    too). There a kernel in 16 bits underflows at that eps; here are logarithms in float32. eps is the code's 0.1, its
    few-shot script has 0.01. In the code all clients train in the first round; here those that are selected. All
    clients start with the same p_L, drawn independently of p_G, which alone starts at ``init_words``.

    Further arguments as ``TransportMethod``.

    Args:
        gamma: share of an image that is matched.
    """

    personal = ("own_context",)
    per_example = True

    def __init__(self, *arguments: Any, gamma: AboveZero = 0.8, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.gamma = gamma
        with keyed_initialization("own context"):
            self.own_context = nn.Parameter(0.02 * torch.randn(self.context.shape))

    def prompts(self) -> Tensor:
        """Return the client's contexts, [J, L, w]."""
        return torch.stack([self.context, self.own_context])
