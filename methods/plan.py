"""PLAN: each client's own deep prompts, and attention, averaged by the server, that merges them into global ones."""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.backbones.parts import Prompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.ranges import Few, NonNegativeFloat, PositiveFloat
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.losses import cross_entropy, taught_entropy
from methods.prompt_aggregator import aggregator
from methods.prompt_merging import AGGREGATORS, MergingRule, merged, trains_prompts
from methods.templates import TaughtByTemplates

#: The code's scripts have this rate in both stages.
PROMPT_TRAINING = LocalTraining(lr=0.0015, epochs=1, momentum=0.9, weight_decay=5e-4)


class PLAN(TaughtByTemplates):
    """PLAN (Gong et al., "Federated Domain Generalization via Prompt Learning and Aggregation", IEEE TIFS 2025).

    Each client has prompts of its own at the first L layers of both towers, independent of each other (FedPromptSRC).
    Two stages alternate by round. Stage 1, in odd rounds: a client trains its prompts P_i, with logits s, by
    ``CE(s) + c H(t, s)``, ``H = -T^2 mean_b sum_c softmax(t/T)_bc log softmax(s/T)_bc``, and t the logits of the last
    global prompts; before there are any, of the frozen model under a mean of templates. Stage 2, in even rounds: the
    server sends all clients' prompts to all, and a client trains by cross-entropy, of each tower, the attention that
    merges the prompts into global ones (``methods.prompt_aggregator``); prompts rest. The server averages the
    attention, all clients alike, and merges the prompts that it has. Evaluated are the global prompts, also for clients
    that never train: they are the initial ones until the first stage 2 has ended, so that a run has an even
    number of rounds, two for each of the paper's.

    Message, for prompts of P = L n (w + v) numbers and aggregators of A: stage 1 up P, down P (the first time 0); stage
    2 up A, down A + K P for K clients. For ViT-B/16, P = 122,880 and A = 81,901,568. Every client sees the prompts of
    all.

    Readings: the paper could not be read beyond its abstract, formulas are its code's. The student of stage 1 is the
    client's own prompts, as the abstract has it. In the code it is, from the second time on, the global prompts,
    through which no gradient reaches the own ones, so that there is no option for it. The code's clients keep the
    aggregators and make global prompts themselves, and get all prompts as stage 1 ends; here the server sends global
    prompts as stage 1 begins and all prompts as stage 2 does, since a client may have missed rounds. All clients start
    from the same prompts, where in the code those of the first text layer alone are equal. With ``text_merge="mean"``
    the text tower has no aggregator (the code for Office-Home).

    CLIP's image tower must be a ViT. Further arguments as ``TaughtByTemplates``.

    Args:
        num_context: n, tokens of each prompt, in both towers.
        depth: L, layers with prompts, 1 for the first alone; None for as many as the less deep tower has.
        heads: of the attention, divides the width of both towers' tokens.
        text_merge: of text prompts: ``attention``, or their ``mean`` over the clients.
        distillation: c, weight of the teacher.
        temperature: T.
        training: of the prompts, and of the aggregators.

    Raises:
        ConfigurationError: an image tower that is a ResNet; a depth that a tower has not; ``heads`` that do not divide
            a width.
    """

    clip_class = PromptedCLIP
    shared: tuple[str, ...] = (*AGGREGATORS, *AGGREGATORS.values())
    personal: tuple[str, ...] = ("own_context", "own_image_prompts")
    uploads = ("own_context", "own_image_prompts")
    inputs = ("images", "features")
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        num_context: Few = 8,
        depth: Few | None = None,
        heads: Few = 8,
        text_merge: Literal["attention", "mean"] = "attention",
        distillation: NonNegativeFloat = 1.0,
        temperature: PositiveFloat = 1.0,
        training: LocalTraining = PROMPT_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_context=num_context, training=training, **settings)
        clip = self.clip
        clip.need_image_tower("vit", needs="PLAN puts prompts between the patches of a ViT")
        layers = min(clip.text_depth, clip.vision_depth) if depth is None else depth
        for tower in (clip.text_tower, clip.image_tower):
            tower.layers_from(layers, "PLAN: depth")
        if clip.text_width % heads or clip.vision_width % heads:
            raise ConfigurationError(
                f"PLAN: heads={heads} must divide the widths of both towers, {clip.text_width} (text) and "
                f"{clip.vision_width} (image); give a divisor of {math.gcd(clip.text_width, clip.vision_width)}"
            )
        self.heads, self.distillation, self.temperature = heads, distillation, temperature
        self._new_rule = partial(MergingRule, heads)
        with keyed_initialization("PLAN"):
            deep = 0.02 * torch.randn(layers - 1, num_context, clip.text_width)
            images = 0.02 * torch.randn(layers, num_context, clip.vision_width)
        self.context = nn.Parameter(torch.cat([self.context.detach().unsqueeze(0), deep]))
        self.image_prompts = nn.Parameter(images)
        self.own_context = nn.Parameter(self.context.detach().clone())
        self.own_image_prompts = nn.Parameter(images.clone())
        if text_merge == "attention":
            with keyed_initialization("PLAN text"):
                self.text_aggregator = aggregator(layers, clip.text_width)
        else:
            self.shared = tuple(name for name in self.shared if name != "text_aggregator")
        with keyed_initialization("PLAN image"):
            self.image_aggregator = aggregator(layers, clip.vision_width)

    def local_phases(self) -> list[Phase]:
        """Train the own prompts in odd rounds, and what merges all in even ones."""
        aggregators = tuple(name for name in self.shared if name not in AGGREGATORS)
        prompts, merging = (self.training_settings.phase(*of) for of in (self.personal, aggregators))
        return [replace(prompts, every=2), replace(merging, first_round=2, every=2)]

    def text_under(self, context: Tensor, split: str) -> Tensor:
        """Return features [C, e] of the classes of a split under text prompts [L, n, w]."""
        deep = [Prompts(context[1:], first_layer=1)] if len(context) > 1 else []
        return self.clip.text_features(self.class_prompts(split), context[0], *deep)

    def logits_under(self, prompts: Values, batch: MiniBatch) -> Tensor:
        """Return logits [B, C] of a mini-batch under the prompts of both towers."""
        images = self.clip.image_features(batch.x, prompts["image_prompts"])
        return self.logits(images, self.text_under(prompts["context"], batch.split))

    def text_features(self, split: str) -> Tensor:
        """Return features of the classes of a split under the global text prompts, [C, e]."""
        return self.text_under(self.context, split)

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return features of a mini-batch among the global image prompts, [B, e]."""
        return self.clip.image_features(batch.x, self.image_prompts)

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits(self.clip.image_features(x, self.image_prompts), self.text_features(split))

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return, in stage 1, the text features that teach, as ``teacher`` [C, e]."""
        if stage is Stage.EVALUATE:
            return super().prepare(client, stage, split)
        if not self.distillation or not trains_prompts(client.round.number):
            return {}
        taught = "context" in client.received
        return {"teacher": self.text_under(client.received["context"], split) if taught else self.frozen_text(split)}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy under the client's own prompts and, weighted, the teacher's; in stage 2 under merged."""
        if batch.phase:
            of_all = {name: client.received[f"all_{name}"] for name in AGGREGATORS}
            logits = self.logits_under(merged(of_all, client.parameters, self.heads), batch)
            return cross_entropy(logits, batch.y, batch.mask)
        own: Values = {"context": self.own_context, "image_prompts": self.own_image_prompts}
        logits = self.logits_under(own, batch)
        loss = cross_entropy(logits, batch.y, batch.mask)
        if not self.distillation:
            return loss
        prompts = client.received.get("image_prompts")
        images = batch.features["image"] if prompts is None else self.clip.image_features(batch.x, prompts)
        teacher, t = self.logits(images, client.prepared["teacher"]), self.temperature
        return loss + self.distillation * t**2 * taught_entropy(logits / t, teacher / t, batch.mask)

    def message(self, client: Client, noise: Values) -> Values:
        """Return the own prompts in stage 1, the aggregators in stage 2."""
        own = trains_prompts(client.round.number)
        sent = self.personal if own else tuple(f"{of}." for of in AGGREGATORS.values())
        return {name: value for name, value in client.parameters.items() if name.startswith(sent)}

    def make_server(self) -> ServerRule:
        """Return the server that keeps and merges prompts."""
        return self._new_rule()
