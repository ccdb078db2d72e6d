"""Runs whose test images are held against foreign ones: what is scored, and that nothing else changes by it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import CONF, EACH_ROUND, build, fit, learned
from over_ranks import over_ranks
from sklearn.metrics import roc_auc_score
from torch.func import functional_call

from benchmark.engine.plan.work import Shown
from benchmark.metrics import METRICS, POOLED_CLIENT
from benchmark.ranks.strategy import RanksStrategy
from benchmark.records.metrics_table import read_table
from benchmark.records.record_file import read_record
from benchmark.records.run_intervals import lines_of
from benchmark.records.stored_run import stored_run, verify_record
from benchmark.run.cli import main

STREAM = "--data.ood={source: federation.ForeignImages, images: 10}"
FEW = ("--data.partition=federation.Few", "--data.clients_per_round=5")
OF_STREAMS = {name for name, metric in METRICS.items() if metric.first_in == "ood"}


def run(conf: str, *options: str, rounds: int = 1, settings: dict[str, Any] | None = None) -> Any:
    """A method after its last evaluation, of one before and one after each round, and all that it leaves behind."""
    method, data = build(conf, *FEW, *options)
    fit(method, data, rounds, settings={**EACH_ROUND, **(settings or {})})
    return method, learned(method)


def test_every_clients_own_model_scores_its_images_and_the_whole_stream() -> None:
    method, _ = run("FedPer", STREAM, "--data.evaluate_local=false")
    data = method.trainer.datamodule
    values = method.evaluation.scores["server", "test"].compute()
    pooled: list[list[float]] = [[], []]
    for client in range(6):
        own = {name: method.store.all_rows(name)[client] for name in method.roles.personal}

        def scores(images: torch.Tensor, own: dict[str, torch.Tensor] = own) -> list[float]:
            logits = functional_call(method, own, (data.transform(images, None),))
            return logits.double().softmax(-1).amax(-1).tolist()

        with torch.no_grad():
            known = scores(data.pool.images[torch.from_numpy(data.splits.test[client])])
            foreign = scores(data.others[Shown.FOREIGN].images)
        expected = roc_auc_score([1] * len(known) + [0] * 10, known + foreign)
        assert values["ood_auroc"][client].item() == pytest.approx(expected, abs=1e-6)
        pooled[0] += known
        pooled[1] += foreign
    expected = roc_auc_score([1] * 18 + [0] * 60, np.r_[pooled[0], pooled[1]])
    assert method.evaluation.scores["server", "test"].pooled()["ood_auroc"] == pytest.approx(expected, abs=1e-6)


#: Personal heads, fitted copies, scores that rest on draws, kept features of a ViT, text prompts and a local point, and
#: logits that say how foreign an image is.
KINDS = ("FedPer", "FedBABU", "PFedBayesPT", "HeadTune", "PromptAMP", "FOCoOp")


@pytest.mark.parametrize("conf", KINDS)
def test_the_stream_changes_no_other_number_and_no_width_its_scores(conf: str) -> None:
    made, left = run(conf, STREAM, "--data.evaluate_local=true", "--data.clients_at_once=3")
    _, before = run(conf, "--data.evaluate_local=true", "--data.clients_at_once=3")
    more = {key for key in left if key.split("/")[-1] in OF_STREAMS}
    assert {*left} - more == {*before}
    assert all(torch.equal(before[key], left[key]) or before[key].isnan().any() for key in before)
    other, _ = run(conf, STREAM, "--data.evaluate_local=true", "--data.clients_at_once=1", "--data.num_workers=1")
    for key, scores in made.evaluation.scores.items():
        rows, others = scores.stream.rows, other.evaluation.scores[key].stream.rows
        clients = 6 if key[0] == "server" else 5  # one has never trained
        assert int(rows.foreign.sum()) == 10 * clients
        assert int((~rows.foreign).sum()) == int(scores.images().sum())
        assert torch.equal(rows.client, others.client)
        assert torch.equal(rows.foreign, others.foreign)
        torch.testing.assert_close(rows.scores, others.scores, rtol=1e-4, atol=1e-5)


def test_features_of_the_stream_are_kept_and_give_the_same_scores_as_made_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        kept, _ = run("HeadTune", STREAM)
    made = [message for message in caplog.messages if message.startswith("keeping what frozen parts make of")]
    assert [message.split()[-2] for message in made] == ["39", "10"]  # the clients' images by themselves
    anew, _ = run("HeadTune", STREAM, "--data.cache_features=false")
    rows, others = (of.evaluation.scores["server", "test"].stream.rows for of in (kept, anew))
    torch.testing.assert_close(rows.scores, others.scores, rtol=1e-4, atol=1e-5)


def test_ranks_change_no_score() -> None:
    options = (STREAM, "--data.evaluate_local=true", "--data.clients_at_once=2")

    def work(strategy: RanksStrategy) -> Any:
        method, _ = run("FedPer", *options, settings={"devices": 2, "strategy": strategy})
        return {key: (of.compute(), of.pooled()) for key, of in method.evaluation.scores.items()}

    alone, _ = run("FedPer", *options)
    for found in over_ranks(2, work):
        for key, (values, pooled) in found.items():
            scores = alone.evaluation.scores[key]
            torch.testing.assert_close(values, scores.compute(), rtol=0, atol=0, equal_nan=True)
            assert pooled == scores.pooled()


def test_base_to_novel_holds_the_clients_own_classes_against_the_stream() -> None:
    method, data = build(
        "PromptFL",
        STREAM,
        "--data.partition={class_path: datamodules.BaseToNovel, init_args: {num_clients: 2, shots: 4}}",
        "--data.clients_per_round=1",
        "--data.new_clients=0.5",
        "--data.val_fraction=0.3",
    )
    fit(method, data, 1)
    held = {split: scores.stream is not None for (_, split), scores in method.evaluation.scores.items()}
    assert held == {"test": True, "base": False, "novel": False, "base_excl_local": False, "val": True, "new": True}
    assert method.evaluation.scores["server", "test"].num_classes == len(data.label_spaces["test"]) == 4
    for split, clients in (("test", 1), ("new", 1), ("val", 1)):
        assert int(method.evaluation.scores["server", split].stream.rows.foreign.sum()) == 10 * clients


def test_a_resumed_run_writes_the_same_values_into_its_files(tmp_path: Path) -> None:
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "FedPer.yaml")]
    given = ["fit", *configs, STREAM, "--data.evaluate_local=true"]
    main([*given, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'whole'}"])
    main([*given, "--trainer.max_epochs=1", f"--run_dir={tmp_path / 'half'}"])
    half = f"--ckpt_path={tmp_path / 'half' / 'checkpoints' / 'last.ckpt'}"
    main([*given, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'resumed'}", half])
    whole = tmp_path / "whole"
    assert (tmp_path / "resumed" / "metrics.parquet").read_bytes() == (whole / "metrics.parquet").read_bytes()
    table = read_table(whole / "metrics.parquet")
    assert {*table["metric"]} > OF_STREAMS
    assert {*table.loc[table["client"] == POOLED_CLIENT, "metric"]} == OF_STREAMS
    assert {*table["round"]} == {0, 1, 2}
    assert verify_record(whole) == []
    entry = read_record(whole).summary["server"]["test"]
    assert entry["ood_auroc"]["last"]["worst"] <= entry["ood_auroc"]["last"]["average"]
    assert entry["fpr95"]["last"]["worst"] >= entry["fpr95"]["last"]["average"]
    assert "pooled" in entry["fpr95_energy"]["best_on_test"]
    # The best round of what is better below.
    last = table.query("metric == 'fpr95' and point == 'server' and client >= 0 and round > 0")
    assert entry["fpr95"]["best_on_test"]["average"] == pytest.approx(last.groupby("round")["value"].mean().min())
    assert len(lines_of(stored_run(whole), "ood_auroc", "server", "test")) == 1


def test_what_is_tuned_on_split_val_has_them_without_a_test_image(tmp_path: Path) -> None:
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    only = ["--data.val_only=true", "--data.val_fraction=0.2", "--data.partition=federation.Longer"]
    few = ["--data.partition.init_args.num_clients=3", "--data.clients_per_round=3"]
    main(["fit", *configs, STREAM, *only, *few, "--trainer.max_epochs=1", f"--run_dir={tmp_path / 'run'}"])
    summary = read_record(tmp_path / "run").summary["server"]
    assert {*summary} == {"val"}
    assert 0 <= summary["val"]["ood_auroc"]["last"]["average"] <= 1
