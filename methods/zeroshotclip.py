"""Zero-shot CLIP: hand-written prompts, no training, nothing sent."""

from typing import Any, ClassVar

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.contract import Phase
from methods.text_prompt import TRAINING, TextPromptMethod


class ZeroShotCLIP(TextPromptMethod):
    """Zero-shot CLIP (Radford et al., ICML 2021): the name of each class in a template, and no learnable context.

    Nothing is trained and nothing sent, so that all rounds have the same result: one is enough. It is PromptFL before
    its first round, where that starts from the words of the template.
    Further arguments as ``TextPromptMethod``, but none of the context.

    Args:
        template: a text with ``{}`` for the name. FedPGP's code has this one for every data set; CoOp has one for each
            data set, such as "a photo of a {}, a type of pet.", which ``own`` takes.
    """

    paper_names: ClassVar[tuple[str, ...]] = ("CLIP",)
    shared: tuple[str, ...] = ()

    def __init__(self, *arguments: Any, template: str = "a photo of a {}.", **settings: Any) -> None:
        super().__init__(*arguments, num_context=0, training=TRAINING, init_words=None, **settings)
        self.template_words = template

    def make_class_prompts(self, split: str) -> ClassPrompts:
        """Return the template with each name."""
        return self.clip.class_prompts(self.names_of(split), 0, self.templates_of(split, self.template_words))

    def local_phases(self) -> list[Phase]:
        """Train nothing."""
        return []
