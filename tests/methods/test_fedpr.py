from typing import Any

import pytest
import torch
from federation import build, fit, learned
from timm.models.vision_transformer import VisionTransformer

from benchmark.backbones.vit import PromptedViT
from benchmark.contract import Client, Stage
from benchmark.engine.roles import names_under
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from methods.fedpr import FedPR, leading_directions, project

PROMPT = "prompt.tokens"
DEPTHS = {"shallow": "FedVPT", "deep": "FedVPTDeep"}
SMALL = ["--data.partition.init_args.num_clients=4", "--data.clients_per_round=3"]
DECAY = "--model.init_args.training.weight_decay=0.01"


def vit_b() -> PromptedViT:
    """The shapes of ViT-B/16 without its numbers."""
    with torch.device("meta"):
        return PromptedViT(VisionTransformer(num_classes=0))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projector(dropped: torch.Tensor) -> torch.Tensor:
    return torch.eye(dropped.shape[-1], dtype=dropped.dtype) - dropped.mT @ dropped


def null_space(prompts: torch.Tensor, dropped: int) -> torch.Tensor:
    """T of one layer as the paper says it, from the singular value decomposition of A = P^T P, [d, d]."""
    kept = torch.linalg.svd(prompts.T @ prompts).Vh[dropped:].T
    return kept @ kept.T


def test_a_projection_by_hand() -> None:
    prompts = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 2.0, 0.0]])
    update = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    own = leading_directions(prompts, torch.empty(0, 4))
    torch.testing.assert_close(project(update, own[:1]), torch.tensor([[0.0, 2.0, 3.0, 4.0]]))
    torch.testing.assert_close(project(update, own), torch.tensor([[0.0, 2.0, 0.0, 4.0]]))
    filled = leading_directions(prompts, torch.tensor([[5.0, 0.0, 1.0, 0.5]]))
    torch.testing.assert_close(project(update, filled), torch.tensor([[0.0, 2.0, 0.0, 0.0]]))


@pytest.mark.parametrize("dropped", [1, 4, 7])
def test_the_projector_is_that_of_the_smallest_singular_values(dropped: int) -> None:
    prompts = draw(2, 7, 10)
    made = projector(leading_directions(prompts, torch.empty(2, 0, 10, dtype=torch.float64))[:, :dropped])
    torch.testing.assert_close(made, torch.stack([null_space(layer, dropped) for layer in prompts]))


def test_the_projector_is_symmetric_idempotent_and_of_the_rank_it_should_have() -> None:
    prompts = draw(12, 3, 40)
    made = [projector(leading_directions(prompts, draw(12, 5, 40, seed=seed))) for seed in (1, 2)]
    for t in made:
        torch.testing.assert_close(t, t.mT)
        torch.testing.assert_close(t @ t, t)
        torch.testing.assert_close(t.diagonal(dim1=1, dim2=2).sum(1), torch.full((12,), 32.0, dtype=torch.float64))
        assert (prompts @ t).abs().max() < 1e-12
    assert (made[0] - made[1]).abs().max() > 0.1, "beyond the rank of the prompts, the filling decides"


@pytest.mark.parametrize(("depth", "floats"), [("shallow", 7_680), ("deep", 92_160)])
def test_sizes_at_vit_b(depth: Any, floats: int) -> None:
    method = FedPR(10, 4, vit_b(), depth=depth, null_scale="frobenius")
    shared = {name: method.get_parameter(name) for name in names_under(method, method.shared)}
    sent = method.make_server().broadcast(Round(1, (0,), 0), shared, (0,)).message()
    assert sum(value.numel() for value in sent) == floats
    assert method.num_dropped == 153
    assert method.scale == pytest.approx(615**-0.5)
    assert method.scale == pytest.approx(0.0403, abs=5e-5)


def test_a_share_that_has_no_exact_float_is_rounded_first() -> None:
    vit = PromptedViT(VisionTransformer(img_size=8, patch_size=4, embed_dim=10, depth=1, num_heads=1, num_classes=0))
    assert FedPR(3, 2, vit, num_prompts=1, ratio=0.8).num_dropped == 2
    assert int(10 * (1.0 - 0.8)) == 1, "the authors' code, a declared deviation"
    assert int(768 * (1.0 - 0.8)) == FedPR(3, 2, vit_b()).num_dropped == 153
    assert FedPR(3, 2, vit, num_prompts=1, ratio=0.75).num_dropped == 2
    assert FedPR(3, 2, vit, num_prompts=1, ratio=1).num_dropped == 0


def run(conf: str, rounds: int, *overrides: str) -> tuple[Any, list[tuple[Values, dict[int, Values]]]]:
    """A run; per round the prompt that was sent and the uploads."""
    method, data = build(conf, *SMALL, *overrides)
    history: list[tuple[Values, dict[int, Values]]] = []
    rule = method.make_server()
    average = rule.aggregate

    def aggregate(round: Round, shared: Values, uploads: Uploads) -> Values:
        sent = {name: value.clone() for name, value in shared.items()}
        rows = {client: {n: v[k] for n, v in uploads.values.items()} for k, client in enumerate(uploads.clients)}
        history.append((sent, rows))
        return average(round, shared, uploads)

    rule.aggregate = aggregate
    method.make_server = lambda: rule
    fit(method, data, rounds)
    return method, history


def test_a_projection_is_exact_in_mixed_precision_too() -> None:
    prompts, update = draw(3, 40).float(), draw(3, 40, seed=1).float()
    own = leading_directions(prompts, torch.empty(0, 40))
    with torch.autocast("cpu", torch.bfloat16):
        moved = project(update, own)
    assert (moved @ prompts.T).abs().max() < 1e-5


def test_directions_beyond_the_prompts_own_are_drawn_for_each_round_and_seed() -> None:
    method, data = build("FedPR", *SMALL)
    fit(method, data, 0)

    def dropped(number: int, seed: int) -> torch.Tensor:
        parameters = {name: method.get_parameter(name) for name in method.roles.trained}
        counts = torch.zeros(8, dtype=torch.int64)
        client = Client(parameters, {PROMPT: parameters[PROMPT]}, counts, Round(number, (0,), seed))
        return method.prepare(client, Stage.TRAIN, "train")["dropped"]

    own = method.get_parameter(PROMPT).shape[-2]
    assert method.num_dropped > own
    first = dropped(2, 0)
    assert torch.equal(first, dropped(2, 0))
    for other in (dropped(3, 0), dropped(2, 1)):
        torch.testing.assert_close(projector(other[..., :own, :]), projector(first[..., :own, :]), rtol=1e-4, atol=1e-5)
        assert (projector(other) - projector(first)).abs().max() > 0.01


@pytest.mark.parametrize("depth", DEPTHS)
def test_from_round_two_on_training_is_orthogonal_to_the_received_prompt(depth: str) -> None:
    method, history = run("FedPR", 3, f"--model.init_args.depth={depth}")
    for number, (sent, uploads) in enumerate(history, start=1):
        for upload in uploads.values():
            moved = upload[PROMPT] - sent[PROMPT]
            along = (moved @ sent[PROMPT].mT).abs().max()
            assert moved.abs().max() > 1e-3
            assert (along < 1e-5) == (number > 1)
    assert (method.store.all_rows("head.weight") - method.head.weight).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize(("depth", "plain"), DEPTHS.items())
def test_the_first_round_is_fedvpts(depth: str, plain: str) -> None:
    method, _ = run("FedPR", 1, f"--model.init_args.depth={depth}", DECAY)
    other, _ = run(plain, 1, DECAY)
    for name, value in learned(other).items():
        torch.testing.assert_close(learned(method)[name], value, rtol=0, atol=0, equal_nan=True)
    assert method.server.traffic.per_client() == other.server.traffic.per_client()


@pytest.mark.parametrize(("depth", "plain"), DEPTHS.items())
def test_with_all_singular_values_it_is_fedvpt(depth: str, plain: str) -> None:
    method, _ = run("FedPR", 2, f"--model.init_args.depth={depth}", "--model.init_args.ratio=1.0", DECAY)
    other, _ = run(plain, 2, DECAY)
    torch.testing.assert_close(method.get_parameter(PROMPT), other.get_parameter(PROMPT), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["none", "frobenius"])
@pytest.mark.parametrize(("depth", "plain"), DEPTHS.items())
def test_a_step_is_fedvpts_step_times_the_projector(depth: str, plain: str, scale: str) -> None:
    # One step a client and round; 64 * 0.03 = 1.9, so that one of three directions is dropped, which is well defined.
    training = ["lr=0.1", "weight_decay=0.5", "epochs=1"]
    steps = ["--data.batch_size=64", *(f"--model.init_args.training.{value}" for value in training)]
    own = [f"--model.init_args.depth={depth}", "--model.init_args.ratio=0.97", f"--model.init_args.null_scale={scale}"]
    _, history = run("FedPR", 2, *steps, *own)
    _, expected = run(plain, 2, *steps)
    (sent, uploads), (same, others) = history[1], expected[1]
    assert torch.equal(sent[PROMPT], same[PROMPT])
    start = sent[PROMPT].double().reshape(-1, 3, 64)
    projectors = torch.stack([null_space(layer, 1) for layer in start])
    if scale == "frobenius":
        projectors = projectors / projectors.flatten(1).norm(dim=1).view(-1, 1, 1)
    for client, upload in uploads.items():
        update = others[client][PROMPT].double().reshape(-1, 3, 64) - start
        moved = upload[PROMPT].double().reshape(-1, 3, 64) - start
        torch.testing.assert_close(moved, update @ projectors, rtol=1e-4, atol=1e-6)


def test_new_clients_fit_their_head_alone() -> None:
    method, data = build("FedPR", *SMALL, "--data.new_clients=0.5", "--data.clients_per_round=2")
    trainer = fit(method, data, 2)
    fitted = trainer.callbacks[0].values[2, "server", "new", "accuracy"]
    assert (~fitted.isnan()).nonzero().flatten().tolist() == data.new_clients


def test_without_prompts_or_singular_values_there_is_nothing_to_project() -> None:
    with pytest.raises(ConfigurationError, match="num_prompts: expected a whole number from 1 to 1,000, got 0"):
        FedPR(3, 2, vit_b(), num_prompts=0)
    for ratio in (0.0, 1.5):
        with pytest.raises(ConfigurationError, match=f"ratio: expected a number above 0 and at most 1, got {ratio}"):
            FedPR(3, 2, vit_b(), ratio=ratio)
