"""Two runs on the same images: hand-computed differences and tests, what is refused, and what `compare` prints."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from federation import CONF
from recorded_results import kept_images, write_run
from refusal import refused
from three_clients import HELD, LABELS, LOGITS

from benchmark.commands import main as command
from benchmark.intervals import mcnemar
from benchmark.metrics import METRICS
from benchmark.records.compared_runs import ALIKE, AT_END, FEW, GROUPED, PairedTest, auroc_of, compared
from benchmark.records.keeping import keep_record
from benchmark.records.predictions import PREDICTIONS
from benchmark.records.run_intervals import POOLED, THESE
from benchmark.records.same_images import paired_images
from benchmark.records.stored_run import stored_run
from benchmark.run.cli import main

NAMES = ("amazon", "dslr", "webcam")
ACCURACIES = [0.6, 0.5, 2 / 3]
Rows = pd.DataFrame


def rows_of(logits: list[list[float]]) -> Rows:
    """The twelve images with other logits."""
    return kept_images().assign(logits=logits, prediction=[int(np.argmax(row)) for row in logits])


def second_rows() -> Rows:
    """The second method: column 2 halved, and two images moved."""
    logits = [[a, b, c / 2] for a, b, c in LOGITS]
    logits[1][2], logits[9][2] = 1.3, 0.1
    return rows_of(logits)


FIRST, SECOND = kept_images(), second_rows()


def test_a_second_method_differs_as_computed_by_hand() -> None:
    """All twelve images at one client: there and together, the values are those of the specification."""
    at_one = FIRST.assign(client=0), SECOND.assign(client=0)
    accuracy = compared(at_one, METRICS["accuracy"], NAMES)
    area = compared(at_one, auroc_of(2), NAMES, 2)
    for line in (accuracy.clients[0], accuracy.over[1]):
        assert line.value == pytest.approx(-2 / 12)
        assert line.interval == pytest.approx((-0.416667, 0), abs=1e-6)
        assert line.test == PairedTest(0.5, alone=(2, 0))
    for line in (area.clients[0], area.over[1]):
        assert (line.first, line.second) == (pytest.approx(0.9375), pytest.approx(0.8125))
        assert line.test is not None
        assert line.test.error == pytest.approx(0.110801, abs=1e-6)
        assert line.test.p_value == pytest.approx(0.259256, abs=1e-6)
    assert accuracy.over[0].test is None  # a mean over clients has none


def test_clients_their_mean_and_all_images_have_a_difference() -> None:
    """Accuracies 3/5, 2/4, 2/3 and 2/5, 2/4, 1/3; the draws of each client are the same for both runs."""
    made = compared((FIRST, SECOND), METRICS["accuracy"], NAMES)
    assert [line.of for line in (*made.clients, *made.over)] == [*NAMES, THESE, POOLED]
    assert [line.images for line in (*made.clients, *made.over)] == [5, 4, 3, 12, 12]
    found = [line.value for line in (*made.clients, *made.over)]
    assert found == pytest.approx([-1 / 5, 0, -1 / 3, (-1 / 5 - 1 / 3) / 3, -2 / 12])
    assert made.clients[0].interval == pytest.approx((-0.6, 0))  # one of five images is lost, drawn up to 3 times
    assert all(map(math.isnan, made.clients[1].interval))  # both are right on the same two of four
    assert [line.test and line.test.alone for line in made.clients] == [(1, 0), (0, 0), (1, 0)]
    assert made.adjusted == [1, 1, 1]
    assert [line.of for line in compared((FIRST, SECOND), METRICS["macro_f1"], NAMES).over] == [THESE]  # is not pooled


@pytest.mark.parametrize("metric", ["accuracy", "loss", "auroc", "kappa"])
def test_a_run_does_not_differ_from_itself(metric: str) -> None:
    made = compared((FIRST, FIRST), METRICS[metric], NAMES)
    for line in (*made.clients, *made.over):
        if line.first is not None:
            assert (line.value, *line.interval) in ((0, 0, 0), (0, math.nan, math.nan))
    if metric in ("accuracy", "loss"):  # the others are undefined for some client in more than a tenth of the draws
        assert made.over[0].interval == (0, 0)
    assert made.unpaired == []


def test_no_test_tells_a_run_from_itself() -> None:
    accuracy = compared((FIRST, FIRST), METRICS["accuracy"], NAMES)
    assert [line.test and line.test.p_value for line in accuracy.clients] == [1, 1, 1]
    area = compared((FIRST, FIRST), auroc_of(2), NAMES, 2)
    assert area.over[1].test == PairedTest(error=0.0, why=ALIKE)
    assert area.over[1].interval == (0, 0)


def test_delongs_test_says_why_there_is_none() -> None:
    """AUROCs of class 2 are 1 at the first client with one such image, undefined at the others."""
    assert [line.test for line in compared((FIRST, SECOND), auroc_of(2), NAMES, 2).clients] == [
        PairedTest(why=FEW),
        None,
        None,
    ]
    two = FIRST.assign(client=0, label=[0, 1, 2, 1, 2, 0, 0, 1, 1, 2, 1, 2])
    perfect = rows_of([[0.0, 0.0, float(label == 2)] for label in two["label"]]).assign(client=0, label=two["label"])
    (line,) = compared((two, perfect), auroc_of(2), NAMES, 2).clients
    assert line.second == 1
    assert line.test is not None
    assert (line.test.p_value, line.test.why) == (None, AT_END)


def test_images_of_a_group_are_drawn_together_and_are_not_tested() -> None:
    """Five images of one patient at the first client: each draw is all of them, as often as they are."""
    group = [0] * 5 + [*range(1, 8)]
    both = FIRST.assign(group=group), SECOND.assign(group=group)
    made = compared(both, METRICS["accuracy"], NAMES)
    assert all(map(math.isnan, made.clients[0].interval))  # all draws are alike
    assert made.clients[0].test == PairedTest(alone=(1, 0), why=GROUPED)
    assert made.clients[2].test == PairedTest(1.0, alone=(1, 0))  # its images are of one patient each
    assert made.over[1].test == PairedTest(alone=(2, 0), why=GROUPED)
    assert made.adjusted == [None, 1, 1]
    assert compared(both, auroc_of(2), NAMES, 2).over[1].test == PairedTest(why=GROUPED)


def test_a_mean_is_over_the_same_clients_in_each_draw() -> None:
    """A client whose value is undefined in a third of the draws leaves the mean without an interval."""
    labels = np.array([0, 1] * 20 + [1] + [0] * 19)  # of the second client, one of twenty images is of class 1
    client = np.array([0] * 40 + [1] * 20)
    ranks = np.random.default_rng(3).normal(size=60)
    logits = [[[0.0, rank + sign * label] for rank, label in zip(ranks, labels, strict=True)] for sign in (1, 2)]
    first, second = (
        pd.DataFrame({**dict.fromkeys(("round", "point", "split"), ""), "client": client, "image": range(60)}).assign(
            label=labels, group=range(60), logits=each, prediction=[int(b > a) for a, b in each]
        )
        for each in logits
    )
    made = compared((first, second), auroc_of(1), ("a", "b"), 1)
    assert made.over[0].value is not None
    assert all(map(math.isnan, made.over[0].interval))
    assert not any(map(math.isnan, made.clients[0].interval))


def test_groups_of_several_clients_are_drawn_for_all_of_them_at_once() -> None:
    """Two patients with one image at each of six clients: a draw has each patient 0, 1 or 2 times, everywhere."""
    client, group = np.repeat(np.arange(6), 2), np.tile([0, 1], 6)
    rows = FIRST.assign(client=client, group=group, label=0)
    first = rows.assign(logits=[[1.0, 0.0, 0.0]] * 12, prediction=0)
    second = first.assign(logits=[[1.0 - 2 * patient, 0.0, 0.0] for patient in group], prediction=group)
    made = compared((first, second), METRICS["accuracy"], [f"c{n}" for n in range(6)])
    assert made.span_clients
    for line in made.over:  # of patient 1, whom B is wrong on at every client, a quarter of the draws has all or none
        assert (line.value, *line.interval) == (-0.5, -1, 0)


def test_holms_p_values_are_the_clients_in_their_order() -> None:
    """8 of 8, 6 of 6 and 1 of 2 discordant images: p 2/256, 2/64 and 1; adjusted 6/256, 4/64 and 1."""
    client = np.repeat([0, 1, 2, 3], 10)
    right = [[1] * 6 + [1] * 4, [1] * 8 + [1, 1], [1, 1, 0] + [1] * 7, [1] * 10]
    wrong = [[0] * 6 + [1] * 4, [0] * 8 + [1, 1], [1, 0, 1] + [1] * 7, [1] * 10]
    group = [*range(30), *[30] * 10]  # the last client's images show one patient
    first, second = (
        pd.DataFrame({**dict.fromkeys(("round", "point", "split"), ""), "client": client, "image": range(40)}).assign(
            label=0, group=group, logits=[[float(hit), 0.5] for row in kind for hit in row], prediction=0
        )
        for kind in (right, wrong)
    )
    made = compared((first, second), METRICS["accuracy"], "abcd")
    assert [line.test and line.test.p_value for line in made.clients] == [2 / 64, 2 / 256, 1, None]
    assert made.adjusted == [4 / 64, 6 / 256, 1, None]


def test_a_client_that_one_run_has_no_value_of_is_in_no_mean() -> None:
    """The second run has no prediction of an image of the first client; its loss and AUROC are not defined."""
    broken = SECOND.assign(logits=[[math.nan] * 3, *SECOND["logits"][1:]], prediction=[-1, *SECOND["prediction"][1:]])
    made = compared((FIRST, broken), METRICS["auroc"], NAMES)
    assert made.unpaired == ["amazon"]
    assert made.over[0].first == made.clients[1].first == pytest.approx(0.875)
    assert (made.clients[0].first, made.clients[0].value) == (pytest.approx(0.944444, abs=1e-6), None)
    paired = [line for line in made.clients if line.value is not None]
    assert [line.of for line in paired] == ["dslr"]  # so the mean is its value, in all draws too
    assert made.undefined == ["webcam"]
    assert made.over[0].images == 4
    assert made.over[0].interval == pytest.approx(paired[0].interval, nan_ok=True)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run of some kept images."""

    def write(name: str, kept: Rows | None, **fields: Any) -> Path:
        write_run(tmp_path / name, "FedAvg", 0, ACCURACIES, kept=kept, **fields)
        return tmp_path / name

    return write


def test_compare_prints_both_runs_and_their_differences(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    a, b = written("a", FIRST), written("b", SECOND)
    assert command(["compare", str(a), str(b), "--metric", "accuracy", "loss", "--class", "mug"]) == 0
    said = capsys.readouterr().out
    assert f"A  {a}: FedAvg on CIFAR10, seed 0, round 2, after aggregation" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["amazon", "5", "60.00", "40.00", "-20.00", "-60.00", "0.00", "1", "/", "0", "1.0000", "1.0000"] in lines
    assert ["all", "images", "together", "12", "58.33", "41.67", "-16.67"] in [line[:7] for line in lines]
    assert "test loss, less is better" in said
    assert "test auroc of mug" in said
    assert "No DeLong test of amazon: an AUROC is 0 or 1." in said
    assert "No p value is corrected for several comparisons; Holm's p is, for the clients of its table." in said


def test_the_auroc_of_two_classes_is_tested_without_asking(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 2 of the twelve images against the rest, by the probabilities of both methods."""
    monkeypatch.setenv("COLUMNS", "120")
    folders = []
    for name, of in (("a", FIRST), ("b", SECOND)):
        p = np.exp(list(of["logits"]))[:, 2] / np.exp(list(of["logits"])).sum(1)
        logits = np.stack([np.zeros(12), np.log(p / (1 - p))], 1).astype("float32")
        label = np.equal(LABELS, 2).astype(int)
        kept = of.assign(client=0, label=label, prediction=logits.argmax(1), logits=list(logits))
        folders.append(str(written(name, kept)))
    assert command(["compare", *folders, "--metric", "auroc"]) == 0
    said = capsys.readouterr().out
    assert "test auroc of label 1" in said
    (line,) = [line.split() for line in said.splitlines() if line.startswith("amazon")]
    assert line[:5] == ["amazon", "12", "0.9375", "0.8125", "-0.1250"]
    assert line[7:] == ["0.1108", "0.2593"]  # one client alone has no p value by Holm's method
    assert "--class NAME" not in said


def test_a_run_is_compared_with_itself_before_and_after_local_training(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    both = pd.concat([FIRST, SECOND.assign(point="local")], ignore_index=True)
    run = written("run", both, local=[0.4, 0.5, 1 / 3])
    assert command(["compare", str(run), str(run), "--point_b", "local", "--metric", "accuracy"]) == 0
    said = capsys.readouterr().out
    assert "after local" in said
    assert "-16.67" in said
    assert command(["compare", str(run), str(run), "--point", "local", "--metric", "accuracy"]) == 0
    assert "-16.67" not in capsys.readouterr().out


REFUSED: dict[str, tuple[Rows | None, dict[str, Any], list[str], str]] = {
    "no images": (None, {}, [], "b has no predictions.parquet: only a run with"),
    "keeps none": (None, {"data": {"keep_predictions": "none"}}, [], "again with --data.keep_predictions=last"),
    "fewer images": (SECOND[:-1], {}, [], "image 11 in the first run alone"),
    "another image": (SECOND.assign(image=[*range(11), 12]), {}, [], "has image 11 in the first run alone"),
    "another client": (SECOND.assign(client=[*[0] * 4, *[1] * 5, *[2] * 3]), {}, [], "'amazon' has image 4 in the"),
    "other labels": (
        SECOND.assign(label=[1, *LABELS[1:]]),
        {},
        [],
        "image 0 of client 'amazon' has the labels 0 and 1",
    ),
    "other groups": (SECOND.assign(group=[5, *range(1, 12)]), {}, [], "image 0 of client 'amazon' has the groups 0"),
    "other classes": (SECOND.assign(logits=[[*row, -1.0] for row in LOGITS]), {}, [], "3 classes, the second one 4"),
    "another data set": (SECOND, {"source": "MNIST"}, [], "they are on 'CIFAR10' and on 'MNIST'"),
    "no such client": (
        SECOND.assign(client=[7, *SECOND["client"][1:]]),
        {},
        [],
        "has a client that is none of the run's, 0 to 2",
    ),
    "a split of two lines": (SECOND, {}, ["--split", "a\nb"], "stored no predictions of the split 'a\\nb' after"),
    "a partition": (SECOND, {"split": "def"}, [], "their partitions differ, and no hash shows"),
    "a point": (
        SECOND,
        {},
        ["--point", "local"],
        "stored no predictions of the split 'test' after local training; it stored those of test",
    ),
    "its point": (SECOND, {}, ["--point_b", "local"], "b stored no predictions of the split 'test' after local"),
    "a split": (SECOND, {}, ["--split", "val"], "stored no predictions of the split 'val' after aggregation"),
    "a metric": (SECOND, {}, ["--metric", "acuracy"], "no metric that is made of predictions (did you mean accuracy"),
    "no such images": (SECOND, {}, ["--metric", "ood_auroc"], "no metric that is made of predictions"),
    "a class": (SECOND, {}, ["--class", "cup"], "has no class 'cup'; give one of bike, mug"),
    "support": (SECOND, {"data": {"min_support": 5}}, ["--metric", "auroc"], "data.min_support is 1 and 5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_paired_is_refused_in_one_line(
    case: str, written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kept, fields, options, said = REFUSED[case]
    a, b = written("a", FIRST), written("b", kept, **fields)
    assert said in refused(capsys, command, ["compare", str(a), str(b), *options])


def test_another_partition_of_the_same_images_is_compared(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same test images; others to train on, say."""
    a, b = written("a", FIRST, images_sha256="i"), written("b", SECOND, split="def", images_sha256="i")
    assert command(["compare", str(a), str(b)]) == 0
    assert "The runs' partitions are not the same" in capsys.readouterr().out
    one, other = paired_images(stored_run(a), stored_run(b), ("server", "server"), "test")
    assert [*one["image"]] == [*other["image"]] == [*range(12)]
    assert [*one["client"]] == [number for number, (begin, end) in enumerate(HELD) for _ in range(begin, end)]


def test_images_of_other_pixels_are_compared_and_named_as_such(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = written("a", FIRST, images_sha256="i"), written("b", SECOND, images_sha256="j")
    assert command(["compare", str(a), str(b)]) == 0
    assert "not the same pixels" in " ".join(capsys.readouterr().out.split())
    assert command(["compare", str(a), str(a)]) == 0
    assert "not the same pixels" not in " ".join(capsys.readouterr().out.split())


def test_two_real_runs_are_compared_and_a_copy_that_has_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    base = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    for rounds in (1, 2):
        options = ["--data.metrics=clinical", f"--trainer.max_epochs={rounds}", f"--run_dir={tmp_path / str(rounds)}"]
        main(["fit", *base, *options])
    kept = keep_record(tmp_path / "2", tmp_path / "kept")
    line = refused(capsys, command, ["compare", str(tmp_path / "1"), str(kept)])
    assert "is missing; if this is a kept copy, name the folder of the run itself" in line
    shutil.copy(tmp_path / "2" / PREDICTIONS, kept)
    assert command(["compare", str(tmp_path / "1"), str(kept)]) == 0
    said = capsys.readouterr().out
    assert "round 1, after aggregation" in said
    for title in ("test accuracy, %", "test balanced accuracy, %", "test auroc, mean over classes"):
        assert title in said
    runs = [stored_run(tmp_path / "1"), stored_run(kept)]
    made = compared(
        paired_images(*runs, ("server", "server"), "test"), METRICS["accuracy"], runs[0].record.client_names
    )
    last = [run.record.summary["server"]["test"]["accuracy"]["last"] for run in runs]
    assert (made.over[0].first, made.over[0].second) == pytest.approx([each["average"] for each in last])
    assert (made.over[1].first, made.over[1].second) == pytest.approx([each["pooled"] for each in last])
    right = [run.scored("server", "test").eval("label == prediction").to_numpy() for run in runs]
    assert made.over[1].test is not None
    assert made.over[1].test.alone == mcnemar(*right)[:2]
