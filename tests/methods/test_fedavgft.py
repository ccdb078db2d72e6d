"""Fine-tuning a copy before the evaluation: what moves, by how much, and that the federation does not notice."""

from typing import Any

import pytest
import torch
from federation import EACH_ROUND, build, fit, learned

from benchmark.errors import ConfigurationError
from methods import FedAvgFT

PROMPT = (
    "--model.init_args.visual_prompt=benchmark.backbones.pixel_prompts.PaddingPrompt",
    "--model.init_args.visual_prompt.init_args={size: 3, image_size: 16, training: {lr: 1.0, epochs: 1}}",
)
NEW = ("--data.new_clients=0.2", "--data.clients_per_round=5")


def run(conf: str, *overrides: str, rounds: int = 1) -> tuple[Any, Any, dict[Any, torch.Tensor]]:
    """Method, data and scores of a run."""
    method, data = build(conf, *NEW, *overrides)
    return method, data, fit(method, data, rounds, settings=EACH_ROUND).callbacks[0].values


def test_the_heads_fine_tuning_is_gradient_descent_on_the_clients_own_images() -> None:
    method, data, scores = run(
        "FedAvgFT",
        "--data.batch_size=32",  # whole batches
        "--model.init_args.finetuned=head",
        "--model.init_args.finetuning={lr: 0.5, epochs: 3}",
    )
    for split, client in (("new", data.new_clients[0]), ("new", data.new_clients[1]), ("test", 7)):
        rows = torch.from_numpy(data.train_indices[client])
        x, y = data.transform(data.pool.images[rows], None), data.pool.labels[rows]
        features = method.backbone(x).detach()
        weight, bias = method.head.weight.clone(), method.head.bias.clone()
        for _ in range(3):
            error = ((features @ weight.T + bias).softmax(1) - torch.eye(8)[y]) / len(y)
            weight, bias = weight - 0.5 * error.T @ features, bias - 0.5 * error.sum(0)
        held = torch.from_numpy(data.held_out[split][client])
        x, y = data.transform(data.pool.images[held], None), data.pool.labels[held]
        logits = method.backbone(x).detach() @ weight.T + bias
        assert scores[1, "server", split, "accuracy"][client] == pytest.approx(
            (logits.argmax(1) == y).double().mean().item()
        )
        assert scores[1, "server", split, "loss"][client].item() == pytest.approx(
            torch.nn.functional.cross_entropy(logits, y).item(), rel=1e-4
        )


def test_with_a_prompt_the_federation_is_pfedpts_and_no_epoch_leaves_its_scores() -> None:
    same = [*PROMPT, "--model.init_args.training={epochs: 1, lr: 0.02}"]
    theirs, _, expected = run("PFedPT", *same, rounds=2)
    for epochs in (0, 3):
        finetuning = f"--model.init_args.finetuning={{lr: 1.0, momentum: 0.5, epochs: {epochs}}}"
        ours, _, scores = run("FedAvgFT", *same, "--model.init_args.finetuned=prompt", finetuning, rounds=2)
        kept = {name: value for name, value in learned(theirs).items() if not name.startswith("metric.")}
        assert all(torch.equal(learned(ours)[name], value) for name, value in kept.items())
        loss = (2, "server", "new", "loss")
        assert torch.allclose(scores[loss], expected[loss], equal_nan=True) == (epochs == 0)


def test_only_the_chosen_part_is_fine_tuned() -> None:
    for part, expected in (("all", {"backbone", "head"}), ("head", {"head"}), ("prompt", {"visual_prompt"})):
        method, _ = build("FedAvgFT", *PROMPT, f"--model.init_args.finetuned={part}")
        for new in (True, False):
            groups = [group for phase in method.finetune_phases(new) for group in phase.groups]
            assert {name for group in groups for name in group.parameters} == expected


def test_a_prompt_that_is_not_there_is_not_fine_tuned() -> None:
    with pytest.raises(ConfigurationError, match="finetuned=prompt needs a prompt on the pixels, which is not there"):
        FedAvgFT(8, 11, build("FedAvg")[0].backbone, finetuned="prompt")


def test_a_rate_that_follows_the_rounds_is_refused() -> None:
    method, data = build("FedAvgFT", "--model.init_args.finetuning.schedule=cosine")
    with pytest.raises(ConfigurationError, match=r"FedAvgFT\.finetune_phases .* follows a cosine .*='constant'"):
        fit(method, data, 1)
