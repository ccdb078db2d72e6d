"""Youden's operating point: thresholds and rates by hand and by scikit-learn, and what `show` prints."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from recorded_results import kept_images, write_run
from refusal import refused
from sklearn.metrics import roc_curve

from benchmark.commands import main as command
from benchmark.counts import ScoredBatch
from benchmark.metrics import POOLED_CLIENT
from benchmark.records.operating_points import operating_points, rates, youden_threshold
from benchmark.records.stored_run import StoredRun

ACCURACIES = [0.6, 0.5, 2 / 3]
#: Probabilities of the second class, and labels, of two clients' images.
VAL = [(0.9, 1), (0.8, 0), (0.7, 1), (0.4, 1), (0.3, 0), (0.2, 0)], [(0.6, 0), (0.9, 0)]
TEST = [(0.95, 1), (0.45, 1), (0.42, 0), (0.1, 0), (0.2, 1)], [(0.41, 1), (0.6, 1), (0.3, 0), (0.7, 0)]


def images(*pairs: tuple[float, int]) -> ScoredBatch:
    p, labels = zip(*pairs, strict=True)
    return ScoredBatch(torch.tensor([[0.0, math.log(each / (1 - each))] for each in p]), torch.tensor(labels))


def rows(split: str, *clients: list[tuple[float, int]]) -> pd.DataFrame:
    made = []
    for client, pairs in enumerate(clients):
        of = images(*pairs)
        columns = {"label": of.y, "prediction": of.predictions, "logits": list(of.logits.numpy())}
        made.append(pd.DataFrame({"point": "server", "split": split, "round": 2, "client": client, **columns}))
    found = pd.concat(made, ignore_index=True)
    return found.assign(image=range(len(found)), group=range(len(found)))


def written(folder: Path, kept: pd.DataFrame) -> StoredRun:
    write_run(folder, "FedVPT", 0, ACCURACIES, kept=kept)
    return StoredRun(folder)


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return written(tmp_path / "run", pd.concat([rows("val", *VAL), rows("test", *TEST)], ignore_index=True))


def test_the_threshold_has_the_largest_index_and_is_the_larger_of_two() -> None:
    """Indices of the first client's images from .9 down: 1/3, 0, 1/3, 2/3, 1/3, 0."""
    assert youden_threshold(images(*VAL[0]), 1) == pytest.approx(0.4)
    assert youden_threshold(images((0.9, 1), (0.5, 0), (0.4, 1), (0.1, 0)), 1) == pytest.approx(0.9)  # .5, 0, .5, 0
    assert youden_threshold(images((0.5, 1), (0.5, 0), (0.2, 0)), 1) == pytest.approx(
        0.5
    )  # equal ones are called alike
    assert youden_threshold(images(*VAL[1]), 1) is None
    broken = images(*VAL[0])
    broken.logits[0, 0] = math.nan
    assert youden_threshold(broken, 1) is None


def test_many_images_agree_with_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 300)
    p = np.round(np.clip(rng.normal(0.4 + 0.2 * labels, 0.2), 0.01, 0.99), 2)
    false, true, thresholds = roc_curve(labels, p, drop_intermediate=False)
    found = youden_threshold(images(*zip(p.tolist(), labels.tolist(), strict=True)), 1)
    assert found == pytest.approx(thresholds[(true - false).round(12).argmax()])  # from the largest threshold down


def test_each_client_has_its_own_and_all_images_one(run: StoredRun) -> None:
    made = operating_points(run, 1, "server")
    assert [*made] == [POOLED_CLIENT, 0, 1]
    own = made[0]
    assert (own.val_images, own.threshold) == (6, pytest.approx(0.4))
    # As predicted, .95 alone is called positive; from .4 on .95, .45 and .42.
    assert own.predicted == {"sensitivity": (1, 3), "specificity": (2, 2), "ppv": (1, 1), "npv": (2, 4)}
    assert own.chosen == {"sensitivity": (2, 3), "specificity": (1, 2), "ppv": (2, 3), "npv": (1, 2)}
    assert own.chosen["sensitivity"].value == pytest.approx(2 / 3)
    assert own.chosen["sensitivity"].interval == pytest.approx((0.207660, 0.938508), abs=1e-6)
    assert (made[1].threshold, made[1].chosen) == (None, {})
    # All: .9 (one of two) 1/3 - 1/5, .8 1/3 - 2/5, .7 2/3 - 2/5, .6 2/3 - 3/5, .4 1 - 3/5, .3 1 - 4/5, .2 0.
    assert made[POOLED_CLIENT].threshold == pytest.approx(0.4)
    assert made[POOLED_CLIENT].chosen == {"sensitivity": (4, 5), "specificity": (2, 4), "ppv": (4, 6), "npv": (2, 3)}


def test_either_class_may_be_positive(run: StoredRun) -> None:
    """Of class 0 val images have .8 .7 .6 .4 .3 .2 .1 .1, of which .8 .7 .4 .2 and one .1 are positive: .7 is best."""
    other = operating_points(run, 0, "server")[POOLED_CLIENT]
    assert other.threshold == pytest.approx(0.7)
    assert other.predicted["sensitivity"] == operating_points(run, 1, "server")[POOLED_CLIENT].predicted["specificity"]
    assert other.chosen == {"sensitivity": (2, 4), "specificity": (4, 5), "ppv": (2, 3), "npv": (4, 6)}


def test_rates_without_images_are_not_defined() -> None:
    found = rates(torch.tensor([True, True]), torch.tensor([True, False]))
    assert found["specificity"] == (0, 0)
    assert found["specificity"].value is None
    assert math.isnan(found["specificity"].interval.low)
    assert (found["ppv"], found["npv"]) == ((1, 1), (0, 1))


def test_an_image_without_a_prediction_is_not_called_positive(tmp_path: Path) -> None:
    kept = pd.concat([rows("val", *VAL), rows("test", *TEST)], ignore_index=True)
    at = len(rows("val", *VAL))  # the test image of .95
    kept.at[at, "logits"], kept.loc[at, "prediction"] = np.array([math.nan, 0.0]), -1
    own = operating_points(written(tmp_path / "a", kept), 1, "server")[0]
    assert own.predicted["sensitivity"] == (0, 3)
    assert own.chosen["sensitivity"] == (1, 3)


def test_show_prints_the_rates_of_all_images(run: StoredRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(run.folder), "--youden", "label 1"]) == 0
    said = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]
    assert [line[1] for line in lines] == 2 * ["sensitivity", "specificity", "PPV", "NPV"]
    assert lines[0] == ["as predicted", "sensitivity", "5", "40.00", "11.76", "76.93"]
    assert lines[4] == ["from 0.4000 on", "sensitivity", "5", "80.00", "37.55", "96.38"]
    assert lines[7][2:4] == ["3", "66.67"]
    words = " ".join(said.split())
    assert (
        "mug as the positive class, test images after aggregation" in words or "label 1 as the positive class" in words
    )
    assert "on 8 val images, held out of training, and was never chosen on test images" in words


def test_wrong_uses_are_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept: dict[str, Any] = {"no val": rows("test", *TEST), "none": None}
    for name, given in kept.items():
        write_run(tmp_path / name, "FedVPT", 0, ACCURACIES, kept=given)
        line = refused(capsys, command, ["show", str(tmp_path / name), "--youden", "1"])
        assert "--data.val_fraction=0.1, and --data.metrics=clinical or --data.keep_predictions=last" in line
    three = pd.concat([kept_images(), kept_images().assign(split="val")], ignore_index=True)
    written(tmp_path / "three", three)
    for of in ("1", "2"):
        line = refused(capsys, command, ["show", str(tmp_path / "three"), "--youden", of])
        assert "has 3 classes; an operating point is of two" in line
    written(tmp_path / "two", pd.concat([rows("val", *VAL), rows("test", *TEST)], ignore_index=True))
    line = refused(capsys, command, ["show", str(tmp_path / "two"), "--youden", "cup"])
    assert "has no class 'cup'; give one of label 0, label 1, or a label from 0 to 1" in line
    of_one = pd.concat([rows("val", VAL[1]), rows("test", *TEST)], ignore_index=True)
    written(tmp_path / "one", of_one)
    assert command(["show", str(tmp_path / "one"), "--youden", "1"]) == 0
    assert "No threshold after aggregation: val images are of one class" in capsys.readouterr().out
