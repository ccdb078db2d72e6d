"""Temperatures fitted on val images: numbers of SciPy and scikit-learn, by hand, and of a run with held-out images."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from federation import CONF
from recorded_results import kept_images, write_run
from refusal import refused
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.metrics import brier_score_loss, log_loss
from three_clients import HELD, LABELS, LOGITS
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmark.commands import main as command
from benchmark.counts import ScoredBatch
from benchmark.metrics import POOLED_CLIENT
from benchmark.records.calibration import BOUNDS, MEASURED, calibration_of, calibrations, fit_temperature, scaled
from benchmark.records.stored_run import stored_run
from benchmark.run.cli import main

ACCURACIES = [0.6, 0.5, 2 / 3]
TWELVE = ScoredBatch(torch.tensor(LOGITS), torch.tensor(LABELS))


def of_client(client: int) -> ScoredBatch:
    begin, end = HELD[client]
    return ScoredBatch(TWELVE.logits[begin:end], TWELVE.y[begin:end])


def both_splits(point: str = "server") -> pd.DataFrame:
    """The twelve images, once as test images and once as val images."""
    test = kept_images(point)
    return pd.concat([test, test.assign(split="val")], ignore_index=True)


def test_the_twelve_images_have_the_temperature_and_the_errors_that_are_known() -> None:
    made = calibration_of(TWELVE, TWELVE)
    assert made.temperature is not None
    assert made.temperature == (pytest.approx(0.525887, abs=1e-6), False)
    assert made.before == pytest.approx({"ece": 0.355413, "loss": 0.668705, "brier": 0.379605}, abs=1e-6)
    assert (made.after["loss"], made.after["ece"]) == pytest.approx((0.595324, 0.302776), abs=1e-6)
    for client, (temperature, loss) in enumerate([(0.479292, 0.620791), (0.632524, 0.661402), (0.447960, 0.445252)]):
        own = calibration_of(of_client(client), of_client(client))
        assert own.temperature is not None
        assert own.temperature.value == pytest.approx(temperature, abs=1e-6)
        assert own.after["loss"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize(("classes", "sharpness"), [(2, 0.3), (5, 3.0)])
def test_many_images_agree_with_scipy_and_scikit_learn(classes: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(classes)
    plain = torch.randn(400, classes, generator=generator)
    y = plain.softmax(-1).multinomial(1, generator=generator).squeeze(1)
    val, test = (ScoredBatch(sharpness * plain[rows], y[rows]) for rows in (slice(0, 200), slice(200, 400)))
    logits = val.logits.double().numpy()

    def loss(beta: float) -> float:
        return float(-log_softmax(beta * logits, axis=1)[np.arange(200), val.y.numpy()].mean())

    expected = 1 / minimize_scalar(loss, bracket=(0.1, 1), tol=1e-10).x  # by 1 / T, in which it is convex
    made = calibration_of(val, test)
    assert made.temperature is not None
    assert made.temperature.value == pytest.approx(expected, rel=1e-5)
    p = torch.softmax(test.logits.double() / made.temperature.value, -1)
    assert made.after["loss"] == pytest.approx(log_loss(y[200:], p.numpy(), labels=range(classes)))
    squared = brier_score_loss(
        np.eye(classes)[y[200:]].argmax(1),
        p.numpy() if classes > 2 else p[:, 1].numpy(),
        labels=range(classes),
        scale_by_half=False,
    )
    assert made.after["brier"] == pytest.approx(squared, abs=1e-8)
    ece = multiclass_calibration_error(p, y[200:], num_classes=classes, n_bins=15, norm="l1").item()
    assert made.after["ece"] == pytest.approx(ece, abs=1e-6)


def test_one_changes_nothing_and_no_temperature_changes_a_prediction() -> None:
    made = calibration_of(None, TWELVE)
    assert made.temperature is None
    assert made.after == dict.fromkeys(MEASURED)
    assert torch.equal(scaled(TWELVE, 1.0).probabilities, TWELVE.probabilities)
    for log in (*BOUNDS, 0.7):
        assert torch.equal(scaled(TWELVE, math.exp(log)).predictions, TWELVE.predictions)
    tied = ScoredBatch(torch.tensor([[0.1, 0.3, 0.3], [1e30, 1e30, 0.0]]), torch.tensor([1, 0]))
    assert scaled(tied, 0.3).predictions.tolist() == tied.predictions.tolist() == [1, 0]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])  # from 100 on the loss is 0 well before the bound
def test_images_that_are_all_right_or_worse_than_chance_are_at_a_bound(scale: float) -> None:
    right = ScoredBatch(scale * torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1]))
    made = fit_temperature(right)
    assert made is not None
    assert made == (pytest.approx(math.exp(-4)), True)
    wrong = fit_temperature(ScoredBatch(right.logits, torch.tensor([1, 0])))
    assert wrong is not None
    assert wrong == (pytest.approx(math.exp(4)), True)


def test_an_image_without_a_prediction_leaves_nothing_defined() -> None:
    logits = TWELVE.logits.clone()
    logits[3, 1] = math.nan
    broken = ScoredBatch(logits, TWELVE.y)
    assert fit_temperature(broken) is None
    assert fit_temperature(ScoredBatch(logits[:0], TWELVE.y[:0])) is None
    made = calibration_of(TWELVE, broken)
    assert made.temperature is not None
    assert made.before == made.after == dict.fromkeys(MEASURED)


def test_a_client_without_val_images_has_no_temperature(tmp_path: Path) -> None:
    kept = both_splits()
    kept = kept[(kept["split"] == "test") | (kept["client"] != 1)]
    write_run(tmp_path / "run", "FedVPT", 0, ACCURACIES, kept=kept)
    made = calibrations(stored_run(tmp_path / "run"), "server")
    assert [*made] == [0, 1, 2, POOLED_CLIENT]
    assert (made[1].val_images, made[1].test_images, made[1].temperature) == (0, 4, None)
    assert made[1].before["loss"] == pytest.approx(0.702405, abs=1e-6)
    assert made[1].after == dict.fromkeys(MEASURED)
    assert (made[POOLED_CLIENT].val_images, made[POOLED_CLIENT].test_images) == (8, 12)


def test_show_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    kept = both_splits()
    right = (kept["client"] == 2) & (kept["split"] == "val") & (kept["label"] != kept["prediction"])
    write_run(tmp_path / "run", "FedVPT", 0, ACCURACIES, kept=kept[~right])  # val images of client 2 are all right
    assert command(["show", str(tmp_path / "run"), "--calibration"]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert rows[0] == ["amazon", "5", "5", "0.4793", rows[0][4], "0.7129 -> 0.6208", rows[0][6]]
    assert rows[0][4].startswith("0.3913 -> ")
    assert rows[2][3] == "0.0183 *"
    assert rows[3][:3] == ["all images together", "11", "12"]
    words = " ".join(said.split())
    assert "fitted on the val images of round 2, held out of training, and never on test images" in words
    assert "* At a bound of the range from 0.0183 to 54.60" in words


def test_a_run_without_val_images_says_what_gives_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, kept in (("a", kept_images()), ("b", None)):
        write_run(tmp_path / name, "FedVPT", 0, ACCURACIES, kept=kept)
        line = refused(capsys, command, ["show", str(tmp_path / name), "--calibration"])
        assert "--data.val_fraction=0.1, and --data.metrics=clinical or --data.keep_predictions=last" in line


def test_a_run_with_held_out_images_has_them_and_its_own_numbers_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    more = [
        *("--data.partition=federation.Even", "--data.clients_per_round=4"),
        *("--data.metrics=clinical", "--data.val_fraction=0.3"),
        "--trainer.max_epochs=1",
        f"--run_dir={tmp_path / 'r'}",
    ]
    main(["fit", *configs, *more])
    run = stored_run(tmp_path / "r")
    made = calibrations(run, "server")
    assert [*made] == [*range(len(run.record.client_names)), POOLED_CLIENT]
    assert made[POOLED_CLIENT].val_images == (run.predictions["split"] == "val").sum() > 0
    entry = run.record.summary["server"]["test"]
    for metric in MEASURED:
        own = [value for client, of in made.items() if client >= 0 and (value := of.before[metric]) is not None]
        assert len(own) == len(made) - 1
        assert np.mean(own) == pytest.approx(entry[metric]["last"]["average"], abs=1e-6)
    for metric in ("ece", "brier"):
        assert made[POOLED_CLIENT].before[metric] == pytest.approx(entry[metric]["last"]["pooled"], abs=1e-9)
    capsys.readouterr()
    assert command(["show", str(tmp_path / "r"), "--calibration"]) == 0
    assert "all images together" in " ".join(capsys.readouterr().out.split())
