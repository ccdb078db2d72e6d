"""PEP-FedPT: shared prompts, and a prompt of each class that every image mixes by its nearness to class prototypes."""

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.parts import Prompts
from benchmark.contract import Client, Input, MiniBatch, Phase, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.ranges import Few, FewOrNone, NonNegativeFloat, PositiveFloat
from benchmark.server import ServerRule
from methods.prototypes import SUMMED, PrototypeRule, mixing_weights
from methods.vit_prompt import ViTPromptMethod


class PEPFedPT(ViTPromptMethod):
    """PEP-FedPT (Yashwanth et al., "Prompt Estimation from Prototypes for Federated Prompt Tuning of Vision
    Transformers", TMLR 2026).

    Beside shared prompts P_S before the first block there is a prompt P_C[c] of each class. An image mixes them,
    ``P_M(x) = sum_c w_c(x) P_C[c]`` with ``w = softmax_c(cos(q(x), M_c) / tau + log prior(c))``: M are the prototypes
    of the classes, the prior is the client's share of each class, no gradient goes through w. P_M(x) stands right
    behind the class token from block ``mix_block`` on. Prompts and the head are shared, no client keeps anything of its
    own. Objective cross-entropy; evaluated with the new values and the client's prior.

    Readings, as the abstract alone was at hand: the query q is the frozen, prompt-free class token, normalised, so that
    a prototype is exact once all clients that hold the class have sent their sums, each of them once; before any, the
    weights are the prior. Prompts and head have one rate; the head starts at 0. ``class_average="fedavg"`` is the
    abstract's "traditional federated averaging", by which a client without a class damps its prompt; ``by_count`` does
    not. Where to mix is not known. A client sends its class counts and sums of features: what they reveal is no less
    than that. Message: K_s d + C K_c d + 2 (C d + C) numbers up. ``forward`` alone, of images from anywhere, takes a
    uniform prior. Further arguments as ``ViTPromptMethod``.

    Args:
        num_prompts: K_s.
        class_tokens: K_c, tokens of each class.
        first_block: the block, counted from 1, before which P_S is inserted.
        mix_block: the block, counted from 1, before which P_M is inserted.
        tau: temperature of the weights.
        prior: the client's share of each class, or the same for all.
        prior_smoothing: added to the client's number of each class.
        class_init: one draw for all classes' prompts, or one of each.
        class_average: see above.

    Raises:
        ConfigurationError: there is no such block, or images would be mixed before the shared prompts stand.
    """

    shared = ("shared_prompt", "class_prompts", "head", *SUMMED)
    inputs: tuple[Input, ...] = ("images", "features", "own_images")

    def __init__(
        self,
        *arguments: Any,
        num_prompts: FewOrNone = 10,
        class_tokens: Few = 1,
        first_block: Few = 1,
        mix_block: Few = 7,
        tau: PositiveFloat = 0.1,
        prior: Literal["client", "uniform"] = "client",
        prior_smoothing: NonNegativeFloat = 0.0,
        class_init: Literal["same", "independent"] = "same",
        class_average: Literal["fedavg", "by_count"] = "fedavg",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.backbone.tower.layers_from(mix_block, "PEPFedPT: mix_block")
        self.begin_at(first_block)
        if mix_block < first_block:
            raise ConfigurationError(f"mix_block must be first_block ({first_block}) or later; got {mix_block}")
        self.mix_layer, self.tau, self.prior, self.prior_smoothing = mix_block - 1, tau, prior, prior_smoothing
        count, width = self.num_classes, self.backbone.embed_dim
        self.inputs = ("images", "features", "own_images") if first_block == 1 else ("features", "own_images")
        self.shared_prompt = self.new_tokens(num_prompts, first_block=first_block)
        drawn = self.new_tokens(class_tokens * (1 if class_init == "same" else count))().detach()
        self.class_prompts = nn.Parameter(drawn.view(-1, class_tokens, width).expand(count, -1, -1).clone())
        self.head = self.new_head()
        for value in self.head.parameters():
            nn.init.zeros_(value)
        self.prototypes = nn.Parameter(torch.zeros(count, self.backbone.num_features))
        self.prototype_counts = nn.Parameter(torch.zeros(count))
        self._new_rule = partial(PrototypeRule, class_average)

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return the queries of images [B, 3, H, W], ``query`` [B, d], L2-normalised; and the tokens at P_S's block."""
        tokens = self.backbone.tokens_before(x, self.first_layer)
        kept = {"tokens": tokens.half()} if self.first_layer else {}
        return kept | {"query": F.normalize(self.backbone.from_tokens(tokens, first_layer=self.first_layer), dim=-1)}

    def local_phases(self) -> list[Phase]:
        """Train prompts and head; prototypes are made of the images."""
        return [self.training_settings.phase("shared_prompt", "class_prompts", "head")]

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Fit nothing: no client has anything of its own."""
        return []

    def message(self, client: Client, noise: Values) -> Values:
        """Send prompts and head, and of each class the sum of the queries and their number."""
        sent = super().message(client, noise)
        assert isinstance(sent, dict)
        own = client.own_images
        held = (F.one_hot(own["label"].clamp(min=0), self.num_classes) * own["mask"].unsqueeze(1)).to(self.dtype)
        return sent | {"prototypes": held.mT @ own["query"], "prototype_counts": held.sum(0)}

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return the prior of each class, [C]; a uniform one where the client has no image."""
        counts = client.class_counts.to(self.dtype) + self.prior_smoothing
        if self.prior == "uniform":
            counts = torch.ones_like(counts)
        counts = torch.where(counts.sum() > 0, counts, 1.0)
        return {"prior": counts / counts.sum()}

    def mixed(self, query: Tensor, prior: Tensor) -> Prompts:
        """Return each image's mix of the class prompts, of queries [B, d] under a prior [C]."""
        cosines = query @ self.prototypes.detach().mT
        weights = mixing_weights(cosines, self.prototype_counts.detach() > 0, prior, self.tau)
        return Prompts(torch.einsum("bc,ckd->bkd", weights, self.class_prompts).unsqueeze(1), self.mix_layer)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits [B, C] under the client's prior."""
        mixed = self.mixed(batch.features["query"], client.prepared["prior"])
        if not self.first_layer:
            return self.classify(batch.x, mixed)
        kept = batch.features["tokens"].to(self.dtype)
        features = self.backbone.from_tokens(kept, mixed, self.shared_prompt, first_layer=self.first_layer)
        logits: Tensor = self.head(features)
        return logits

    def classify(self, x: Tensor, mixed: Prompts) -> Tensor:
        """Return logits [B, C] of images [B, 3, H, W] with each image's mix of the class prompts."""
        logits: Tensor = self.head(self.backbone(x, mixed, self.shared_prompt))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] of images [B, 3, H, W] under a uniform prior."""
        prior = x.new_full((self.num_classes,), 1 / self.num_classes)
        return self.classify(x, self.mixed(self.frozen_features(x)["query"], prior))

    def make_server(self) -> ServerRule:
        """Return the server with the prototypes."""
        return self._new_rule()
