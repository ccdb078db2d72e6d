"""FedMGP: groups of prompts, each client's own, of which it shares some in a round, more often those like the last."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Client, Input, Message, MiniBatch, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.masked import masked_mean
from benchmark.ranges import Few, FewOrNone, NonNegativeFloat, PositiveFloat
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.losses import cross_entropy
from methods.prompt_slots import SlotRule, drawn_groups, likeness, similarities
from methods.text_prompt import TextPromptMethod

Select = Literal["similarity", "highest", "lowest", "random", "fixed", "all"]


class FedMGP(TextPromptMethod):
    """FedMGP (Bo et al., "FedMGP: Personalized Federated Learning with Multi-Group Text-Visual Prompts", NeurIPS 2025).

    A client has G groups of its own, each a text prompt t_j and a visual prompt v_j behind an image's patches. Group j
    has the logits ``s f_j W_j^T`` of image features under v_j and text features under t_j. Objective: the mean over the
    groups of the cross-entropy, plus lambda times how alike the groups are (``likeness``): of the text features, a mean
    over classes, and of the image features, a mean over images, half of each. A client classifies with the mean of the
    groups' logits.

    At a round's end it draws s groups, text and visual apart, with probabilities ``softmax(sim_j / tau)``, where sim_j
    is the likeness to the last round's slots (``similarities``), and sends them in the order drawn. The server averages
    slot by slot weighted with n_k, and the clients of the round put slot r where their r-th group was; all other
    groups stay. In the first round the draw is uniform. Message: s (L w + n v) numbers up, as many down at a round's
    beginning, the last slots, and at its end, the new ones. Without visual prompts and with ``groups=share=1`` it is
    FedAvg of one text prompt.

    Readings: formulas are the paper's text with its code. The code makes the groups alike, as it adds the absolute
    value of a negative distance; ``attract`` does so. It puts visual prompts back to where they started before each
    training and evaluation; here they are kept. It averages uniformly (``by_images=false``). All clients start alike.
    Its draws have the same seed for text and visual; here each has its own key. A client that had taken part in the
    round before has its slots already; here they are sent to all.

    CLIP's image tower must be a ViT where there are visual prompts. Further arguments as ``TextPromptMethod``.

    Args:
        groups: G.
        share: s.
        num_context: L, tokens of a text prompt; the rest of ``init_words`` stands between it and the class name.
        num_visual: n, tokens of a visual prompt; 0 for none.
        init_words: words that text prompts start from, with noise of 0.01; None draws them from N(0, 0.02^2), as
            visual prompts are.
        diversity: lambda.
        measure: of likeness, ``cos``, ``l1`` or ``l2``.
        attract: turn its sign, as the code has it.
        select: ``similarity`` as above; ``highest`` or ``lowest`` takes the s groups most or least like the slots,
            ``random`` draws uniformly, ``fixed`` takes the first s, ``all`` takes all groups in their order.
        tau: temperature of the draw.
        by_images: see above.
        inference: ``average`` of the groups' logits; ``largest``, those of the group with the largest logit;
            ``features``, logits of the mean features.

    Raises:
        ConfigurationError: ``share`` above ``groups``, an image tower that is no ViT, or ``init_words`` of fewer than
            L words, or whose first L are not one token each.
    """

    clip_class = PromptedCLIP
    shared: tuple[str, ...] = ()
    personal: tuple[str, ...] = ("context", "image_prompts")
    inputs: tuple[Input, ...] = ("images",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        groups: Few = 5,
        share: Few = 2,
        num_context: Few = 2,
        num_visual: FewOrNone = 2,
        init_words: str | None = "a photo of a",
        diversity: NonNegativeFloat = 1.0,
        measure: Literal["cos", "l1", "l2"] = "cos",
        attract: bool = False,
        select: Select = "similarity",
        tau: PositiveFloat = 1.0,
        by_images: bool = True,
        inference: Literal["average", "largest", "features"] = "average",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_context=num_context, init_words=init_words, **settings)
        if share > groups:
            raise ConfigurationError(f"FedMGP: share={share} of groups={groups}; a client cannot send more than it has")
        self.visual = num_visual > 0
        if self.visual:
            needs = "FedMGP puts prompts between the patches of a ViT"
            self.clip.need_image_tower("vit", needs=needs, otherwise="or num_visual=0")
        self.name_template = self.rest_of_words(init_words)
        with keyed_initialization("FedMGP"):
            noise = torch.randn(groups, *self.context.shape)
            visual = 0.02 * torch.randn(groups, num_visual, self.clip.vision_width)
        self.context = nn.Parameter(self.context.detach() + 0.01 * noise if init_words else 0.02 * noise)
        if self.visual:
            self.image_prompts = nn.Parameter(visual)
        else:
            self.personal, self.inputs = ("context",), ("features",)
        self.share = groups if select == "all" else share
        self.diversity, self.measure, self.sign = diversity, measure, -1.0 if attract else 1.0
        self.select, self.tau, self.by_images, self.inference = select, tau, by_images, inference

    # ------------------------------------------------------------------ a client's steps

    def make_class_prompts(self, split: str) -> ClassPrompts:
        """Return the prompts of these classes: the rest of the initial words, and the names."""
        return self.clip.class_prompts(self.names_of(split), self.num_context, self.name_template)

    def groups_of(self, x: Tensor) -> Tensor:
        """Return features [G, B, e] of images [B, 3, H, W] under each group's visual prompt."""
        return torch.stack([self.clip.image_features(x, prompt) for prompt in self.image_prompts])

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return ONE client's features of a mini-batch, [G, B, e]; without visual prompts the groups have the same."""
        if self.visual:
            return self.groups_of(batch.x)
        return batch.features["image"].expand(len(self.context), -1, -1)

    def combined(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return the logits [B, C] that a client classifies with."""
        if self.inference == "features":
            return self.logits(images.mean(0), classes.mean(0))
        logits = self.logits(images, classes)
        if self.inference == "average":
            return logits.mean(0)
        largest = logits.amax(-1).argmax(0)  # [B]
        return logits.gather(0, largest[None, :, None].expand(1, -1, logits.shape[-1]))[0]

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        images = self.groups_of(x) if self.visual else self.clip.image_features(x).expand(len(self.context), -1, -1)
        return self.combined(images, self.text_features(split))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the groups' mean cross-entropy, and how alike they are."""
        images, classes = self.image_features(batch), self.text_features(batch.split)
        losses = [cross_entropy(logits, batch.y, batch.mask) for logits in self.logits(images, classes)]
        loss = torch.stack(losses).mean() + self.alike(classes)
        if not self.visual:
            return loss
        return loss + self.sign * self.diversity / 2 * masked_mean(likeness(images, self.measure), batch.mask)

    def alike(self, classes: Tensor) -> Tensor:
        """Return the weighted likeness of text features [G, C, e]."""
        weight = self.sign * self.diversity / (2 if self.visual else 1)
        return weight * likeness(classes, self.measure).mean()

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the likeness of text features, which reads no image."""
        return self.alike(self.text_features("train"))

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the combined logits with the text features that were prepared."""
        return self.combined(self.image_features(batch), client.prepared["text"])

    # ------------------------------------------------------------------ a round's end

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> Values:
        """Draw the numbers that decide which groups are sent."""
        if stage is not Stage.MESSAGE or self.select not in ("similarity", "random"):
            return {}
        shape = (len(self.personal), len(self.context))
        return {"uniform": torch.rand(shape, generator=generator, device=generator.device)}

    def message(self, client: Client, noise: Values) -> Message:
        """Send the chosen groups; keep which they are."""
        sent, chosen = {}, {}
        for number, name in enumerate(self.personal):
            prompts = client.parameters[name]
            places = self.chosen(prompts, client.received.get(f"{name}_slots"), noise, number)
            sent[f"{name}_slots"], chosen[name] = prompts[places], places
        return sent, chosen

    def chosen(self, prompts: Tensor, slots: Tensor | None, noise: Values, number: int) -> Tensor:
        """Return which groups are sent, in order, [s]."""
        if self.select in ("fixed", "all") or (slots is None and self.select in ("highest", "lowest")):
            return torch.arange(self.share, device=prompts.device)
        alike = prompts.new_zeros(len(prompts)) if slots is None else similarities(prompts, slots)
        if self.select == "similarity":
            return drawn_groups(alike / self.tau, noise["uniform"][number], self.share)
        if self.select == "random":
            return drawn_groups(0 * alike, noise["uniform"][number], self.share)
        return (alike if self.select == "highest" else -alike).topk(self.share).indices

    def take(self, client: Client, kept: Values) -> Values:
        """Put the slots where the groups were that were sent."""
        slots = client.received
        return {name: client.parameters[name].index_copy(0, at, slots[f"{name}_slots"]) for name, at in kept.items()}

    def make_server(self) -> ServerRule:
        """Return the server of slots."""
        return SlotRule(self.by_images)
