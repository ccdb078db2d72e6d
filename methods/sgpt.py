"""SGPT: shared prompts, and prompts of groups among which every image selects its own."""

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from benchmark.errors import ConfigurationError
from benchmark.ranges import Few, FewOrNone, UnitInterval
from benchmark.server import ServerRule
from methods.classifier import new_client_training
from methods.losses import cross_entropy, masked_mean
from methods.prompt_groups import (
    FREQUENCY,
    SELECTIONS,
    GroupRule,
    key_similarity,
    majority,
    nearest_group,
    one_hot,
    orthonormal_keys,
    training_group,
)
from methods.vit_prompt import ViTPromptMethod


class SGPT(ViTPromptMethod):
    """SGPT (Deng, Thrampoulidis, Li, "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized
    Federated Learning", CVPR 2024).

    Before each of ``shared_blocks`` one shared token, and before each of ``group_blocks`` one token of the image's
    group, is inserted right after the class token; tokens stay, so that the sequence grows. The group is selected by
    ``s_g = 1 - cos(q, k_g)``; the query q is the ReLU of the class token of a frozen pass without prompts, after the
    final norm. In training ``argmin_g s_g (freq_g + 5e-4)``, in tests ``argmin_g s_g`` of each image.

    Local training has two stages: (1) selection off, shared prompts and head by CE on the class token; (2) selection
    on, group prompts, keys and head by ``CE - mean_batch cos(q, k_selected)`` on the mean of the class token and the
    group tokens. The server: see ``GroupRule``. Messages: S d + L G d + G d numbers (shared tokens, group tokens,
    keys) and the head if it is global, and G more for the selections: counts up, frequencies down. Evaluated with the
    client's head (point ``server``), and right after local training (point ``local``). Clients that never train fit
    their head with the selection on.

    Deviations and readings:
    * The head is the client's own, as in pFedBayesPT's comparison; SGPT averages it (``head="global"``).
    * freq_g is what the server has counted over all clients and rounds before this one, and fixed within a round. In
      the authors' code clients run one after the other and each client's counts are added when it has finished, so
      that the next one of the same round sees them. In both the counts never decay.
    * All keys start with length 1. The authors' code leaves the first one as Xavier drew it, about 1.4 long at d = 768
      and G = 20. A cosine does not see the length; the first key's steps, by its gradient, are smaller there.
    * With ``batch_majority`` the selections are counted after the vote.
    * The keys' term counts in all epochs of stage 2; in the authors' code in the first five, which are all of theirs.

    The ViT must have a class token. Further arguments as ``ViTPromptMethod``.

    Args:
        shared_blocks: layers, from 0, before which a shared token is inserted; the authors have 0-3 or 0-4.
        group_blocks: layers before which a group token is inserted, after the shared ones; 4-6 or 5-6.
        num_groups: G; 20 for CIFAR-100, 4 for Office.
        query_blocks: layers that the query passes; None for all (CIFAR-100), 6 for Office.
        batch_majority: in training all images of a mini-batch take the group that most of them select (Office).
        head: ``personal`` or ``global``.
        prompt_momentum: of the group prompts on the server.
        key_momentum: of the keys on the server; 0.5 for CIFAR-100, 0 for Office.
        training: of each of the two stages.

    Raises:
        ConfigurationError: blocks that the backbone does not have or in another order, no or too many groups, a
            momentum outside of [0, 1], or a backbone without a class token.
    """

    inputs = ("images", "features")
    uploads = (SELECTIONS,)

    def __init__(
        self,
        *arguments: Any,
        shared_blocks: tuple[FewOrNone, ...] = (0, 1, 2, 3),
        group_blocks: tuple[FewOrNone, ...] = (4, 5, 6),
        num_groups: Few = 20,
        query_blocks: Few | None = None,
        batch_majority: bool = False,
        head: Literal["personal", "global"] = "personal",
        prompt_momentum: UnitInterval = 0.5,
        key_momentum: UnitInterval = 0.5,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9, weight_decay=1e-5),
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        width, depth = self.backbone.embed_dim, self.backbone.depth
        blocks = (*shared_blocks, *group_blocks)
        if not shared_blocks or not group_blocks or sorted(set(blocks)) != list(blocks) or not 0 <= blocks[-1] < depth:
            raise ConfigurationError(
                f"shared_blocks and then group_blocks must rise within 0 to {depth - 1}, the layers of this backbone, "
                f"with at least one each; got {list(shared_blocks)} and {list(group_blocks)}"
            )
        if num_groups > width:
            raise ConfigurationError(
                f"num_groups must be from 1 to {width}, since the keys start orthogonal; got {num_groups}"
            )
        if query_blocks is not None and query_blocks > depth:
            raise ConfigurationError(f"query_blocks must be from 1 to {depth}, or null for all; got {query_blocks}")
        if not self.backbone.vit.has_class_token:
            raise ConfigurationError("SGPT reads the class token, and this backbone has none; take another ViT")
        self.begin_at(blocks[0] + 1)
        self.shared_blocks, self.group_blocks = tuple(shared_blocks), tuple(group_blocks)
        self.num_groups, self.query_blocks, self.batch_majority = num_groups, query_blocks, batch_majority
        self._new_rule = partial(GroupRule, prompt_momentum, key_momentum)
        self.shared_prompts = nn.Parameter(torch.zeros(len(shared_blocks), width))
        self.group_prompts = self.new_tokens(num_groups, len(group_blocks))
        self.group_keys = nn.Parameter(orthonormal_keys(num_groups, width))
        self.head = self.new_head()
        prompts = ("shared_prompts", "group_prompts", "group_keys")
        self.shared = (*prompts, "head") if head == "global" else prompts
        self.personal = () if head == "global" else ("head",)

    def make_server(self) -> ServerRule:
        """Return the server that counts selections."""
        return self._new_rule()

    def local_phases(self) -> list[Phase]:
        """Train shared prompts and head with the selection off; then group prompts, keys and head with it on."""
        training = self.training_settings
        return [training.phase("shared_prompts", "head"), training.phase("group_prompts", "group_keys", "head")]

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit the head of a client that never trains, in the second of the two stages."""
        fitting = new_client_training(self.training_settings).phase("head")
        return [replace(fitting, epochs=0), fitting] if new else []

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the query of images, and where blocks without a token come first, the output of these, [B, T, d]."""
        tokens = self.backbone.tokens_before(x, self.first_layer)
        kept = {"tokens": tokens.half()} if self.first_layer else {}
        return kept | {"query": self.query(x, tokens)}

    def query(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the query [B, d] of images [B, 3, H, W], of which ``tokens`` enter the first block with a token."""
        if self.query_blocks is not None and self.query_blocks < self.first_layer:
            return F.relu(self.backbone.grow(x, {}, self.query_blocks)[:, 0])
        return F.relu(self.backbone.grow_from(tokens, {}, self.first_layer, self.query_blocks)[:, 0])

    def first_tokens(self, batch: MiniBatch) -> Tensor:
        """Return what the first block with a token takes of a mini-batch, [B, T, d]."""
        return batch.features["tokens"].to(self.dtype) if self.first_layer else self.backbone.tokens_before(batch.x, 0)

    def logits(self, tokens: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return logits [B, C] with the selection off, or with the group that was selected for each image.

        Args:
            tokens: what the first block with a token takes, [B, T, d].
            chosen: one-hot rows [B, G]; None with the selection off.
        """
        inserted = dict(zip(self.shared_blocks, self.shared_prompts.unsqueeze(1), strict=True))
        if chosen is None:
            return self.head(self.backbone.grow_from(tokens, inserted, self.first_layer)[:, 0])
        # A product instead of an index: its gradient is the same sum on every device.
        own = torch.einsum("bg,lgd->lbd", chosen.to(self.dtype), self.group_prompts())
        inserted |= dict(zip(self.group_blocks, own.unsqueeze(2), strict=True))
        return self.head(self.backbone.grow_from(tokens, inserted, self.first_layer)[:, : 1 + len(own)].mean(1))

    def classify(self, tokens: Tensor, query: Tensor) -> Tensor:
        """Return logits [B, C], each image in the group nearest to its query [B, d]; tokens as for ``logits``."""
        return self.logits(tokens, one_hot(nearest_group(key_similarity(query, self.group_keys)), self.num_groups))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] of images [B, 3, H, W], each in its nearest group."""
        tokens = self.backbone.tokens_before(x, self.first_layer)
        return self.classify(tokens, self.query(x, tokens))

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits as ``forward``, with the query that the engine has."""
        return self.classify(self.first_tokens(batch), batch.features["query"])

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return CE in the first stage; in the second, CE less the mean cosine of query and key, and the selections."""
        if batch.phase == 0:
            none = torch.zeros(self.num_groups, device=batch.y.device)
            return cross_entropy(self.logits(self.first_tokens(batch)), batch.y, batch.mask), {SELECTIONS: none}
        similarity = key_similarity(batch.features["query"], self.group_keys)
        chosen = one_hot(training_group(similarity, client.received[FREQUENCY]), self.num_groups)
        if self.batch_majority:
            chosen = majority(chosen, batch.mask)
        agreement = masked_mean((similarity * chosen).sum(1), batch.mask)
        loss = cross_entropy(self.logits(self.first_tokens(batch), chosen), batch.y, batch.mask) - agreement
        return loss, {SELECTIONS: (chosen * batch.mask.unsqueeze(1)).sum(0)}
