"""FedCoCoOp against a federation by hand and against PromptFL, and its message."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from oracle import FEW, Values, simulate
from torch import Tensor

from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.contract import MiniBatch
from benchmark.engine.roles import read_roles
from methods import FedCoCoOp
from methods.promptfl import PromptFL


def conditional_logits(method: Any, values: Values, f: Tensor) -> Tensor:
    """Image by image: its bias on every token, its text features, its logits."""
    rows = []
    for image in f:
        hidden = F.relu(values["meta_net.0.weight"] @ image + values["meta_net.0.bias"])
        bias = values["meta_net.2.weight"] @ hidden + values["meta_net.2.bias"]
        text = method.clip.text_features(method.class_prompts("train"), values["context"] + bias)
        rows.append(method.clip.logit_scale * text @ image)
    return torch.stack(rows)


def test_agrees_with_a_sequential_simulation() -> None:
    def loss(method: Any, values: Values, *others: Any) -> Tensor:
        x, y = others[-2:]
        return F.cross_entropy(conditional_logits(method, values, method.clip.image_features(x)), y)

    longer = ("--data.partition=federation.Longer", "--data.partition.init_args.num_clients=4")
    expected = simulate("FedCoCoOp", 2, loss, *longer)
    method, data = build("FedCoCoOp", *FEW, *longer)
    start = {name: value.detach().clone() for name, value in method.named_parameters()}
    fit(method, data, 2)
    assert len(expected) == 5
    for name, value in expected.items():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-3, atol=1e-5)


def ready() -> Any:
    """A method whose meta-net says something."""
    method, _ = build("FedCoCoOp")
    method.set_label_spaces({})
    method.meta_net[2].weight.data.mul_(5)
    return method


def test_logits_of_an_image_do_not_depend_on_the_others() -> None:
    method = ready()
    f = F.normalize(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    together = method.logits_per_image(f, "test")
    one_by_one = torch.cat([method.logits_per_image(image[None], "test") for image in f])
    torch.testing.assert_close(together, one_by_one, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        together, conditional_logits(method, dict(method.named_parameters()), f), atol=1e-4, rtol=1e-4
    )
    assert (together - method.logits(f, method.text_features("test"))).abs().max() > 0.1, (
        "the context does depend on it"
    )


def test_a_meta_net_of_zeros_makes_it_promptfl() -> None:
    method = ready()
    plain = PromptFL(11, method.class_names, method.clip, num_context=3)
    plain.set_label_spaces({})
    assert torch.equal(plain.context, method.context)
    for value in method.meta_net.parameters():
        value.data.zero_()
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(method(x), plain(x), rtol=1e-5, atol=1e-4)
    batch = MiniBatch(
        x, torch.tensor([0, 3, 2, 7]), torch.tensor([True, True, True, False]), features=method.frozen_features(x)
    )
    torch.testing.assert_close(method.client_loss(None, batch), plain.client_loss(None, batch))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tower", "num_context", "expected"),
    [("ViT-B-16", 16, 166_016), ("ViT-B-16", 4, 141_440), ("RN50", 16, 32_768 + 395_520)],
)
def test_message(tower: str, num_context: int, expected: int) -> None:
    with torch.device("meta"):  # shapes only
        method = FedCoCoOp(10, ["a", "b"], PromptedCLIP(tower, "random"), num_context=num_context)
    roles = read_roles(method)
    sent = [method.get_parameter(name) for name in roles.shared]
    assert sum(value.numel() * value.element_size() for value in sent) == expected
    assert not roles.personal
