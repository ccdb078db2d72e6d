"""Net benefit by threshold: known numbers of twelve images, scikit-learn's counts, and what `show` prints."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from recorded_results import kept_images, write_run
from refusal import refused
from sklearn.metrics import confusion_matrix
from three_clients import HELD, LABELS, LOGITS

from benchmark.commands import main as command
from benchmark.counts import ScoredBatch
from benchmark.errors import ConfigurationError
from benchmark.formulas import THRESHOLDS, net_benefit
from benchmark.metrics import POOLED_CLIENT
from benchmark.records.decision_curves import decision_curves
from benchmark.records.stored_run import stored_run

ACCURACIES = [0.6, 0.5, 2 / 3]
TWELVE = ScoredBatch(torch.tensor(LOGITS), torch.tensor(LABELS))


def by_hand(images: ScoredBatch, of: int, positive: torch.Tensor, t: float) -> float:
    (_, false), (_, hits) = confusion_matrix(images.y == of, positive, labels=[False, True])
    return float(hits / len(images.y) - false / len(images.y) * t / (1 - t))


def test_class_two_has_the_net_benefits_that_are_known() -> None:
    model, every = net_benefit(TWELVE, 2, (0.2, 0.5))
    assert model.tolist() == pytest.approx([0.270833, 0.166667], abs=1e-6)
    assert every.tolist() == pytest.approx([0.166667, -0.333333], abs=1e-6)
    assert (len(THRESHOLDS), THRESHOLDS[0], THRESHOLDS[9], THRESHOLDS[-1]) == (19, 0.05, 0.5, 0.95)


def test_all_classes_agree_with_counts_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, y = 2 * torch.randn(60, 4, generator=generator), torch.randint(0, 3, (60,), generator=generator)
    images = ScoredBatch(logits, y)
    for of in range(4):  # the last one does not occur
        model, every = net_benefit(images, of)
        p = images.probabilities[:, of]
        assert model.tolist() == pytest.approx([by_hand(images, of, p >= t, t) for t in THRESHOLDS])
        assert every.tolist() == pytest.approx([by_hand(images, of, p >= 0, t) for t in THRESHOLDS])
    assert (model <= 0).all()


def test_at_the_threshold_one_acts_and_without_a_prediction_the_model_does_not() -> None:
    images = ScoredBatch(torch.tensor([[0.0, 0.0], [math.nan, 0.0]]), torch.tensor([1, 1]))
    model, every = net_benefit(images, 1, (0.5, 0.55))
    assert model.tolist() == [0.5, 0.0]
    assert every.tolist() == [1.0, 1.0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    kept = kept_images()
    more = kept.assign(split="val", prediction=0, label=0)  # other splits count for nothing
    write_run(tmp_path / "run", "FedVPT", 0, ACCURACIES, kept=pd.concat([kept, more], ignore_index=True))
    return tmp_path / "run"


def test_a_run_has_a_curve_for_each_client_and_for_all(run: Path) -> None:
    made = decision_curves(stored_run(run), 2, "server")
    assert [*made] == [POOLED_CLIENT, 0, 1, 2]
    assert made[POOLED_CLIENT][:2] == (12, 4)
    for client, (begin, end) in enumerate(HELD):
        own = ScoredBatch(TWELVE.logits[begin:end], TWELVE.y[begin:end])
        assert made[client].own == int((own.y == 2).sum())
        expected = [by_hand(own, 2, own.probabilities[:, 2] >= t, t) for t in THRESHOLDS]
        assert made[client].model == pytest.approx(expected)
    with pytest.raises(ConfigurationError, match="stored no predictions of test images after local training"):
        decision_curves(stored_run(run), 2, "local")


@pytest.mark.parametrize("named", ["mug", "1"])
def test_show_prints_the_curve_of_all_images(run: Path, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(run), "--net_benefit", named]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert len(rows) == len(THRESHOLDS)
    model, every = net_benefit(TWELVE, 1)
    assert rows[9] == ["0.50", f"{model[9]:.4f}", f"{every[9]:.4f}", "0"]
    assert "net benefit of acting on mug, test images after aggregation" in " ".join(said.split())
    assert "4 of 12 images are of the class" in said


def test_wrong_uses_are_told_in_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, command, ["show", str(run), "--net_benefit", "cup"])
    assert "has no class 'cup'; give one of bike, mug" in line
    assert "a label from 0 to 2" in line
    assert "no class '3'" in refused(capsys, command, ["show", str(run), "--net_benefit", "3"])
    write_run(tmp_path / "basic", "FedVPT", 0, ACCURACIES)
    line = refused(capsys, command, ["show", str(tmp_path / "basic"), "--net_benefit", "mug"])
    assert "--data.keep_predictions=last stores its predictions" in line
