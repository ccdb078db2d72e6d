"""The frozen model's text features under many hand-written templates, which teach a method of text prompts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.errors import ConfigurationError
from benchmark.ranges import PositiveInt
from methods.text_prompt import TextPromptMethod


class TaughtByTemplates(TextPromptMethod):
    """Base of the methods that are held near the frozen model under a mean of templates.

    Further arguments as ``TextPromptMethod``.

    Args:
        templates: how many of open_clip's for ImageNet are averaged, the first.

    Raises:
        ConfigurationError: more templates than there are.
    """

    def __init__(self, *arguments: Any, templates: PositiveInt = 60, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        from open_clip import OPENAI_IMAGENET_TEMPLATES

        if templates > len(OPENAI_IMAGENET_TEMPLATES):
            raise ConfigurationError(
                f"{type(self).__name__}: templates={templates}, but open_clip has {len(OPENAI_IMAGENET_TEMPLATES)}"
            )
        self.templates = [template("{}") for template in OPENAI_IMAGENET_TEMPLATES[:templates]]

    def set_label_spaces(self, label_spaces: dict[str, tuple[int, ...]]) -> None:
        """Make the templates' prompts of the training label space too."""
        super().set_label_spaces(label_spaces)
        self.fix_prompts("frozen_prompts", self.under_templates)
        self._frozen_text: dict[str, Tensor] = {}

    def under_templates(self, split: str) -> nn.ModuleList:
        """Return the prompts of a split's classes under each template."""
        names = self.names_of(split)
        return nn.ModuleList(self.clip.class_prompts(names, 0, each) for each in self.templates)

    def frozen_text(self, split: str) -> Tensor:
        """Return w^0 of the classes of training, [C, e]: directions of the mean features under the templates."""
        if split not in self._frozen_text:  # the same in all rounds
            prompts = self.fixed_prompts("frozen_prompts", split)
            features = [self.clip.text_features(each, normalize=False) for each in prompts]
            self._frozen_text[split] = F.normalize(torch.stack(features).mean(0), dim=-1)
        return self._frozen_text[split]
