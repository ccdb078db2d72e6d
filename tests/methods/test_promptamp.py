"""Prompt+AMP: the server's attention by a naive loop, and the pull towards the cloud prompt."""

import math

import pytest
import torch
from federation import build
from text_prompts import ONE, alone, client_of, run
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.federation import Round
from benchmark.seeds import torch_generator
from methods.promptamp import CLOUD, PromptAMP, attentive_mean

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def naive_cloud(prompts: Tensor, i: int, alpha_k: float, sigma: float) -> Tensor:
    own, total = torch.zeros_like(prompts[i]), 0.0
    for j in range(len(prompts)):
        if j != i:
            squared = sum(float(d) ** 2 for d in (prompts[i] - prompts[j]).flatten())
            xi = alpha_k * math.exp(-squared / sigma) / sigma
            own += xi * prompts[j]
            total += xi
    return own + (1 - total) * prompts[i]


def test_the_attention_is_that_of_a_naive_loop_and_does_not_depend_on_the_order() -> None:
    prompts = 0.3 * torch.randn(5, 2, 3, generator=torch_generator("prompts"))
    made = torch.stack([attentive_mean(p, prompts, 0.2, 0.9) for p in prompts])
    for i in range(5):
        torch.testing.assert_close(made[i], naive_cloud(prompts, i, 0.2, 0.9))
    order = torch.tensor([3, 0, 4, 1, 2])
    again = torch.stack([attentive_mean(p, prompts[order], 0.2, 0.9) for p in prompts[order]])
    torch.testing.assert_close(again, made[order])
    # Weights that sum to one move with the prompts.
    torch.testing.assert_close(attentive_mean(prompts[1] + 5, prompts + 5, 0.2, 0.9), made[1] + 5)


def test_two_prompts_by_hand() -> None:
    own, other = torch.zeros(1, 1), torch.ones(1, 1)
    # squared distance 1, sigma 2: xi = 0.5 exp(-1/2) / 2
    made = attentive_mean(own, torch.stack([own, other]), 0.5, 2.0)
    assert made.item() == pytest.approx(0.25 * math.exp(-0.5))


def test_equal_prompts_stay_bit_for_bit() -> None:
    prompt = torch.randn(3, 4, generator=torch_generator("prompt"))
    assert torch.equal(attentive_mean(prompt, prompt.expand(7, -1, -1), 0.1, 1.0), prompt)


def test_the_server_sends_each_client_its_cloud_prompt_and_they_keep_their_own() -> None:
    method = run("PromptAMP", rounds=2)
    rows = method.store.all_rows("context")
    message = method.server.rule.broadcast(Round(3, (), 0), {}, tuple(range(11)))
    sent = message.own
    assert (set(message.common), set(sent)) == (set(), {CLOUD})
    for i in range(11):
        torch.testing.assert_close(sent[CLOUD][i], naive_cloud(rows, i, 0.1, 1.0))
    assert (rows - rows.mean(0)).abs().amax((1, 2)).max() > 0.01
    floats = 3 * method.clip.text_width
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == floats


def test_the_pull_has_a_gradient_towards_the_cloud_prompt() -> None:
    method, batch = alone("PromptAMP", "--model.init_args.lam=0.6")
    cloud = method.context.detach() + 0.1 * torch.randn(3, 64, generator=torch_generator("cloud"))
    context = method.context.requires_grad_()
    losses = {lam: lam for lam in (0.0, 0.6)}
    gradients = {}
    for lam in losses:
        method.pull = lam / 0.1
        losses[lam] = method.client_loss(client_of(method, {CLOUD: cloud}, {}), batch)
        (gradients[lam],) = torch.autograd.grad(losses[lam], context)
    away = context.detach() - cloud
    # lambda / (2 alpha_K) = 0.6 / 0.2
    torch.testing.assert_close(losses[0.6] - losses[0.0], 3 * away.square().sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[0.6] - gradients[0.0], 6 * away, rtol=1e-3, atol=1e-4)


def test_without_the_pull_it_is_coop() -> None:
    settings = ["--model.init_args.training.lr=0.03", "--model.init_args.training.momentum=0.5"]
    amp, coop = run("PromptAMP", "--model.init_args.lam=0", *settings), run("CoOp", *settings)
    assert torch.equal(amp.store.all_rows("context"), coop.store.all_rows("context"))
    pulled = run("PromptAMP", *settings)
    assert not torch.equal(pulled.store.all_rows("context"), coop.store.all_rows("context"))


def test_a_client_alone_is_pulled_to_its_own_prompt() -> None:
    method = run("PromptAMP", *ONE)
    sent = method.server.rule.broadcast(Round(3, (), 0), {}, (0,)).own
    assert torch.equal(sent[CLOUD][0], method.store.all_rows("context")[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha_k": 1.0}, r"alpha_k must be at most sigma / \(N - 1\) = 0.1"),
        ({"alpha_k": 0.0}, "alpha_k: expected a number above 0, got 0.0"),
        ({"sigma": -1.0}, "sigma: expected a number above 0, got -1.0"),
    ],
)
def test_constants_that_make_no_mean_are_refused(settings: dict[str, float], message: str) -> None:
    clip = build("PromptFL")[0].clip
    with pytest.raises(ConfigurationError, match=message):
        PromptAMP(11, ["a", "b"], clip, num_context=2, **settings)
