"""pFedBayesPT: prompts drawn for every image from a semi-implicit posterior, whose encoder all clients share."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.errors import ConfigurationError
from benchmark.ranges import AboveZero, Few, FewOrNone, NonNegativeFloat, NonNegativeInt, Size
from methods.losses import masked_mean
from methods.prompt_encoder import PromptEncoder
from methods.variational import (
    gaussian_kl,
    gaussian_negative_entropy,
    importance_weighted_bound,
    log_gaussian,
    log_likelihood,
    log_mixture,
    log_predictive,
    log_standard_gaussian,
)
from methods.vit_prompt import ViTPromptMethod


class PFedBayesPT(ViTPromptMethod):
    """pFedBayesPT (Ye et al., CIKM 2025), with its ablations -G and -D.

    The prompt of layer i is ``[p_bar_i, p_i]``: K global tokens, and nu tokens of the image at hand, drawn from
    ``q(p | psi) = N(mu, diag Sigma^2)``. ``psi = (mu, Sigma) = G(f m)`` is itself random: f are the frozen, prompt-free
    features of the image at the input of each layer, and m leaves each token but CLS out with probability 1 - pi. With
    J prompts p^j from J draws of the masks, and S further draws psi~^s, a client maximises

    ``log (1/J) sum_j exp( log p(y|p^j,x) + log p(p^j|x) - log Omega^j )``,
    ``Omega^j = [ q(p^j|psi^j) + sum_s q(p^j|psi~^s) ] / (S + 1)``.

    It trains p_bar and its head with eta and the encoder G with rho, together; the server averages weighted with n_k.
    A prediction is the mean of the probabilities under V draws of the masks, with p = mu. Both parts of the objective
    are recorded: ``cross_entropy``, and ``kl``, the mean of ``log Omega - log p(p|x)``, before its weight. Evaluated
    with the global values and the client's own head (point ``server``), and right after local training (``local``).
    Message: L_g K d + L_i (2d + 2 (T h + h + nu h + nu)) numbers each way, 416,280 at ViT-B/16, and the head if it is
    global.

    * ``posterior="gaussian"`` is -G: no masks, so that psi is a function of x, and the ELBO
      ``E[log p(y|p,x)] - KL(q || p)`` with J samples and the analytic KL.
    * ``posterior="deterministic"`` is -D: no masks, p = mu, cross-entropy alone. It has no MLP^Sigma, and does not send
      one.

    Deviations and readings:
    * The prior is not given: N(0, I), as in the semi-implicit VAE's code.
    * No weight of the KL part is given, which sums over D = L_i nu d entries (9,216 at ViT-B/16) and dwarfs the
      cross-entropy: ``kl_weight=1`` is the paper as written. The weight multiplies ``log p(p|x) - log Omega``.
    * Algorithm 1 averages the heads. The baselines' heads are personal, and so is the trend of the published numbers:
      ``personal`` is the default, ``global`` the literal reading.
    * The MLPs' sizes are not given: T -> 64 -> nu with GELU; the last layer of MLP^Sigma starts at zero, so that Sigma
      is 1, and that of MLP^mu small.
    * Global prompts are one set a layer. Beyond a family's depth the outputs of its tokens are carried on.

    The backbone is also the feature extractor. Further arguments as ``ViTPromptMethod``.

    Args:
        num_prompts: K, global tokens of a layer.
        instance_prompts: nu, tokens of a layer that are the image's own.
        training: of p_bar and head (lr is eta); momentum and weight decay are not given and are those of SGPT's code.
        encoder_lr: rho, of the encoder; 1e-4 to 1e-2 in the paper.
        posterior: see above.
        keep: pi, probability that a token is kept.
        importance_samples: J.
        mixing_draws: S.
        test_draws: V.
        kl_weight: a number, or ``"1/D"``.
        kl_warmup_rounds: the weight grows linearly and is whole from this round on; 0 for the whole weight at once.
        prior: ``std_normal``, or ``none`` to leave ``log p(p|x)`` out.
        head: see above.
        global_depth: L_g, layers with global prompts, from the first on; None for all.
        instance_depth: L_i, layers with instance prompts, from the first on; None for all.
        hidden: h, width of the encoder's hidden layers.

    Raises:
        ConfigurationError: a number is out of range.
    """

    inputs = ("features",)
    per_example = True

    def __init__(
        self,
        *arguments: Any,
        num_prompts: FewOrNone = 10,
        instance_prompts: Few = 1,
        training: LocalTraining = LocalTraining(lr=0.01, momentum=0.9, weight_decay=1e-5),
        encoder_lr: NonNegativeFloat = 1e-3,
        posterior: Literal["semi_implicit", "gaussian", "deterministic"] = "semi_implicit",
        keep: AboveZero = 0.9,
        importance_samples: Few = 1,
        mixing_draws: FewOrNone = 1,
        test_draws: Few = 5,
        kl_weight: NonNegativeFloat | Literal["1/D"] = 1.0,
        kl_warmup_rounds: NonNegativeInt = 0,
        prior: Literal["std_normal", "none"] = "std_normal",
        head: Literal["personal", "global"] = "personal",
        global_depth: Few | None = None,
        instance_depth: Few | None = None,
        hidden: Size = 64,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, training=training, **settings)
        backbone = self.backbone
        global_depth = backbone.depth if global_depth is None else global_depth
        instance_depth = backbone.depth if instance_depth is None else instance_depth
        for name, depth in (("global_depth", global_depth), ("instance_depth", instance_depth)):
            if depth > backbone.depth:
                raise ConfigurationError(
                    f"{name} must be from 1 to {backbone.depth}, the backbone's layers, or null for all; got {depth}"
                )
        own_head = head == "personal"
        self.shared = ("prompt", "encoder") if own_head else ("prompt", "encoder", "head")
        self.personal = ("head",) if own_head else ()
        tokens, width = backbone.num_prefix_tokens + backbone.num_patches, backbone.embed_dim
        self.prompt = self.new_tokens(num_prompts, global_depth)
        variance = posterior != "deterministic"
        self.encoder = PromptEncoder(instance_depth, tokens, width, hidden, instance_prompts, variance)
        self.head = self.new_head()
        self.encoder_lr, self.posterior, self.prior, self.keep = encoder_lr, posterior, prior, keep
        self.importance_samples, self.mixing_draws, self.test_draws = importance_samples, mixing_draws, test_draws
        self.kl_weight = 1 / (instance_depth * instance_prompts * width) if kl_weight == "1/D" else float(kl_weight)
        self.kl_warmup_rounds = kl_warmup_rounds
        #: of an image: masks [L_i, T], instance prompts [L_i, nu, d]
        self.mask_shape = (instance_depth, tokens)
        self.prompt_shape = (instance_depth, instance_prompts, width)

    # ------------------------------------------------------------------ training

    def local_phases(self) -> list[Phase]:
        """Train global prompts and head with eta and the encoder with rho, together."""
        encoder = replace(self.training_settings, lr=self.encoder_lr).group("encoder")
        return [self.training_settings.phase_of(self.training_settings.group("prompt", "head"), encoder)]

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        """Return f, the input of the layers with instance prompts in a pass without prompts, [B, L_i, T, d]."""
        return {"tokens": self.backbone.token_features(x, layers=self.prompt_shape[0])}

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, Tensor]:
        """Draw ``masks``: m, bool [J + S or V, B, L_i, T]; and ``eps``: standard normal, [J, B, L_i, nu, d]."""
        device, noise = generator.device, {}
        if self.posterior == "semi_implicit":
            draws = self.test_draws if stage is Stage.EVALUATE else self.importance_samples + self.mixing_draws
            uniform = torch.rand(draws, batch_size, *self.mask_shape, generator=generator, device=device)
            noise["masks"] = uniform < self.keep
            noise["masks"][..., : self.backbone.num_prefix_tokens] = True  # CLS is never left out
        if self.posterior != "deterministic" and stage is not Stage.EVALUATE:
            samples = self.importance_samples
            noise["eps"] = torch.randn(samples, batch_size, *self.prompt_shape, generator=generator, device=device)
        return noise

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        """Return the weight of the KL part, as a tensor: a number would be recorded with the step."""
        if stage is Stage.EVALUATE:
            return {}
        # Copies are fitted as in the round that comes next.
        weight = self.current_kl_weight(client.round.number + (stage is not Stage.TRAIN))
        return {"kl_weight": torch.tensor(weight, device=self.device)}

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the negative bound, and its two parts."""
        tokens = batch.features["tokens"]
        masks = batch.noise.get("masks", _all_kept(tokens))
        if self.posterior == "deterministic":
            fit = log_likelihood(self._logits(tokens, self.encoder.means(tokens, masks)), batch.y)
            loss = masked_mean(-fit[0], batch.mask)
            return loss, {"cross_entropy": loss}
        mean, log_std = self.encoder(tokens, masks)
        J = self.importance_samples
        prompts = mean[:J] + log_std[:J].exp() * batch.noise["eps"]
        fit = log_likelihood(self._logits(tokens, prompts), batch.y)
        weight = client.prepared["kl_weight"]
        if self.posterior == "gaussian":
            kl = self._analytic_kl(mean[0].flatten(1), log_std[0].flatten(1))
            losses = weight * kl - fit.mean(0)
        else:
            log_ratio = self._log_ratio(prompts.flatten(2), mean.flatten(2), log_std.flatten(2))
            kl = -log_ratio.mean(0)
            losses = -importance_weighted_bound(fit, weight * log_ratio)
        parts = {"cross_entropy": -fit.mean(0), "kl": kl}
        return masked_mean(losses, batch.mask), {name: masked_mean(part, batch.mask) for name, part in parts.items()}

    def _log_ratio(self, prompts: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return ``log p(p^j|x) - log Omega^j``, [J, B], of prompts [J, B, D], psi and psi~ in rows [J + S, B, D]."""
        J = self.importance_samples
        own = log_gaussian(prompts, mean[:J], log_std[:J])
        mixing = log_gaussian(prompts, mean[J:].unsqueeze(1), log_std[J:].unsqueeze(1))
        log_prior = log_standard_gaussian(prompts) if self.prior == "std_normal" else 0.0
        return log_prior - log_mixture(own, mixing)

    def _analytic_kl(self, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return ``E_q[log q(p|psi) - log p(p|x)]`` of mu and log Sigma [B, D], [B]."""
        return gaussian_kl(mean, log_std) if self.prior == "std_normal" else gaussian_negative_entropy(log_std)

    def current_kl_weight(self, round: int) -> float:
        """Return the weight of the KL part in a round, from 1."""
        return self.kl_weight * (min(1.0, round / self.kl_warmup_rounds) if self.kl_warmup_rounds else 1.0)

    def _logits(self, tokens: Tensor, prompts: Tensor) -> Tensor:
        """Classify all images under each of R draws of their prompts, in one pass.

        Args:
            tokens: f, [B, L_i, T, d]; the input of the first layer is where the pass begins.
            prompts: [R, B, L_i, nu, d].

        Returns:
            [R, B, C].
        """
        first = tokens[:, 0].expand(len(prompts), *tokens[:, 0].shape).flatten(0, 1)
        features = self.backbone.from_tokens(first, self.prompt, prompts.flatten(0, 1))
        return self.head(features).unflatten(0, prompts.shape[:2])

    # ------------------------------------------------------------------ prediction

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C] of images [B, 3, H, W] with p = mu of the whole image, as -G and -D predict."""
        tokens = self.frozen_features(x)["tokens"]
        return self._logits(tokens, self.encoder.means(tokens, _all_kept(tokens)))[0]

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return log-probabilities [B, C] under V draws of the masks; one after the other, to spare memory."""
        tokens = batch.features["tokens"]
        draws = batch.noise.get("masks", _all_kept(tokens)).split(1)
        return log_predictive(torch.cat([self._logits(tokens, self.encoder.means(tokens, m)) for m in draws]))


def _all_kept(tokens: Tensor) -> Tensor:
    """Return one draw of masks that leaves no token out: [1, B, L, T] for tokens [B, L, T, d]."""
    return torch.ones(1, *tokens.shape[:3], dtype=torch.bool, device=tokens.device)
