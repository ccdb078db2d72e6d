"""FedVPT-D: FedVPT with prompt tokens before every layer."""

from methods.fedvpt import FedVPT


class FedVPTDeep(FedVPT):
    """FedVPT-D: as FedVPT with VPT-deep prompts, [depth, K, d], new tokens before every layer.

    pFedPG prints a cost of 9.22e3 numbers, which is one token a layer; K = 10 is 92,160 at ViT-B/16 (``num_prompts: 1``
    gives the printed one). Arguments as ``FedVPT``.
    """

    paper_names = ("FedVPT-D",)
    deep = True
