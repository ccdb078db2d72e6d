"""FedPHA: a personal prompt of the client's own length, beside a shared one that it is pushed off."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.class_prompts import ClassPrompts
from benchmark.backbones.prompted_clip import NO_LENGTHS, PromptedCLIP
from benchmark.contract import Client, MiniBatch, Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Terms, Values
from benchmark.masked import at_least_float32
from benchmark.ranges import Few, NonNegativeFloat, UnitInterval
from benchmark.seeds import keyed_initialization, torch_generator
from methods.losses import cross_entropy
from methods.text_prompt import TextPromptMethod


def projected(own: Tensor, shared: Tensor, ratio: float, complement: bool, through: bool) -> Tensor:
    """Return the personal prompt's part among the directions in which the shared prompt has least energy.

    With the thin decomposition ``G = U S V^T``, singular values descending, and ``V_1`` the first
    ``int(n (1 - ratio))`` columns of V: ``A V_2 V_2^T``, V_2 the other columns of V; or ``A - A V_1 V_1^T``.

    Args:
        own: A, [..., w].
        shared: G, [n, w] with n <= w.
        ratio: share of the columns that are V_2.
        complement: take all of the space but V_1.
        through: whether the gradient also goes through the decomposition into G; it is large where singular values of
            G are close to each other.
    """
    cut = int(len(shared) * (1 - ratio))
    of = at_least_float32(shared if through else shared.detach())
    finite = of.isfinite().all()  # of a client that has diverged there is no decomposition: NaN says so
    rows = torch.where(finite, torch.linalg.svd(torch.where(finite, of, 0.0), full_matrices=False).Vh, torch.nan)
    if complement:
        return own - own @ rows[:cut].mT @ rows[:cut]
    return own @ rows[cut:].mT @ rows[cut:]


def push(own: Tensor, shared: Tensor, distance: float) -> Tensor:
    """Return ``(1 / C) sum_c max(0, alpha - ||W_L[c] - W_G[c]||)``.

    Args:
        own: W_L, [C, e].
        shared: W_G, [C, e].
        distance: alpha, beyond which nothing pushes.
    """
    # Where they are equal, the norm has a gradient of 0.
    return (distance - ((own - shared).square().sum(-1) + 1e-12).sqrt()).clamp(min=0).mean()


class FedPHA(TextPromptMethod):
    """FedPHA (Fang et al., "FedPHA: Federated Prompt Learning for Heterogeneous Client Adaptation", ICML 2025).

    Beside the shared context G a client has one of its own, A, of n_k tokens, a length of its own. With the text
    features W_G of G, W_L of A and W_P of A's projection off G (``projected``), L2-normalised, its objective is
    ``CE(s f W_L^T) + CE(s f W_G^T) + pull MSE(W_L, W_P) + push (1/C) sum_c max(0, alpha - ||W_L[c] - W_G[c]||)``, MSE a
    mean over all C x e numbers. Both contexts are trained together. It classifies with A alone. The server averages G
    weighted with n_k; A never leaves. Message: G alone, L x w numbers each way, whatever n_k is. Without pull and push
    A is CoOp's context of n_k tokens, and G is PromptFL's.

    Readings: formulas are the code's, as the paper could not be read. What it calls G's null space is the part of
    G's row space with least energy, in which an independent A has next to nothing (``complement=false``); the whole
    complement is the other choice. A gradient through the decomposition, which the code has, grows without bound where
    singular values meet, so it is left out by default. The code reads shorter prompts at the end of the longest;
    here each is read at its own end. All A start as the first n_k rows of one draw. Drawn lengths come from the run's
    seed. Predictions outside of a run, which know no client's length, take all rows.

    Further arguments as ``TextPromptMethod``; ``num_context`` and ``init_words`` are G's.

    Args:
        own_lengths: n_k of every client; None draws them, each length from ``shortest`` to ``longest`` alike.
        shortest: see above.
        longest: see above; without effect where ``own_lengths`` are given.
        ratio: share of G's directions that A is projected on.
        complement: see above.
        svd_gradient: whether the pull also moves G.
        alpha: distance of text features, beyond which nothing pushes.
        pull: weight of the distance to the projection.
        push: weight of the push.

    Raises:
        ConfigurationError: ``own_lengths`` are not N numbers, or ``shortest`` is above ``longest``; a CoCa as model.
    """

    clip_class = PromptedCLIP
    personal = ("own_context",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        own_lengths: list[Few] | None = None,
        shortest: Few = 4,
        longest: Few = 32,
        ratio: UnitInterval = 0.8,
        complement: bool = False,
        svd_gradient: bool = False,
        alpha: NonNegativeFloat = 1.0,
        pull: NonNegativeFloat = 1.0,
        push: NonNegativeFloat = 1.0,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        if not self.clip.takes_lengths:
            raise ConfigurationError(f"FedPHA needs contexts of different lengths: {NO_LENGTHS}")
        if own_lengths is not None and len(own_lengths) != self.num_clients:
            raise ConfigurationError(
                f"FedPHA: own_lengths names {len(own_lengths)} lengths for {self.num_clients} clients; give N"
            )
        if own_lengths is None and shortest > longest:
            raise ConfigurationError(
                f"FedPHA: shortest={shortest} is above longest={longest}; lengths lie between them"
            )
        self.own_lengths, self.shortest, self.longest = own_lengths, shortest, longest
        self.ratio, self.complement, self.svd_gradient = ratio, complement, svd_gradient
        self.alpha, self.pull, self.push = alpha, pull, push
        with keyed_initialization("own context"):
            most = max(own_lengths) if own_lengths else longest
            self.own_context = nn.Parameter(0.02 * torch.randn(most, self.clip.text_width))

    def client_constants(self, number: int, terms: Terms) -> Values:
        """Return the length of a client's context, as ``length``, a scalar."""
        if self.own_lengths is not None:
            return {"length": torch.tensor(self.own_lengths[number])}
        generator = torch_generator(terms.seed, "FedPHA", number)
        return {"length": torch.randint(self.shortest, self.longest + 1, (), generator=generator)}

    def make_class_prompts(self, split: str) -> ClassPrompts:
        """Return the prompts of a split's classes behind the longest of the own contexts."""
        return self.clip.class_prompts(self.names_of(split), len(self.own_context))

    def set_label_spaces(self, label_spaces: dict[str, tuple[int, ...]]) -> None:
        """Make the prompts behind the shared context of the training label space too."""
        super().set_label_spaces(label_spaces)
        self.fix_prompts("shared_prompts", super().make_class_prompts)

    def prompt(self) -> Tensor:
        """Return the context that a client of the greatest length classifies with, [L, w]."""
        return self.own_context

    def own_features(self, client: Client, split: str, context: Tensor) -> Tensor:
        """Return ONE client's features of the classes of a split under contexts of its length: [C, e]."""
        return self.clip.text_features(self.class_prompts(split), context, length=client.constants["length"])

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """Return, in an evaluation, the features of the split's classes under the own context, as ``text`` [C, e]."""
        return {"text": self.own_features(client, split, self.own_context)} if stage is Stage.EVALUATE else {}

    def shared_features(self, split: str) -> Tensor:
        """Return the features of the classes of training under the shared context, [C, e]."""
        return self.clip.text_features(self.fixed_prompts("shared_prompts", split), self.context)

    def pull_and_push(self, client: Client, split: str, own: Tensor, shared: Tensor) -> Tensor:
        """Return the two terms that read no image, of text features [C, e] each."""
        total = self.push * push(own, shared, self.alpha)
        if not self.pull:
            return total
        near = projected(self.own_context, self.context, self.ratio, self.complement, self.svd_gradient)
        return total + self.pull * F.mse_loss(own, self.own_features(client, split, near))

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the cross-entropies under both contexts, pull and push."""
        images = self.image_features(batch)
        own = self.own_features(client, batch.split, self.own_context)
        shared = self.shared_features(batch.split)
        losses = [cross_entropy(self.logits(images, classes), batch.y, batch.mask) for classes in (own, shared)]
        return losses[0] + losses[1] + self.pull_and_push(client, batch.split, own, shared)

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return pull and push."""
        own = self.own_features(client, "train", self.own_context)
        return self.pull_and_push(client, "train", own, self.shared_features("train"))
