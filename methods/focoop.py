"""FOCoOp: contexts for classes, shared and own, and contexts for what is of no class, all moved apart."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.contract import Client, MiniBatch, Stage
from benchmark.errors import ConfigurationError
from benchmark.masked import in_float32
from benchmark.ranges import FewOrNone, NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval
from benchmark.seeds import keyed_initialization
from benchmark.server import ServerRule
from methods.context_matching import ContextMatching, Mix, Select
from methods.losses import masked_mean, soft_maximum, unevenness
from methods.text_prompt import TextPromptMethod
from methods.uphill import moved_uphill


class FOCoOp(TextPromptMethod):
    """FOCoOp (Liao et al., "FOCoOp: Enhancing Out-of-Distribution Robustness in Federated Prompt Learning for
    Vision-Language Models", ICML 2025, arXiv:2506.16218).

    Each class has a shared context G_c and one of the client's own, L_c, which are mixed before the text tower: ``P_c =
    (1 - frac) L_c + frac G_c``. K shared contexts O_j stand for images of no class; their prompts hold no name. An
    image has the logits s over the C + K text features. Objective: the mean over images of cross-entropy over all C + K
    columns plus ``det_weight`` times ``L_det = logsumexp_j s_j - mean_j s_j`` over the K last ones, where text features
    are moved first, each by at most rho, to where it is greater (``moved_uphill``). The server averages G, weighted
    with n_k, mixes into it those O that look like clients' classes, and chooses new O (``ContextMatching``); L never
    leaves. Evaluated with the new G and O and the client's own L, the initial one if it was never selected. Message: G
    and O, (C + K) L w numbers each way. With ``num_ood=0``, ``robust=none`` and ``class_specific=False`` it is PromptFL
    at ``frac=1`` and CoOp at ``frac=0``.

    Its own score of images of no class, the probability of all C columns together, is in the order of the logits'
    energy: a client's logits are its C columns less ``logsumexp`` of the K others, which changes no probability among
    the classes. So ``ood_auroc_energy`` and ``fpr95_energy`` are those of that probability, where K is above 0.

    Readings: the paper could not be read in full; formulas are its abstract and its code. The code's objective
    (``dro``, off by default there) moves features by noise of norm 4 on features of norm 1, weighs it with factors that
    reach 0 after some 200 steps, where the loss is 0 x inf, and is not offered; here features move within a ball. The
    prompts of O_j hold the words of a list in the code, which is not shipped with this suite; ``ood_words`` takes K of
    one's own. Its server averages with numbers of mini-batches as weights, does not divide in the mixture, which
    shrinks G with many classes, starts 2-means at rows drawn without a seed, and puts new O beside the words of others;
    ``mix`` and ``ood_select`` have the latter two. It skips mini-batches of one image; its optimizer is kept, without
    momentum. G and L start alike.

    Class-specific contexts know the classes of training alone, so that splits may have label spaces of their own only
    with ``class_specific=False``. Further arguments as ``TextPromptMethod``.

    Args:
        num_ood: K.
        frac: share of the shared context.
        class_specific: a context for each class, or one for all.
        ood_words: a word behind each O_j, K of them; None for none.
        robust: ``ball`` as above; ``none`` leaves features where they are.
        rho: the ball's radius; 0 is ``none``.
        steps: of the ascent, for the classes and then for the others.
        det_weight: weight of L_det.
        dro_tau: above 0, ``tau log mean_i exp(l_i / tau)`` takes the place of the mean over images.
        uot: match contexts as above; without it the server averages G and O.
        reg: weight of the transport's marginals.
        ema: share of G that stays where O are mixed in.
        mix: ``barycenter``, or ``official``, which does not divide.
        ood_select: ``slot``, ``official`` or ``mean``, see ``ContextMatching``.

    Raises:
        ConfigurationError: ``ood_words`` of another number than K, or two that have the same tokens.
    """

    shared: tuple[str, ...] = ("context", "ood_context")
    personal = ("own_context",)
    open_vocabulary = False
    per_example = False

    def __init__(
        self,
        *arguments: Any,
        num_ood: FewOrNone = 100,
        frac: UnitInterval = 0.2,
        class_specific: bool = True,
        ood_words: list[str] | None = None,
        robust: Literal["ball", "none"] = "ball",
        rho: NonNegativeFloat = 0.1,
        steps: PositiveInt = 4,
        det_weight: NonNegativeFloat = 0.5,
        dro_tau: NonNegativeFloat = 0.0,
        uot: bool = True,
        reg: PositiveFloat = 0.1,
        ema: UnitInterval = 0.5,
        mix: Mix = "barycenter",
        ood_select: Select = "slot",
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        if ood_words is not None and len(ood_words) != num_ood:
            raise ConfigurationError(f"FOCoOp: {len(ood_words)} ood_words for num_ood={num_ood}; give a word for each")
        if class_specific:
            with keyed_initialization("contexts of classes"):
                drawn = 0.02 * torch.randn(len(self.class_names), *self.context.shape)
            words = settings.get("init_words")
            self.context = nn.Parameter(self.context.detach().expand_as(drawn).clone() if words else drawn)
        self.own_context = nn.Parameter(self.context.detach().clone())
        if num_ood:
            with keyed_initialization("contexts of no class"):
                self.ood_context = nn.Parameter(0.02 * torch.randn(num_ood, self.num_context, self.clip.text_width))
            self.ood_prompts = self.clip.class_prompts(ood_words or [""], self.num_context)
        else:
            self.shared = ("context",)
        self.num_ood, self.frac, self.class_specific, self.worded = num_ood, frac, class_specific, bool(ood_words)
        self.rho, self.steps = rho if robust == "ball" else 0.0, steps
        self.det_weight, self.dro_tau = det_weight, dro_tau
        self.uot, self.matching = uot, (reg, ema, mix, ood_select)
        self.open_vocabulary = not class_specific
        self.per_example = not self.rho and not dro_tau

    # ------------------------------------------------------------------ text features

    def prompt(self) -> Tensor:
        """Return the contexts that ONE client classifies with, [C, L, w], or [L, w] for all classes."""
        return (1 - self.frac) * self.own_context + self.frac * self.context

    def text_features(self, split: str) -> Tensor:
        """Return ONE client's features of the classes of a split, [C, e], L2-normalised."""
        if not self.class_specific:
            return super().text_features(split)
        return self.clip.text_features(self.class_prompts(split), self.prompt().unsqueeze(0))[0]

    def foreign_features(self, like: Tensor) -> Tensor:
        """Return the features of what is of no class, [K, e], L2-normalised; ``like``: features [C, e]."""
        if not self.num_ood:
            return like[:0]
        if self.worded:
            return self.clip.text_features(self.ood_prompts, self.ood_context.unsqueeze(0))[0]
        return self.clip.text_features(self.ood_prompts, self.ood_context)[:, 0]  # one prompt under K contexts

    # ------------------------------------------------------------------ the objective

    @in_float32
    def losses(self, images: Tensor, classes: Tensor, foreign: Tensor, *, y: Tensor) -> Tensor:
        """Return each image's cross-entropy over all columns, plus the weighted L_det: [B]."""
        columns = self.logits(images, torch.cat([classes, foreign]))
        losses = F.cross_entropy(columns, y.clamp(min=0), reduction="none")
        if not len(foreign):
            return losses
        return losses + self.det_weight * unevenness(columns[:, len(classes) :])

    @in_float32
    def moved(
        self, images: Tensor, classes: Tensor, foreign: Tensor, *, y: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return classes [C, e] and others [K, e], moved to where the mean loss is greater, and normalised again."""

        def loss(*rows: Tensor) -> Tensor:
            return masked_mean(self.losses(images, *rows, y=y), mask)

        made = moved_uphill(loss, (classes, foreign), self.rho, self.steps)
        return made[0], made[1]

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the mean, or the soft maximum, of the images' losses where features are moved."""
        images, classes = self.image_features(batch), self.text_features(batch.split)
        foreign = self.foreign_features(classes)
        if self.rho:
            classes, foreign = self.moved(images, classes, foreign, y=batch.y, mask=batch.mask)
        losses = self.losses(images, classes, foreign, y=batch.y)
        return soft_maximum(losses, batch.mask, self.dro_tau) if self.dro_tau else masked_mean(losses, batch.mask)

    # ------------------------------------------------------------------ evaluation and the server

    @in_float32
    def scored(self, images: Tensor, classes: Tensor, foreign: Tensor) -> Tensor:
        """Return logits [B, C] less ``logsumexp`` of the K other columns: their energy is ``log(S / (1 - S))``.

        S is the probability of all classes together among C + K columns.
        """
        logits = self.logits(images, classes)
        return logits - self.logits(images, foreign).logsumexp(-1, keepdim=True) if len(foreign) else logits

    def forward(self, x: Tensor, split: str = "test") -> Tensor:
        """Classify images [B, 3, H, W] among the classes of a split, by default the own test set's: logits [B, C]."""
        classes = self.text_features(split)
        return self.scored(self.clip.image_features(x), classes, self.foreign_features(classes))

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return, in an evaluation, the features of the split's classes, ``text``, and of no class, ``foreign``."""
        made = super().prepare(client, stage, split)
        return made | {"foreign": self.foreign_features(made["text"])} if made else made

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return logits with the text features that were prepared."""
        return self.scored(self.image_features(batch), client.prepared["text"], client.prepared["foreign"])

    def make_server(self) -> ServerRule:
        """Return the rule that matches contexts, or the weighted mean."""
        return ContextMatching(*self.matching) if self.uot and self.num_ood else ServerRule()
