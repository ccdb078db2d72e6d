"""A module's parameters by name."""

import torch
from torch import nn

from benchmark.engine.parameters import Parameters


def test_they_are_those_that_the_module_has_now() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 1, bias=False)))
    found = Parameters(module)
    for name, parameter in module.named_parameters():
        assert found[name] is parameter
    assert found.first is module[0].weight
    module[0].weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    assert found.first is found["0.weight"] is module[0].weight
