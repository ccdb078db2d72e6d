"""Runs whose test images are corrupted in the last round: what is scored then, and that nothing else changes by it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import CONF, EACH_ROUND, build, fit, learned
from over_ranks import over_ranks
from torch.func import functional_call

from benchmark.engine.plan.work import Shown
from benchmark.engine.scores import ClientScores
from benchmark.metrics import METRICS, POOLED_CLIENT
from benchmark.ranks.strategy import RanksStrategy
from benchmark.records.metrics_table import read_table
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.run.cli import main

CORRUPTED = "--data.corruptions={kinds: [contrast, gaussian_noise], severities: [1, 5], images: 3}"
STREAM = "--data.ood={source: federation.ForeignImages, images: 10}"
FEW = ("--data.partition=federation.Few", "--data.clients_per_round=5")
VERSIONS = [f"accuracy_{kind}_{severity}" for kind in ("contrast", "gaussian_noise") for severity in (1, 5)]
MADE = {"corrupted_accuracy", "corrupted_drop", *VERSIONS}


def run(conf: str, *options: str, rounds: int = 1, settings: dict[str, Any] | None = None) -> Any:
    """A method after its last evaluation, of one before and one after each round, and all that it leaves behind."""
    method, data = build(conf, *FEW, *options)
    fit(method, data, rounds, settings={**EACH_ROUND, **(settings or {})})
    return method, learned(method)


def test_right_and_wrong_by_hand() -> None:
    scores = ClientScores(2, 2, versions=("accuracy_clean_0", "accuracy_jpeg_1", "accuracy_jpeg_5"))
    right, wrong, none = [2.0, 0.0], [0.0, 2.0], [float("nan"), 0.0]
    scores.update(torch.tensor([[right], [right]]), torch.zeros(2, 1, dtype=torch.int64), (1, 0))
    assert "corrupted_accuracy" not in scores.compute()
    # Client 1: two images in three versions; client 0: one, and padding.
    logits = torch.tensor([[right, right, wrong, right, wrong, none], [right, wrong, wrong, right, right, right]])
    y, rows = torch.zeros(2, 6, dtype=torch.int64), torch.tensor([[6, 7, 8, 0, 1, 2], [3, 4, 5, 0, 0, 0]])
    y[1, 3:] = -100
    scores.update(logits, y, (1, 0), rows, Shown.CORRUPTED)
    made = scores.compute()
    assert made["accuracy_jpeg_1"].tolist() == [0.0, 0.5]
    assert made["accuracy_jpeg_5"].tolist() == [0.0, 0.0]
    assert made["corrupted_accuracy"].tolist() == [0.0, 0.25]
    assert made["corrupted_drop"].tolist() == [1.0, 0.75]
    assert made["accuracy"].tolist() == [1.0, 1.0]
    pooled = scores.pooled()
    assert pooled["accuracy_jpeg_1"] == pytest.approx(1 / 3)
    assert (pooled["corrupted_accuracy"], pooled["corrupted_drop"]) == pytest.approx((1 / 6, 1 - 1 / 6))


def test_every_clients_own_model_scores_its_corrupted_images() -> None:
    method, _ = run("FedPer", CORRUPTED, "--data.evaluate_local=false", rounds=2)
    data = method.trainer.datamodule
    values, images = method.evaluation.scores["server", "test"].compute(), data.others[Shown.CORRUPTED]
    for client, rows in data.federation.holdings.corrupted.rows.items():
        own = {name: method.store.all_rows(name)[client] for name in method.roles.personal}
        at = torch.from_numpy(rows)
        with torch.no_grad():
            logits = functional_call(method, own, (data.transform(images.images[at], None),))
        right = (logits.argmax(-1) == images.labels[at]).double().view(-1, 5).mean(0).tolist()
        assert [values[name][client].item() for name in VERSIONS] == pytest.approx(right[1:])
        assert values["corrupted_accuracy"][client].item() == pytest.approx(sum(right[1:]) / 4)
        assert values["corrupted_drop"][client].item() == pytest.approx(right[0] - sum(right[1:]) / 4)


@pytest.mark.parametrize("conf", ["FedPer", "FedBABU", "PFedBayesPT", "HeadTune", "PromptAMP"])
def test_corruptions_change_no_other_number_and_no_width_theirs(conf: str) -> None:
    local = ("--data.evaluate_local=true", STREAM)
    made, left = run(conf, CORRUPTED, *local, "--data.clients_at_once=3")
    _, before = run(conf, *local, "--data.clients_at_once=3")
    more = {key for key in left if key.split("/")[-1] in MADE}
    assert {*left} - more == {*before}
    assert all(torch.equal(before[key], left[key]) or before[key].isnan().any() for key in before)
    assert {key.split("/")[0] for key in more} == {"metric.1"}  # nothing before training
    other, _ = run(conf, CORRUPTED, *local, "--data.clients_at_once=1", "--data.num_workers=1")
    for key, scores in made.evaluation.scores.items():
        values, others = scores.compute(), other.evaluation.scores[key].compute()
        for name in MADE:
            torch.testing.assert_close(values[name], others[name], rtol=0, atol=0.34, equal_nan=True)
        counts, of_other = scores.versions_counted, other.evaluation.scores[key].versions_counted
        assert torch.equal(counts[..., 1], of_other[..., 1])
        shown = [3, 2, 3, 1, 3, 2]
        assert [int(own) for own in counts[:, 0, 1]] == shown if key[0] == "server" else counts[:, 0, 1].sum() < 14
        assert (counts[..., 0] - of_other[..., 0]).abs().sum() <= 1  # where two classes are nearly equal


def test_ranks_change_no_corrupted_accuracy() -> None:
    options = (CORRUPTED, "--data.evaluate_local=true", "--data.clients_at_once=2")

    def work(strategy: RanksStrategy) -> Any:
        method, _ = run("FedPer", *options, settings={"devices": 2, "strategy": strategy})
        return {key: (of.compute(), of.pooled()) for key, of in method.evaluation.scores.items()}

    alone, _ = run("FedPer", *options)
    for found in over_ranks(2, work):
        for key, (values, pooled) in found.items():
            scores = alone.evaluation.scores[key]
            torch.testing.assert_close(values, scores.compute(), rtol=0, atol=0, equal_nan=True)
            assert pooled == scores.pooled()


def test_base_to_novel_corrupts_images_of_the_clients_own_classes() -> None:
    partition = "{class_path: datamodules.BaseToNovel, init_args: {num_clients: 2, shots: 4}}"
    method, data = build("PromptFL", CORRUPTED, f"--data.partition={partition}", "--data.clients_per_round=2")
    fit(method, data, 1)
    assert "corrupted_accuracy" in method.evaluation.scores["server", "test"].compute()
    assert "corrupted_accuracy" not in method.evaluation.scores["server", "novel"].compute()
    counts = method.evaluation.scores["server", "test"].versions_counted
    assert counts[..., 1].tolist() == [[3] * 5, [3] * 5]


def test_files_have_them_of_the_last_round_also_after_a_resume_and_a_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    given = ["fit", *configs, CORRUPTED, "--data.evaluate_local=true"]
    main([*given, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'whole'}"])
    main([*given, "--trainer.max_epochs=1", f"--run_dir={tmp_path / 'half'}"])
    half = f"--ckpt_path={tmp_path / 'half' / 'checkpoints' / 'last.ckpt'}"
    main([*given, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'resumed'}", half])
    whole, resumed = (read_table(tmp_path / name / "metrics.parquet") for name in ("whole", "resumed"))
    last = whole[whole["metric"].isin(MADE)]
    assert {*last["round"]} == {2}
    assert {*last["metric"]} == MADE
    assert {*last.loc[last["client"] == POOLED_CLIENT, "metric"]} == MADE
    # The half run had its own last round, whose values the resumed one keeps.
    assert {*resumed[resumed["metric"].isin(MADE)]["round"]} == {1, 2}
    assert whole.equals(resumed[~resumed["metric"].isin(MADE) | (resumed["round"] == 2)].reset_index(drop=True))
    assert verify_record(tmp_path / "whole") == []
    entry = read_record(tmp_path / "whole").summary["server"]["test"]["corrupted_accuracy"]
    assert entry["last"]["round"] == 2
    assert entry["last"]["worst"] <= entry["last"]["average"] <= 1
    assert entry["round0"]["average"] is None
    assert {name for name, metric in METRICS.items() if metric.first_in == "corrupted"} > MADE
    capsys.readouterr()
    main(["test", f"--run_dir={tmp_path / 'whole'}"])
    assert "corrupted" in capsys.readouterr().out
