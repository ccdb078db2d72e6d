"""HiLoRA: low-rank factors of all clients, of clusters of them and of each client, trained one after the other."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmark.backbones.parts import LowRank, TowerPart
from benchmark.contract import Client, LocalTraining, Loss, MiniBatch, Phase
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.ranges import BelowOne, Few, FewOrNone, NonNegativeFloat
from benchmark.server import ServerRule
from methods.classifier import new_client_training
from methods.fedlora import LORA_TRAINING, FedLoRA
from methods.losses import cross_entropy
from methods.tiers import CLUSTER, ROOT, TIERS, TierRule


class HiLoRA(FedLoRA):
    """HiLoRA (Peng et al., "HiLoRA: Hierarchical Low-Rank Adaptation for Personalized Federated Learning", CVPR 2026).

    Three tiers of low-rank factors are added up, ``W = W0 + s (B_r A_r + B_c A_c + B_l A_l)``, trained one after the
    other, and rest from then on: the root by all clients in the first ``root_rounds`` rounds, a cluster's by its
    clients in the next ``cluster_rounds``, and the leaf, a client's own, in those that are left. The server averages
    *products*, and keeps the nearest matrix of rank r (FlexLoRA). Between the first two stages clients are clustered by
    the subspaces of their own B_r (``spectral_clusters``). A tier is kept off those before it: the objective is
    ``CE + gamma_c ||B_r^T B_c||^2`` in the second stage, and ``CE + gamma_c ||B_r^T B_l||^2 + gamma_l ||B_c^T B_l||^2``
    in the third, Frobenius norms summed over projections. The head is personal and trained in all stages. A client that
    never trains fits the root for an epoch, joins the cluster that its subspace is nearest to, and fits its leaf.
    Message: one tier up in the first two stages, none in the third.

    Readings: the paper could not be read; abstract, notes and a port for language models were at hand. Ranks, rates and
    when a stage ends are not known: equal ranks, and fixed numbers of rounds. Clusters are made once. A client that
    took no part in the first stage joins the largest cluster, where a first pass could be asked of it. Down go the root
    and the cluster's factors in every round that has them, as clients that missed rounds need both. Further arguments
    as ``FedLoRA``.

    Args:
        root_rounds: T_root; with all rounds it is FlexLoRA.
        cluster_rounds: T_cluster.
        clusters: K; None by the largest gap of eigenvalues, from 2 to 10.
        memory: lambda, share of what the server keeps of a client's subspace.
        gamma_c: see above.
        gamma_l: see above.
        training: of factors and head together.

    Raises:
        ConfigurationError: a rank of 0.
    """

    shared = ("lora", "cluster_lora")
    personal: tuple[str, ...] = ("own_lora", "head")
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        root_rounds: FewOrNone = 15,
        cluster_rounds: FewOrNone = 20,
        clusters: Few | None = None,
        memory: BelowOne = 0.9,
        gamma_c: NonNegativeFloat = 0.1,
        gamma_l: NonNegativeFloat = 0.1,
        training: LocalTraining = replace(LORA_TRAINING, epochs=1),
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        of, tower = self.lora, self.backbone.tower
        if not of.rank:
            raise ConfigurationError("HiLoRA: rank=0 leaves no subspace to cluster clients by; give 1 or more")
        self.cluster_lora = LowRank(of.rank, of.alpha, of.targets, of.first_block, key="cluster").fit(tower)
        self.own_lora = LowRank(of.rank, of.alpha, of.targets, of.first_block, key="own").fit(tower)
        self.stages = root_rounds, root_rounds + cluster_rounds
        self.gamma_c, self.gamma_l = gamma_c, gamma_l
        self._new_rule = partial(TierRule, clusters, memory)

    def parts(self) -> tuple[TowerPart, ...]:
        """Return all tiers."""
        return (self.lora, self.cluster_lora, self.own_lora)

    def local_phases(self) -> list[Phase]:
        """Train a tier and the head in the rounds of its stage; a stage without rounds keeps its place."""
        root, cluster, leaf = (self.training_settings.phase(tier, "head") for tier in TIERS)
        first, second = self.stages
        made = []
        for phase, begin, end in ((root, 1, first), (cluster, first + 1, second), (leaf, second + 1, None)):
            made.append(
                replace(phase, first_round=begin, last_round=end) if end != begin - 1 else replace(phase, epochs=0)
            )
        return made

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the root, by which a cluster is found, then the leaf and the head of a client that never trains."""
        if not new:
            return []
        training = new_client_training(self.training_settings)
        return [replace(training, epochs=e).phase(tier, "head") for tier, e in zip(TIERS, (1, 0, 5), strict=True)]

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return how far the tier that is trained leans on those before it."""
        if phase == TIERS.index(ROOT):
            return None
        root, cluster, leaf = self.lora.b, self.cluster_lora.b, self.own_lora.b
        if phase == TIERS.index(CLUSTER):
            return self.gamma_c * overlap(root.items(), cluster)
        return self.gamma_c * overlap(root.items(), leaf) + self.gamma_l * overlap(cluster.items(), leaf)

    def client_loss(self, client: Client, batch: MiniBatch) -> Loss:
        """Return cross-entropy, and the penalty of the stage."""
        loss = cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)
        penalty = self.regulariser(client, batch.phase)
        return loss if penalty is None else loss + penalty

    def message(self, client: Client, noise: Values) -> Values:
        """Return the tier of the stage, and the head where it is shared."""
        first, second = self.stages
        tier = ROOT if client.round.number <= first else CLUSTER if client.round.number <= second else "nothing"
        sent = (f"{tier}.", *(("head.",) if "head" in self.shared else ()))
        return {name: value for name, value in client.parameters.items() if name.startswith(sent)}

    def make_server(self) -> ServerRule:
        """Return the server of tiers."""
        return self._new_rule()


def overlap(before: Iterable[tuple[str, Tensor]], after: Any) -> Tensor:
    """Return ``||B^T B'||_F^2`` summed over targets and blocks; B [L, out, r] by target, B' the same."""
    return torch.stack([(b.mT @ after[target]).square().sum() for target, b in before]).sum()
