"""Servers for any method whose own one averages: an optimizer on the mean update, and clusters of clients."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from benchmark.client_store import ClientStore
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.ranges import BelowOne, Few, PositiveFloat, PositiveInt
from benchmark.server import ServerRule, weighted_mean

__all__ = ["ClusteredServer", "FedAdam", "FedAvgM", "FedYogi"]


class ServerOptimizer(ServerRule):
    """FedOpt's server (Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1): an optimizer's step.

    Its gradient is ``g = w - mean``: what the clients received less the weighted mean of what they upload. Both, and
    the optimizer's state, are in host memory. The mean is weighted with the clients' numbers of training images, where
    the paper's Algorithm 2 has equal weights.

    Args:
        lr: eta, the server's learning rate.
    """

    def __init__(self, lr: PositiveFloat) -> None:
        super().__init__()
        self.lr = lr

    @property
    def reads_rows(self) -> bool:
        """Return False: it sees the mean alone."""
        return False

    def start(self, initial: Values, terms: Terms) -> None:
        """Make the optimizer."""
        super().start(initial, terms)
        self.values = {name: value.detach().to("cpu", copy=True) for name, value in initial.items()}
        self.optimizer = self.make_optimizer(list(self.values.values()))

    def make_optimizer(self, parameters: list[Tensor]) -> Optimizer:
        """Return an optimizer of these values, with its state before the first round."""
        raise NotImplementedError(f"{type(self).__name__}.make_optimizer")

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Take one step from the shared values."""
        for name, mean in super().aggregate(round, shared, uploads).items():
            value = self.values[name].copy_(shared[name])
            value.grad = value - mean.to(value)
        self.optimizer.step()
        return {name: self.values[name].to(value.device, copy=True) for name, value in shared.items()}

    def get_extra_state(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the optimizer's state."""
        self.optimizer.load_state_dict(state)


class FedAvgM(ServerOptimizer):
    """FedAvgM (Hsu et al., arXiv:1909.06335): ``v <- momentum v + g``, ``w <- w - lr v``.

    With ``lr=1`` and ``momentum=0`` the server is FedAvg's but for rounding: ``w - (w - mean)`` is the mean bit for
    bit where that is between w/2 and 2w, and elsewhere off by at most half a unit in the last place of ``w - mean`` and
    half a one in that of the mean.

    Args:
        lr: eta, the server's learning rate; the paper has 1.
        momentum: beta.
    """

    def __init__(self, lr: PositiveFloat = 1.0, momentum: BelowOne = 0.9) -> None:
        super().__init__(lr)
        self.momentum = momentum

    def make_optimizer(self, parameters: list[Tensor]) -> Optimizer:
        """Return SGD with momentum."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum)


class FedAdam(ServerOptimizer):
    """FedAdam (Reddi et al., ICLR 2021, Algorithm 2).

    ``m <- beta1 m + (1 - beta1) g``, ``v <- beta2 v + (1 - beta2) g^2``, ``w <- w - lr m / (sqrt(v) + tau)``, from
    m = 0 and v = tau^2. Nothing is corrected for these first values, as in the paper.

    Args:
        lr: eta, the server's learning rate; the paper tunes it.
        beta1: of the first moment.
        beta2: of the second moment.
        tau: how adaptive it is; smaller is more.
    """

    def __init__(
        self, lr: PositiveFloat = 0.01, beta1: BelowOne = 0.9, beta2: BelowOne = 0.99, tau: PositiveFloat = 1e-3
    ) -> None:
        super().__init__(lr)
        self.betas, self.tau = (beta1, beta2), tau

    def make_optimizer(self, parameters: list[Tensor]) -> Optimizer:
        """Return Adam after infinitely many steps, where its correction of the first moments' bias is a factor of 1."""
        optimizer = Adam(parameters, lr=self.lr, betas=self.betas, eps=self.tau)
        for parameter in parameters:
            optimizer.state[parameter] = {"step": torch.tensor(torch.inf), **_first_moments(parameter, self.tau)}
        return optimizer


class FedYogi(FedAdam):
    """FedYogi (Reddi et al., ICLR 2021, Algorithm 2): FedAdam with another second moment.

    ``v <- v - (1 - beta2) g^2 sign(v - g^2)``. Arguments as ``FedAdam``.
    """

    def make_optimizer(self, parameters: list[Tensor]) -> Optimizer:
        """Return Yogi."""
        return Yogi(parameters, self.lr, self.betas, self.tau)


class Yogi(Optimizer):
    """Yogi (Zaheer et al., NeurIPS 2018) without correction of the moments' bias, as FedYogi has it.

    Args:
        parameters: what it moves.
        lr: learning rate.
        betas: of the two moments.
        eps: added to the root of the second moment, which starts at its square.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _first_moments(parameter, eps)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step; there is no closure."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                first, second = self.state[parameter]["exp_avg"], self.state[parameter]["exp_avg_sq"]
                square = parameter.grad.square()
                first.lerp_(parameter.grad, 1 - beta1)
                second.addcmul_(square, (second - square).sign(), value=beta2 - 1)
                parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-group["lr"])


def _first_moments(parameter: Tensor, tau: float) -> dict[str, Tensor]:
    return {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.full_like(parameter, tau * tau)}


class ClusteredServer(ServerRule):
    """FL+HC's server (Briggs et al., "Federated learning with hierarchical clustering of local updates", IJCNN 2020).

    Until the round ``clustering_round`` it is FedAvg's. Then the participants' updates, upload less what was sent, are
    clustered by Ward's linkage, and from there on every cluster has a model of its own: each client receives that of
    its cluster, and the model becomes the weighted mean of what the cluster's clients upload.

    Deviations and readings:
    * The paper's clusters are made once, of all clients; here of the participants. A client that takes part for the
      first time later receives the shared values, and joins the cluster whose model is nearest (Euclidean) to what it
      uploads. So it does with ``clients_per_round`` below the number of clients.
    * The paper cuts the tree at a distance; here it is cut into a number of clusters.
    * Shared values, which never-seen clients receive, are the weighted mean of all uploads of the last round.

    Args:
        clusters: how many; fewer where fewer clients take part in the clustering round.
        clustering_round: the round after which clients are clustered.
        similarity: of two updates: the angle between them, or their distance.
    """

    def __init__(
        self,
        clusters: Few = 2,
        clustering_round: PositiveInt = 1,
        similarity: Literal["cosine", "euclidean"] = "cosine",
    ) -> None:
        super().__init__()
        self.clusters, self.clustering_round, self.similarity = clusters, clustering_round, similarity
        self.cluster_of: Tensor
        self.clustered: Tensor

    def start(self, initial: Values, terms: Terms) -> None:
        """Give all clusters the initial values, and no client a cluster (-1)."""
        super().start(initial, terms)
        self.models = ClientStore(initial, self.clusters)
        self.register_buffer("cluster_of", torch.full((terms.num_clients,), -1))
        self.register_buffer("clustered", torch.tensor(0))  # how many clusters there are, 0 before the clustering round

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send each client the model of its cluster; the shared values to those without one."""
        if not self.clustered:
            return super().broadcast(round, shared, clients)
        cluster = self.cluster_of[list(clients)]
        own = {}
        for name, value in shared.items():
            own[name] = self.models.all_rows(name)[cluster]
            own[name][cluster < 0] = value.cpu()
        return Broadcast(own=own)

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Take the mean of every cluster, and of all; the clustering round makes the clusters."""
        if not self.clustered and round.number >= self.clustering_round and shared:
            found = self._cluster({n: uploads.values[n] - value for n, value in shared.items()})
            self.clustered.fill_(int(found.max()) + 1)
            self.cluster_of[list(uploads.clients)] = found
        if self.clustered:
            self._admit(shared, uploads)
            self._take_means(shared, uploads)
        return super().aggregate(round, shared, uploads)

    def _cluster(self, updates: Values) -> Tensor:
        """Return the cluster of each client of a round, int64 [S], from [S, ...] of every parameter."""
        from sklearn.cluster import AgglomerativeClustering  # slow to import

        rows = _flat(updates)
        if self.similarity == "cosine":  # unit vectors' squared distance is twice one less their cosine
            rows = torch.nn.functional.normalize(rows)
        count = min(self.clusters, len(rows))
        if count == 1:
            return torch.zeros(len(rows), dtype=torch.int64)
        found = AgglomerativeClustering(n_clusters=count, linkage="ward").fit_predict(rows.numpy())
        return torch.from_numpy(found.astype(np.int64))

    def _admit(self, shared: Values, uploads: Uploads) -> None:
        """Give clients that have no cluster the one whose model is nearest to what they upload."""
        new = [place for place, client in enumerate(uploads.clients) if self.cluster_of[client] < 0]
        if new:
            models = _flat({name: self.models.all_rows(name)[: int(self.clustered)] for name in shared})
            away = torch.cdist(_flat({name: uploads.values[name][new] for name in shared}), models)
            self.cluster_of[[uploads.clients[place] for place in new]] = away.argmin(dim=1)

    def _take_means(self, shared: Values, uploads: Uploads) -> None:
        cluster = self.cluster_of[list(uploads.clients)]
        for number in cluster.unique().tolist():
            members = uploads.only(shared).of((cluster == number).nonzero().flatten().tolist())
            for name, mean in weighted_mean(members.values, members.weights).items():
                self.models.write(name, [number], mean.unsqueeze(0))


def _flat(values: Values) -> Tensor:
    """All parameters side by side, float64 [S, P] in host memory."""
    return torch.cat([rows.detach().flatten(1).double().cpu() for rows in values.values()], dim=1)
