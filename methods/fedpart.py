"""FedPart: FedAvg of any part in a frozen ViT: adapters, biases, low-rank factors, or a custom one."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn

from benchmark.backbones.parts import Adapter, Tower, TowerPart
from benchmark.contract import LocalTraining
from benchmark.errors import ConfigurationError
from methods.fedlora import LORA_TRAINING
from methods.vit_prompt import ViTPromptMethod


def fitted(method: nn.Module, part: TowerPart, tower: Tower) -> TowerPart:
    """Return a part with its parameters for a tower.

    Raises:
        ConfigurationError: it has none, or the tower has not the block that it begins at.
    """
    made = part.fit(tower)
    if not isinstance(made, nn.Module) or not list(made.parameters()):
        raise ConfigurationError(
            f"{type(method).__name__}: {type(made).__name__} has no parameters to train; give an nn.Module with some"
        )
    return made


def divided(
    name: str, part: TowerPart, share: Literal["declared", "all", "nothing"]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the prefixes of a part's parameters that are shared, and of those that are personal.

    Args:
        name: of the part among the method's modules.
        part: fitted; what declares nothing as personal is shared as a whole.
        share: as the part declares, all of it, or nothing.
    """
    if share == "nothing":
        return (), (name,)
    if share == "all" or not part.personal:
        return (name,), ()
    shared, personal = (tuple(f"{name}.{of}" for of in names) for names in (part.shared, part.personal))
    return shared, personal


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
        self.part = fitted(self, Adapter() if part is None else copy.deepcopy(part), self.backbone.tower)
        self.begin_at(self.part.first_layer + 1)
        self.head = self.new_head()
        shared, personal = divided("part", self.part, share)
        self.shared = (*shared, "head") if head == "shared" else shared
        self.personal = personal if head == "shared" else (*personal, "head")

    def parts(self) -> Sequence[TowerPart | Tensor]:
        """Return the part."""
        return (self.part,)
