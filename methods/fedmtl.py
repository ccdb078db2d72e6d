"""FedMTL: every client keeps a model of its own, pulled towards the models of the round's other clients."""

from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.client_store import ClientStore
from benchmark.contract import Client, LocalTraining, MiniBatch, Stage
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.server import ServerRule
from methods.fedavg import FedAvg
from methods.losses import column_relation, squared_norm


class ColumnRule(ServerRule):
    """Keep every client's last model, and send each client of a round those of all the round's clients.

    A message holds per parameter ``columns.<name>`` [m, ...], the models of the m clients of the round in the order of
    their ids, and ``column``, which of them is the receiver's own. In evaluations nothing is sent.
    """

    def start(self, initial: Values, terms: Terms) -> None:
        """Give all clients the initial model."""
        super().start(initial, terms)
        self.models = ClientStore(initial, terms.num_clients)

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the columns, the same to all, and each client's own index, [K]."""
        if not round.clients:
            return Broadcast()
        rows = list(round.clients)
        columns = {f"columns.{name}": self.models.all_rows(name)[rows] for name in self.models.names}
        return Broadcast(columns, {"column": torch.tensor([rows.index(client) for client in clients])})

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Replace the old models by the uploaded ones."""
        for name in self.models.names:
            self.models.write(name, uploads.clients, uploads.values[name])
        return {}


class FedMTL(FedAvg):
    """FedMTL, the baseline of pFedPT (Li et al., arXiv:2303.08678) that stands for MOCHA (Smith et al., NeurIPS 2017).

    The models of the m clients of a round are the columns of W [P, m]. Client t minimises
    ``CE(w_t; D_t) + 10^-f (||W||_F^2 + tr(W Omega W^T))``, ``Omega = I - 11^T / m``, ``f = floor(log10(P) + 1) + 1``,
    over its own column alone, the others as they were uploaded last. Nothing is averaged; evaluated with the client's
    own model. Messages: P numbers up, m P numbers and an index down.

    Of MOCHA this has the objective: one model a task, and a penalty on how they differ. It has neither its dual solver,
    which needs linear models, nor does it learn Omega. Terms in which w_t does not occur are left out of the loss.

    ``mtl_grad``: the code that pFedPT builds upon makes the penalty from detached copies of the parameters, so that it
    has no gradient and the method is ``Local`` with momentum. ``detached`` is that: the penalty is left out, and the
    messages are sent all the same. ``live`` is the objective above. That code also has ``sum_r (sum_j W_rj)^2`` times
    ``Omega_00^2`` for the trace, which would pull the sum of all models to zero and not the models to each other.
    At the CNN's 815,892 parameters the scale is 1e-7, so ``live`` too stays close to ``Local`` with momentum.
    A prompt on the pixels is no part of W. Further arguments as ``FedAvg``.

    Args:
        mtl_grad: see above.
        training: of backbone and head together; momentum 0.5 is the code's.

    Raises:
        ConfigurationError: an unknown ``mtl_grad``.
    """

    shared = ()
    personal = ("backbone", "head")
    uploads = ("backbone", "head")
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        mtl_grad: Literal["live", "detached"] = "live",
        training: LocalTraining = LocalTraining(lr=0.005, momentum=0.5),
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        self.mtl_grad = mtl_grad
        size = sum(p.numel() for p in (*self.backbone.parameters(), *self.head.parameters()))
        self.scale = 10.0 ** -(len(str(size)) + 1)  # floor(log10(P) + 1) is the number of digits of P

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return the mean of the other clients' models, per parameter."""
        if stage is not Stage.TRAIN or self.mtl_grad == "detached":
            return {}
        columns = {n.removeprefix("columns."): v for n, v in client.received.items() if n.startswith("columns.")}
        m = len(columns["head.bias"])
        others = (torch.arange(m, device=self.device) != client.received["column"]).to(self.dtype) / max(m - 1, 1)
        return {name: torch.tensordot(others, value, dims=1) for name, value in columns.items()}

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy plus what of the penalty depends on the client's own model."""
        loss = super().model_loss(client, batch)
        if self.mtl_grad == "detached":
            return loss
        return loss + self.penalty(client)

    def penalty(self, client: Client) -> Tensor:
        """Return what of the penalty depends on the client's own model."""
        m = len(client.received["columns.head.bias"])
        own = {name: client.parameters[name] for name in client.prepared}
        return self.scale * (squared_norm(own) + column_relation(own, client.prepared, m))

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the penalty, in the phase that knows it."""
        live = self.mtl_grad == "live" and self.is_models(phase)
        return self.penalty(client) if live else None

    def make_server(self) -> ServerRule:
        """Return the server that keeps the columns."""
        return ColumnRule()
