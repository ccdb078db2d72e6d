"""FedBABU: the body is trained under a head that never moves; before testing, a copy is fine-tuned."""

from benchmark.contract import Phase
from methods.fedavgft import FedAvgFT


class FedBABU(FedAvgFT):
    """FedBABU (Oh, Kim, Yun, ICLR 2022).

    The head keeps its common random values during the federated training and is never sent; the server averages the
    body. At every evaluation a copy of each client is fine-tuned first, so that the federated state does not change.

    Deviation: the server weights with n_k like everywhere here; the authors' code takes the plain mean. Reading:
    pFedPT's one fine-tuning step is one epoch over body and head at its training's rate, 0.005, whatever rate is given
    here; its code leaves the head out by mistake. A prompt on the pixels rests meanwhile. Arguments as ``FedAvgFT``,
    with ``training`` of the body.
    """

    shared = ("backbone",)
    per_example = True

    def model_phases(self) -> list[Phase]:
        """Train the body alone."""
        return [self.training_settings.phase("backbone")]
