"""A prompt of one's own for a frozen ViT: tokens that are shared, one more that each client keeps, and a head.

Run it from anywhere: ``python examples/visual_prompt.py``. It takes seconds and leaves no file.
"""

from typing import Any

import torch
from fedprompt import fit
from fedprompt.benchmark.backbones.vit import TimmViT
from fedprompt.benchmark.contract import LocalTraining
from fedprompt.datamodules import DigitDomains, DomainPerClient
from fedprompt.datamodules.federated import FederatedDataModule
from fedprompt.methods.vit_prompt import ViTPromptMethod
from lightning import seed_everything
from torch import Tensor


class OneOwnToken(ViTPromptMethod):
    """Four shared prompt tokens before the ViT's first block, and one token and a head of each client's own."""

    shared = ("tokens",)
    personal = ("own_token", "head")

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.tokens, self.own_token = self.new_tokens(4), self.new_tokens(1)
        self.head = self.new_head()

    def parts(self) -> tuple[Tensor, ...]:
        """Put both behind the class token of ONE client's images."""
        return (torch.cat([self.tokens.tokens, self.own_token.tokens]),)


def main(rounds: int = 3) -> float:
    """Train on digits in six styles, one style a client; return the mean accuracy over clients."""
    seed_everything(0)
    data = FederatedDataModule(DigitDomains(), DomainPerClient())
    vit = TimmViT("micro_vit", "embedded")  # for real images: TimmViT("deit_tiny_patch16_224", "hub")
    method = OneOwnToken(data.num_classes, data.num_clients, vit, training=LocalTraining(lr=0.1, epochs=1))
    run = fit(method, data, rounds=rounds)
    average = run.record.summary["server"]["test"]["accuracy"]["last"]["average"]
    print(run.metrics.query(f"round == {rounds} and point == 'server' and metric == 'accuracy'").to_string(index=False))
    return float(average)


if __name__ == "__main__":
    print(f"mean accuracy: {main():.1%}")
