"""FedPart: FedAvg of any part in a frozen ViT: adapters, biases, low-rank factors, or a custom one."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from benchmark.backbones.parts import Adapter, TowerPart
from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from methods.fedlora import LORA_TRAINING
from methods.vit_prompt import ViTPromptMethod


class FedPart(ViTPromptMethod):
    """FedAvg of a part in a frozen ViT, of any class; by default the bottlenecks of Houlsby et al. (ICML 2019).

    Objective ``CE(H_k(F(x)), y)``. What the part declares as shared is averaged with the weights n_k, what it declares
    as personal stays with its client, and so does the head unless it is shared. With ``LowRank`` it is ``FedLoRA``.
    Further arguments as ``ViTPromptMethod``.

    Args:
        part: what is put into the tower.
        share: what of it is sent: as the part declares, all of it, or nothing.
        head: whose it is.
        training: of part and head together.

    Raises:
        ConfigurationError: the part has no parameters.
    """

    shared: tuple[str, ...] = ("part",)
    personal: tuple[str, ...] = ("head",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        part: TowerPart | None = None,
        share: Literal["declared", "all", "nothing"] = "declared",
        head: Literal["personal", "shared"] = "personal",
        training: LocalTraining = LORA_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        fitted = (Adapter() if part is None else copy.deepcopy(part)).fit(self.backbone.tower)
        if not isinstance(fitted, nn.Module) or not list(fitted.parameters()):
            raise ConfigurationError(
                f"FedPart: {type(fitted).__name__} has no parameters to train; give an nn.Module with some"
            )
        self.part: TowerPart = fitted
        self.begin_at(fitted.first_layer + 1)
        self.head = self.new_head()
        shared, personal = (tuple(f"part.{name}" for name in names) for names in (fitted.shared, fitted.personal))
        if share == "all" or (share == "declared" and not personal):
            shared, personal = ("part",), ()
        elif share == "nothing":
            shared, personal = (), ("part",)
        self.shared = (*shared, "head") if head == "shared" else shared
        self.personal = personal if head == "shared" else (*personal, "head")

    def parts(self) -> Sequence[TowerPart | Tensor]:
        """Return the part."""
        return (self.part,)
