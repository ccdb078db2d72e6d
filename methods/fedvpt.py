"""FedVPT: FedAvg of visual prompt tokens on a frozen ViT, with a head of each client's own."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from benchmark.backbones.parts import TowerPart
from benchmark.ranges import Few, FewOrNone
from methods.vit_prompt import ViTPromptMethod


class FedVPT(ViTPromptMethod):
    """FedVPT, baseline of pFedPG (Yang et al., ICCV 2023), after VPT-shallow (Jia et al., ECCV 2022).

    Objective ``CE(H_k(F([c, P, z])), y)``; prompt P and head H_k are trained together for E epochs, the server
    averages P weighted with n_k. Evaluated with the global P and the client's own head (point ``server``), and right
    after local training (point ``local``). A client that never trains receives P and fits its head. Message: K x d
    numbers each way. Prompts have weight decay like the head. Further arguments as ``ViTPromptMethod``.

    Args:
        num_prompts: K, prompt tokens.
        first_block: the block, counted from 1, before which the first tokens stand.
    """

    shared: tuple[str, ...] = ("prompt",)
    personal: tuple[str, ...] = ("head",)
    per_example = True
    deep = False  #: whether every layer has tokens of its own

    def __init__(self, *arguments: Any, num_prompts: FewOrNone = 10, first_block: Few = 1, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.begin_at(first_block)
        layers = self.backbone.depth - self.first_layer if self.deep else None
        self.prompt = self.new_tokens(num_prompts, layers, first_block)
        self.head = self.new_head()

    def parts(self) -> Sequence[TowerPart | Tensor]:
        """Return the prompt."""
        return (self.prompt,)
