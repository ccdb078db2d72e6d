"""The mathematics of pFedBayesPT: densities in log-space, for ONE client, one function per equation.

D is the number of entries of an image's instance prompts, all layers together. Log-densities are sums over D, thousands
of nats, so they are only ever compared as logarithms, and in float32 at least.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.masked import at_least_float32

LOG_2PI = math.log(2 * math.pi)


def log_gaussian(p: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """``log N(p; mu, diag Sigma^2) = -1/2 sum_D [((p - mu) / Sigma)^2 + 2 log Sigma + log 2 pi]``.

    Args:
        p: [..., D].
        mean: mu, [..., D].
        log_std: log Sigma, [..., D].

    Returns:
        [...], the shapes broadcast.
    """
    return -0.5 * (((p - mean) * torch.exp(-log_std)).square() + 2 * log_std + LOG_2PI).sum(-1)


def log_standard_gaussian(p: Tensor) -> Tensor:
    """``log N(p; 0, I) = -1/2 sum_D [p^2 + log 2 pi]``, [..., D] to [...]."""
    return -0.5 * (p.square() + LOG_2PI).sum(-1)


def log_mixture(own: Tensor, mixing: Tensor) -> Tensor:
    """``log Omega^j``: the semi-implicit density of a prompt, estimated with S more draws of its parameters.

    ``log [ q(p^j | psi^j) + sum_s q(p^j | psi~^s) ] - log(S + 1)``.

    Args:
        own: ``log q(p^j | psi^j)``, [J, B].
        mixing: ``log q(p^j | psi~^s)``, [S, J, B].

    Returns:
        [J, B].
    """
    return torch.logsumexp(torch.cat([own.unsqueeze(0), mixing]), 0) - math.log(len(mixing) + 1)


def log_likelihood(logits: Tensor, y: Tensor) -> Tensor:
    """``log p(y | p^j, x)``, the negative cross-entropy of each image under each prompt.

    Args:
        logits: [J, B, C].
        y: labels, [B]; negative ones, of padded rows, give some finite number.

    Returns:
        [J, B], at least float32.
    """
    labels = y.clamp(min=0).expand(logits.shape[:-1]).unsqueeze(-1)
    return F.log_softmax(at_least_float32(logits), -1).gather(-1, labels).squeeze(-1)


def importance_weighted_bound(log_likelihood: Tensor, log_ratio: Tensor) -> Tensor:
    """``log (1/J) sum_j exp( log p(y | p^j, x) + log p(p^j | x) - log Omega^j )`` per image, to be maximised.

    Args:
        log_likelihood: ``log p(y | p^j, x)``, [J, B].
        log_ratio: ``log p(p^j | x) - log Omega^j``, [J, B].

    Returns:
        [B].
    """
    return torch.logsumexp(log_likelihood + log_ratio, 0) - math.log(len(log_ratio))


def gaussian_kl(mean: Tensor, log_std: Tensor) -> Tensor:
    """``KL(N(mu, diag Sigma^2) || N(0, I)) = 1/2 sum_D [mu^2 + Sigma^2 - 1 - 2 log Sigma]``, [..., D] to [...]."""
    return 0.5 * (mean.square() + torch.exp(2 * log_std) - 1 - 2 * log_std).sum(-1)


def gaussian_negative_entropy(log_std: Tensor) -> Tensor:
    """``E[log N(p; mu, diag Sigma^2)] = -1/2 sum_D [1 + 2 log Sigma + log 2 pi]``, [..., D] to [...]."""
    return -0.5 * (1 + 2 * log_std + LOG_2PI).sum(-1)


def log_predictive(logits: Tensor) -> Tensor:
    """``log (1/V) sum_v softmax(logits^v)``: the mean of the probabilities, not of the logits.

    Args:
        logits: [V, B, C].

    Returns:
        [B, C], at least float32.
    """
    return torch.logsumexp(F.log_softmax(at_least_float32(logits), -1), 0) - math.log(len(logits))
