"""Zero-shot CLIP: hand-written prompts, no training, nothing sent."""

from collections.abc import Sequence

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import Phase
from methods.text_prompt import TextPromptMethod


class ZeroShotCLIP(TextPromptMethod):
    """Zero-shot CLIP (Radford et al., ICML 2021): the name of each class in a template, and no learnable context.

    Nothing is trained and nothing sent, so that all rounds have the same result: one is enough. It is PromptFL before
    its first round, where that starts from the words of the template.

    Args:
        num_clients: N.
        class_names: names of all classes, in the order of the labels.
        clip: CLIP's towers, frozen.
        template: a text with ``{}`` for the name. FedPGP's code has this one for every data set; CoOp has one for each
            data set, such as "a photo of a {}, a type of pet.".
    """

    shared = ()

    def __init__(
        self, num_clients: int, class_names: list[str], clip: PromptedCLIP, template: str = "a photo of a {}."
    ) -> None:
        super().__init__(num_clients, class_names, clip, num_context=0)
        self.template_words = template

    def make_class_prompts(self, class_names: Sequence[str]) -> ClassPrompts:
        """The template with each name."""
        return self.clip.class_prompts(class_names, 0, self.template_words)

    def local_phases(self) -> list[Phase]:
        """None."""
        return []
