"""Draws of other threads of the process, which are not the method's."""

import math
import random

import pytest
import torch
from federation import build, fit

from benchmark.engine.refusals.watch import Watch
from benchmark.errors import ConfigurationError


def test_only_what_draws_again_is_refused() -> None:
    method, data = build("FedVPT")
    fit(method, data, 1)
    watch, cpu = Watch(method, ()), torch.device("cpu")
    with watch.over("client_loss", (1,), cpu, lambda: None):
        random.random()  # as another thread would meanwhile
    with (
        pytest.raises(ConfigurationError, match="draws random numbers from a global generator"),
        watch.over("client_loss", (2,), cpu, random.random),
    ):
        random.random()


def test_a_number_that_is_none_does_not_change() -> None:
    method, _ = build("FedVPT")
    method.threshold = math.nan
    watch, cpu = Watch(method, ()), torch.device("cpu")
    with watch.over("client_loss", (1,), cpu, lambda: None):
        pass
    with (
        pytest.raises(ConfigurationError, match="changes the attribute 'threshold'"),
        watch.over("client_loss", (2,), cpu, lambda: None),
    ):
        method.threshold = 0.5
