"""FedTPG: FedAvg of a network that writes the context for the class names at hand."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.contract import Client, LocalTraining, MiniBatch, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from benchmark.ranges import Few
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.losses import cross_entropy
from methods.prompt_networks import ContextWriter
from methods.text_prompt import TextPromptMethod

#: [code]: a client takes one pass over its few images in a round, and keeps its momentum.
WRITER_TRAINING = LocalTraining(
    lr=0.003, epochs=1, momentum=0.9, weight_decay=1e-5, schedule="cosine", optimizer_state="client"
)


class EqualMean(ServerRule):
    """The mean of all uploads, whatever their numbers of images."""

    weighs_by_images = False

    @property
    def reads_rows(self) -> bool:
        """Return no: the mean is all that it needs."""
        return False

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """Return the plain mean."""
        return super().aggregate(round, shared, replace(uploads, weights=uploads.equal_weights))


class FedTPG(TextPromptMethod):
    """FedTPG (Qiu et al., "Federated Text-driven Prompt Generation for Vision-Language Models", ICLR 2024).

    No context is learned, but a network that writes one for the task at hand: ``P = G(E)``. E [n, e] are CLIP's
    features of the n bare class names; learned queries Q [L, w] attend to them (4 heads), and a feed-forward network
    with GEGLU follows: ``X = MHA(LN(Q), LN(E))``, ``P = X + FF(LN(X))``. The one context P serves all n classes.
    Clients hold other classes, of other data sets even; for names that were never seen the same network writes theirs.
    Objective of a client: ``CE(G)`` over its own classes alone. The server takes the plain mean of Q and G
    (``average="images"``: weighted with n_k), which are all that is trained; nothing is personal. Message: 4,206,080
    numbers each way for ViT-B/16 and L = 4.

    In training the names are those of the classes that a client holds, and only they are told apart; in an evaluation
    those of the whole label space of the split. Its protocols, several data sets in one federation, are
    :class:`datamodules.ClassesOfDataSets`. ``names="all"`` takes the whole label space in training too, as
    re-implementations do on one data set: then the input never changes, and G is one context in other coordinates.

    Readings: the paper could not be read, formulas are its code's. Its code halves numbers to 16 bits; here they have
    32. Blocks of attention behind the first, which its scripts switch off, are left out, as are contexts of deeper
    layers. With features of another width than the tokens', keys and values are projected from that.
    Further arguments as ``TextPromptMethod``; Q starts as a context does.

    Args:
        num_context: L.
        names: whose names the network reads in training: of the client's ``own`` classes, or of ``all``.
        input_template: of a name, with ``{}``, for E.
        heads: of the attention; divides w.
        average: ``clients``, all alike, or ``images``, weighted with n_k.
        training: of Q and G; ``data.batch_size`` was 200.

    Raises:
        ConfigurationError: ``heads`` that do not divide w.
    """

    shared: tuple[str, ...] = ("context", "writer")

    def __init__(
        self,
        *arguments: Any,
        num_context: Few = 4,
        names: Literal["own", "all"] = "own",
        input_template: str = "{}",
        heads: Few = 4,
        average: Literal["clients", "images"] = "clients",
        training: LocalTraining = WRITER_TRAINING,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, num_context=num_context, training=training, **settings)
        width = self.clip.text_width
        if width % heads:
            raise ConfigurationError(f"FedTPG: heads={heads} must divide the {width} numbers of a token")
        self.names, self.average, self.input_template = names, average, input_template
        with keyed_initialization("FedTPG"):
            self.writer = ContextWriter(self.clip.embed_dim, width, heads)

    @property
    def per_example(self) -> bool:  # type: ignore[override]
        """Return whether no count of images takes part in the loss, as the classes that a client holds do."""
        return self.names == "all"

    def set_label_spaces(self, label_spaces: dict[str, tuple[int, ...]]) -> None:
        """Forget the names of other classes."""
        super().set_label_spaces(label_spaces)
        self._names: dict[str, Tensor] = {}

    def name_features(self, split: str) -> Tensor:
        """Return E of the classes of a split, [C, e]; the same in all rounds."""
        if split not in self._names:
            texts = [self.input_template.replace("{}", name.replace("_", " ")) for name in self.names_of(split)]
            self._names[split] = self.clip.text_features_of(texts)
        return self._names[split]

    def features_for(self, split: str, names: Tensor, is_there: Tensor) -> Tensor:
        """Return the features of a split's classes under the context that is written for names, [C, e]."""
        return self.clip.text_features(self.class_prompts(split), self.writer(self.context, names, is_there))

    def text_features(self, split: str) -> Tensor:
        """Return the features of a split's classes under the context that is written for all of them, [C, e]."""
        names = self.name_features(split)
        return self.features_for(split, names, torch.ones_like(names[:, 0], dtype=torch.bool))

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return, in training, E and which of its classes the client learns, as ``names`` [C, e] and ``own`` [C]."""
        if stage is Stage.EVALUATE:
            return super().prepare(client, stage, split)
        own = client.class_counts[list(self.classes_of(split))] > 0
        return {"names": self.name_features(split), "own": own if self.names == "own" else torch.ones_like(own)}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy among the classes that the client learns."""
        own = client.prepared["own"]
        classes = self.features_for(batch.split, client.prepared["names"], own)
        logits = self.logits(self.image_features(batch), classes)
        never = torch.finfo(logits.dtype).min  # not infinite: padded rows have any label
        return cross_entropy(logits.masked_fill(~own, never), batch.y, batch.mask)

    def make_server(self) -> ServerRule:
        """Return the plain mean, or the weighted one."""
        return EqualMean() if self.average == "clients" else ServerRule()
