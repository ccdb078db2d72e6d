import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import EACH_ROUND, build, fit, learned
from lightning.pytorch.callbacks import Callback
from oracle import Images, images_at, mini_batches

from benchmark.checks.outcome import require_equal
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads
from methods.generator_rule import GeneratorRule, generator_objective
from methods.prompt_generators import AdaINGenerator, CrossAttentionGenerator, MLPGenerator

K, WIDTH, CLIENTS = 3, 6, 4


def tensors(seed: int = 0, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(K, WIDTH, generator=generator), torch.randn(CLIENTS, rows, WIDTH, generator=generator)


def generators() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    prompt, descriptors = tensors()
    return {
        "cross_attention": CrossAttentionGenerator(prompt, descriptors, "xavier"),
        "cross_attention K rows": CrossAttentionGenerator(prompt, tensors(rows=K)[1], "xavier"),
        "adain": AdaINGenerator(prompt, descriptors),
        "mlp": MLPGenerator(K, descriptors),
    }


def test_cross_attention_by_hand() -> None:
    base = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    made = CrossAttentionGenerator(base.clone(), torch.tensor([[[1.0, 0.0]]]), "xavier")
    for matrix, value in (("w_q", 1.0), ("w_k", 1.0), ("w_v", 2.0), ("w_o", 3.0)):
        getattr(made, matrix).data = value * torch.eye(2)
    # Scores (1, 0) / sqrt(2); the attended row is the weights themselves, since P_base is the identity.
    a = math.exp(1 / math.sqrt(2))
    row = torch.tensor([a / (a + 1), 1 / (a + 1)]) * 6
    torch.testing.assert_close(made(0), base + row)


def test_read_literally_all_rows_are_shifted_alike_and_with_k_rows_they_are_not() -> None:
    made = generators()
    shift = made["cross_attention"](1) - made["cross_attention"].base
    torch.testing.assert_close(shift, shift[:1].expand(K, -1))
    own = made["cross_attention K rows"](1) - made["cross_attention K rows"].base
    assert (own - own[:1]).abs().max() > 1e-3


def test_a_zero_output_matrix_starts_at_the_base_prompt() -> None:
    prompt, descriptors = tensors()
    assert torch.equal(CrossAttentionGenerator(prompt, descriptors, "zero")(2), prompt)


def test_adain_takes_mean_and_deviation_from_the_descriptor() -> None:
    made = generators()["adain"]
    style, prompt = made.descriptors[1, 0], made(1)
    torch.testing.assert_close(prompt.mean(1), style.mean().expand(K))
    torch.testing.assert_close(prompt.std(1, correction=0), style.std(correction=0).expand(K), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["cross_attention", "cross_attention K rows", "adain", "mlp"])
def test_every_generator_makes_k_different_prompts_for_every_client(name: str) -> None:
    made = generators()[name]
    prompts = [made(client) for client in range(CLIENTS)]
    assert all(p.shape == (K, WIDTH) for p in prompts)
    assert all((a - b).abs().max() > 1e-5 for a in prompts for b in prompts if a is not b)


def server_step(sign: str, lr: float = 0.01, reduction: str = "sum", clients: tuple[int, ...] = (0, 1, 2, 3)) -> tuple:
    server = GeneratorRule(lr=lr, sign=sign, reduction=reduction)  # type: ignore[arg-type]
    server.generator = generators()["cross_attention"]
    server.optimizer = torch.optim.SGD(server.generator.parameters(), lr=lr)
    before = {n: p.detach().clone() for n, p in server.generator.named_parameters()}
    old = [p.detach() for p in server.generate(clients)]
    delta = [torch.randn(K, WIDTH, generator=torch.Generator().manual_seed(c)) * 0.1 for c in clients]
    changed = torch.stack([p + d for p, d in zip(old, delta, strict=True)])
    uploads = Uploads(clients, {"prompt.tokens": changed}, torch.ones(len(clients)))
    assert server.aggregate(Round(1, clients, 0), {}, uploads) == {}
    moved = {n: p.detach() - before[n] for n, p in server.generator.named_parameters()}
    new = [p.detach() for p in server.generate(clients)]
    return moved, old, new, delta, before


@pytest.mark.parametrize("surrogate", ["inner product", "squared distance"])
def test_the_server_step_is_autograds_on_both_surrogates(surrogate: str) -> None:
    moved, old, _, delta, _ = server_step("toward")
    fresh = generators()["cross_attention"]
    prompts = [fresh(c) for c in range(CLIENTS)]
    if surrogate == "inner product":
        loss = -sum((p * d).sum() for p, d in zip(prompts, delta, strict=True))
    else:
        loss = 0.5 * sum(((p - (o + d)) ** 2).sum() for p, o, d in zip(prompts, old, delta, strict=True))
    gradients = torch.autograd.grad(loss, list(fresh.parameters()))
    for (name, _), gradient in zip(fresh.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(moved[name], -0.01 * gradient, rtol=1e-4, atol=1e-7)


def test_the_server_step_is_the_jacobian_product_of_equation_5() -> None:
    moved, _, _, delta, before = server_step("toward")
    fresh = generators()["cross_attention"]
    for name in ("base", "w_o", "w_q"):
        total = torch.zeros_like(before[name])
        for client in range(CLIENTS):
            jacobian = torch.autograd.functional.jacobian(
                lambda value, c=client, n=name: torch.func.functional_call(fresh, {n: value}, (c,)), before[name]
            )
            total += torch.einsum("kw,kw...->...", delta[client], jacobian)
        torch.testing.assert_close(moved[name], 0.01 * total, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("sign", "direction"), [("toward", 1), ("as_printed", -1)])
def test_the_sign_moves_prompts_towards_or_away_from_the_adapted_ones(sign: str, direction: int) -> None:
    _, old, new, delta, _ = server_step(sign, lr=1e-3)
    gain = sum(((n - o) * d).sum().item() for n, o, d in zip(new, old, delta, strict=True))
    assert direction * gain > 0


def test_mean_is_the_sum_over_the_number_of_clients() -> None:
    summed, averaged = server_step("toward")[0], server_step("toward", reduction="mean")[0]
    for name, value in summed.items():
        torch.testing.assert_close(averaged[name], value / CLIENTS, rtol=1e-4, atol=1e-7)


def test_only_a_participants_descriptor_moves() -> None:
    moved = server_step("toward", clients=(1, 3))[0]["descriptors"]
    assert moved[[1, 3]].abs().amax((1, 2)).min() > 0
    assert not moved[[0, 2]].any()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_descriptor_rests_in_rounds_without_its_client(optimizer: str) -> None:
    method, data = build(
        "PFedPG",
        f"--model.init_args.server_optimizer={optimizer}",
        "--model.init_args.server_lr=0.01",
        "--data.clients_per_round=2",
    )
    seen: list[torch.Tensor] = []

    class Watching(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(pl_module.server.rule.generator.descriptors.detach().clone())

    trainer = fit(method, data, 4, callbacks=[Watching()])
    rule = trainer.lightning_module.server.rule
    for number, (before, after) in enumerate(pairwise(seen), start=2):
        moved = (after - before).abs().amax((1, 2)).nonzero().flatten().tolist()
        assert moved == list(rule.select(number))


def test_what_a_generator_cannot_take_is_refused_before_any_round() -> None:
    with pytest.raises(ConfigurationError, match=r"descriptor_tokens=2, but .* each of the 3 prompts: give 1 or 3"):
        fit(*build("PFedPG", "--model.init_args.descriptor_tokens=2", "--model.init_args.num_prompts=3"), 1)
    with pytest.raises(ConfigurationError, match="broadcast_base sends P_base, and generator=mlp has none"):
        fit(*build("PFedPG", "--model.init_args.generator=mlp", "--model.init_args.broadcast_base=true"), 1)
    with pytest.raises(ConfigurationError, match=r"descriptor_tokens=7 is of generator=cross_attention; .* with mlp"):
        fit(*build("PFedPG", "--model.init_args.generator=mlp", "--model.init_args.descriptor_tokens=7"), 1)
    with pytest.raises(ConfigurationError, match=r"wo_init=zero is of generator=cross_attention; .* with adain"):
        fit(*build("PFedPG", "--model.init_args.generator=adain", "--model.init_args.wo_init=zero"), 1)


def test_objective_by_hand() -> None:
    p = torch.tensor([[1.0, 2.0]], requires_grad=True)
    objective = generator_objective([p], [torch.tensor([[2.0, 0.0]])], 1.0)
    assert objective.item() == -(1 * 1 + 2 * -2)
    objective.backward()
    assert p.grad is not None
    assert p.grad.tolist() == [[-1.0, 2.0]]


def test_one_client_and_an_idle_server_are_vpt_restarted_every_round() -> None:
    one = [
        "--data.partition.init_args.num_clients=1",
        "--data.clients_per_round=1",
        "--model.init_args.training.epochs=1",
    ]
    method, data = build("PFedPG", *one, "--model.init_args.server_lr=0", "--model.init_args.broadcast_base=true")
    start = method.prompt.tokens.detach().clone()
    fit(method, data, 1)
    vpt, data = build("FedVPT", *one)
    assert torch.equal(vpt.prompt.tokens, start)
    fit(vpt, data, 1)
    assert torch.equal(method.store.all_rows("last.prompt.tokens")[0], vpt.get_parameter("prompt.tokens"))
    assert torch.equal(method.server.rule.generate([0])[0].detach(), start)


@pytest.mark.parametrize("generator", ["cross_attention", "mlp", "adain"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_generator_learns_and_is_restored(generator: str, optimizer: str, tmp_path: object) -> None:
    arguments = [f"--model.init_args.generator={generator}", f"--model.init_args.server_optimizer={optimizer}"]
    method, data = build("PFedPG", *arguments)
    fit(method, data, 2, save_to=tmp_path)  # type: ignore[arg-type]
    resumed, data = build("PFedPG", *arguments)
    fit(resumed, data, 2, ckpt_path=f"{tmp_path}/checkpoints/last.ckpt")
    fresh, data = build("PFedPG", *arguments)
    fit(fresh, data, 0)
    for name, value in method.server.rule.generator.state_dict().items():
        assert torch.equal(value, resumed.server.rule.generator.state_dict()[name])
    assert any(
        not torch.equal(value, fresh.server.rule.generator.state_dict()[name])
        for name, value in method.server.rule.generator.state_dict().items()
    )


NEW = ["--data.new_clients=0.3", "--data.clients_per_round=4", "--model.init_args.training.epochs=1"]


def adapted_by_hand(method: Any, data: Any, client: int) -> float:
    """Test loss of a client that never trains, with autograd alone."""
    generator = copy.deepcopy(method.server.rule.generator)
    fresh, _ = build("PFedPG")
    head = fresh.head.requires_grad_(True)
    batches = list(mini_batches(data, client, 0, 1, 1, 1, 1, 1, 5, stage="adapt"))

    def loss(prompt: torch.Tensor, batch: Images) -> torch.Tensor:
        return F.cross_entropy(head(method.backbone(batch.x, prompt)), batch.y)

    for phase in range(6):
        received = generator(client).detach()
        prompt = received.clone().requires_grad_(phase < 5)
        trained = [*head.parameters(), *([prompt] if phase < 5 else [])]
        optimizer = torch.optim.SGD(trained, lr=0.02, momentum=0.9, weight_decay=1e-3)
        for batch in (b for b in batches if b.phase == phase):
            optimizer.zero_grad()
            loss(prompt, batch).backward()
            optimizer.step()
        if phase < 5:
            agreement = (generator(client) * (prompt - received).detach()).sum()
            (gradient,) = torch.autograd.grad(agreement, generator.descriptors)
            with torch.no_grad():
                generator.descriptors[client] += 0.5 * gradient[client]
    return loss(generator(client).detach(), images_at(data, data.splits.test[client])).item()


def test_a_new_clients_descriptor_takes_five_steps_while_the_generator_rests() -> None:
    method, data = build("PFedPG", *NEW)
    trainer = fit(method, data, 1)
    recorded = trainer.callbacks[0].values[1, "server", "new", "loss"]
    for client in data.new_clients:
        assert recorded[client].item() == pytest.approx(adapted_by_hand(method, data, client), rel=1e-4)


def test_a_new_client_is_fitted_at_the_rates_of_the_first_round() -> None:
    """It comes when training is over, where a schedule has brought the rates to nothing."""
    method, _ = build("PFedPG", *NEW, "--model.init_args.training.schedule=cosine")
    phases = method.finetune_phases(new=True)
    assert len(phases) == 6
    assert {phase.schedule for phase in phases} == {"constant"}


def test_nothing_of_a_new_client_outlives_its_evaluation() -> None:
    arguments = [*NEW, "--model.init_args.server_optimizer=adam"]
    results = []
    for width, adapts in ((1, True), (3, True), (3, False)):
        method, data = build("PFedPG", *arguments, f"--data.clients_at_once={width}")
        if not adapts:
            method.finetune_phases = lambda new: []
        # New clients are evaluated before this round, too. In float64: some processors round by the number of rows.
        fit(method, data, 1, settings={**EACH_ROUND, "precision": "64-true"})
        assert not hasattr(method.server.rule, "_adapting")
        results.append(learned(method))
    narrow, wide, unfitted = results
    loss = "metric.1/server/new/loss"
    assert not torch.allclose(wide[loss], unfitted[loss], equal_nan=True)
    require_equal(narrow, wide, "a new client depends on those evaluated with it", tolerance=1e-11)
    old = [{name: value for name, value in found.items() if "/new/" not in name} for found in (wide, unfitted)]
    require_equal(*old, "what a new client has fitted outlives its evaluation")


def test_the_base_prompt_has_no_descriptor_to_fit() -> None:
    method, data = build("PFedPG", *NEW, "--model.init_args.broadcast_base=true")
    fit(method, data, 1)
    (phase,) = method.finetune_phases(new=True)
    assert [group.parameters for group in phase.groups] == [("head",)]
    assert phase.epochs == 5
