"""FedPLOT: FedAvg of several text prompts, between which an image's regions are shared out by optimal transport."""

from typing import Any

import torch
from torch import nn

from benchmark.errors import ConfigurationError
from benchmark.ranges import Few
from benchmark.seeds import keyed_initialization
from methods.transport import TransportMethod


class FedPLOT(TransportMethod):
    """FedAvg of PLOT (Chen et al., "PLOT: Prompt Learning with Optimal Transport for Vision-Language Models", ICLR
    2023).

    N contexts, all shared, describe a class from several sides. A class is scored by the similarity that the balanced
    entropic transport plan between its N text features and the M regions of an image carries (``TransportMethod``).
    Objective: cross-entropy; the plan has no gradient. The server averages each context with the same one of the other
    clients, weighted with n_k; the global contexts are evaluated. Message: N x L x w numbers each way.

    Readings: the paper trains one centralised model; federated it is FedAvg of all that it trains. Regions of a ViT are
    its patch tokens, as FedOTP has them; the paper's are a ResNet's. Its code stops after at most 100 iterations, by
    a change of the whole batch, so that an image's score depends on its neighbours; here their number is fixed. Left
    out: the pooled feature's logits, which it adds on ImageNet alone, and PLOT++ with its visual prompts.

    Further arguments as ``TransportMethod``, but for ``init_words``: prompts that start alike stay alike.

    Args:
        num_prompts: N.

    Raises:
        ConfigurationError: ``init_words`` are given.
    """

    per_example = True

    def __init__(self, *arguments: Any, num_prompts: Few = 4, **settings: Any) -> None:
        if settings.get("init_words") is not None:
            raise ConfigurationError(
                "FedPLOT: init_words would make all prompts alike, and alike they stay; leave it out"
            )
        super().__init__(*arguments, **settings)
        with keyed_initialization("PLOT"):
            self.context = nn.Parameter(0.02 * torch.randn(num_prompts, *self.context.shape))
