"""Clients that tell different classes apart: each method of the CLIP family, in cohorts, over ranks, after a kill."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import build, clients_and_server, fit
from over_ranks import run_over
from own_spaces import SPACES, THIRD
from text_prompts import FULL
from trained_runs import trained

import methods
from benchmark import live
from benchmark.checks.methods import MethodUnderCheck, check_resume
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast
from benchmark.live import LocalClient, OwnImages
from benchmark.predict.trained_run import TrainedRun
from benchmark.records.stored_run import read_metrics

#: Class-specific contexts are of the data set's classes.
OPEN = {name for name in methods.__all__ if getattr(methods, name).open_vocabulary} - {"FOCoOp"}
#: Those that do with label spaces what others here do, too.
ALIKE = {
    *("CoOp", "FedCLIP", "FedLoRACLIP", "FedPartCLIP", "FedPLOT", "LocalCLIP", "PFedMMA", "PromptAMP", "PromptFLFT"),
    *("PromptFolio", "PromptPer", "PromptProx", "TPFL"),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


OWN = ("--data.partition=own_spaces.OwnSpaces", "--data.clients_per_round=5")


def made(conf: str, *options: str) -> Any:
    return build(conf, *OWN, *options)


@pytest.mark.parametrize(
    "conf", [*sorted(OPEN - ALIKE), *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(ALIKE))]
)
def test_the_width_of_cohorts_changes_nothing(conf: str) -> None:
    found = []
    for width in (1, 3):
        method, data = made(conf, f"--data.clients_at_once={width}")
        fit(method, data, 1, evaluate=width == 3)
        found.append(clients_and_server(method))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=2e-4, atol=2e-4, equal_nan=True, msg=name)
    for (point, split), scores in method.evaluation.scores.items():
        scored = scores.compute()["loss"][list(data.held_out[split])]
        assert scored.isfinite().all() if point == "server" else not scored.isinf().any()


def test_a_cohort_has_one_label_space() -> None:
    method, data = made("PromptFL", "--data.clients_at_once=3", "--data.clients_per_round=6")
    fit(method, data, 0)
    together = [clients for clients, *_ in data.loaders.training(1).cohorts]
    assert sorted(map(sorted, together)) == [[0, 2, 4], [1], [3, 5]]


def test_clients_are_scored_among_own_classes_and_testers_by_the_servers_values() -> None:
    method, data = made("FedPGP")
    initial = {name: method.get_parameter(name).detach().clone() for name in ("u", "v")}
    fit(method, data, 2)
    clip, pool, held = method.clip, data.pool, data.held_out
    rows = {name: method.store.all_rows(name) for name in initial}
    spaces = {"test": dict(enumerate(SPACES)), "whole": {6: (0, 1, 2, 3, 4)}, "apart": {7: THIRD}}
    found = {split: scores.compute() for (_, split), scores in method.evaluation.scores.items()}
    assert {split: list(own) for split, own in held.items()} == {"test": [*range(6)], "whole": [6], "apart": [7]}
    for split, own in held.items():
        for client, images in own.items():
            classes, at = spaces[split][client], torch.from_numpy(images)
            if client > 5:  # it has never trained
                assert all(torch.equal(rows[name][client], value) for name, value in initial.items())
            context = method.context + rows["u"][client] @ rows["v"][client]
            with torch.no_grad():
                prompts = clip.class_prompts([f"class{c}" for c in classes], method.num_context)
                f = clip.image_features(data.transform(pool.images[at], None))
                logits = clip.logit_scale * f @ clip.text_features(prompts, context).mT
            y = torch.tensor([classes.index(label) for label in pool.labels[at].tolist()])
            loss = torch.nn.functional.cross_entropy(logits, y).item()
            assert found[split]["loss"][client].item() == pytest.approx(loss, rel=1e-4)
            assert found[split]["accuracy"][client] == (logits.argmax(1) == y).double().mean()
        others = sorted(set(range(8)) - set(own))
        assert found[split]["loss"][others].isnan().all()


def test_a_client_trains_among_its_own_classes() -> None:
    """One step of plain SGD on all its images, and a mean of which one client is all."""
    method, data = made("PromptFL", *FULL, "--data.clients_per_round=1", "--model.init_args.training.epochs=1")
    start = method.context.detach().clone()
    fit(method, data, 1)
    (client,) = data.loaders.trained
    clip, classes, images = method.clip, SPACES[client], torch.from_numpy(data.train_indices[client])
    context = start.clone().requires_grad_()
    text = clip.text_features(clip.class_prompts([f"class{c}" for c in classes], method.num_context), context)
    logits = clip.logit_scale * clip.image_features(data.transform(data.pool.images[images], None)) @ text.mT
    y = torch.tensor([classes.index(label) for label in data.pool.labels[images].tolist()])
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), context)
    torch.testing.assert_close(method.context.detach(), start - 0.05 * gradient, rtol=1e-3, atol=1e-6)
    assert not torch.equal(method.context, start)


@pytest.mark.parametrize("conf", ["FedPGP", "FedTPG"])
def test_a_resume_changes_nothing(conf: str) -> None:
    check_resume(MethodUnderCheck(lambda *options: made(conf, *options)))


def test_held_out_images_and_new_clients_have_the_spaces_of_training() -> None:
    method, data = made("FedTPG", "--data.val_fraction=0.3", "--data.new_clients=0.34", "--data.clients_per_round=2")
    fit(method, data, 1)
    assert set(data.new_clients) < set(range(6))
    assert {split: sorted(rows) for split, rows in data.held_out.items()} == {
        "test": data.training_clients,
        "val": data.training_clients,
        "new": data.new_clients,
        "whole": [6],
        "apart": [7],
    }
    for split in ("val", "new"):
        for client in data.held_out[split]:
            space = data.federation.terms.space_of(split, client)
            assert data.federation.terms.classes_in(space) == SPACES[client]
        losses = method.evaluation.scores["server", split].compute()["loss"]
        assert losses[list(data.held_out[split])].isfinite().all()


def test_ranks_change_nothing() -> None:
    alone, over = (run_over(count, "FedPGP", *OWN, "--data.clients_at_once=2")[0] for count in (1, 2))
    assert alone.keys() == over.keys()
    for name, value in alone.items():
        torch.testing.assert_close(value, over[name], rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_live_client_is_that_of_the_simulation() -> None:
    options = ("FedTPG", "--data.clients_at_once=1", "--data.cache_features=false")
    method, data = made(*options)
    fit(method, data, 0)
    of_all = method.evaluation.scores["server", "test"].compute()["loss"]
    for client in (1, 3):
        live, _ = made(*options)
        held = {split: rows[client] for split, rows in data.held_out.items() if client in rows}
        own = OwnImages(data.pool, data.transform, data.train_indices[client], held, cache_features=False)
        one = LocalClient(live, client, own, data.federation.terms, 1)
        sent = {name: live.get_parameter(name).detach() for name in live.roles.shared}
        scored = one.evaluate(0, Broadcast(sent))["server", "test"].compute()["loss"]
        assert torch.equal(of_all[client], scored[client])


def test_a_message_is_tried_out_on_classes_of_the_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    method, data = made("FedMGP")
    data.setup()
    data.match(method)
    seen: list[OwnImages] = []

    class Watched(LocalClient):
        def __init__(self, method: Any, number: int, own: OwnImages, *more: Any) -> None:
            seen.append(own)
            super().__init__(method, number, own, *more)

    monkeypatch.setattr(live, "LocalClient", Watched)
    form = live.message_form(method, method.make_server(), data.transform, data.federation.terms, (32, 32), 1)
    assert seen[0].pool.labels.tolist() == list(SPACES[0])
    assert all(value.isfinite().all() for value in form.values())


def test_a_client_and_a_tester_predict_among_their_classes(tmp_path: Path) -> None:
    live = trained(tmp_path / "run", "FedTPG", *OWN)
    run, data, table = TrainedRun(live.run_dir), live.datamodule, read_metrics(live.run_dir)
    for split, client, own in (("test", 1, SPACES[1]), ("test", 3, SPACES[3]), ("whole", 6, (0, 1, 2, 3, 4))):
        rows = torch.from_numpy(data.held_out[split][client])
        assert run.client(client).class_names == tuple(f"class{c}" for c in own)
        found = run.predict(data.pool.images[rows], client)["class"]
        right = found == [data.class_names[label] for label in data.pool.labels[rows]]
        recorded = table.query(f"client == {client} and metric == 'accuracy' and split == {split!r}")["value"]
        assert right.sum() == round(recorded.iloc[-1] * len(rows))
    with pytest.raises(ConfigurationError, match="clients of this run tell different classes apart"):
        run.new_client(tmp_path)


@pytest.mark.parametrize(
    ("conf", "options", "said"),
    [
        ("FedAvg", (), "FedAvg classifies among all classes, but the partition gives the splits"),
        ("PromptFL", ("--data.metrics=clinical",), "data.metrics compares classes, and with OwnSpaces clients tell"),
        ("PromptFL", ("--data.label_orders=2",), "data.label_orders=2 does not go with a partition whose splits"),
        ("PromptFL", ("--data.record_privacy.target_epsilon=8",), "data.record_privacy compares classes"),
    ],
)
def test_what_compares_classes_is_refused(conf: str, options: tuple[str, ...], said: str) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=re.escape(said)):
        fit(*made(conf, *options), 1)
