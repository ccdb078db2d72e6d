"""HiLoRA's server: three tiers of low-rank factors, of all clients, of clusters of them and of each."""

import torch
from torch import Tensor

from benchmark.client_store import ClientStore
from benchmark.federation import Broadcast, Facts, Round, Terms, Uploads, Values
from benchmark.ranges import BelowOne, Few
from benchmark.seeds import derived_seed
from benchmark.server import ServerRule
from methods.subspaces import MOST, basis, distances, mean_product, spectral_clusters

#: Prefixes of the three tiers' factors; a phase trains that of its number.
TIERS = ROOT, CLUSTER, LEAF = "lora", "cluster_lora", "own_lora"


class TierRule(ServerRule):
    """HiLoRA's server: products are averaged, first of all clients, then within clusters that are made in between.

    Args:
        clusters: how many; None by the largest gap of the Laplacian's eigenvalues.
        memory: lambda, share that a client's kept B has in the next one.
    """

    takes_stale = False

    def __init__(self, clusters: Few | None = None, memory: BelowOne = 0.9) -> None:
        super().__init__()
        self.clusters, self.memory = clusters, memory
        self.seen: Tensor
        self.cluster_of: Tensor

    def start(self, initial: Values, terms: Terms) -> None:
        """Begin without clusters (-1), and with the initial factors in each that may come."""
        super().start(initial, terms)
        of = {tier: {n: value for n, value in initial.items() if n.startswith(f"{tier}.")} for tier in (ROOT, CLUSTER)}
        self.targets = [name.removeprefix(f"{ROOT}.b.") for name in initial if name.startswith(f"{ROOT}.b.")]
        self.root = ClientStore(of[ROOT], 1)
        self.tiers = ClientStore(of[CLUSTER], self.clusters or MOST)
        kept = {target: torch.zeros_like(initial[f"{ROOT}.b.{target}"]) for target in self.targets}
        self.spans = ClientStore(kept, terms.num_clients)
        self.register_buffer("seen", torch.zeros(terms.num_clients, dtype=torch.bool))
        self.register_buffer("cluster_of", torch.full((terms.num_clients,), -1))

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        """Send the root, and to clients of a cluster its factors."""
        common = {name: value for name, value in shared.items() if not name.startswith(f"{CLUSTER}.")}
        cluster = self.cluster_of[list(clients)]
        if (cluster < 0).all():
            return Broadcast(common)
        own = {}
        for name in self.tiers.names:
            own[name] = self.tiers.all_rows(name)[cluster]
            own[name][cluster < 0] = shared[name].cpu().to(own[name].dtype)
        return Broadcast(common, own)

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Average the products of the tier that came, and what else is shared as usual."""
        rest = {name: value for name, value in shared.items() if not name.startswith(tuple(f"{t}." for t in TIERS))}
        made = super().aggregate(round, rest, uploads)
        if f"{ROOT}.b.{self.targets[0]}" in uploads.values:
            self._remember(uploads)
            root = self._mean_of(ROOT, uploads)
            for name, value in root.items():
                self.root.write(name, [0], value.unsqueeze(0))
                made[name] = value.to(shared[name])
        elif f"{CLUSTER}.b.{self.targets[0]}" in uploads.values:
            if (self.cluster_of < 0).all():
                self._make_clusters()
            cluster = self.cluster_of[list(uploads.clients)]
            for number in cluster.unique().tolist():
                members = uploads.of((cluster == number).nonzero().flatten().tolist())
                for name, value in self._mean_of(CLUSTER, members).items():
                    self.tiers.write(name, [number], value.unsqueeze(0))
        return made

    def report(self, round: Round) -> Facts:
        """Return each client's cluster, once there are any."""
        return {} if (self.cluster_of < 0).all() else {"cluster": self.cluster_of.double()}

    def adapt(self, round: Round, clients: tuple[int, ...], phase: int, values: Values) -> Values:
        """Give clients that have fitted the root the server's root back, and the nearest cluster's factors."""
        if phase != TIERS.index(ROOT):
            return {}
        count = len(clients)
        made = {
            name: self.root.all_rows(name).expand(count, *self.root.all_rows(name).shape[1:])
            for name in self.root.names
        }
        known = (self.seen & (self.cluster_of >= 0)).nonzero().flatten()
        if len(known):
            apart = self._distances({target: values[f"{ROOT}.b.{target}"].cpu() for target in self.targets}, known)
            of_known = self.cluster_of[known]
            numbers = of_known.unique()
            means = torch.stack([apart[:, of_known == number].mean(1) for number in numbers], 1)
            nearest = numbers[means.argmin(1)]
            made |= {name: self.tiers.all_rows(name)[nearest] for name in self.tiers.names}
        return {name: value.to(values[name]) for name, value in made.items()}

    def _mean_of(self, tier: str, uploads: Uploads) -> Values:
        """Return the factors of the mean product of each target."""
        weights, made = uploads.weights / uploads.weights.sum(), {}
        for target in self.targets:
            a, b = f"{tier}.a.{target}", f"{tier}.b.{target}"
            made[a], made[b] = mean_product(uploads.values[a], uploads.values[b], weights)
        return made

    def _remember(self, uploads: Uploads) -> None:
        """Move what is kept of each client's B, of norm 1, towards its new one."""
        clients = list(uploads.clients)
        old = torch.where(self.seen[clients], self.memory, 0.0)
        for target in self.targets:
            b = uploads.values[f"{ROOT}.b.{target}"].cpu()
            b = b / b.flatten(2).norm(dim=2)[..., None, None].clamp(min=1e-12)
            share = old.view(-1, *[1] * (b.ndim - 1)).to(b)
            self.spans.write(target, clients, share * self.spans.all_rows(target)[clients] + (1 - share) * b)
        self.seen[clients] = True

    def _distances(self, spans: Values, others: Tensor) -> Tensor:
        """Return distances of B's, per target [K, L, out, r], to those that are kept of others; mean over targets."""
        found = [distances(basis(b), basis(self.spans.all_rows(target)[others])) for target, b in spans.items()]
        return torch.stack(found).mean(0)

    def _make_clusters(self) -> None:
        """Cluster the clients that have been seen; the others join the largest cluster."""
        known = self.seen.nonzero().flatten()
        found = torch.zeros(1, dtype=torch.int64)
        if len(known):
            apart = self._distances({target: self.spans.all_rows(target)[known] for target in self.targets}, known)
            found = spectral_clusters((apart + apart.mT) / 2, self.clusters, derived_seed(self.terms.seed, "HiLoRA"))
        self.cluster_of[list(self.terms.training_clients)] = found.bincount().argmax()
        self.cluster_of[known] = found[: len(known)]
