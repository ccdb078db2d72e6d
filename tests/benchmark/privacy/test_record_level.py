"""Record-level privacy in local training: what is clipped, drawn, noised, accounted for, refused and recorded."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import fedprompt
import numpy as np
import pytest
import torch
from federation import StopAfterTwo, build, clients_and_server, fit, terms
from over_ranks import WholeStore, over_ranks
from torch import Tensor, nn

import methods
from benchmark.checks.methods import MethodUnderCheck
from benchmark.checks.outcome import FailedCheck, NotCheckedError
from benchmark.checks.privacy import check_single_images
from benchmark.contract import Client, MiniBatch, Phase, Stage
from benchmark.engine.local_training import schedule_factor
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.engine.plan.work import Step
from benchmark.engine.private_step import ClippedSteps, PrivateSteps
from benchmark.engine.repeat import recorded_step
from benchmark.engine.step_function import AsWritten, Made
from benchmark.errors import ConfigurationError
from benchmark.federation import Round
from benchmark.method import FederatedMethod
from benchmark.privacy import UserLevelPrivacy
from benchmark.privacy.record_level import RecordAccount, RecordLevelPrivacy, Training
from benchmark.ranks.strategy import RanksStrategy
from methods.fedavg import FedAvg
from methods.losses import masked_mean

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")
EVEN = ("--data.partition=Even", "--data.clients_per_round=6")
FEW = ("--data.partition=Few", "--data.clients_per_round=4")
#: A norm that no gradient reaches, and no noise.
PLAIN = "--data.record_privacy={clip: 1e9, noise_multiplier: 0.0, sampling: epochs}"
NOISY = "--data.record_privacy={clip: 0.5, noise_multiplier: 1.0}"

REFUSED = {
    "FOCoOp": "does not say that its loss is a mean over single images",
    "FedMVP": "does not say that its loss is a mean over single images",
    "FedProGrad": "does not say that its loss is a mean over single images",
    "FedRoD": "does not say that its loss is a mean over single images",
    "FedTPG": "does not say that its loss is a mean over single images",
    "FederatedRidge": "does not say that its loss is a mean over single images",
    "HiLoRA": "its phases differ by round",
    "NearestClassMean": "does not say that its loss is a mean over single images",
    "PLAN": "its phases differ by round",
    "PEPFedPT": "does not say that its loss is a mean over single images",
    "PerFedAvg": "does not say that its loss is a mean over single images",
    "SGPT": "its clients upload group_selections",
}
TRAINED = sorted({*methods.__all__} - {"ZeroShotCLIP"})
#: Term that the method's loss has besides one of each image, and options without it.
REGULARISED = {
    "Ditto": ("lam", 0.0),
    "FedProx": ("mu", 0.0),
    "HeadTune --model.init_args.head_mu=0.5": ("head_mu", None),
    "FedMTL": ("mtl_grad", "detached"),
    "PromptProx": ("mu", 0.0),
    "PromptAMP": ("pull", 0.0),
    "FedKgCoOp": ("lam", 0.0),
    "FedPGP": ("contrast_weight", 0.0),
    "FedPHA": ("pull_and_push", lambda client, split, own, shared: 0.0),
    "FedPromptSRC": ("weights", (0.0, 10.0, 1.0)),
}


class OfItsOwn(FedAvg):
    """Pulls images of a mini-batch together, and does not say that this is no loss of each."""

    def model_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return cross-entropy, and how far the images' logits lie apart."""
        return super().model_loss(client, batch) + self(batch.x).var(0, correction=0).sum()


# --- the step ---


class Linear(FederatedMethod):
    """Its loss is the product of its weights and an image, whose gradient is that image."""

    shared = ("w",)
    per_example = True

    def __init__(self) -> None:
        super().__init__(1)
        self.w = nn.Parameter(torch.zeros(2))
        self.pull = 0.0

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        """Return the mean product, and a pull towards ones."""
        return masked_mean(batch.x @ self.w, batch.mask) + self.pull * (self.w - 1).square().sum()

    def regulariser(self, client: Client, phase: int) -> Tensor | None:
        """Return the pull."""
        return self.pull * (self.w - 1).square().sum() if self.pull else None


def summed(images: list[list[float]], mask: list[bool] | None = None, pull: float = 0.0, chunk: int = 8) -> Any:
    """Return sums of clipped gradients and the gradient of the regulariser, of images that are their gradients."""
    method = Linear()
    method.pull = pull
    steps = ClippedSteps(method, None, None, RecordLevelPrivacy(1.0, 0.0), 2, 0)  # type: ignore[arg-type]
    there = torch.tensor([True] * len(images) if mask is None else mask)
    labels = torch.where(there, 0, -100)
    client = Client({"w": method.w}, {}, torch.zeros(1), Round(1, (0,), 0))
    batch = MiniBatch(torch.tensor(images), labels, there)
    _, _, sums, regulariser = steps.summed(client, batch, ("w",), {}, chunk)
    return sums["w"], regulariser.get("w")


def test_each_images_gradient_is_clipped_and_not_their_mean() -> None:
    sums, _ = summed([[6.0, 8.0], [0.6, 0.0]])
    torch.testing.assert_close(sums / 2, torch.tensor([0.6, 0.4]))
    torch.testing.assert_close(sums / 4, torch.tensor([0.3, 0.2]))


def test_padding_and_the_number_of_images_at_once_change_nothing() -> None:
    plain, _ = summed([[6.0, 8.0], [0.6, 0.0], [0.0, -3.0]])
    for chunk in (1, 2, 3):
        padded, _ = summed([[6.0, 8.0], [9e9, -1.0], [0.6, 0.0], [0.0, -3.0]], [True, False, True, True], chunk=chunk)
        torch.testing.assert_close(padded, plain, rtol=1e-6, atol=0)


def test_an_empty_lot_sums_to_nothing() -> None:
    sums, pull = summed([[5.0, 5.0]], [False], pull=0.5)
    assert torch.equal(sums, torch.zeros(2))
    assert torch.equal(pull, torch.tensor([-1.0, -1.0]))


@pytest.mark.parametrize("broken", [math.nan, math.inf, 3e38])
def test_an_image_that_is_not_finite_adds_nothing_and_leaves_nobody_out(broken: float) -> None:
    plain, _ = summed([[6.0, 8.0], [0.6, 0.0]])
    sums, _ = summed([[6.0, 8.0], [broken, 1.0], [0.6, 0.0]])
    assert torch.equal(sums, plain)
    method, client, batch = Linear(), None, None
    steps = ClippedSteps(method, None, None, RecordLevelPrivacy(1.0, 0.0), 2, 0)  # type: ignore[arg-type]
    method.w.data += 1.0
    client = Client({"w": method.w}, {}, torch.zeros(1), Round(1, (0,), 0))
    there = torch.tensor([True, True])
    batch = MiniBatch(torch.tensor([[broken, broken], [1.0, 2.0]]), torch.zeros(2, dtype=torch.int64), there)
    loss = steps.summed(client, batch, ("w",), {}, 2)[0]
    assert loss.item() == pytest.approx(3.0)


def test_another_image_moves_the_sum_by_two_norms_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        images = 4 * torch.randn(5, 2, generator=generator)
        before, _ = summed(images.tolist())
        images[2] = 100 * torch.randn(2, generator=generator)
        after, _ = summed(images.tolist())
        assert (after - before).norm() <= 2 * (1 + 1e-6)


def test_what_reads_no_image_is_neither_clipped_nor_counted_in_the_norm() -> None:
    sums, pull = summed([[6.0, 8.0], [0.6, 0.0]], pull=50.0)
    torch.testing.assert_close(sums, torch.tensor([1.2, 0.8]))
    torch.testing.assert_close(pull, torch.tensor([-100.0, -100.0]))


@pytest.mark.parametrize("conf", sorted({*TRAINED} - {*REFUSED}))
def test_gradients_of_single_images_add_up_to_that_of_a_mini_batch(conf: str) -> None:
    check_single_images(MethodUnderCheck(lambda *options: build(conf, *FEW, *options)))


@pytest.mark.parametrize("conf", ["FedAvg", "FedMTL", "FedPGP", "PFedBayesPT", "PFedPG"])
def test_without_noise_and_a_far_norm_it_is_training_as_usual(conf: str) -> None:
    found = []
    for options in ((), (PLAIN,)):
        method, data = build(conf, *EVEN, "--data.clients_at_once=3", *options)
        fit(method, data, 1, evaluate=False)
        found.append(clients_and_server(method))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=2e-5, msg=name)


def test_a_loss_that_is_none_of_single_images_fails_the_check() -> None:
    def make(*options: str) -> Any:
        method, data = build("FedAvg", *FEW, *options)
        method.__class__ = OfItsOwn
        return method, data

    OfItsOwn.per_example = True
    try:
        with pytest.raises(FailedCheck, match="of single images do not add up to the mini-batch's"):
            check_single_images(MethodUnderCheck(make))
    finally:
        del OfItsOwn.per_example
    with pytest.raises(NotCheckedError, match="does not say per_example"):
        check_single_images(MethodUnderCheck(lambda *options: build("FedRoD", *FEW)))


@pytest.mark.parametrize("conf", sorted(REGULARISED))
def test_what_reads_no_image_is_what_the_loss_has_beside_one_of_each_image(conf: str) -> None:
    option, without = REGULARISED[conf]
    method, data = build(*conf.split(), *EVEN, PLAIN)
    simulation = method.join(data)
    server = method.make_server()
    server.start(method.initial_values(), simulation.terms)
    clients = (1, 4)
    received = server.broadcast(Round(1, clients, 0), simulation.shared(), clients).to(simulation.device)
    cohort = simulation.begin(clients, Stage.TRAIN, Round(1, clients, 0), received)
    phase = simulation.phases[Stage.TRAIN][-1]
    (optimizer,) = simulation.local_steps.optimizers([phase])
    simulation.local_steps.start(phase, optimizer, schedule_factor(phase, 0, 1), {})
    generator = torch.Generator().manual_seed(1)
    for slot in simulation.slots.all().values():
        slot.data += 0.1 * torch.randn(slot.shape, generator=generator)
    number = len(simulation.phases[Stage.TRAIN]) - 1
    plan = RoundPlan(clients, simulation.holdings.train_rows, simulation.terms, [phase], Stage.TRAIN, 2, 1)
    step = replace(plan[0], phase=number)
    batch = replace(simulation.mini_batch(step), phase=number)
    as_written = AsWritten(method, simulation.clients, simulation.slots)
    whole = {n: v.clone() for n, v in as_written(cohort, step, batch).gradients.items() if v is not None}
    clipped = ClippedSteps(method, simulation.clients, simulation.slots, RecordLevelPrivacy(1e-12, 0.0), 4, 0)
    alone = clipped(cohort, step, batch).gradients
    setattr(method, option, without)
    rest = as_written(cohort, step, batch).gradients
    assert max(float(value.abs().max()) for value in alone.values() if value is not None) > 1e-9
    for name, value in whole.items():
        there = rest[name]
        expected = value if there is None else value - there
        torch.testing.assert_close(alone[name], expected, rtol=1e-3, atol=1e-5, msg=name)


def test_the_noise_has_the_size_that_is_accounted_for() -> None:
    method, data = build("FedAvg", *EVEN, "--data.record_privacy={clip: 1.0e-3, noise_multiplier: 2.0}")
    simulation = method.join(data)
    steps = simulation.gradients
    assert isinstance(steps, PrivateSteps)
    zeros = {"w": torch.zeros(3, 20_000), "v": torch.zeros(3, 40, 500)}
    step = Step((0, 1, 2), (0, 1, 2), round=4, number=7)
    with pytest.raises(RuntimeError, match="without an account"):
        steps.noised(step, zeros)
    steps.noise_multiplier = 2.0
    noised = steps.noised(step, zeros)
    for value in noised.values():
        assert value.std().item() == pytest.approx(2e-3 / 4, rel=0.02)  # in batches of four
    assert not torch.equal(noised["w"][0], noised["w"][1])
    alone = steps.noised(replace(step, clients=(1,)), {name: value[:1] for name, value in zeros.items()})
    assert torch.equal(alone["w"][0], noised["w"][1])
    assert not torch.equal(steps.noised(replace(step, number=8), zeros)["w"], noised["w"])


# --- lots ---


def lots(sizes: dict[int, int], batch_size: int, clients: tuple[int, ...], rounds: int) -> list[Step]:
    """Return the steps of some rounds, of clients whose images are numbered from a thousand times their number."""
    largest = max(sizes.values())
    facts = replace(
        terms(len(sizes), batch_size=batch_size, row=min(batch_size, largest)), own_row=largest, poisson_lots=True
    )
    rows = {client: 1000 * client + np.arange(size) for client, size in sizes.items()}
    phases = [Phase((), epochs=2)]
    found = []
    for round in range(1, rounds + 1):
        plan = RoundPlan(clients, rows, facts, phases, Stage.TRAIN, len(clients), round)
        found += [plan[place] for place in range(len(plan.steps))]
    return found


def test_lots_draw_each_image_alike_and_hold_at_most_twice_the_batch() -> None:
    sizes = {0: 40, 1: 7, 2: 3}
    steps = lots(sizes, 5, (0, 1, 2), 300)
    assert {step.mask.shape[1] for step in steps if step.mask is not None} == {10}
    drawn: dict[int, list[Tensor]] = {client: [] for client in sizes}
    for step in steps:
        assert step.index is not None
        assert step.mask is not None
        for row, client in enumerate(step.clients):
            own = step.index[row][step.mask[row]]
            assert ((own >= 1000 * client) & (own < 1000 * client + sizes[client])).all()
            assert len(own.unique()) == len(own)
            drawn[client].append(own)
    assert {len(own) for own in drawn[2]} == {3}  # no more than a batch: all of them, always
    for client in (0, 1):
        times = torch.bincount(torch.cat(drawn[client]) - 1000 * client, minlength=sizes[client])
        rates, expected = times / len(drawn[client]), 5 / sizes[client]
        assert len(drawn[client]) == 300 * 2 * -(-sizes[client] // 5)
        assert rates.mean().item() == pytest.approx(expected, rel=0.03)
        assert (rates - expected).abs().max() < 5 * math.sqrt(expected / len(drawn[client]))


def test_a_clients_lots_do_not_depend_on_the_others() -> None:
    together = lots({0: 40, 1: 7, 2: 30}, 5, (0, 1, 2), 1)
    alone = lots({0: 40, 1: 7, 2: 30}, 5, (1,), 1)
    for step, other in zip(alone, together, strict=False):
        row = other.clients.index(1)
        assert step.index is not None
        assert other.index is not None
        assert torch.equal(step.index[0], other.index[row])


# --- the account ---


def account(images: int, batch: int, epochs: int, rounds: int, z: float, sampling: Any = "poisson") -> float:
    steps = epochs * -(-images // batch)
    made = RecordAccount(
        RecordLevelPrivacy(1.0, z, sampling=sampling), batch, {0: Training(images, steps, epochs)}, {0: rounds}
    )
    for _ in range(rounds):
        made.count((0,))
    epsilon: Any = made.guarantee(1)["epsilon"]
    return float(epsilon)


@pytest.mark.parametrize(
    ("setting", "z", "poisson", "epochs"),
    [
        ((413, 32, 1, 100), 1.0, 21.6702, 91.8173),
        ((413, 32, 1, 100), 2.0, 7.1314, 33.1037),
        ((413, 32, 1, 100), 4.0, 2.9884, 13.2067),
        ((500, 32, 1, 15), 1.0, 6.7629, 23.3463),
        ((2000, 32, 1, 25), 1.0, 3.8471, 33.1037),
    ],
)
def test_the_account_is_that_of_the_library_in_ten_times_finer_steps(
    setting: tuple[int, int, int, int], z: float, poisson: float, epochs: float
) -> None:
    assert account(*setting, z) == pytest.approx(poisson, rel=1e-3)
    assert account(*setting, z, "epochs") == pytest.approx(epochs, rel=1e-3)


def test_what_a_lot_has_no_room_for_costs() -> None:
    made = RecordAccount(RecordLevelPrivacy(1.0, 1.0), 32, {0: Training(413, 1, 1)}, {0: 1})
    assert made.epsilons(1.0, {0: 100})[0] == pytest.approx(5.4345, rel=1e-3)
    small = RecordAccount(
        RecordLevelPrivacy(1.0, 1.0), 32, {0: Training(60, 1, 1), 1: Training(20, 1, 1)}, {0: 1, 1: 1}
    )
    cost = small.epsilons(1.0, {0: 10, 1: 10})
    assert cost[0] < cost[1] == pytest.approx(17.8566, rel=1e-4)  # no more than a batch: nothing is hidden


def test_a_target_is_met_by_the_client_that_pays_most() -> None:
    of_a_round = {0: Training(413, 13, 1), 1: Training(80, 3, 1), 2: Training(20, 1, 1)}
    made = RecordAccount(RecordLevelPrivacy(1.0, target_epsilon=4.0), 32, of_a_round, {0: 20, 1: 20, 2: 5})
    z = made.noise_multiplier
    assert max(made.epsilons(z, {0: 20, 1: 20, 2: 5}).values()) <= 4.0
    assert max(made.epsilons(z - 2e-3, {0: 20, 1: 20, 2: 5}).values()) > 4.0
    with pytest.raises(ConfigurationError, match=r"needs the rounds in which clients train; set trainer.max_epochs"):
        RecordAccount(RecordLevelPrivacy(1.0, target_epsilon=4.0), 32, of_a_round, {0: 0, 1: 0, 2: 0})
    with pytest.raises(ConfigurationError, match="needs the rounds in which clients train"):
        RecordAccount(RecordLevelPrivacy(1.0, target_epsilon=4.0), 32, {0: Training(20, 0, 0)}, {0: 5})
    with pytest.raises(ConfigurationError, match=r"no noise_multiplier up to 100000 meets target_epsilon 1e-09"):
        RecordAccount(RecordLevelPrivacy(1.0, target_epsilon=1e-9), 32, {0: Training(20, 1, 1)}, {0: 5})
    with pytest.raises(ConfigurationError, match="less than one in the 413 images"):
        RecordAccount(RecordLevelPrivacy(1.0, 1.0, delta=1 / 413), 32, of_a_round, {})


def test_an_account_goes_on_with_rounds_of_one_kind() -> None:
    def of(sampling: Any = "epochs", batch: int = 32, epochs: int = 2) -> RecordAccount:
        training = {0: Training(413, 13 * epochs, epochs)}
        return RecordAccount(RecordLevelPrivacy(1.0, 1.0, sampling=sampling), batch, training, {0: 3})

    made = of()
    made.count((0,))
    state = made.state_dict()
    for other, said in (
        (of("poisson"), "sampling epochs, this run has poisson"),
        (of(batch=20), "data.batch_size 32, this run has 20"),
        (of(epochs=1), "client 0's training 26 steps on 413 images a round, this run has 13 steps on 413 images"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            other.load_state_dict(state)
        older = {name: state[name] for name in ("noise_multiplier", "trainings")}
        other.load_state_dict(older)
        assert other.trainings == {0: 1}
    again = of()
    again.load_state_dict(state)
    assert again.guarantee(1) == made.guarantee(1)


def test_half_a_setting_is_refused() -> None:
    for given in ({}, {"noise_multiplier": 1.0, "target_epsilon": 1.0}):
        with pytest.raises(ConfigurationError, match="either noise_multiplier, or target_epsilon"):
            RecordLevelPrivacy(1.0, **given)


# --- runs ---


@pytest.mark.parametrize("conf", ["FedVPT", "PromptFL"])
def test_the_automatic_width_is_chosen_with_private_steps(conf: str) -> None:
    """The default, which looks at the memory of steps that nobody has accounted for."""
    found = []
    for width in (1, "auto"):
        method, data = build(conf, *FEW, NOISY, f"--data.clients_at_once={width}")
        fit(method, data, 1, evaluate=False)
        found.append(clients_and_server(method))
    assert data.loaders.width > 1
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("conf", ["FedVPT", "PFedBayesPT", "FedAvg", "PFedPG"])
def test_neither_the_width_nor_a_resume_changes_what_is_learned(conf: str, tmp_path: Path) -> None:
    found = []
    for width, workers in ((1, 0), (3, 1)):
        method, data = build(conf, *FEW, NOISY, f"--data.clients_at_once={width}", f"--data.num_workers={workers}")
        fit(method, data, 3, evaluate=False)
        found.append(clients_and_server(method))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)
    method, data = build(conf, *FEW, NOISY, "--data.clients_at_once=3", "--data.num_workers=1")
    fit(method, data, 3, [StopAfterTwo()], save_to=tmp_path, evaluate=False)
    method, data = build(conf, *FEW, NOISY, "--data.clients_at_once=3", "--data.num_workers=1")
    fit(method, data, 3, ckpt_path=str(next(tmp_path.glob("**/*.ckpt"))), save_to=tmp_path / "on", evaluate=False)
    again = clients_and_server(method)
    assert all(torch.equal(again[name], value) for name, value in found[1].items())
    trainings = method.server.account.trainings
    assert sum(trainings.values()) == 12


def test_a_recorded_step_repeats_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    run, repeated = recorded_step.Visit.run, []

    def counted(visit: recorded_step.Visit) -> Made:
        repeated.append(visit)
        return run(visit)

    monkeypatch.setattr(recorded_step.Visit, "run", counted)
    monkeypatch.setattr(recorded_step, "SMALL_STEP", 60.0)
    found = []
    for before in (10**9, 2):
        assert not repeated
        monkeypatch.setattr(recorded_step, "BEFORE_RECORDING", before)
        method, data = build("FedVPT", *EVEN, NOISY, "--data.clients_at_once=3")
        fit(method, data, 4, evaluate=False)
        found.append(clients_and_server(method))
    assert len(repeated) >= 4
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


def test_the_number_of_ranks_changes_no_bit() -> None:
    def work(strategy: RanksStrategy, count: int = 2) -> dict[str, Tensor]:
        method, data = build("FedVPT", *FEW, NOISY, "--data.clients_at_once=2")
        store = WholeStore()
        fit(method, data, 2, [store], settings={"devices": count, "strategy": strategy}, evaluate=False)
        trainings = torch.tensor(list(method.server.account.trainings.values()))
        return (
            {name: value.clone() for name, value in method.simulation.shared().items()} | store.rows | {"t": trainings}
        )

    one, two = work(RanksStrategy(), count=1), over_ranks(2, work)[0]
    assert all(torch.equal(two[name], value) for name, value in one.items())


def test_the_run_says_what_each_client_has_paid() -> None:
    method, data = build("FedVPT", *FEW, "--data.record_privacy={clip: 0.5, target_epsilon: 6.0}")
    made = fedprompt.fit(method, data, rounds=2, accelerator="cpu", enable_progress_bar=False)
    privacy = made.record.privacy
    assert privacy is not None
    assert privacy["unit"] == "record"
    assert not privacy["trusted_server"]
    assert 5.9 < privacy["epsilon"] <= 6.0
    trained = method.server.account.trainings
    assert [epsilon > 0 for epsilon in privacy["epsilons"]] == [trained[client] > 0 for client in range(6)]
    assert max(privacy["epsilons"]) == privacy["epsilon"]
    assert any("one image" in line for line in privacy["not_covered"])


def test_a_method_is_refused_where_the_account_would_not_hold() -> None:
    for conf, why in REFUSED.items():
        method, data = build(conf, *FEW, NOISY)
        with pytest.raises(ConfigurationError, match=f"data.record_privacy is not for {conf}: {why}|{why}"):
            method.join(data)


def test_a_loss_of_ones_own_has_to_say_that_it_is_one_of_each_image() -> None:
    method, data = build("FedAvg", *FEW, NOISY)
    method.__class__ = OfItsOwn
    with pytest.raises(ConfigurationError, match="OfItsOwn has a model_loss of its own, and its base says per_example"):
        method.join(data)


def test_so_has_a_property_and_a_base_that_decides_by_its_arguments() -> None:
    class Looking(FedAvg):
        @property
        def spread(self) -> float:
            return 0.0

    method, data = build("FedAvg", *FEW, NOISY)
    method.__class__ = Looking
    with pytest.raises(ConfigurationError, match="Looking has a spread of its own"):
        method.join(data)

    class Own(methods.PFedPrompt):
        def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
            return super().client_loss(client, batch)

    method, data = build("PFedPrompt", *FEW, NOISY)
    method.__class__ = Own
    with pytest.raises(ConfigurationError, match="Own has a client_loss of its own"):
        method.join(data)
    method, data = build("PFedPrompt", *FEW, NOISY, "--model.init_args.lfa_in_train=true")
    with pytest.raises(ConfigurationError, match="does not say that its loss is a mean over single images"):
        method.join(data)


def test_data_and_rules_that_the_account_does_not_know_are_refused() -> None:
    method, data = build("FedVPT", *FEW, NOISY, "--data.drop_last=true")
    with pytest.raises(ConfigurationError, match="drop_last leaves out images"):
        method.join(data)
    method, data = build("FedVPT", *FEW, NOISY)
    facts = data.federation
    shared = dict.fromkeys(range(6), facts.holdings.train_rows[0])
    twice = replace(facts, holdings=replace(facts.holdings, train_rows=shared))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(data), "federation", property(lambda _: twice))
        with pytest.raises(ConfigurationError, match="clients train on the same images"):
            method.join(data)
    with pytest.raises(ConfigurationError, match="bf16-mixed would round"):
        fit(method, data, 1, settings={"precision": "bf16-mixed"})
    method, data = build("FedVPT", *FEW, NOISY)
    rule = UserLevelPrivacy(noise_multiplier=1.0)
    with pytest.raises(ConfigurationError, match="protect the same tensors twice"):
        fedprompt.fit(method, data, rounds=1, server=rule, accelerator="cpu", enable_progress_bar=False)
