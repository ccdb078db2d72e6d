"""FedPer: the body is shared, the head is each client's own, both trained together."""

from benchmark.contract import Phase
from methods.classifier import new_client_training
from methods.fedavg import FedAvg


class FedPer(FedAvg):
    """FedPer (Arivazhagan et al., arXiv:1912.00818, 2019).

    Body and head are trained jointly, the server averages the body weighted with n_k, heads are never sent. Evaluated
    with the global body and the client's own head, the initial one if it was never selected. A client that never trains
    fits its head first. Arguments as ``FedAvg``.
    """

    shared = ("backbone",)
    personal = ("head",)

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the head of a client that never trains."""
        return [new_client_training(self.training_settings).phase("head")] if new else []
