"""FedAvg-LoRA in CLIP: low-rank factors in the text tower, the image tower or both, classified by a fixed template."""

from typing import Any, Literal

from benchmark.backbones.parts import LowRank, Target
from benchmark.ranges import Few, PositiveFloat
from methods.fedpartclip import FedPartCLIP


class FedLoRACLIP(FedPartCLIP):
    """Federated LoRA in CLIP's towers: FedAvg-LoRA, FFA-LoRA, FedSA-LoRA or local LoRA, by what is shared.

    ``W = W0 + (alpha / r) B A`` in every block of the chosen towers; the classes are named by a fixed template.
    Objective cross-entropy; what is shared is averaged with the weights n_k. ``share="both"`` is FedAvg-LoRA (FedIT),
    ``"B"`` FFA-LoRA (Sun et al., ICLR 2024: A rests at its common start), ``"A"`` FedSA-LoRA (Guo et al., ICLR 2025: B
    stays with its client), ``"none"`` each client by itself. Message at r = 8, both towers of ViT-B/16: 491,520
    numbers, or half of them. Stacking (``FLoRA``) is for ViTs alone.

    All of these were published for language models; queries and values are adapted, without dropout, and trained as
    FedPGP trains its contexts. ``training`` and further arguments as ``FedPartCLIP``.

    Args:
        towers: which are adapted; images are encoded once where the image tower is not.
        share: see above.
        rank: r.
        alpha: of the scale alpha / r.
        targets: adapted projections.
        first_block: the first adapted block of both, counted from 1.

    Raises:
        ConfigurationError: the image tower is no ViT and to be adapted, or there is no such block.
    """

    shared: tuple[str, ...] = ("text_lora", "image_lora")
    suffix = "lora"
    without_image = "or towers=text"

    def __init__(
        self,
        *arguments: Any,
        towers: Literal["text", "image", "both"] = "both",
        share: Literal["both", "A", "B", "none"] = "both",
        rank: Few = 8,
        alpha: PositiveFloat = 16.0,
        targets: list[Target] = ["q", "v"],  # noqa: B006 (it is not changed)
        first_block: Few = 1,
        **settings: Any,
    ) -> None:
        factors = LowRank(rank, alpha, targets, first_block)
        super().__init__(
            *arguments,
            text=None if towers == "image" else factors,
            image=None if towers == "text" else factors,
            share="nothing" if share == "none" else "all",
            **settings,
        )
        if share in ("A", "B"):
            a, b = (tuple(f"{name}_lora.{kind}" for name in self.towers) for kind in "ab")
            self.shared, self.personal = (a, b) if share == "A" else (b, ())
