import ast
import inspect

import pytest
import torch
from federation import build, fit
from torch import Tensor, nn

import methods.fedprox
import methods.fedvpt
from benchmark.backbones.parts import Tower
from benchmark.backbones.prompts import VisualPromptTokens
from benchmark.backbones.vit import PromptedViT
from benchmark.contract import LocalTraining
from methods.classifier import new_client_training
from methods.fedvpt import FedVPT
from methods.fedvptdeep import FedVPTDeep

ONE = ["--data.partition.init_args.num_clients=1", "--data.clients_per_round=1"]


def lines_of_code(source: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    kept = {n.lineno for n in ast.walk(tree) if hasattr(n, "lineno")} | {
        n.end_lineno for n in ast.walk(tree) if hasattr(n, "end_lineno")
    }
    return len(kept)


def test_simple_methods_stay_short() -> None:
    assert lines_of_code(inspect.getsource(methods.fedvpt.FedVPT)) <= 40
    assert lines_of_code(inspect.getsource(methods.fedprox.FedProx)) <= 15


@pytest.mark.parametrize(("conf", "floats"), [("FedVPT", 3 * 64), ("FedVPTDeep", 12 * 3 * 64)])
def test_a_message_holds_the_prompt_and_nothing_else(conf: str, floats: int) -> None:
    method, data = build(conf)
    floats = 3 * method.backbone.embed_dim * (method.backbone.depth if conf == "FedVPTDeep" else 1)
    fit(method, data, 1)
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == floats
    assert made["up_bytes"] == made["down_bytes"] == 4 * floats


class WideStandIn(PromptedViT):
    """Has the sizes of ViT-B/16 and next to no arithmetic."""

    embed_dim = num_features = 768
    depth, patch_size = 12, 16
    tower = Tower("vit", 768, 12, 3072)

    def __init__(self) -> None:
        nn.Module.__init__(self)  # it has no transformer
        self.scale = nn.Parameter(torch.ones(768))

    def forward(self, x: Tensor, prompts: VisualPromptTokens) -> Tensor:
        return x.mean((1, 2, 3))[:, None] * self.scale + prompts().flatten(0, -2).mean(0)


@pytest.mark.parametrize(
    ("kind", "num_prompts", "floats"), [(FedVPT, 10, 7_680), (FedVPTDeep, 10, 92_160), (FedVPTDeep, 1, 9_216)]
)
def test_the_numbers_of_a_message_at_the_size_of_vit_b_16(kind: type, num_prompts: int, floats: int) -> None:
    _, data = build("FedVPT")
    method = kind(8, 11, WideStandIn(), num_prompts=num_prompts, training=LocalTraining(lr=0.1, epochs=1))
    assert method.prompt.tokens.abs().max().item() == pytest.approx(0.0625, rel=1e-2)
    fit(method, data, 1)
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == floats


def test_a_new_client_fits_its_head_for_five_epochs_at_the_first_rounds_rate() -> None:
    training = LocalTraining(lr=0.1, epochs=2, momentum=0.5, weight_decay=0.01, steps=3, schedule="cosine")
    assert new_client_training(training) == LocalTraining(lr=0.1, epochs=5, momentum=0.5, weight_decay=0.01)


def test_without_prompts_nothing_is_sent_and_it_is_a_linear_probe() -> None:
    method, data = build("FedVPT", "--model.init_args.num_prompts=0", *ONE)
    fit(method, data, 1)
    assert method.server.traffic.per_client()["up_bytes"] == 0
    x = data.transform(data.pool.images[:3], None)
    torch.testing.assert_close(method(x), method.head(method.backbone(x)))


def test_with_one_client_aggregation_changes_nothing() -> None:
    method, data = build("FedVPT", *ONE)
    fit(method, data, 3)
    assert torch.equal(method.get_parameter("prompt.tokens"), method.store.all_rows("last.prompt.tokens")[0])


def test_deep_prompts_of_the_first_layer_alone_are_shallow_prompts() -> None:
    shallow, data = build("FedVPT")
    data.setup()
    x = data.transform(data.pool.images[:4], None)
    prompt = shallow.prompt()
    torch.testing.assert_close(shallow.backbone(x, prompt.unsqueeze(0)), shallow.backbone(x, prompt))


def test_the_local_point_is_the_clients_state_before_aggregation() -> None:
    method, data = build("FedVPT", "--data.clients_per_round=11")
    fit(method, data, 1)
    prompts = method.store.all_rows("last.prompt.tokens")
    weights = torch.tensor([float(data.train_sizes[c]) for c in range(11)])
    mean = (prompts * (weights / weights.sum()).view(-1, 1, 1)).sum(0)
    torch.testing.assert_close(method.get_parameter("prompt.tokens"), mean)
    assert (prompts - mean).abs().amax((1, 2)).min() > 0
