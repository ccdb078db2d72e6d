"""A text prompt of one's own for a frozen CLIP: half of the context is shared, half is each client's.

Run it from anywhere: ``python examples/text_prompt.py``. It takes seconds and leaves no file.
"""

from typing import Any

import torch
from fedprompt import fit
from fedprompt.benchmark.backbones.prompted_clip import PromptedCLIP
from fedprompt.benchmark.contract import LocalTraining
from fedprompt.datamodules import BaseToNovel, DigitDomains
from fedprompt.datamodules.federated import FederatedDataModule
from fedprompt.methods.text_prompt import TextPromptMethod
from lightning import seed_everything
from torch import Tensor, nn


class HalfAndHalf(TextPromptMethod):
    """The first tokens of the context are the federation's, the last ones stay at home."""

    personal = ("own_context",)
    per_example = True  # its loss is a mean over single images, so that record-level privacy can hide each of them

    def __init__(self, *arguments: Any, own_tokens: int = 2, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.own_context = nn.Parameter(self.context[-own_tokens:].detach().clone())

    def prompt(self) -> Tensor:
        """Return the context that ONE client classifies with, [L, w]."""
        return torch.cat([self.context[: -len(self.own_context)], self.own_context])


def main(rounds: int = 3) -> dict[str, float]:
    """Five clients learn one digit each; return accuracy on own, on all learned and on never learned classes."""
    seed_everything(0)
    data = FederatedDataModule(DigitDomains(), BaseToNovel(num_clients=5), batch_size=32)
    training = LocalTraining(lr=0.0003, epochs=2, momentum=0.9)
    method = HalfAndHalf(data.num_clients, data.class_names, PromptedCLIP(), num_context=4, training=training)
    run = fit(method, data, rounds=rounds)
    return {s: run.record.summary["server"][s]["accuracy"]["last"]["average"] for s in ("test", "base", "novel")}


if __name__ == "__main__":
    print(", ".join(f"{split}: {accuracy:.1%}" for split, accuracy in main().items()))
