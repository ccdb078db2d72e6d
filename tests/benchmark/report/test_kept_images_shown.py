"""The report on kept images: numbers by hand of twelve images of three clients, and a run that keeps none."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import vl_convert
from recorded_results import HOSTILE, kept_images, write_results, write_run

from benchmark.counts import BINS
from benchmark.errors import ConfigurationError
from benchmark.records.grouped_runs import read_run
from benchmark.records.predictions import PREDICTIONS
from benchmark.report.page import write_report
from benchmark.report.scored import MEAN, MOST_CLASSES_BY_CLIENT, MOST_CORNERS, Scored, scored_images

ALL = -1


def shown(folder: Path, kept: pd.DataFrame, **given: Any) -> list[Scored]:
    write_run(folder, "FedVPT", 0, [0.6, 0.5, 0.667], kept=kept, **given)
    return scored_images("FedVPT", read_run(folder))


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Scored:
    (made,) = shown(tmp_path_factory.mktemp("runs") / "a", kept_images())
    return made


def of(rows: Any, **chosen: int) -> dict[str, Any]:
    (row,) = (row for row in rows if all(row[name] == value for name, value in chosen.items()))
    return dict(row)


def area(row: dict[str, Any]) -> float:
    return float(np.trapezoid(row["y"], row["x"]))


def steps(row: dict[str, Any]) -> float:
    return float((np.diff(row["x"]) * np.array(row["y"])[1:]).sum())


def test_confusion_matrices_are_counted(scored: Scored) -> None:
    expected = {
        0: [[1, 0, 1], [1, 1, 0], [0, 0, 1]],
        1: [[1, 1, 0], [0, 1, 1], [0, 0, 0]],
        2: [[0, 0, 0], [0, 0, 0], [1, 0, 2]],
        ALL: [[2, 1, 1], [1, 2, 1], [1, 0, 3]],
    }
    for client, matrix in expected.items():
        row, made = of(scored.confusion, client=client), np.zeros((3, 3), dtype=int)
        made[row["label"], row["predicted"]] = row["images"]
        assert made.tolist() == matrix
    assert (scored.label, scored.classes) == ("FedVPT, seed 0, after aggregation", ["bike", "mug", HOSTILE])
    assert scored.clients == {0: "amazon", 1: "dslr", 2: HOSTILE}


def test_reliability_bins_are_those_of_the_calibration_error(scored: Scored) -> None:
    row = of(scored.reliability, client=2)
    # Confidences .673910 (right), .436752 (wrong), .880462 (right), in bins of a fifteenth.
    assert row["bin"] == [6, 10, 13]
    assert row["images"] == [1, 1, 1]
    assert row["confidence"] == [0.4368, 0.6739, 0.8805]
    assert row["accuracy"] == [0.0, 1.0, 1.0]
    assert row["said"] == "ECE 0.294, 3 images"
    whole = of(scored.reliability, client=ALL)
    error = sum(
        n / 12 * abs(a - c) for n, a, c in zip(whole["images"], whole["accuracy"], whole["confidence"], strict=True)
    )
    assert error == pytest.approx(0.355413, abs=1e-4)
    assert max(whole["bin"]) < BINS


def test_roc_points_are_those_made_by_hand(scored: Scored) -> None:
    # Class 1 of client 1 by falling probability: images 7 (own), 6, 8 (own), 5.
    row = of(scored.roc, client=1, of=1)
    assert (row["x"], row["y"]) == ([0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.5, 1.0, 1.0])
    assert row["said"] == "AUROC 0.750, 2 of 4 images"
    # Class 0 of client 1 is right in all pairs; the mean of both goes up at 0, and again at a half.
    assert of(scored.roc, client=1, of=0)["y"] == [0.0, 0.5, 1.0, 1.0]
    mean = of(scored.roc, client=1, of=MEAN)
    assert (mean["x"], mean["y"]) == ([0.0, 0.0, 0.5, 0.5, 1.0], [0.0, 0.75, 0.75, 1.0, 1.0])
    assert mean["said"] == "AUROC 0.875, mean over 2 of 3 classes"
    assert [row["client"] for row in scored.roc].count(2) == 0  # its images are of one class


def test_precision_by_recall_is_that_made_by_hand(scored: Scored) -> None:
    row = of(scored.precision_recall, client=1, of=1)
    assert (row["x"], row["y"]) == ([0.0, 0.5, 1.0], [1.0, 1.0, 0.6667])
    assert row["said"] == "AP 0.833, 2 of 4 images"
    mean = of(scored.precision_recall, client=1, of=MEAN)
    assert (mean["x"], mean["y"]) == ([0.0, 0.5, 1.0], [1.0, 1.0, 0.8333])


@pytest.mark.parametrize(
    ("client", "roc", "ap"),
    [
        (0, [0.833333, 1, 1, 0.944444], [0.833333, 1, 1, 0.944444]),
        (ALL, [0.875, 0.9375, 0.9375, 0.916667], [0.816667, 0.8875, 0.916667, 0.873611]),
    ],
)
def test_areas_under_the_curves_are_the_metrics(scored: Scored, client: int, roc: list[float], ap: list[float]) -> None:
    for place, expected in zip((0, 1, 2, MEAN), zip(roc, ap, strict=True), strict=True):
        curves = [of(rows, client=client, of=place) for rows in (scored.roc, scored.precision_recall)]
        assert [area(curves[0]), steps(curves[1])] == pytest.approx(list(expected), abs=1e-4)
        assert [curve["said"].split()[1].strip(",") for curve in curves] == [f"{each:.3f}" for each in expected]


def test_decision_curves_are_the_net_benefits(scored: Scored) -> None:
    row = of(scored.decision, client=ALL, of=2)
    at = [row["x"].index(threshold) for threshold in (0.2, 0.5)]
    assert [row["y"][place] for place in at] == [0.2708, 0.1667]
    assert [row["every"][place] for place in at] == [0.1667, -0.3333]
    assert row["said"] == "0.167 at 0.5, 4 of 12 images"
    # Client 1 at a half: of class 0 image 5 is found (.736), of class 1 image 7 (.796), and nothing else.
    assert of(scored.decision, client=1, of=0)["y"][9] == 0.25
    assert of(scored.decision, client=1, of=1)["y"][9] == 0.25
    mean = of(scored.decision, client=1, of=MEAN)  # class 2 does not occur
    assert (mean["y"][9], mean["said"]) == (0.25, "0.250 at 0.5, mean over 2 of 3 classes")
    assert [row["of"] for row in scored.decision if row["client"] == 2] == [2, MEAN]


def test_many_images_and_classes_stay_small(tmp_path: Path) -> None:
    rng, count, classes = np.random.default_rng(0), 1500, MOST_CLASSES_BY_CLIENT + 1
    labels, client = rng.integers(0, 5, count), np.sort(rng.integers(0, 3, count))
    logits = rng.normal(size=(count, classes)) + 2 * np.eye(classes)[labels]
    images = {"image": range(count), "group": range(count), "prediction": logits.argmax(1)}
    kept = pd.DataFrame({"point": "server", "split": "test", "round": 2, "client": client, "label": labels, **images})
    (made,) = shown(tmp_path / "a", kept.assign(logits=list(logits)))
    assert made.classes == [f"label {each}" for each in range(classes)]  # the partition knows three
    for rows, under in ((made.roc, area), (made.precision_recall, steps)):
        assert {(row["client"], row["of"]) for row in rows} == {
            *((ALL, each) for each in (*range(5), MEAN)),
            *((each, MEAN) for each in range(3)),
        }
        for row in rows:
            assert len(row["x"]) == len(row["y"]) <= MOST_CORNERS
            assert under(row) == pytest.approx(float(row["said"].split()[1].strip(",")), abs=0.01)
            assert (row["x"][0], row["x"][-1]) == (0.0, 1.0)
            assert row["x"] == sorted(row["x"])


def test_images_without_a_prediction_are_in_no_curve(tmp_path: Path) -> None:
    kept = kept_images("local")
    kept.at[9, "logits"], kept.loc[9, "prediction"] = (float("nan"), 0.0, 0.0), -1
    (made,) = shown(tmp_path / "a", kept, local=[0.6, 0.5, 0.333])
    assert made.label == "FedVPT, seed 0, after local training"
    row = of(made.confusion, client=2)
    assert (row["label"], row["predicted"], row["images"]) == ([2, 2, 2], [0, 2, 3], [1, 1, 1])
    assert of(made.reliability, client=2)["said"] == "ECE not defined: an image has no prediction, 3 images"
    assert {row["client"] for row in made.roc} == {0, 1}


def test_two_classes_have_no_mean(tmp_path: Path) -> None:
    kept = kept_images().query("label < 2 and prediction < 2")
    kept["logits"] = [row[:2] for row in kept["logits"]]
    (made,) = shown(tmp_path / "a", kept)
    assert (made.first, {row["of"] for row in made.roc}) == (1, {0, 1})


def test_images_of_no_client_or_class_of_the_run_are_told(tmp_path: Path) -> None:
    for name, column, value, told in (
        ("a", "client", 3, "the run's, 0 to 2"),
        ("b", "label", -1, "the classes of its logits"),
        ("c", "prediction", 3, "the classes of its logits"),
    ):
        kept = kept_images()
        kept.loc[11, column] = value
        with pytest.raises(ConfigurationError, match=f"it has a {column} that is none of {told}"):
            shown(tmp_path / "runs" / name, kept)


def board_of(page: str) -> str:
    (text,) = (part for part in page.split("<section ") if 'id="data-' in part[:60] and "<h3>Runs</h3>" in part)
    return text


def test_the_page_shows_them_for_the_runs_that_kept_them(tmp_path: Path) -> None:
    folder = write_results(tmp_path)
    assert "Stored predictions" not in write_report(tmp_path / "page.html", folder).path.read_text()
    write_run(folder / "runs" / "c0", "FedPer", 0, [0.6, 0.5, 0.667], kept=kept_images())
    write_run(folder / "runs" / "d0", "FedBN", 0, [0.6, 0.5, 0.667], kept=kept_images())
    (folder / "runs" / "d0" / PREDICTIONS).unlink()  # as in a kept copy
    written = write_report(tmp_path / "page.html", folder)
    text = board_of(written.path.read_text())
    assert len(written.problems) == 1  # that of the folder
    assert HOSTILE not in text
    options = [unescape(each) for each in re.findall(r"<option[^>]*>(.*?)</option>", text)]
    clients, classes = ["amazon", "dslr", HOSTILE], ["bike", "mug", HOSTILE]
    assert options == [
        *("FedPer, seed 0, after aggregation", "All together", *clients),
        *("Mean over classes", *classes),
    ]
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    specs = [spec for spec in json.loads(data) if spec.get("usermeta", {}).get("chosen")]
    assert len(specs) == text.count('role="img"') - 7 == 5
    for spec in specs:
        said = vl_convert.vegalite_to_svg({**spec, "width": 400, "autosize": "pad"})
        told = ("AUROC 0.917", "AP 0.874", "ECE 0.355", ">bike<", "0.167 at 0.5, mean over 3")
        assert sum(each in said for each in told) == 1
        assert "<img" not in said
    label = "ROC curve, all clients together; FedPer, seed 0, after aggregation: AUROC 0.917, mean over 3 of 3 classes"
    assert f'aria-label="{label}"' in text


def test_damaged_images_are_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "FedPer", 0, [0.6, 0.5, 0.667], kept=kept_images())
    (tmp_path / "runs" / "a" / PREDICTIONS).write_bytes(b"PAR1")
    written = write_report(tmp_path / "page.html", tmp_path)
    assert written.runs == 1
    (problem,) = written.problems
    assert "predictions.parquet was changed after the run" in problem
    assert "Stored predictions" not in written.path.read_text()
