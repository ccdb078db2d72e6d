"""Learn a text prompt for a frozen CLIP: the base of the methods that do."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.two_towers import TwoTowers
from benchmark.contract import Client, Input, LocalTraining, MiniBatch, Stage
from benchmark.errors import ConfigurationError
from benchmark.masked import in_float32
from benchmark.method import FederatedMethod
from benchmark.ranges import FewOrNone, NumClients
from methods.losses import cross_entropy

#: How FedPGP (Cui et al., ICML 2024) trains a context: rate and epochs are the paper's, the rest is its code's.
TRAINING = LocalTraining(lr=0.001, epochs=2, momentum=0.9, weight_decay=5e-4)


class TextPromptMethod(FederatedMethod):
    """Base of the methods that learn a context for the text tower of a frozen CLIP (CoOp, Zhou et al., IJCV 2022).

    An image with features f has the logits ``s f^T w_c(p)``: w_c(p) are the text features of the prompt
    ``[p, name of class c, full stop]``, features are L2-normalised, s is CLIP's scale. The classes are those in the
    label space of the split. The context p is the same for all classes and holds none of their names, so that it serves
    classes that were never trained. Images are encoded once where the transform is deterministic, and the classes once
    in an evaluation.

    Args:
        num_clients: N.
        class_names: names of all classes, in the order of the labels.
        clip: the two towers: a ``PromptedCLIP``, or ``BertCLIP`` or ``NamedViT``, which take no parts.
        num_context: L, tokens of the context.
        training: of the context, and of what a method learns beside it.
        init_words: words whose embeddings the context starts from, such as "a photo of a"; None draws every entry from
            N(0, 0.02^2).
        class_templates: what the data set says of each class, with ``{}`` for its name; comes from the data, and is
            what a method with a ``template`` takes for ``"own"``.

    Raises:
        ConfigurationError: ``init_words`` of fewer than L tokens, other towers than the method's, or (when the data
            are known) a prompt longer than the text tower takes.
    """

    shared: tuple[str, ...] = ("context",)
    open_vocabulary = True
    per_example: bool = True
    inputs: tuple[Input, ...] = ("features",)
    #: hand-written text with ``{}`` for a name, or ``"own"``, for ``template_features``; set in the constructor
    template: str | None = None
    #: the model that it can work with; one that puts parts into towers, or looks at patches, needs a CLIP's
    clip_class: type[TwoTowers] = TwoTowers

    def __init__(
        self,
        num_clients: NumClients,
        class_names: list[str],
        clip: TwoTowers,
        *,
        num_context: FewOrNone = 16,
        training: LocalTraining = TRAINING,
        init_words: str | None = None,
        class_templates: list[str] | None = None,
    ) -> None:
        super().__init__(num_clients)
        if not isinstance(clip, self.clip_class):
            raise ConfigurationError(
                f"{type(self).__name__} needs the tokens of {self.clip_class.__name__}, got {type(clip).__name__}; "
                "take that, or another method"
            )
        self.class_names = class_names
        self.class_templates = class_templates
        self.clip = clip
        self.num_context = num_context
        self.training_settings = training
        self.context = nn.Parameter(self.initial_context(init_words))

    # ------------------------------------------------------------------ what a method writes in its own way

    def initial_context(self, init_words: str | None) -> Tensor:
        """Return what the context starts from, [L, w]."""
        return self.clip.initial_context(self.num_context, init_words)

    def make_class_prompts(self, split: str) -> ClassPrompts:
        """Return the prompts of the classes of a split without their context; called once for each label space."""
        return self.clip.class_prompts(self.names_of(split), self.num_context)

    def prompt(self) -> Tensor:
        """Return the context that ONE client classifies with, [L, w]."""
        return self.context

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's features of the classes of a split, [C, e], L2-normalised."""
        return self.clip.text_features(self.class_prompts(split), self.prompt())

    def image_features(self, batch: MiniBatch) -> Tensor:
        """Return ONE client's features of a mini-batch, [B, e], L2-normalised; of the images as they are by default."""
        return batch.features["image"]

    def rest_of_words(self, init_words: str | None) -> str:
        """Return the template of those initial words that a short context does not take, and the name.

        Of "a photo of a" a context of 2 takes two, and "of a {}." is left.

        Raises:
            ConfigurationError: the first L words are not one token each.
        """
        words = init_words.split() if init_words else []
        if words and len(self.clip.tokenizer.encode(" ".join(words[: self.num_context]))) != self.num_context:
            raise ConfigurationError(
                f"{type(self).__name__}: init_words={init_words!r}: the context starts from the first "
                f"{self.num_context} words, which must be one token each; give others, or null for a random context"
            )
        return " ".join([*words[self.num_context :], "{}."])

    def template_features(self, split: str) -> Tensor:
        """Return the features of the classes of training under the template, [C, e], L2-normalised.

        They are the same in all rounds, and made when ``prepare`` first asks for them.
        """
        if split not in self._template_features:
            self._template_features[split] = self.clip.text_features(self.fixed_prompts("template_prompts", split))
        return self._template_features[split]

    # ------------------------------------------------------------------ label spaces

    def classes_of(self, split: str) -> Sequence[int]:
        """List the classes of a split, in the order in which its labels are counted."""
        return self.label_spaces.get(split, range(len(self.class_names)))

    def names_of(self, split: str) -> list[str]:
        """List the names of the classes of a split, in the order in which its labels are counted."""
        return [self.class_names[c] for c in self.classes_of(split)]

    def templates_of(self, split: str, template: str) -> str | list[str]:
        """Return a template, or for ``"own"`` that of each class of a split as its data set has it.

        Raises:
            ConfigurationError: the data do not say them.
        """
        if template != "own":
            return template
        if self.class_templates is None:
            raise ConfigurationError(
                f"{type(self).__name__}: template 'own' is what the data set says of each class, which comes with the "
                "data of a run; give class_templates, or a text such as 'a photo of a {}.'"
            )
        return [self.class_templates[c] for c in self.classes_of(split)]

    def class_prompts(self, split: str) -> ClassPrompts:
        """Return the prompts of the classes of a split, without their context.

        Raises:
            ConfigurationError: they are all classes of several data sets, of which two have one name.
        """
        key = _key(split if split in self.label_spaces else "")
        if key not in self.vocabularies:
            raise ConfigurationError(
                f"{type(self).__name__} names classes by their words, and two of all have the same; take a partition "
                "that has clients tell the classes of one data set apart, such as datamodules.ClassesOfDataSets"
            )
        return cast(ClassPrompts, self.vocabularies[key])

    def set_label_spaces(self, label_spaces: dict[str, tuple[int, ...]]) -> None:
        """Make the prompts of every label space."""
        super().set_label_spaces(label_spaces)
        # Splits with the same classes have the same prompts; those that are not named have all classes. Names that two
        # data sets share are never told apart.
        unnamed = [""] if len(set(self.class_names)) == len(self.class_names) else []
        spaces = {space: tuple(self.classes_of(space)) for space in (*unnamed, *label_spaces)}
        one_of = {classes: space for space, classes in spaces.items()}
        made = {classes: self.make_class_prompts(space) for classes, space in one_of.items()}
        self.vocabularies = nn.ModuleDict({_key(space): made[classes] for space, classes in spaces.items()})
        if self.template is not None:
            self.fix_prompts("template_prompts", self._templated)
        self._template_features: dict[str, Tensor] = {}

    def fix_prompts(self, name: str, make: Callable[[str], nn.Module]) -> None:
        """Make prompts of the classes of training that never change, for ``fixed_prompts``.

        Args:
            name: of them.
            make: called once for each label space of training.
        """
        own = [space for space in self.label_spaces if space.startswith("train/")]
        for space in own or ["train"]:
            self.add_module(name + space.removeprefix("train"), make(space))

    def fixed_prompts(self, name: str, split: str) -> Any:
        """Return what was made with ``fix_prompts`` for the label space that is trained on."""
        return self.get_submodule(name + split.removeprefix("train"))

    def _templated(self, space: str) -> ClassPrompts:
        assert self.template is not None
        return self.clip.class_prompts(self.names_of(space), 0, self.templates_of(space, self.template))

    # ------------------------------------------------------------------ the contract

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return features of images [B, 3, H, W], as ``image`` [B, e], L2-normalised."""
        return {"image": self.clip.image_features(x)}

    @in_float32
    def logits(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return logits [..., B, C] of image features [..., B, e] and text features [..., C, e]."""
        return self.clip.logit_scale * images @ classes.mT

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        return self.logits(self.frozen_features(x)["image"], self.text_features(split))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy."""
        logits = self.logits(self.image_features(batch), self.text_features(batch.split))
        return cross_entropy(logits, batch.y, batch.mask)

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return, in an evaluation, the text features of the split's classes, as ``text`` [C, e]."""
        return {"text": self.text_features(split)} if stage is Stage.EVALUATE else {}

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits with the text features that were prepared."""
        return self.logits(self.image_features(batch), client.prepared["text"])


def _key(split: str) -> str:
    """Return a split's key among the vocabularies: a bare "train" is a method of every module."""
    return f"{split}_classes"
