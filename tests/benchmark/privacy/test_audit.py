"""An audit of user-level privacy: what a distinguishing test finds of one client lies below what is accounted.

A test that says "it took part" above a threshold has, under (epsilon, delta), a rate of hits of at most
``e^epsilon`` times its rate of false alarms plus delta (Jagielski et al., "Auditing differentially private machine
learning", NeurIPS 2020); with exact intervals of both rates (Clopper and Pearson, 1934) it bounds epsilon from below.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from federation import Witness, build, fit, terms
from scipy.stats import binomtest
from torch import Tensor

from benchmark.engine.rounds import Server
from benchmark.federation import Round, Uploads
from benchmark.privacy import UserLevelPrivacy
from benchmark.server import ServerRule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*"),
]
#: In a simulation of the test on plain Gaussians, eight seeds each, half of this noise was told apart every time.
RUNS, ROUNDS, NOISE, DELTA, CLIP = 3000, 2, 1.0, 1e-2, 1e-3
#: Whose presence is guessed.
CLIENT = 2


class HalfTheNoise(UserLevelPrivacy):
    """Adds half of the noise that it accounts for."""

    def _noise(self, round: Round, name: str, shape: torch.Size, device: torch.device, *client: int) -> Tensor:
        return super()._noise(round, name, shape, device, *client) / 2


@pytest.fixture(scope="module")
def trained() -> Uploads:
    """Return the uploads of six clients of a tiny federation after a round of training a prompt of one token.

    All but the client whose presence is guessed upload the received values, so that the guess has only the noise to
    overcome.
    """
    method, data = build(
        "FedVPT", "--model.init_args.num_prompts=1", "--data.partition=Few", "--data.clients_per_round=6"
    )
    rule = Witness()
    fit(method, data, 1, [Server(rule)], evaluate=False)
    (sent,) = rule.seen
    sent = sent.only(["prompt.tokens"])
    guessed = torch.tensor([client == CLIENT for client in sent.clients]).view(-1, 1, 1)
    return sent.with_values(
        {name: torch.where(guessed, rows, sent.received[name]) for name, rows in sent.values.items()}
    )


def scores(
    rule_of: Callable[..., UserLevelPrivacy], sampling: Literal["full", "poisson"], trained: Uploads, there: bool
) -> tuple[np.ndarray, float]:
    """Run the federation many times, with or without the client; each run has noise of its own.

    Returns:
        how far along the client's update the shared values have moved in each run, [runs], and the accounted epsilon.
    """
    count, update = len(trained.clients), trained.matrix(trained.values)[CLIENT].double()
    first = {name: rows[0].double() for name, rows in trained.received.items()}
    participants = count // 2 if sampling == "poisson" else count
    found = []
    for number in range(RUNS):
        rule = rule_of(clip=CLIP, noise_multiplier=NOISE, delta=DELTA, sampling=sampling)
        rule.complete(ServerRule)
        rule.start(first, terms(count, participants, seed=2 * number + there))
        shared = first
        for at in range(1, ROUNDS + 1):
            chosen = tuple(rule.select(at))
            sent = trained.of([client for client in chosen if there or client != CLIENT])
            moved = {name: shared[name] + rows for name, rows in sent.updates().items()}
            began = {name: value.expand(len(sent.clients), *value.shape) for name, value in shared.items()}
            shared = rule.aggregate(Round(at, chosen, number), shared, replace(sent, values=moved, received=began))
        found.append(sum(float((shared[name] - first[name]).flatten() @ update) for name in shared))
    return np.array(found), rule.epsilon


def bound(with_client: np.ndarray, without: np.ndarray) -> float:
    """Return a lower bound of epsilon, with 97.5 % confidence.

    One half of the runs gives the threshold, the other the rates.
    """
    half = RUNS // 2

    def of(hit: np.ndarray, alarm: np.ndarray, threshold: float) -> float:
        hits, alarms = int((hit > threshold).sum()), int((alarm > threshold).sum())
        low = binomtest(hits, len(hit)).proportion_ci(0.975, "exact").low
        high = binomtest(alarms, len(alarm)).proportion_ci(0.975, "exact").high
        return math.log((low - DELTA) / high) if low > DELTA else 0.0

    thresholds = np.quantile(np.concatenate([with_client[:half], without[:half]]), np.linspace(0.02, 0.98, 97))
    best = max(thresholds, key=lambda threshold: of(with_client[:half], without[:half], threshold))
    return of(with_client[half:], without[half:], best)


@pytest.mark.parametrize("sampling", ["full", "poisson"])
def test_what_tells_of_a_client_stays_below_the_account(sampling: Literal["full", "poisson"], trained: Uploads) -> None:
    assert trained.matrix(trained.values)[CLIENT].norm() > CLIP
    found = {}
    for rule in (UserLevelPrivacy, HalfTheNoise):
        with_client, accounted = scores(rule, sampling, trained, there=True)
        without, same = scores(rule, sampling, trained, there=False)
        assert accounted == same
        found[rule] = bound(with_client, without)
    assert 0 < found[UserLevelPrivacy] < accounted
    assert found[HalfTheNoise] > accounted
