"""Mini-batches of several steps that are made in one."""

from unittest.mock import patch

import pytest
import torch
from federation import build, fit

from benchmark.contract import MiniBatch, Stage
from benchmark.engine.batches import images as feed
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.plan.work import Step

#: whose mini-batches, with which options, and whether they can be made in one
CASES = [
    (("FedAvg",), True),
    (("FedAvg", "--data.transform=datamodules.ImageTransform", "--data.transform.init_args.augment=fedbn"), True),
    (("HeadTune", "--data.cache_features=true"), True),
    (("HeadTune", "--data.cache_features=false"), False),
    (("PromptFL", "--data.cache_features=true"), True),
]


def assert_equal(one: MiniBatch, other: MiniBatch) -> None:
    assert (one.phase, one.split, one.features.keys()) == (other.phase, other.split, other.features.keys())
    for name in ("x", "y", "mask"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name, value in one.features.items():
        assert torch.equal(value, other.features[name])


@pytest.mark.parametrize(("arguments", "together"), CASES)
@pytest.mark.parametrize("room", [2**24, 2**17, 1])
def test_steps_that_are_made_in_one_are_those_of_each(arguments: tuple[str, ...], together: bool, room: int) -> None:
    method, data = build(*arguments, "--data.clients_at_once=4")
    fit(method, data, 1)
    phases, facts, images = method.simulation.phases[Stage.TRAIN], data.federation, method.simulation.images
    plan = RoundPlan(
        facts.terms.training_clients,
        facts.holdings.train_rows,
        facts.terms,
        phases,
        Stage.TRAIN,
        width=4,
        round=2,
        augment_numbers=images.pool.transform.augment_numbers,
    )
    steps = [plan[number] for number in range(len(plan.steps))]
    alone = [images.fill(step) for step in steps]
    groups: list[int] = []
    fill = images.fill

    def counted(step: Step) -> MiniBatch:
        assert step.index is not None
        if step.index.ndim == 3:
            groups.append(len(step.index))
        return fill(step)

    with patch.object(images, "fill", counted), patch.object(feed, "TOGETHER", room):
        made = list(images.fill_all(steps))
    for one, other in zip(made, alone, strict=True):
        assert_equal(one, other)
    assert bool(groups) == (together and room > 1)
    assert room > 2**17 or max(groups, default=0) <= 8
