"""Prompts on the pixels: pFedPT, and every method of its paper that can be given one, against plain PyTorch loops."""

import copy
import functools
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import TinyImages, build, fit, learned
from lightning.pytorch.callbacks import Callback
from oracle import Values, federate, mini_batches, values_of
from torch import nn

import methods.moon
from benchmark.backbones.pixel_prompts import PaddingPrompt
from benchmark.contract import Group, LocalTraining, Phase, Stage
from benchmark.engine.roles import names_under
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Uploads
from methods import FedRep, PFedPT

FEW = ["--data.partition.init_args.num_clients=4", "--data.clients_per_round=3"]
SHORT = "--model.init_args.visual_prompt.init_args.training.epochs=1"
ALL = ("FedAvg", "FedProx", "MOON", "FedPer", "FedRep", "FedBABU", "Local", "FedMTL")


def prompt(kind: str = "PaddingPrompt", size: int = 3, image_size: int = 16, **settings: Any) -> str:
    """The argument that gives a method a prompt."""
    arguments = {"size": size, "image_size": image_size, **settings}
    path = f"benchmark.backbones.pixel_prompts.{kind}"
    return "--model.init_args.visual_prompt=" + json.dumps({"class_path": path, "init_args": arguments})


@functools.cache
def run(conf: str, *overrides: str, rounds: int = 2) -> Any:
    """A run of four clients, three a round; made once, for reading."""
    method, data = build(conf, *FEW, *overrides)
    fit(method, data, rounds)
    return method


def prompts_of(method: Any) -> dict[str, torch.Tensor]:
    """Every client's prompt, [N, ...] per part."""
    names = names_under(method, ["visual_prompt"])
    assert names
    return {name: method.store.all_rows(name).clone() for name in names}


def state(method: Any) -> dict[str, torch.Tensor]:
    """Shared values and what clients keep, without the prompt; who has taken part only where there is more."""
    values = {n: method.get_parameter(n).clone() for n in method.roles.shared}
    names = [name for name in method.store.names if "visual_prompt" not in name]
    kept = [] if names == ["participated"] else names
    return values | {f"bank.{n}": method.store.all_rows(n).clone() for n in kept}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    assert left
    for name in left:
        assert torch.equal(left[name], right[name]), name


# ---------------------------------------------------------------- by hand


def contrast(z: torch.Tensor, near: torch.Tensor, far: torch.Tensor, tau: float) -> torch.Tensor:
    """MOON's contrast as it is written down."""
    a, b = (torch.exp(F.cosine_similarity(z, other, dim=1) / tau) for other in (near, far))
    return -(a / (a + b)).log().mean()


def framed(x: torch.Tensor, parts: dict[str, torch.Tensor], p: int) -> torch.Tensor:
    """Images with a frame, by slices."""
    x = x.clone()
    x[:, :, :p] += parts["up"]
    x[:, :, -p:] += parts["down"]
    x[:, :, p:-p, :p] += parts["left"]
    x[:, :, p:-p, -p:] += parts["right"]
    return x


def by_hand(conf: str, rounds: int) -> tuple[Values, list[Values]]:
    """Client after client with whole copies of model and prompt; prompt for 1 epoch, then model for 2."""
    method, data = build(conf, *FEW, prompt(), SHORT)
    data.setup()
    group = method.model_phases()[0].groups[0]
    model = nn.Sequential(method.backbone, method.head)
    start = {n: p.detach().clone() for n, p in method.visual_prompt.named_parameters()}
    prompts = [{n: v.clone() for n, v in start.items()} for _ in range(4)]
    previous = [copy.deepcopy(model) for _ in range(4)]

    def train(client: int, round: int, shared: Values) -> Values:
        local, delta = copy.deepcopy(model), prompts[client]
        local.load_state_dict(shared)
        received = copy.deepcopy(local)
        optimizers = [
            torch.optim.SGD([v.requires_grad_() for v in delta.values()], 1.0, 0.5),
            torch.optim.SGD(local.parameters(), group.lr, group.momentum),
        ]
        for phase, images, y, _ in mini_batches(data, client, round, 1, 2):
            x = framed(images, delta, 3)
            loss = F.cross_entropy(local(x), y)
            if phase == 1 and conf == "FedProx":
                pairs = zip(local.parameters(), received.parameters(), strict=True)
                loss = loss + 0.3 / 2 * sum(((p - q.detach()) ** 2).sum() for p, q in pairs)
            if phase == 1 and conf == "MOON":
                with torch.no_grad():
                    near, far = received[0](x), previous[client][0](x)
                loss = loss + contrast(local[0](x), near, far, 0.5)
            optimizers[phase].zero_grad()
            loss.backward()
            optimizers[phase].step()
        prompts[client] = {n: v.detach() for n, v in delta.items()}
        previous[client] = local
        return values_of(local)

    return federate(method, data, rounds, values_of(model), train), prompts


@pytest.mark.parametrize("conf", ["PFedPT", "FedProx", "MOON"])
def test_agrees_with_a_sequential_simulation(conf: str) -> None:
    shared, prompts = by_hand(conf, 2)
    method = run(conf, prompt(), SHORT)
    for name, value in zip(method.roles.shared, shared.values(), strict=True):
        torch.testing.assert_close(method.get_parameter(name), value, rtol=1e-3, atol=2e-6)
    for name, rows in prompts_of(method).items():
        expected = torch.stack([own[name.removeprefix("visual_prompt.")] for own in prompts])
        torch.testing.assert_close(rows, expected, rtol=1e-3, atol=2e-6)


# ---------------------------------------------------------------- phases


@pytest.mark.parametrize("conf", ALL)
def test_each_phase_trains_its_own_parts_and_nothing_else(conf: str) -> None:
    method, data = build(conf, *FEW, prompt(), SHORT)
    moved: dict[int, set[str]] = {0: set(), 1: set()}

    class Spy(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            take, slots = method.simulation.local_steps.take, method.slots

            def spy(cohort: Any, step: Any, *others: Any) -> None:
                before = {n: v.clone() for n, v in slots.detached().items()}
                take(cohort, step, *others)
                if step.stage is Stage.TRAIN:
                    changed = {n for n, v in before.items() if not torch.equal(v, slots.of(n))}
                    moved[step.phase] |= {n.split(".")[0] for n in changed}

            method.simulation.local_steps.take = spy

    fit(method, data, 2, [Spy()])
    first = {"visual_prompt", "head"} if conf == "FedRep" else {"visual_prompt"}
    second = {"backbone"} if conf in ("FedRep", "FedBABU") else {"backbone", "head"}
    assert moved == {0: first, 1: second}


def test_prompts_start_equal_and_become_each_clients_own() -> None:
    rows = prompts_of(run("PFedPT", rounds=0))
    for value in rows.values():
        assert torch.equal(value, value[:1].expand_as(value))
        assert value.any()
    for value in prompts_of(run("PFedPT", "--data.clients_per_round=4", rounds=1)).values():
        assert all(not torch.equal(value[a], value[b]) for a in range(4) for b in range(a))


def test_fedreps_head_is_trained_at_its_own_rate_beside_the_prompt() -> None:
    method, data = build("FedRep", *FEW, prompt(), SHORT)
    first = method.local_phases()[0]
    assert [(g.parameters, g.lr, g.momentum) for g in first.groups] == [
        (("visual_prompt",), 1.0, 0.5),
        (("head",), 0.05, 0.0),
    ]
    fit(method, data, 1)
    rows = method.store.all_rows("head.weight")
    took_part = method.server.rule.select(1)
    for client in range(4):
        assert torch.equal(rows[client], method.head.weight) == (client not in took_part)


def test_fedrep_refuses_two_lengths_of_its_first_phase() -> None:
    backbone = build("FedAvg")[0].backbone

    def made(training: LocalTraining) -> FedRep:
        prompt = PaddingPrompt(image_size=16, training=training)
        return FedRep(8, 11, backbone, head_training=LocalTraining(0.01, epochs=1), visual_prompt=prompt)

    made(LocalTraining(1.0, epochs=1, momentum=0.9))
    with pytest.raises(ConfigurationError, match=r"FedRep trains prompt and head in one phase.*lr, momentum and"):
        made(LocalTraining(1.0, epochs=3))


# ---------------------------------------------------------------- what a method becomes


def idle_first(method: Any, epochs: int) -> None:
    """Put a phase before the method's own that trains nothing, so that these are numbered as with a prompt.

    The number of a phase is part of the key of the order of its mini-batches.
    """
    own = method.local_phases()
    idle = Phase((Group(own[0].groups[0].parameters[:1], 0.0),), epochs)
    method.local_phases = lambda: [idle, *own]


@pytest.mark.parametrize(
    ("conf", "kind"), [*((conf, "PaddingPrompt") for conf in ("PFedPT", *ALL)), ("FedAvg", "RandomPatchPrompt")]
)
def test_with_an_idle_prompt_of_zeros_it_is_the_plain_method_bit_for_bit(conf: str, kind: str) -> None:
    idle = ["--model.init_args.visual_prompt.init_args.training.lr=0", SHORT]
    prompted = run(conf, prompt(kind, init="zeros"), *idle)
    plain, data = build("FedAvg" if conf == "PFedPT" else conf, *FEW)
    if conf != "FedRep":
        idle_first(plain, epochs=1)
    fit(plain, data, 2)
    assert_same(state(prompted), state(plain))
    assert not any(value.any() for value in prompts_of(prompted).values())
    left, right = ({n: v for n, v in learned(m).items() if "/test/" in n} for m in (prompted, plain))
    assert_same(left, right)


@pytest.mark.parametrize("conf", ["FedProx", "MOON"])
def test_without_mu_it_is_pfedpt_bit_for_bit(conf: str) -> None:
    same = [prompt(), SHORT, "--model.init_args.training.momentum=0.5"]
    method, expected = run(conf, *same, "--model.init_args.mu=0"), run("PFedPT", *same)
    ours, theirs = ({n: m.get_parameter(n) for n in m.roles.shared} for m in (method, expected))
    assert_same(ours, theirs)
    assert_same(prompts_of(method), prompts_of(expected))


@pytest.mark.parametrize(("conf", "mu"), [("FedProx", 0.3), ("FedProx", 5.0), ("MOON", 1.0), ("MOON", 20.0)])
def test_the_prompts_phase_does_not_know_mu(conf: str, mu: float) -> None:
    same = [prompt(), SHORT]
    method = run(conf, *same, f"--model.init_args.mu={mu}", rounds=1)
    assert_same(prompts_of(method), prompts_of(run("PFedPT", *same, rounds=1)))


def test_moons_contrast_is_log_2_at_the_first_participation_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def spy(*arguments: Any) -> torch.Tensor:
        seen.append(original(*arguments))
        return seen[-1]

    original = methods.moon.model_contrast
    monkeypatch.setattr(methods.moon, "model_contrast", spy)
    # One by one: a step that is recorded and repeated calls nobody.
    everybody = [
        *FEW,
        prompt(),
        SHORT,
        "--data.one_by_one=true",
        "--data.clients_at_once=1",
        "--data.clients_per_round=4",
    ]
    method, data = build("MOON", *everybody)
    fit(method, data, 2)
    far = [(values - math.log(2)).abs().max().item() for values in seen]
    assert len(far) % 2 == 0
    first, second = far[: len(far) // 2], far[len(far) // 2 :]
    assert max(first) < 1e-6
    assert max(second) > 1e-4


def test_sharing_fedpers_head_gives_pfedpt_and_without_a_prompt_fedavg() -> None:
    for conf, given in (("PFedPT", (prompt(), SHORT)), ("FedAvg", ())):
        per, data = build("FedPer", *FEW, *given)
        per.shared, per.personal = ("backbone", "head"), ("visual_prompt",) if given else ()
        fit(per, data, 2)
        expected = run(conf, *given)
        assert_same(state(per), state(expected))
        if given:
            assert_same(prompts_of(per), prompts_of(expected))


def test_fedbabus_prompt_rests_while_the_copy_is_fine_tuned() -> None:
    method, _ = build("FedBABU", prompt())
    trained = {p for phase in method.finetune_phases(new=False) for group in phase.groups for p in group.parameters}
    assert trained == {"backbone", "head"}


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("conf", "floats"),
    [("PFedPT", 815_892), ("FedProx", 815_892), ("FedPer", 813_962), ("FedRep", 813_962), ("Local", 0)],
)
def test_messages_have_the_papers_size_and_no_prompt(conf: str, floats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinyImages, "class_names", tuple(f"class{c}" for c in range(10)))
    epochs = ["--model.init_args.training.epochs=1", SHORT]
    cifar = ["--model.init_args.backbone.init_args.image_size=32", "--data.source.init_args.size=32"]
    two = ["--data.partition.init_args.num_clients=2", "--data.clients_per_round=2", "--data.batch_size=16"]
    method, data = build(conf, prompt(size=4, image_size=32), *epochs, *cifar, *two)
    sent: list[str] = []
    rule = method.make_server()
    send, collect = rule.broadcast, rule.aggregate

    def broadcast(*arguments: Any) -> Broadcast:
        made = send(*arguments)
        sent.extend((*made.common, *made.own))
        return made

    def aggregate(round: Round, shared: Values, uploads: Uploads) -> Values:
        sent.extend(uploads.values)
        return collect(round, shared, uploads)

    rule.broadcast, rule.aggregate = broadcast, aggregate
    method.make_server = lambda: rule
    fit(method, data, 1)
    assert sum(p.numel() for p in method.visual_prompt.parameters()) == 1344
    assert method.server.traffic.per_client() == {
        "down_bytes": 4 * floats,
        "up_bytes": 4 * floats,
        "down_floats": floats,
        "up_floats": floats,
    }
    assert set(sent) == set(method.roles.shared)
    assert not any("visual_prompt" in name for name in sent)


def test_pfedpts_default_is_the_papers_frame() -> None:
    backbone, _ = build("FedAvg", "--model.init_args.backbone.init_args.image_size=32")
    method = PFedPT(10, 50, backbone.backbone)
    assert type(method.visual_prompt).__name__ == "PaddingPrompt"
    assert sum(p.numel() for p in method.visual_prompt.parameters()) == 1344
    one, two = method.local_phases()
    assert (one.groups[0].parameters, one.groups[0].lr, one.groups[0].momentum, one.epochs) == (
        ("visual_prompt",),
        1.0,
        0.5,
        5,
    )
    assert (two.groups[0].parameters, two.groups[0].lr, two.groups[0].momentum, two.epochs) == (
        ("backbone", "head"),
        0.005,
        0.0,
        5,
    )


# ---------------------------------------------------------------- other prompts and backbones


@pytest.mark.parametrize("kind", ["FixedPatchPrompt", "RandomPatchPrompt"])
def test_clients_at_once_changes_nothing_with_a_patch(kind: str) -> None:
    one, three = (learned(run("PFedPT", prompt(kind), SHORT, f"--data.clients_at_once={width}")) for width in (1, 3))
    assert one.keys() == three.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, three[name], rtol=2e-5, atol=2e-5, equal_nan=True)


def test_a_random_patch_is_somewhere_else_in_every_step_and_for_every_client() -> None:
    method, data = build(
        "PFedPT", prompt("RandomPatchPrompt"), "--data.clients_per_round=11", "--data.clients_at_once=11"
    )
    corners: dict[Stage, list[torch.Tensor]] = {Stage.TRAIN: [], Stage.EVALUATE: []}
    draw = method.draw_noise

    def spy(generator: torch.Generator, batch_size: int, stage: Stage) -> Values:
        noise = draw(generator, batch_size, stage)
        corners[stage].append(noise["corner"])
        return noise

    method.draw_noise = spy
    fit(method, data, 1)
    for stage, seen in corners.items():
        drawn = torch.stack(seen)
        assert drawn.max() <= 16 - 3 - 1
        assert len(drawn.unique(dim=0)) > 20, stage


BACKBONES = {
    "TinyViT": {"class_path": "benchmark.backbones.tiny_vit.TinyViT", "init_args": {"image_size": 16}},
    "TimmViT": {
        "class_path": "benchmark.backbones.vit.TimmViT",
        "init_args": {"name": "test_vit", "weights": "random", "image_size": 16},
    },
}


@pytest.mark.parametrize("conf", ["PFedPT", *ALL])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_works_with_transformers(conf: str, backbone: str) -> None:
    two = ["--data.partition.init_args.num_clients=2", "--data.clients_per_round=2", "--data.batch_size=16"]
    epochs = ["--model.init_args.training.epochs=1", SHORT]
    given = f"--model.init_args.backbone={json.dumps(BACKBONES[backbone])}"
    method, data = build(conf, given, prompt(), *two, *epochs)
    data.setup()
    method.join(data)
    before = {n: method.get_parameter(n).clone() for n in method.roles.trained}
    fit(method, data, 1)
    for name in method.roles.trained:
        own = name in method.store.names
        after = method.store.all_rows(name) if own else method.get_parameter(name)
        assert after.isfinite().all()
        assert not torch.equal(after, before[name].expand_as(after)), name
