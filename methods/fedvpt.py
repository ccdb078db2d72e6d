"""FedVPT and FedVPT-D: FedAvg of visual prompt tokens on a frozen ViT, with a head of each client's own."""

from dataclasses import replace

from torch import Tensor

from benchmark.backbones.head import LinearHead
from benchmark.backbones.prompts import VisualPromptTokens
from benchmark.backbones.vit import PromptedViT
from benchmark.contract import LocalTraining, Phase
from benchmark.method import FederatedMethod
from benchmark.ranges import FewOrNone


def new_client_training(training: LocalTraining) -> LocalTraining:
    """How a client that never trains fits its head before it is tested: 5 epochs (pFedBayesPT, Table 3).

    The paper says no more; the rest is that of ``training``, at the rates of its first round.
    """
    return replace(training, epochs=5, steps=None, schedule="constant")


class FedVPT(FederatedMethod):
    """FedVPT, baseline of pFedPG (Yang et al., ICCV 2023), after VPT-shallow (Jia et al., ECCV 2022).

    Objective ``CE(H_k(F([c, P, z])), y)``; prompt P and head H_k are trained together for E epochs, the server
    averages P weighted with n_k. Evaluated with the global P and the client's own head (point ``server``), and right
    after local training (point ``local``). A client that never trains receives P and fits its head. Message: K x d
    numbers each way. Prompts have weight decay like the head.

    Args:
        num_classes: C.
        num_clients: N.
        backbone: a ViT, frozen.
        num_prompts: K, prompt tokens.
        training: of prompt and head together; pFedPG states lr 0.25, weight decay 1e-3 and E=5, and no momentum.
    """

    shared: tuple[str, ...] = ("prompt",)
    personal: tuple[str, ...] = ("head",)
    evaluate_local = True

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: PromptedViT,
        num_prompts: FewOrNone = 10,
        training: LocalTraining = LocalTraining(lr=0.25, weight_decay=1e-3),
    ) -> None:
        super().__init__(num_clients)
        self.backbone = backbone
        self.prompt = self.make_prompt(num_prompts)
        self.head = LinearHead(backbone.num_features, num_classes)
        self.training_settings = training

    def make_prompt(self, num_prompts: int) -> VisualPromptTokens:
        """Prompt tokens for the first layer, [K, d]."""
        return VisualPromptTokens(num_prompts, self.backbone.embed_dim, patch_size=self.backbone.patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C] of images [B, 3, H, W]."""
        return self.head(self.backbone(x, self.prompt()))

    def local_phases(self) -> list[Phase]:
        """Prompt and head together."""
        return [self.training_settings.phase("prompt", "head")]

    def finetune_phases(self, new: bool) -> list[Phase]:
        """The head, of a client that never trains."""
        return [new_client_training(self.training_settings).phase("head")] if new else []


class FedVPTDeep(FedVPT):
    """FedVPT-D: as FedVPT with VPT-deep prompts, [depth, K, d], new tokens before every layer.

    pFedPG prints a cost of 9.22e3 numbers, which is one token a layer; K = 10 is 92,160 at ViT-B/16 (``num_prompts: 1``
    gives the printed one). Arguments as ``FedVPT``.
    """

    def make_prompt(self, num_prompts: int) -> VisualPromptTokens:
        """Prompt tokens for every layer, [depth, K, d]."""
        vit = self.backbone
        return VisualPromptTokens(num_prompts, vit.embed_dim, depth=vit.depth, patch_size=vit.patch_size)
