"""FedKgCoOp: PromptFL whose text features are held near those of a hand-written template."""

from typing import Any

from torch import Tensor

from benchmark.contract import Client, MiniBatch, Stage
from benchmark.ranges import NonNegativeFloat
from methods.losses import cosines, cross_entropy
from methods.text_prompt import TextPromptMethod


def knowledge_distance(own: Tensor, template: Tensor) -> Tensor:
    """``1 - (1/C) sum_c cos(w_c, w_c^0)``, in [0, 2], whatever the lengths of the features.

    Args:
        own: text features under the learned context, w, [C, e].
        template: those of the template, w^0, [C, e].
    """
    return 1 - cosines(own, template, eps=1e-7).mean()


class FedKgCoOp(TextPromptMethod):
    """KgCoOp (Yao, Zhang, Xu, "Visual-Language Prompt Tuning with Knowledge-guided Context Optimization", CVPR 2023).

    Objective of a client: ``CE(p) + lambda (1 - (1/C) sum_c cos(w_c(p), w_c^0))`` with the text features w_c(p) under
    the context and w_c^0 under a template, over all C classes of the training label space and not the batch's alone.
    The second term needs no image, and its gradient is the same for every client that holds the same p. The server
    averages p weighted with n_k; one global context is evaluated. Message: L x w numbers each way, as PromptFL's; the
    template's features are computed by every client itself. With ``lam=0`` it is PromptFL.

    Readings: the paper trains one centralised model; federated it is FedAvg of all that it trains (so does FedTPG's
    baseline of that name). A client that holds few classes is penalised over all of them. The context has the other
    text methods' 16 random tokens; KgCoOp's own are the words "a photo of a" (``num_context=4``, ``init_words``), at
    which the second term starts at 0. lambda is its command's 8, its code's default is 1. Its templates: "a photo of a
    {}, a type of pet.", "... of flower.", "... of aircraft.", "... of texture."; "a photo of {}, a type of food.", "a
    centered satellite photo of {}." and "a photo of a person doing {}.".

    Further arguments as ``TextPromptMethod``.

    Args:
        lam: lambda, weight of the distance to the template.
        template: with ``{}`` for the name of a class, or ``own``: what the data set says of each class.
    """

    per_example = True

    def __init__(
        self, *arguments: Any, lam: NonNegativeFloat = 8.0, template: str = "a photo of a {}.", **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self.lam, self.template = lam, template

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return, in training, the text features w^0, as ``template`` [C, e]."""
        if stage is Stage.EVALUATE or not self.lam:
            return super().prepare(client, stage, split)
        return {"template": self.template_features(split)}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy plus the distance to the template."""
        if not self.lam:
            return super().client_loss(client, batch)
        classes = self.text_features(batch.split)
        loss = cross_entropy(self.logits(self.image_features(batch), classes), batch.y, batch.mask)
        return loss + self.lam * knowledge_distance(classes, client.prepared["template"])

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the distance to the template."""
        if not self.lam:
            return None
        return self.lam * knowledge_distance(self.text_features("train"), client.prepared["template"])
