"""pFedBayesPT: the encoder against torch's layers, the invariants of the objective, messages, prompts, gradients."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit
from torch import Tensor, nn

from benchmark.contract import Client, LocalTraining, MiniBatch, Stage
from benchmark.engine.roles import names_under
from benchmark.errors import ConfigurationError
from benchmark.federation import Round
from methods.losses import cross_entropy
from methods.pfedbayespt import PFedBayesPT
from methods.prompt_encoder import PromptEncoder
from methods.variational import gaussian_kl, log_gaussian, log_standard_gaussian

B, C = 5, 8
THREE = ["--data.partition.init_args.num_clients=3", "--data.clients_per_round=3"]
ONCE = "--model.init_args.training.epochs=1"
SIX_LAYERS = "--model.init_args.backbone.init_args.depth=6"
NO_CLIENT = Client({}, {}, torch.zeros(0), Round(1, (), 0))


def made(**arguments: Any) -> PFedBayesPT:
    """A method on the tiny ViT (6 layers of width 64, 5 tokens) whose every trained value is random."""
    template, _ = build("PFedBayesPT", SIX_LAYERS)
    method = PFedBayesPT(C, 11, template.backbone, **{"num_prompts": 2, "hidden": 4, **arguments})
    generator = torch.Generator().manual_seed(0)
    for name in names_under(method, (*method.shared, *method.personal)):
        value = method.get_parameter(name)
        value.data = 0.3 * torch.randn(value.shape, generator=generator)
    return method.eval()


def step(method: PFedBayesPT, stage: Stage = Stage.TRAIN, seed: int = 0) -> MiniBatch:
    """A step's mini-batch of images, features and noise; its last row is padding."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, 3, 32, 32, generator=generator)
    y = torch.randint(0, C, (B,), generator=generator)
    y[-1] = -100
    noise = method.draw_noise(torch.Generator().manual_seed(seed), B, stage)
    with torch.no_grad():
        features = method.frozen_features(x)
    return MiniBatch(x, y, torch.arange(B) < B - 1, noise=noise, features=features)


def loss_of(method: PFedBayesPT, batch: MiniBatch) -> tuple[Tensor, dict[str, Tensor]]:
    client = replace(NO_CLIENT, prepared=method.prepare(NO_CLIENT, Stage.TRAIN, "train"))
    return method.client_loss(client, batch)


# -------------------------------------------------------------------------------------------- encoder


def naive_mlp(mlp: nn.Module, layer: int, tokens: Tensor) -> Tensor:
    """One layer's perceptron as torch's linear layers on the transposed tokens [T, d]."""
    first, second = ({n: p[layer, 0] for n, p in mlp.named_parameters() if n.endswith(i)} for i in "12")
    hidden = F.gelu(F.linear(tokens.T, first["weight1"], first["bias1"].squeeze(-1)))
    return F.linear(hidden, second["weight2"], second["bias2"].squeeze(-1)).T


def test_the_encoder_is_a_layer_norm_of_masked_tokens_and_two_perceptrons() -> None:
    L, T, d, nu, R = 3, 7, 16, 2, 4
    encoder = PromptEncoder(L, T, d, 5, nu, True)
    generator = torch.Generator().manual_seed(0)
    for value in encoder.parameters():
        value.data = torch.randn(value.shape, generator=generator)
    features = 3 + 2 * torch.randn(B, L, T, d, generator=generator)
    masks = torch.rand(R, B, L, T, generator=generator) < 0.6
    mean, log_std = encoder(features, masks)
    assert mean.shape == log_std.shape == (R, B, L, nu, d)
    torch.testing.assert_close(encoder.means(features, masks), mean)
    for layer in range(L):
        scale, shift = encoder.scale[layer, 0], encoder.shift[layer, 0]
        for r in range(R):
            for b in range(B):
                masked = features[b, layer] * masks[r, b, layer].unsqueeze(-1)
                normed = F.layer_norm(masked, (d,), scale, shift)
                expected = naive_mlp(encoder.mean, layer, normed)
                torch.testing.assert_close(mean[r, b, layer], expected, rtol=1e-4, atol=1e-4)
                std = torch.exp(0.5 * naive_mlp(encoder.log_variance, layer, normed))
                torch.testing.assert_close(log_std[r, b, layer].exp(), std, rtol=1e-3, atol=1e-4)


def test_it_starts_at_the_prior() -> None:
    method, _ = build("PFedBayesPT", SIX_LAYERS)
    batch = step(method)
    mean, log_std = method.encoder(batch.features["tokens"], batch.noise["masks"])
    assert torch.equal(log_std, torch.zeros_like(log_std)), "Sigma is 1"
    assert 0 < mean.abs().max() < 0.02


def test_message_and_encoder_of_vit_b_16_have_the_published_sizes() -> None:
    from benchmark.backbones.vit import TimmViT

    with torch.device("meta"):
        method = PFedBayesPT(100, 1, TimmViT("vit_base_patch16_224", "random"))
        both = PFedBayesPT(100, 1, method.backbone, head="global")
        mean_alone = PFedBayesPT(100, 1, method.backbone, posterior="deterministic")
        shallower = PFedBayesPT(100, 1, method.backbone, global_depth=3, instance_depth=2, instance_prompts=4)

    def floats(of: PFedBayesPT, *prefixes: str) -> int:
        return sum(of.get_parameter(name).numel() for name in names_under(of, prefixes))

    assert floats(method, "encoder") == 12 * 27_010 == 324_120
    assert floats(method, *method.shared) == 416_280
    assert floats(both, *both.shared) == 416_280 + 76_900
    assert floats(mean_alone, *mean_alone.shared) == 416_280 - 12 * (197 * 64 + 64 + 64 + 1)
    assert floats(shallower, *shallower.shared) == 3 * 7_680 + 2 * (1_536 + 2 * (197 * 64 + 64 + 4 * 64 + 4))


@pytest.mark.parametrize("head", ["personal", "global"])
def test_a_message_holds_prompts_and_encoder_and_the_head_if_it_is_global(head: str) -> None:
    method, data = build("PFedBayesPT", SIX_LAYERS, f"--model.init_args.head={head}", ONCE, *THREE)
    fit(method, data, 1)
    G = 2 * 64 + 2 * (5 * 4 + 4 + 4 + 1)
    floats = 6 * (2 * 64 + G) + (64 * C + C if head == "global" else 0)
    sent = method.server.traffic.per_client()
    assert sent["up_floats"] == sent["down_floats"] == floats
    assert sent["up_bytes"] == 4 * floats
    assert method.roles.personal == (() if head == "global" else ("head.weight", "head.bias"))


# -------------------------------------------------------------------------------------------- objective


def sampled_elbo(method: PFedBayesPT, batch: MiniBatch, mean: Tensor, log_std: Tensor) -> Tensor:
    """CE + weight (log q(p|psi) - log p(p)) of the first prompt drawn, mean over the images."""
    prompts = mean[0] + log_std[0].exp() * batch.noise["eps"][0]
    logits = method.head(method.backbone(batch.x, method.prompt(), prompts))
    p, mean, log_std = (part.flatten(1) for part in (prompts, mean[0], log_std[0]))
    kl = log_gaussian(p, mean, log_std) - log_standard_gaussian(p)
    return cross_entropy(logits, batch.y, batch.mask) + method.kl_weight * kl[:-1].mean()


def test_without_mixing_draws_it_is_the_one_sample_elbo() -> None:
    method = made(mixing_draws=0, kl_weight=0.5)
    batch = step(method)
    mean, log_std = method.encoder(batch.features["tokens"], batch.noise["masks"])
    loss, parts = loss_of(method, batch)
    torch.testing.assert_close(loss, sampled_elbo(method, batch, mean, log_std), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(parts["cross_entropy"] + 0.5 * parts["kl"], loss, rtol=1e-5, atol=1e-3)


def test_one_mixing_draw_by_the_formula() -> None:
    method = made()
    batch = step(method)
    mean, log_std = method.encoder(batch.features["tokens"], batch.noise["masks"])
    own = sampled_elbo(method, batch, mean, log_std)
    p = (mean[0] + log_std[0].exp() * batch.noise["eps"][0]).flatten(1)
    log_q = [log_gaussian(p, mean[i].flatten(1), log_std[i].flatten(1)) for i in (0, 1)]
    expected = own + (torch.logaddexp(*log_q) - math.log(2) - log_q[0])[:-1].mean()
    torch.testing.assert_close(loss_of(method, batch)[0], expected, rtol=1e-5, atol=1e-3)
    assert loss_of(method, batch)[0] >= own - math.log(2) - 1e-3


@pytest.mark.parametrize("S", [0, 1, 3])
def test_without_masks_every_draw_is_the_same_and_it_is_the_gaussian_elbo(S: int) -> None:
    method, gaussian = made(keep=1.0, mixing_draws=S), made(posterior="gaussian")
    batch = step(method)
    assert batch.noise["masks"].all()
    mean, log_std = method.encoder(batch.features["tokens"], batch.noise["masks"])
    assert mean.shape[0] == S + 1
    torch.testing.assert_close(mean, mean[:1].expand_as(mean))
    loss, parts = loss_of(method, batch)
    torch.testing.assert_close(loss, sampled_elbo(method, batch, mean, log_std), rtol=1e-5, atol=1e-3)
    _, exact = loss_of(gaussian, replace(batch, noise={"eps": batch.noise["eps"]}))
    torch.testing.assert_close(parts["cross_entropy"], exact["cross_entropy"], rtol=1e-5, atol=1e-5)
    kl = gaussian_kl(mean[0].flatten(1), log_std[0].flatten(1))[:-1].mean()
    torch.testing.assert_close(exact["kl"], kl)


def test_the_mean_of_the_sampled_kl_is_that_of_the_gaussian() -> None:
    method, gaussian = made(keep=1.0, mixing_draws=0), made(posterior="gaussian")
    batch = step(method)
    values = [loss_of(method, replace(batch, noise=step(method, seed=s).noise))[1]["kl"] for s in range(30)]
    sampled = torch.stack(values)
    exact = loss_of(gaussian, replace(batch, noise={"eps": batch.noise["eps"]}))[1]["kl"]
    assert abs(sampled.mean() - exact) < 4 * sampled.std() / math.sqrt(len(sampled))


def test_copies_of_one_sample_are_one_sample() -> None:
    one, four = made(mixing_draws=0), made(mixing_draws=0, importance_samples=4)
    batch = step(one)
    noise = {name: value.expand(4, *value.shape[1:]) for name, value in batch.noise.items()}
    loss, parts = loss_of(one, batch)
    again, same = loss_of(four, replace(batch, noise=noise))
    torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(same, parts, rtol=1e-5, atol=1e-3)


def test_all_prompts_of_a_step_in_one_pass_equal_one_pass_for_each() -> None:
    method = made(importance_samples=3)
    batch = step(method)
    prompts = torch.randn(3, B, *method.prompt_shape, generator=torch.Generator().manual_seed(5))
    together = method._logits(batch.features["tokens"], prompts)
    for j in range(3):
        alone = method.head(method.backbone(batch.x, method.prompt(), prompts[j]))
        torch.testing.assert_close(together[j], alone, rtol=1e-4, atol=1e-5)


def test_deterministic_is_cross_entropy_of_the_mean_prompts() -> None:
    method = made(posterior="deterministic")
    batch = step(method)
    assert batch.noise == {}
    loss, parts = loss_of(method, batch)
    torch.testing.assert_close(loss, cross_entropy(method(batch.x), batch.y, batch.mask))
    assert set(parts) == {"cross_entropy"}
    assert not [name for name, _ in method.named_parameters() if "variance" in name]


@pytest.mark.parametrize("posterior", ["semi_implicit", "gaussian"])
def test_without_a_prior_only_the_entropy_counts(posterior: Any) -> None:
    method, with_prior = made(posterior=posterior, prior="none"), made(posterior=posterior)
    batch = step(method)
    mean, log_std = method.encoder(batch.features["tokens"], torch.ones(1, B, 6, 5, dtype=torch.bool))
    if posterior == "semi_implicit":
        psi = [part[0] for part in method.encoder(batch.features["tokens"], batch.noise["masks"])]
        log_prior = log_standard_gaussian((psi[0] + psi[1].exp() * batch.noise["eps"][0]).flatten(1))
    else:
        log_prior = -0.5 * (mean**2 + torch.exp(2 * log_std) + math.log(2 * math.pi))[0].flatten(1).sum(1)
    difference = loss_of(with_prior, batch)[0] - loss_of(method, batch)[0]
    torch.testing.assert_close(difference, -log_prior[:-1].mean(), rtol=1e-4, atol=1e-2)


def test_padding_changes_nothing() -> None:
    method = made(kl_weight=0.1)
    batch = step(method)
    features = {"tokens": batch.features["tokens"].clone()}
    features["tokens"][-1] = 100.0
    torch.testing.assert_close(loss_of(method, batch), loss_of(method, replace(batch, features=features)))


def test_gradients_flow_through_the_prompt_and_both_draws_of_its_parameters() -> None:
    method = made()
    for mlp in (method.encoder.mean, method.encoder.log_variance):
        mlp.weight2.data *= 0.05  # psi and psi~ close to each other, so that neither density vanishes
    batch = step(method)
    gradients = {}
    for cut in ("nothing", "psi", "psi~"):
        encode = method.encoder.forward

        def detached(features: Tensor, masks: Tensor, cut: str = cut, encode: Any = encode) -> tuple[Tensor, Tensor]:
            row = {"nothing": -1, "psi": 0, "psi~": 1}[cut]
            keep = torch.arange(2).view(2, 1, 1, 1, 1) != row
            mean, log_std = (torch.where(keep, part, part.detach()) for part in encode(features, masks))
            return mean, log_std

        method.encoder.forward = detached  # type: ignore[method-assign]
        method.zero_grad()
        loss_of(method, batch)[0].backward()
        method.encoder.forward = encode  # type: ignore[method-assign]
        named = {n: p.grad.clone() for n, p in method.named_parameters() if p.grad is not None}
        gradients[cut] = named
    trained = set(names_under(method, (*method.shared, *method.personal)))
    assert trained <= set(gradients["nothing"])
    assert all(gradients["nothing"][name].abs().max() > 0 for name in trained)
    for cut in ("psi", "psi~"):
        for part in ("encoder.mean.weight2", "encoder.log_variance.weight2"):
            assert not torch.allclose(gradients[cut][part], gradients["nothing"][part])


# ---------------------------------------------------------------------------------- noise, prompts, depth


def test_masks_keep_cls_and_the_given_share_of_the_other_tokens() -> None:
    method = made(importance_samples=4, mixing_draws=3, test_draws=6, instance_prompts=3, instance_depth=4)
    noise = method.draw_noise(torch.Generator().manual_seed(0), 300, Stage.TRAIN)
    assert noise["masks"].shape == (7, 300, 4, 5)
    assert noise["eps"].shape == (4, 300, 4, 3, 64)
    assert noise["masks"][..., 0].all()
    share = noise["masks"][..., 1:].float().mean((1, 3))
    torch.testing.assert_close(share, torch.full((7, 4), 0.9), rtol=0, atol=0.04)
    evaluated = method.draw_noise(torch.Generator().manual_seed(0), 300, Stage.EVALUATE)
    assert set(evaluated) == {"masks"}
    assert evaluated["masks"].shape == (6, 300, 4, 5)
    assert set(made(posterior="gaussian").draw_noise(torch.Generator(), 2, Stage.EVALUATE)) == set()


@pytest.mark.parametrize(("global_depth", "instance_depth"), [(6, 6), (2, 4), (5, 1)])
def test_each_family_is_inserted_in_its_own_first_layers(global_depth: int, instance_depth: int) -> None:
    method = made(global_depth=global_depth, instance_depth=instance_depth, instance_prompts=2, num_prompts=3)
    batch = step(method)
    tokens = batch.features["tokens"]
    assert tokens.shape == (B, instance_depth, 5, 64)
    prompts = method.encoder.means(tokens, torch.ones(1, B, instance_depth, 5, dtype=torch.bool))[0]
    assert prompts.shape == (B, instance_depth, 2, 64)
    vit = method.backbone.vit
    expected = []
    for b in range(B):
        state = vit._pos_embed(vit.patch_embed(batch.x[b : b + 1]))
        cls, own, image, patches = state[:, :1], method.prompt()[:0, 0], prompts[b, :0, 0], state[:, 1:]
        for layer, block in enumerate(vit.blocks):
            own = method.prompt()[layer][None] if layer < global_depth else own
            image = prompts[b, layer][None] if layer < instance_depth else image
            cls, own, image, patches = block(torch.cat([cls, own, image, patches], 1)).split([1, 3, 2, 4], 1)
        expected.append(method.head(vit.norm(cls)[:, 0]))
    torch.testing.assert_close(method(batch.x), torch.cat(expected), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------ prediction


def test_the_prediction_is_the_mean_probability_under_the_mask_draws() -> None:
    method = made(test_draws=4)
    batch = step(method, Stage.EVALUATE)
    tokens, probabilities = batch.features["tokens"], []
    for masks in batch.noise["masks"]:
        prompts = method.encoder(tokens, masks[None])[0][0]
        logits = method.head(method.backbone(batch.x, method.prompt(), prompts))
        probabilities.append(logits.softmax(-1))
    predicted = method.client_logits(NO_CLIENT, batch)
    torch.testing.assert_close(predicted.exp(), torch.stack(probabilities).mean(0), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(probabilities[0], probabilities[1], atol=1e-4)


def test_without_masks_all_draws_predict_the_same() -> None:
    method = made(keep=1.0, test_draws=5)
    batch = step(method, Stage.EVALUATE)
    predicted = method.client_logits(NO_CLIENT, batch)
    torch.testing.assert_close(predicted, method(batch.x).log_softmax(-1), rtol=1e-4, atol=1e-5)
    for posterior in ("gaussian", "deterministic"):
        other = made(posterior=posterior)
        batch = step(other, Stage.EVALUATE)
        torch.testing.assert_close(other.client_logits(NO_CLIENT, batch), other(batch.x).log_softmax(-1))


# ------------------------------------------------------------------------------------------ in a federation


def test_the_weight_of_the_kl_part() -> None:
    def weight(method: PFedBayesPT, number: int, stage: Stage = Stage.TRAIN) -> float:
        client = replace(NO_CLIENT, round=Round(number, (), 0))
        return method.prepare(client, stage, "train")["kl_weight"].item()

    assert weight(made(kl_weight="1/D", instance_depth=3, instance_prompts=2), 1) == pytest.approx(1 / (3 * 2 * 64))
    warming = made(kl_weight=2.0, kl_warmup_rounds=4)
    assert [weight(warming, number) for number in range(1, 7)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    # What is fitted in an evaluation is fitted for the round that comes next.
    assert [weight(warming, number, Stage.ADAPT) for number in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_both_parts_are_recorded_and_the_encoder_has_its_own_rate() -> None:
    method, data = build("PFedBayesPT", "--model.init_args.kl_warmup_rounds=0", *THREE)
    trainer = fit(method, data, 1)
    values = trainer.callbacks[0].values
    loss, ce, kl = (values[1, "local", "train", name] for name in ("loss", "cross_entropy", "kl"))
    torch.testing.assert_close(loss, ce + kl / (6 * 64), rtol=1e-4, atol=1e-4)
    rates = {group.parameters: group.lr for group in method.local_phases()[0].groups}
    assert rates == {("prompt", "head"): 0.02, ("encoder",): 0.01}


@pytest.mark.parametrize(
    "arguments",
    [
        ["posterior=gaussian"],
        ["posterior=deterministic"],
        ["importance_samples=2", "mixing_draws=2", "instance_prompts=2", "global_depth=2", "instance_depth=3"],
    ],
)
def test_other_settings_do_not_depend_on_the_clients_at_once_or_the_cache(arguments: list[str]) -> None:
    results = []
    for width, cached in ((1, "false"), (4, "true")):
        given = [f"--model.init_args.{argument}" for argument in ["training.epochs=1", *arguments]]
        method, data = build(
            "PFedBayesPT", *given, f"--data.clients_at_once={width}", f"--data.cache_features={cached}", *THREE
        )
        fit(method, data, 1)
        results.append({n: method.get_parameter(n).detach().clone() for n in method.roles.shared})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-5)


def test_a_new_client_fits_its_head_alone() -> None:
    method, data = build(
        "PFedBayesPT",
        "--data.new_clients=0.5",
        "--data.partition.init_args.num_clients=3",
        "--data.clients_per_round=1",
    )
    (phase,) = method.finetune_phases(new=True)
    assert ([group.parameters for group in phase.groups], phase.epochs) == ([("head",)], 5)
    trainer = fit(method, data, 1)
    fitted = trainer.callbacks[0].values[1, "server", "new", "accuracy"]
    assert (~fitted.isnan()).nonzero().flatten().tolist() == data.new_clients


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": 0.0}, "keep: expected a number above 0 and at most 1, got 0.0"),
        ({"mixing_draws": -1}, "mixing_draws: expected a whole number from 0 to 1,000, got -1"),
        ({"importance_samples": 0}, "importance_samples: expected a whole number from 1 to 1,000, got 0"),
        ({"global_depth": 7}, "global_depth must be from 1 to 6, the backbone's layers, or null for all; got 7"),
        ({"instance_depth": 0}, "instance_depth: expected a whole number from 1 to 1,000 or null, got 0"),
        ({"kl_weight": -0.1}, "kl_weight: expected a number from 0 on or 1/D, got -0.1"),
        ({"kl_weight": "D"}, "kl_weight: expected a number from 0 on or 1/D, got D"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        made(**arguments)


def test_a_state_has_the_same_scores_whoever_is_tested_together() -> None:
    def scores(*overrides: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        eight = ("--data.partition.init_args.num_clients=8", "--data.val_fraction=0.3")
        method, data = build("PFedBayesPT", *eight, *overrides)
        data.held_out["test"] = {client: rows[: 2 + 4 * (client % 2)] for client, rows in data.held_out["test"].items()}
        trainer = fit(method, data, 0)
        fitted = method.evaluation.scores["server", "test"].loss_sum.clone()
        trainer.test(method, datamodule=data, verbose=False)
        return fitted, method.evaluation.scores["server", "test"].loss_sum

    fitted, tested = scores()
    torch.testing.assert_close(tested, fitted, rtol=1e-4, atol=1e-5)
    for other in scores("--data.one_by_one=true"):
        torch.testing.assert_close(other, fitted, rtol=1e-4, atol=1e-5)


def test_prompts_head_and_encoder_differ_in_their_rate_alone() -> None:
    training = LocalTraining(lr=0.3, momentum=0.7, weight_decay=0.2)
    (phase,) = made(training=training, encoder_lr=0.01).local_phases()
    found = [(group.parameters, group.lr, group.momentum, group.weight_decay) for group in phase.groups]
    assert found == [(("prompt", "head"), 0.3, 0.7, 0.2), (("encoder",), 0.01, 0.7, 0.2)]
