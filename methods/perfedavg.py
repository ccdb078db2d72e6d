"""Per-FedAvg: the shared model is the one from which a step on a client's own images gets furthest."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.ranges import NonNegativeFloat
from methods.classifier import ClassifierMethod
from methods.losses import cross_entropy


class PerFedAvg(ClassifierMethod):
    """Per-FedAvg (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020), first-order version.

    Objective ``min_w sum_k (n_k / n) CE(w - alpha grad CE(w; b1); b2)``. A mini-batch of 2B images is halved into b1
    and b2: ``w' = w - alpha g(w; b1)``, then ``w <- w - beta g(w'; b2)``. The Hessian is left out: g(w; b1) counts as a
    constant, so that the gradient of ``CE(w - alpha g; b2)`` by w is g(w'; b2). The server averages weighted with n_k.

    Before every evaluation a copy of each client takes a plain SGD step of rate alpha on one mini-batch of its training
    images, or such steps over one epoch of them; then it is tested.

    Readings: beta is the rate of ``training``, and alpha is equal to it unless given, as in PFLlib. So that B is the B
    of the other methods, ``data.batch_size`` is twice theirs. The rows of a mini-batch go to b2 and b1 by turns. A last
    batch of m images has ceil(m / 2) of them in b2; if there is but one image, b1 is empty, w' is w, and the step is
    FedAvg's. Clipping, momentum and weight decay concern the outer step alone.

    Further arguments as ``ClassifierMethod``.

    Args:
        training: the outer steps, on backbone and head together.
        inner_lr: alpha, or None for the rate of ``training``.
        personal_steps: of the copy that is evaluated: one ``step``, or one ``epoch``.

    Raises:
        ConfigurationError: a negative ``inner_lr``, or unknown ``personal_steps``.
    """

    shared = ("backbone", "head")

    def __init__(
        self,
        *arguments: Any,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9, clip=1.0),
        inner_lr: NonNegativeFloat | None = None,
        personal_steps: Literal["step", "epoch"] = "step",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        self.inner_lr = training.lr if inner_lr is None else inner_lr
        self.personal_steps = personal_steps

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return alpha in training; a copy that is fitted takes plain steps."""
        if stage is not Stage.TRAIN:
            return {}
        return {"inner_lr": torch.tensor(self.inner_lr, device=self.device)}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return ``CE(w - alpha g(w; b1); b2)`` with g a constant; cross-entropy on a copy."""
        if "inner_lr" not in client.prepared:
            return cross_entropy(self(batch.x), batch.y, batch.mask)
        # A batch is padded at its end, so every second row halves its images as well.
        inner, outer = (replace(batch, x=batch.x[i::2], y=batch.y[i::2], mask=batch.mask[i::2]) for i in (1, 0))
        w = client.parameters
        g = grad(self._loss_at)({name: value.detach() for name, value in w.items()}, inner)
        return self._loss_at({name: value - client.prepared["inner_lr"] * g[name] for name, value in w.items()}, outer)

    def _loss_at(self, parameters: dict[str, Tensor], batch: MiniBatch) -> Tensor:
        """Return the cross-entropy of a mini-batch under other parameters."""
        return cross_entropy(functional_call(self, parameters, (batch.x,)), batch.y, batch.mask)

    def finetune_phases(self, new: bool) -> list[Phase]:
        """Take a step or an epoch at rate alpha."""
        steps = 1 if self.personal_steps == "step" else None
        return [LocalTraining(lr=self.inner_lr, epochs=1, steps=steps).phase("backbone", "head")]
