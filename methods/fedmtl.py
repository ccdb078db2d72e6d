"""FedMTL: every client keeps a model of its own, pulled towards the models of the round's other clients."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.backbones.pixel_prompts import PixelPrompt
from benchmark.bank import ClientBank
from benchmark.method import Client, FederatedMethod, LocalTraining, MiniBatch
from benchmark.server import Message, Server
from methods.fedavg import FedAvg
from methods.losses import column_relation, squared_norm


class ColumnServer(Server):
    """Keeps every client's last model and sends each client of a round those of all the round's clients.

    A message holds per parameter ``columns.<name>`` [m, ...], the models of the m clients of the round in the order of
    their ids, and ``column``, which of them is the receiver's own (-1 for a client that is not among them).
    """

    def prepare(self, method: FederatedMethod) -> None:
        """All clients start with the initial model."""
        self.models = ClientBank({name: method.template(name) for name in method.disclosed_names}, method.num_clients)

    def broadcast(self, method: FederatedMethod, clients: Sequence[int]) -> Message:
        """The columns, the same for all, and each client's own index, [K]."""
        selected = sorted(self.select(self.finished_rounds + 1))
        own = [selected.index(client) if client in selected else -1 for client in clients]
        message = {"column": torch.tensor(own, device=method.device)}
        for name in self.models.names:
            columns = self.models.rows(name, selected, method.device)
            message[f"columns.{name}"] = columns.expand(len(clients), *columns.shape)
        return message

    def finish_round(
        self, method: FederatedMethod, clients: Sequence[int], updates: Sequence[Message], weights: Tensor
    ) -> None:
        """The uploaded models take the place of the old ones."""
        for name in self.models.names:
            self.models.write(name, clients, torch.stack([update[name] for update in updates]))

    def state_dict(self) -> dict[str, Any]:
        """The models, with the counters."""
        return super().state_dict() | {"models": dict(self.models.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the models."""
        super().load_state_dict(state_dict)
        self.models.load_state_dict(state_dict["models"])


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

    Args:
        num_classes: C.
        num_clients: N.
        backbone: images [B, 3, H, W] to features [B, d].
        mtl_grad: see above.
        training: of backbone and head together; momentum 0.5 is the code's.
        visual_prompt: a prompt on the pixels, or None; it is no part of W.

    Raises:
        ConfigurationError: an unknown ``mtl_grad``.
    """

    shared = ()
    disclosed = ("backbone", "head")

    def __init__(
        self,
        num_classes: int,
        num_clients: int,
        backbone: nn.Module,
        mtl_grad: Literal["live", "detached"] = "live",
        training: LocalTraining = LocalTraining(lr=0.005, momentum=0.5),
        visual_prompt: PixelPrompt | None = None,
    ) -> None:
        super().__init__(num_classes, num_clients, backbone, training, visual_prompt)
        self.mtl_grad = mtl_grad
        size = sum(p.numel() for p in (*self.backbone.parameters(), *self.head.parameters()))
        self.scale = 10.0 ** -(len(str(size)) + 1)  # floor(log10(P) + 1) is the number of digits of P

    def prepare(self, client: Client, kind: str, split: str) -> dict[str, Tensor]:
        """Per parameter, the mean of the other clients' models."""
        if kind != "train" or self.mtl_grad == "detached":
            return {}
        columns = {n.removeprefix("columns."): v for n, v in client.received.items() if n.startswith("columns.")}
        m = len(columns["head.bias"])
        others = (torch.arange(m, device=self.device) != client.received["column"]).to(self.dtype) / max(m - 1, 1)
        return {name: torch.tensordot(others, value, dims=1) for name, value in columns.items()}

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Cross-entropy plus what of the penalty depends on the client's own model."""
        loss = super().model_loss(client, batch)
        if self.mtl_grad == "detached":
            return loss
        m = len(client.received["columns.head.bias"])
        own = {name: client.parameters[name] for name in client.prepared}
        return loss + self.scale * (squared_norm(own) + column_relation(own, client.prepared, m))

    def default_server(self) -> Server:
        """The server that keeps the columns."""
        return ColumnServer()
