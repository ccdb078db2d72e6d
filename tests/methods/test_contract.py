"""What every method must keep, for every class that ``methods`` exports: a new one needs a YAML in tests/conf."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import CONF, SIZES, build, fit, learned
from lightning.pytorch.callbacks import Callback

import methods
from benchmark.engine import capacity, round_plan
from benchmark.engine.plan import cohorts
from benchmark.federation import Broadcast, Round, Uploads
from benchmark.server import ServerRule

METHODS = sorted(methods.__all__)
#: Methods that train nothing take no step, so that they have no checkpoint.
UNTRAINED = ["ZeroShotCLIP"]
TRAINED = [name for name in METHODS if name not in UNTRAINED]
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    """The same names, and values equal (bit for bit without a tolerance; NaN equals NaN)."""
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def documented(name: str) -> list[set[str]]:
    """What docs/methods.md says is shared, is personal and makes something of the uploads: the words in backticks."""
    page = (Path(__file__).parents[2] / "docs/methods.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    return [set(re.findall(r"`([^`]+)`", cell)) for cell in row.split("|")[2:5]]


def test_every_method_has_a_tiny_configuration() -> None:
    assert {path.stem for path in CONF.glob("[A-Z]*.yaml")} == set(METHODS)


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, torch.Tensor]]:
    """Three rounds of each method with width 1, made once."""
    return {}


def run(conf: str, *overrides: str, rounds: int = 3, callbacks: list[Callback] | None = None) -> Any:
    method, data = build(conf, *overrides)
    fit(method, data, rounds, callbacks)
    return method


def reference_of(conf: str, reference: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    if conf not in reference:
        reference[conf] = learned(run(conf, "--data.cohort_width=1"))
    return reference[conf]


@pytest.mark.parametrize("conf", METHODS)
@pytest.mark.parametrize(("width", "workers"), [(3, 0), (8, 2), ("auto", 0)])
def test_cohort_width_and_workers_change_nothing(
    conf: str, width: int | str, workers: int, reference: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "CPU_STEP", 2**40)  # auto takes as many clients as there are
    method = run(conf, f"--data.cohort_width={width}", f"--data.num_workers={workers}")
    if width == "auto":
        assert method.trainer.datamodule.loaders.width == method.simulation.federation.participants > 1
    # Stacked weights are summed in another order, and on some processors a product of matrices with frozen weights
    # rounds by its number of rows. Adam divides by a gradient's own size, so that it makes much of what was rounded
    # where the gradient is next to nothing; a step of it is 0.02 here.
    adam = "optimizer: adam" in (CONF / f"{conf}.yaml").read_text()
    assert_equal(reference_of(conf, reference), learned(method), 1e-3 if adam else 2e-5)


@pytest.mark.parametrize("conf", METHODS)
def test_the_order_of_clients_changes_nothing(conf: str, reference: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference_of(conf, reference)
    monkeypatch.setattr(round_plan, "cohorts", lambda *given: cohorts(*given)[::-1])
    assert_equal(expected, learned(run(conf, "--data.cohort_width=1")))


@pytest.mark.parametrize("conf", TRAINED)
def test_training_moves_what_it_should_and_nothing_frozen(conf: str) -> None:
    method, data = build(conf)
    data.setup()
    method.join(data)
    before = {n: p.detach().clone() for n, p in method.named_parameters() if not n.startswith("slots.")}
    start = learned_state(method)
    fit(method, data, 2, evaluate=False)
    trained = set(method.roles.trained)
    for name, value in before.items():
        if name not in method.roles.shared:
            assert torch.equal(value, method.get_parameter(name)), f"{name} is not shared but moved on the server"
    moved = {n for n, v in learned_state(method).items() if not torch.equal(v, start[n])}
    assert trained, "a method that trains nothing has its place in UNTRAINED"
    rule = set() if type(method.server.rule) is ServerRule else {type(method.server.rule).__name__}
    assert documented(conf) == [set(method.shared), set(method.personal), rule]
    for name in method.roles.personal:
        assert f"store.{name}" in moved
    if type(method.server.rule) is ServerRule:
        assert set(method.roles.shared) <= moved


@pytest.mark.parametrize("conf", UNTRAINED)
def test_what_trains_nothing_sends_nothing_and_stays_as_it_is(conf: str) -> None:
    wire = Wire()
    method = run(conf, callbacks=[wire])
    assert method.roles.trained == method.roles.slots == ()
    assert len(wire.down) == len(wire.up) == 3 * 7
    assert not any(wire.down + wire.up)
    scores = {n.split("/", 1)[1]: v for n, v in learned(method).items() if n.startswith("metric.0/")}
    assert any("accuracy" in name for name in scores)
    for round in (1, 2, 3):
        again = {n.split("/", 1)[1]: v for n, v in learned(method).items() if n.startswith(f"metric.{round}/")}
        assert_equal(scores, {name: value for name, value in again.items() if name in scores})


def learned_state(method: Any) -> dict[str, torch.Tensor]:
    state = {n: method.get_parameter(n).detach().clone() for n in method.roles.shared}
    return state | {f"store.{n}": method.store.all_rows(n).clone() for n in method.store.names}


@pytest.mark.parametrize("conf", METHODS)
def test_clients_that_are_not_selected_keep_their_state(conf: str) -> None:
    method, data = build(conf, "--data.clients_per_round=2")
    data.setup()
    method.join(data)
    start = learned_state(method)
    fit(method, data, 1, evaluate=False)
    resting = [c for c in range(11) if c not in method.server.rule.select(1)]
    assert len(resting) == 9
    for name, rows in learned_state(method).items():
        if name.startswith("store."):
            assert torch.equal(rows[resting], start[name][resting])


class Wire(Callback):
    """Notes the names and the bytes of everything that is sent."""

    def __init__(self) -> None:
        self.down: list[dict[str, torch.Tensor]] = []
        self.up: list[dict[str, torch.Tensor]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        rule = pl_module.server.rule
        send, collect = rule.broadcast, rule.aggregate

        def broadcast(round: Round, shared: Any, clients: tuple[int, ...]) -> Broadcast:
            sent = send(round, shared, clients)
            if round.clients:
                for k in range(len(clients)):
                    own = {name: rows[k] for name, rows in sent.own.items()}
                    own |= {name: own[name][mask[k]] for name, mask in sent.masks.items()}  # padding stays at home
                    self.down.append({**sent.common, **own})
            return sent

        def aggregate(round: Round, shared: Any, uploads: Uploads) -> Any:
            received = range(len(uploads.clients))
            self.up += [{name: rows[k] for name, rows in uploads.values.items()} for k in received]
            return collect(round, shared, uploads)

        rule.broadcast, rule.aggregate = broadcast, aggregate


def message_bytes(message: dict[str, torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in message.values())


@pytest.mark.parametrize("conf", METHODS)
def test_personal_tensors_never_leave_and_bytes_are_counted(conf: str) -> None:
    wire = Wire()
    method, data = build(conf)
    fit(method, data, 2, [wire], evaluate=False)
    assert len(wire.down) == len(wire.up) == 2 * 7
    for message in wire.down + wire.up:
        assert not set(message) & (set(method.roles.personal) - set(method.roles.uploaded))
    rounds = method.server.traffic.rounds
    assert [row[0] for row in rounds] == [7, 7]
    assert sum(row[1] for row in rounds) == sum(message_bytes(m) for m in wire.down)
    assert sum(row[2] for row in rounds) == sum(message_bytes(m) for m in wire.up)


class NoEpochs(Callback):
    """Sets every local phase to zero epochs."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        phases = [replace(phase, epochs=0) for phase in pl_module.local_phases()]
        pl_module.local_phases = lambda: phases


@pytest.mark.parametrize("conf", METHODS)
def test_zero_local_epochs_change_nothing(conf: str) -> None:
    untouched, data = build(conf)
    fit(untouched, data, 0)
    method, data = build(conf)
    fit(method, data, 2, [NoEpochs()])
    # What a client was sent may be its own, and then so is what it scores after its local training; and it took part.
    moved = ("metric.", "store.participated", *(("store.last.",) if method.evaluate_local else ()))
    before, after = ({n: v for n, v in learned(m).items() if not n.startswith(moved)} for m in (untouched, method))
    assert_equal(before, after)


class SeenImages(Callback):
    """Rows of the pool that took part in a training step."""

    def __init__(self) -> None:
        self.rows: dict[int, set[int]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for step in batch.steps:
            for client, rows, mask in zip(step.clients, step.index, step.mask, strict=True):
                self.rows.setdefault(client, set()).update(rows[mask].tolist())


@pytest.mark.parametrize("conf", TRAINED)
def test_a_test_image_never_trains_and_every_training_image_does(conf: str) -> None:
    seen = SeenImages()
    method, data = build(conf, "--data.clients_per_round=11")
    fit(method, data, 1, [seen], evaluate=False)
    for client in range(11):
        assert seen.rows[client] == set(data.splits.train[client].tolist())
        assert len(seen.rows[client]) == SIZES[client]
    assert not set().union(*seen.rows.values()) & set().union(*(set(t.tolist()) for t in data.splits.test))


@pytest.mark.parametrize("conf", TRAINED)
def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(conf: str, tmp_path: Path, reference: dict) -> None:
    method, data = build(conf, "--data.cohort_width=1")
    fit(method, data, 1, save_to=tmp_path)
    resumed, data = build(conf, "--data.cohort_width=1")
    torch.rand(5)  # the global generator is somewhere else now
    trainer = fit(resumed, data, 3, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert trainer.num_sanity_val_steps == 0, "the round it resumes from is not evaluated again"
    assert_equal(reference_of(conf, reference), learned(resumed))


@pytest.mark.parametrize("conf", TRAINED)
def test_a_checkpoint_holds_no_frozen_weight_and_no_slot(conf: str, tmp_path: Path) -> None:
    method, data = build(conf)
    fit(method, data, 1, save_to=tmp_path, evaluate=False)
    held = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert {n for n in held if not n.startswith("store.")} == set(method.roles.trained)
