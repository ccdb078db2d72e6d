"""Intervals against scikit-learn, SciPy, NumPy and numbers by hand; they are printed of runs that kept their images."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from federation import CONF
from finished_run import write_finished_run
from recorded_results import kept_images, record_of, write_run
from refusal import refused
from sklearn.metrics import roc_auc_score
from three_clients import HELD, LABELS, LOGITS

from benchmark import commands
from benchmark.counts import ScoredBatch
from benchmark.intervals import delong, drawn, holm, mcnemar, of_clients, of_draws, of_share
from benchmark.metrics import METRICS, STATISTICS
from benchmark.records.drawn_images import values_in
from benchmark.records.keeping import keep_record
from benchmark.records.metrics_table import COLUMNS
from benchmark.records.run_intervals import LIKE_THESE, POOLED, THESE, lines_of, lines_of_images
from benchmark.records.stored_run import stored_run
from benchmark.run.cli import main

IMAGES = ScoredBatch(torch.tensor(LOGITS), torch.tensor(LABELS))
RIGHT = (IMAGES.predictions == IMAGES.y).numpy()
#: probabilities of class 2 by a second method, and its predictions
SECOND = [
    *[0.062890, 0.464770, 0.471776, 0.153897, 0.367165, 0.164252],
    *[0.182703, 0.116949, 0.389803, 0.360297, 0.252092, 0.678484],
]
SECOND_RIGHT = np.equal([0, 2, 2, 0, 2, 0, 1, 1, 2, 0, 0, 2], LABELS)


@pytest.mark.parametrize(
    ("right", "images", "expected"),
    [
        (3, 5, (0.230724, 0.882379)),
        (2, 4, (0.150039, 0.849961)),
        (2, 3, (0.207660, 0.938508)),
        (7, 12, (0.319511, 0.806740)),
    ],
)
def test_a_share_has_wilsons_interval(right: int, images: int, expected: tuple[float, float]) -> None:
    assert of_share(right, images) == pytest.approx(expected, abs=1e-6)


def test_few_clients_have_an_interval_by_t_and_many_are_drawn_anew() -> None:
    three = np.array([0.6, 0.5, 2 / 3])
    assert of_clients(three) == pytest.approx((0.380502, 0.797276), abs=1e-6)
    assert of_clients(three, np.random.default_rng(0), few=0) == pytest.approx((0.5, 2 / 3))
    many = np.random.default_rng(1).normal(0.7, 0.1, 400)
    low, high = of_clients(many)
    assert (low, high) == pytest.approx(many.mean() + np.array([-1, 1]) * 1.96 * many.std() / 20, abs=1e-3)
    assert all(map(math.isnan, of_clients(np.array([0.5]))))
    assert of_clients(np.full(5, 0.25)) == (0.25, 0.25)
    ends = [STATISTICS[name].of for name in ("ci_low", "ci_high")]
    assert [end(three, False) for end in ends if end is not None] == [*of_clients(three)]


def test_images_are_drawn_anew_within_clients_or_all_together() -> None:
    (times,) = drawn([np.arange(12)], np.random.default_rng(0))
    values = values_in(METRICS["accuracy"], IMAGES, times)
    assert values.mean() == pytest.approx(0.584, abs=5e-4)
    assert of_draws(values) == pytest.approx((1 / 3, 5 / 6), abs=1e-6)
    within = drawn([np.arange(end - begin) for begin, end in HELD], np.random.default_rng(0))
    shares = [times @ RIGHT[begin:end] / (end - begin) for times, (begin, end) in zip(within, HELD, strict=True)]
    assert of_draws(np.mean(shares, 0)) == pytest.approx((0.311111, 0.85), abs=1e-6)


@pytest.mark.parametrize("metric", ["balanced_accuracy", "loss", "kappa", "ece", "brier", "auroc", "ap"])
def test_a_metric_of_drawn_images_is_that_of_the_images_repeated(metric: str) -> None:
    times = np.array([[1] * 12, [2, 0, 1, 1, 1, 0, 3, 0, 1, 1, 1, 1]])
    rows = torch.arange(12).repeat_interleave(torch.from_numpy(times[1]))
    repeated = values_in(METRICS[metric], ScoredBatch(IMAGES.logits[rows], IMAGES.y[rows]), np.ones((1, 12), int))
    assert values_in(METRICS[metric], IMAGES, times)[1] == pytest.approx(repeated[0])


def test_images_of_a_patient_are_drawn_together() -> None:
    (draws,) = drawn([np.array([7, 7, 7, 3, 3, 9])], np.random.default_rng(0), 50)
    assert (draws[:, :3] == draws[:, :1]).all()
    assert (draws[:, 3] == draws[:, 4]).all()
    assert (draws[:, 0] + draws[:, 3] + draws[:, 5] == 3).all()


def test_a_draw_without_a_value_counts_as_none_and_many_leave_no_interval() -> None:
    values = np.linspace(0, 1, 1000)
    values[:100] = np.nan
    assert of_draws(values) == pytest.approx(tuple(np.percentile(values[100:], [2.5, 97.5])))
    values[100] = np.nan
    assert all(map(math.isnan, of_draws(values)))


def test_areas_have_the_covariance_of_delong() -> None:
    positive = np.array(LABELS) == 2
    first = IMAGES.probabilities[:, 2].numpy()
    made = delong(np.stack([first, SECOND]), positive)
    assert made.values.tolist() == pytest.approx([0.9375, 0.8125])
    assert made.values[1] == pytest.approx(roc_auc_score(positive, SECOND))
    assert made.covariance[[0, 1, 0], [0, 1, 1]].tolist() == pytest.approx([0.005580, 0.020089, 0.006696], abs=1e-6)
    assert made.error() == pytest.approx(0.110801, abs=1e-6)
    assert (made.values[0] - made.values[1]) / made.error() == pytest.approx(1.128152, abs=1e-6)
    assert made.p_value() == pytest.approx(0.259256, abs=1e-6)
    assert made.interval() == pytest.approx((0.552128, 0.994551), abs=1e-6)
    same = delong(np.stack([first, first**2]), positive)  # the same ranks have no spread
    assert (same.error(), math.isnan(same.p_value())) == (0, True)
    assert all(map(math.isnan, delong(positive[None].astype(float), positive).interval()))
    assert math.isnan(delong(first[None], np.arange(12) < 1).covariance[0, 0])
    assert math.isnan(delong(first[None], np.arange(12) < 0).values[0])


def test_two_methods_differ_by_discordant_images_alone() -> None:
    assert mcnemar(RIGHT, SECOND_RIGHT) == (2, 0, 0.5)
    assert mcnemar(RIGHT, RIGHT) == (0, 0, 1)


def test_the_smallest_of_several_p_values_is_multiplied_by_their_number() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 x .01, 1 x .04 below 2 x .03, 2 x .03
    assert holm([0.5, 0.2, 0.9, 0.001]) == pytest.approx([1, 0.6, 1, 0.004])
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clinical run of one round."""
    folder = tmp_path_factory.mktemp("intervals") / "run"
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    main(["fit", *configs, "--data.metrics=clinical", "--trainer.max_epochs=1", f"--run_dir={folder}"])
    return folder


@pytest.mark.parametrize("metric", ["accuracy", "mcc", "brier"])
def test_a_run_has_intervals_of_its_clients_and_over_them(run: Path, metric: str) -> None:
    stored = stored_run(run)
    lines = {line.of: line for line in lines_of(stored, metric, "server", "test")}
    assert [*lines] == [*stored.record.client_names, THESE, POOLED, LIKE_THESE]
    last = stored.record.summary["server"]["test"][metric]["last"]
    assert lines[THESE].value == pytest.approx(last["average"])
    assert lines[POOLED].value == pytest.approx(last["pooled"])
    for line in lines.values():
        if line.value is not None and not math.isnan(line.interval.low):
            assert line.interval.low <= line.value <= line.interval.high
    right = stored.predictions.query("client == 4").eval("label == prediction").sum()
    if metric == "accuracy":
        assert lines[stored.record.client_names[4]].interval == of_share(right, 6)
    assert lines_of(stored, metric, "server", "test") == [*lines.values()]  # the same draws again


@pytest.mark.parametrize("stored", [False, True], ids=["numbers alone", "stored predictions"])
def test_a_client_that_diverged_is_in_every_mean(stored: bool, tmp_path: Path) -> None:
    values = [("accuracy", (0.5, 0.25, 1.0)), ("loss", (math.nan, 0.5, 0.7))]
    rows = [(1, client, "server", "test", name, value) for name, of in values for client, value in enumerate(of)]
    record = record_of("abc", 0, manifest_hash="", rounds=1, rounds_trained=1, test_sizes=(4, 4, 4))
    kept = kept_images() if stored else None
    if kept is not None:
        kept["round"] = 1
        first = kept["client"] == 0
        kept.loc[first, "logits"] = kept.loc[first, "logits"].map(lambda row: [math.nan] * len(row))
    write_finished_run(tmp_path / "run", record, pd.DataFrame(rows, columns=list(COLUMNS)), predictions=kept)
    lines = {line.of: line for line in lines_of(stored_run(tmp_path / "run"), "loss", "server", "test")}
    assert (lines[LIKE_THESE].value, math.isnan(lines[LIKE_THESE].interval.low)) == (None, True)
    assert not stored or lines[THESE].value is None
    found = {line.of: line.value for line in lines_of(stored_run(tmp_path / "run"), "accuracy", "server", "test")}
    assert found[LIKE_THESE] == pytest.approx(1.75 / 3)


def test_the_auroc_of_two_classes_has_delongs_interval_without_groups(tmp_path: Path) -> None:
    """The classes 0 and 1 are taken together, so that the second is class 2 of the twelve images."""
    p = IMAGES.probabilities[:, 2].numpy()
    logits = np.stack([np.zeros(12), np.log(p / (1 - p))], 1).astype("float32")
    second = (np.array(LABELS) == 2).astype(int)
    kept = kept_images().assign(client=0, label=second, prediction=logits.argmax(1), logits=list(logits))
    for name, group, by in (("single", range(12), "DeLong"), ("grouped", [0, 0, *range(10)], "groups of images")):
        write_run(tmp_path / name, "FedAvg", 0, [0.5, 0.5, 0.5], kept=kept.assign(group=group))
        run = stored_run(tmp_path / name)
        (client, *over) = lines_of_images(
            run.scored("server", "test"), run.metric("auroc"), run.record.client_names, {}
        )
        assert client.value == pytest.approx(0.9375)
        assert client.how.startswith(by)
        assert (client.interval == pytest.approx((0.552128, 0.994551), abs=1e-6)) == (by == "DeLong")
        assert not any("DeLong" in line.how for line in over)


def test_show_prints_them_and_a_run_without_images_has_those_over_clients(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert commands.main(["show", str(run), "--intervals", "balanced_accuracy"]) == 0
    said = capsys.readouterr().out
    assert POOLED in said
    assert "images resampled within clients" in said
    line = refused(capsys, commands.main, ["show", str(run), "--intervals", "acuracy"])
    assert "has no metric 'acuracy'; it has accuracy, ap, auroc" in line
    line = refused(capsys, commands.main, ["show", str(run), "--intervals"])
    assert "has accuracy, ap, auroc" in line
    kept = keep_record(run, tmp_path)
    for metric, lines in (("accuracy", 12), ("mcc", 1)):
        made = lines_of(stored_run(kept), metric, "server", "test")
        assert len(made) == lines
        assert made[-1] == lines_of(stored_run(run), metric, "server", "test")[-1]
    assert made[-1].of == LIKE_THESE


def test_images_that_are_all_right_give_no_interval_of_no_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    images = kept_images().assign(label=lambda rows: rows["prediction"])
    write_run(tmp_path / "run", "FedAvg", 0, [1.0, 1.0, 1.0], kept=images)
    lines = {line.of: line for line in lines_of(stored_run(tmp_path / "run"), "accuracy", "server", "test")}
    assert lines["amazon"].interval == of_share(5, 5)
    for name in (THESE, POOLED):
        assert lines[name].value == 1
        assert all(map(math.isnan, lines[name].interval))
    assert commands.main(["show", str(tmp_path / "run"), "--intervals", "accuracy"]) == 0
    assert "A value has no interval if the metric is undefined" in capsys.readouterr().out


@pytest.mark.parametrize(("values", "beyond"), [([0.1, 0.5, 0.9], True), ([0.5, 0.51, 0.52], False)])
def test_an_interval_by_t_beyond_0_and_1_is_said_to_be_one(
    values: list[float], beyond: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", "FedAvg", 0, values)
    assert commands.main(["show", str(tmp_path / "run"), "--intervals", "accuracy"]) == 0
    assert ("may go beyond 0 or 1" in capsys.readouterr().out.replace("\n", " ")) == beyond
