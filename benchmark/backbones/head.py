"""The linear classifier on a backbone's features."""

from torch import nn

from benchmark.seeds import keyed_initialization


class LinearHead(nn.Linear):
    """``features [B, d] -> logits [B, C]``, with torch's default initial values, drawn for this seed.

    Args:
        num_features: d.
        num_classes: C.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        with keyed_initialization("head"):
            super().__init__(num_features, num_classes)
