"""The objective of pFedBayesPT against plain loops in double precision, without logsumexp."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

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


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def density(p: Tensor, mean: Tensor, std: Tensor) -> float:
    """N(p; mean, diag std^2) as a product over the entries."""
    value = 1.0
    for x, m, s in zip(p.tolist(), mean.tolist(), std.tolist(), strict=True):
        value *= math.exp(-((x - m) ** 2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
    return value


@pytest.mark.parametrize(("S", "J"), [*product((0, 1, 3), (1, 4))])
def test_the_bound_is_the_brute_force_sum(S: int, J: int) -> None:
    B, D, C = 3, 5, 4
    mean, log_std = draw(J + S, B, D, scale=0.5), draw(J + S, B, D, seed=1, scale=0.3)
    p = mean[:J] + log_std[:J].exp() * draw(J, B, D, seed=2)
    logits, y = draw(J, B, C, seed=3), torch.tensor([2, 0, 3])
    own = log_gaussian(p, mean[:J], log_std[:J])
    mixing = log_gaussian(p, mean[J:].unsqueeze(1), log_std[J:].unsqueeze(1))
    log_omega = log_mixture(own, mixing)
    bound = importance_weighted_bound(log_likelihood(logits, y), log_standard_gaussian(p) - log_omega)
    std = log_std.exp()
    for b in range(B):
        total = 0.0
        for j in range(J):
            omega = density(p[j, b], mean[j, b], std[j, b])
            for s in range(S):
                omega += density(p[j, b], mean[J + s, b], std[J + s, b])
            omega /= S + 1
            assert log_omega[j, b].item() == pytest.approx(math.log(omega))
            powers = [math.exp(z) for z in logits[j, b].tolist()]
            likelihood = powers[int(y[b])] / sum(powers)
            total += likelihood * density(p[j, b], torch.zeros(D), torch.ones(D)) / omega
        # The likelihood is float32 by design.
        assert bound[b].item() == pytest.approx(math.log(total / J), rel=1e-5)


def test_one_prompt_and_one_mixing_draw_by_hand() -> None:
    # D = 1: p = 1, psi = (0, 1), psi~ = (1, 1/2). q(p|psi) = phi(1), q(p|psi~) = 2 phi(0), prior phi(1).
    p = torch.tensor([[[1.0]]])
    own = log_gaussian(p, torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    mixing = log_gaussian(p, torch.ones(1, 1, 1), torch.full((1, 1, 1), -math.log(2))).unsqueeze(0)
    phi = [math.exp(-0.5 * x * x) / math.sqrt(2 * math.pi) for x in (0, 1)]
    log_omega = log_mixture(own, mixing)
    assert log_omega.item() == pytest.approx(math.log((phi[1] + 2 * phi[0]) / 2))
    assert log_omega.item() == pytest.approx(torch.logaddexp(own, mixing[0]).item() - math.log(2))
    bound = importance_weighted_bound(torch.tensor([[-0.3]]), log_standard_gaussian(p) - log_omega)
    assert bound.item() == pytest.approx(-0.3 + math.log(phi[1]) - log_omega.item())


def test_the_mean_of_the_sampled_kl_is_the_analytic_one() -> None:
    mean, log_std = draw(6, scale=0.7), draw(6, seed=1, scale=0.5)
    p = mean + log_std.exp() * draw(200_000, 6, seed=2)
    sampled = log_gaussian(p, mean, log_std) - log_standard_gaussian(p)
    error = sampled.std() / math.sqrt(len(p))
    assert abs(sampled.mean() - gaussian_kl(mean, log_std)) < 4 * error
    entropy = log_gaussian(p, mean, log_std)
    assert abs(entropy.mean() - gaussian_negative_entropy(log_std)) < 4 * entropy.std() / math.sqrt(len(p))


def test_the_analytic_kl_by_hand() -> None:
    # mu = (1, 0), Sigma = (1, e): (1 + 0 + (e^2 - 1 - 2)) / 2
    kl = gaussian_kl(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    assert kl.item() == pytest.approx((1 + math.e**2 - 3) / 2)
    assert gaussian_kl(torch.zeros(7), torch.zeros(7)).item() == 0


@pytest.mark.parametrize("S", [0, 1, 3])
def test_equal_parameters_make_the_mixture_one_gaussian(S: int) -> None:
    own = log_gaussian(draw(2, 3, 9000), draw(2, 3, 9000, seed=1), draw(2, 3, 9000, seed=2))
    torch.testing.assert_close(log_mixture(own, own.expand(S, 2, 3)), own, rtol=1e-12, atol=1e-9)


def test_one_more_draw_lowers_the_density_by_log_two_at_most() -> None:
    own, mixing = draw(4, 50, scale=100), draw(1, 4, 50, seed=1, scale=100)
    log_omega = log_mixture(own, mixing)
    assert (log_omega >= own - math.log(2) - 1e-12).all()
    # So L_{S=1} <= L_{S=0} + log 2, whatever prior and likelihood.
    rest = draw(4, 50, seed=2)
    more, none = (importance_weighted_bound(rest, -value) for value in (log_omega, own))
    assert (more <= none + math.log(2) + 1e-12).all()


def test_copies_of_one_sample_change_nothing() -> None:
    fit, ratio = draw(1, 8), draw(1, 8, seed=1, scale=1000)
    one = importance_weighted_bound(fit, ratio)
    torch.testing.assert_close(one, (fit + ratio)[0])
    torch.testing.assert_close(importance_weighted_bound(fit.expand(5, 8), ratio.expand(5, 8)), one)


def test_thousands_of_nats_stay_finite_in_float32() -> None:
    p = draw(2, 3, 9216).float()
    own = log_gaussian(p, p + 1, torch.full_like(p, -1.0)).requires_grad_()
    bound = importance_weighted_bound(torch.zeros(2, 3), log_standard_gaussian(p) - log_mixture(own, own[None] - 5000))
    bound.sum().backward()
    assert bound.isfinite().all()
    assert own.grad is not None
    assert own.grad.isfinite().all()


def test_padded_rows_have_some_finite_likelihood() -> None:
    logits = torch.tensor([[[0.0, math.log(3)], [1.0, 1.0]]])
    values = log_likelihood(logits, torch.tensor([1, -100]))
    torch.testing.assert_close(values, torch.tensor([[math.log(0.75), math.log(0.5)]]))


def test_the_prediction_averages_probabilities() -> None:
    logits = torch.tensor([[[0.0, 0.0]], [[math.log(9), 0.0]]])
    torch.testing.assert_close(log_predictive(logits).exp(), torch.tensor([[0.7, 0.3]]))
    torch.testing.assert_close(log_predictive(logits[1:].expand(5, 1, 2)), logits[1].log_softmax(-1))
