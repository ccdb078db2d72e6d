"""A method of one's own from scratch: a small network whose first layer is shared, and whose second stays at home.

Run it from anywhere: ``python examples/own_method.py``. It takes seconds and leaves no file.
"""

import torch
from fedprompt import fit
from fedprompt.benchmark.contract import LocalTraining
from fedprompt.benchmark.method import FederatedMethod
from fedprompt.datamodules import DigitDomains, DomainPerClient
from fedprompt.datamodules.federated import FederatedDataModule
from lightning import seed_everything
from torch import Tensor, nn


class SharedFirst(FederatedMethod):
    """A shared layer below, an own layer above; the engine runs this for many clients at once."""

    shared = ("first",)  # the server averages it, weighted with the clients' numbers of images
    personal = ("second",)  # it never leaves its client

    def __init__(self, num_classes: int, num_clients: int) -> None:
        super().__init__(num_clients)
        self.first, self.second = nn.Linear(3 * 32 * 32, 64), nn.Linear(64, num_classes)
        self.training_settings = LocalTraining(lr=0.01, epochs=2, momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        """Classify ONE client's images [B, 3, H, W]."""
        return self.second(torch.relu(self.first(x.flatten(1))))


def main(rounds: int = 3) -> float:
    """Train on digits in six styles, one style a client; return the mean accuracy over clients."""
    seed_everything(0)
    data = FederatedDataModule(DigitDomains(), DomainPerClient())
    run = fit(SharedFirst(data.num_classes, data.num_clients), data, rounds=rounds)
    last = run.metrics.query(f"round == {rounds} and point == 'server' and metric == 'accuracy' and split == 'test'")
    print(last[["client", "value"]].to_string(index=False))
    return float(last.query("client >= 0")["value"].mean())


if __name__ == "__main__":
    print(f"mean accuracy: {main():.1%}")
