"""Means over classes that leave out classes with few images: AUROC and average precision of runs with min_support."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from federation import CONF, build
from recorded_results import kept_images, write_run
from sklearn.metrics import average_precision_score, roc_auc_score
from three_clients import LABELS, LOGITS, scored

from benchmark.commands import main as command
from benchmark.counts import ScoredBatch
from benchmark.engine.scores import ClientScores
from benchmark.errors import ConfigurationError
from benchmark.metrics import METRICS, POOLED_CLIENT, with_support
from benchmark.own_metrics import chosen_metrics
from benchmark.records.averaged_classes import averaged_classes, classes_of_means, counts_in_words, not_alike
from benchmark.records.drawn_images import values_in
from benchmark.records.grouped_runs import read_run
from benchmark.records.hashes import config_hash
from benchmark.records.predictions import by_class
from benchmark.records.stored_run import stored_run
from benchmark.report.page import write_report
from benchmark.report.scored import MEAN, scored_images
from benchmark.run.cli import main
from benchmark.run.differences import differences

NONE = math.nan
TWELVE = ScoredBatch(torch.tensor(LOGITS), torch.tensor(LABELS))


@pytest.mark.parametrize(
    ("least", "auroc", "ap"),
    [
        # Classes of client 0: 2, 2 and 1 of 5 images; of client 1: 2, 2 and 0 of 4; of client 2: 3 of 3; in all 4 each.
        (1, [0.944444, 0.875, NONE, 0.916667], [0.944444, 0.916667, NONE, 0.873611]),
        # Class 2 drops out of client 0's mean: (.833333 + 1) / 2.
        (2, [0.916667, 0.875, NONE, 0.916667], [0.916667, 0.916667, NONE, 0.873611]),
        (3, [NONE, NONE, NONE, 0.916667], [NONE, NONE, NONE, 0.873611]),
        (5, [NONE] * 4, [NONE] * 4),
    ],
)
def test_means_are_of_classes_with_enough_images(least: int, auroc: list[float], ap: list[float]) -> None:
    scores = scored(chosen=chosen_metrics("clinical", least))
    made, pooled = scores.compute(), scores.pooled()
    for name, expected in {"auroc": auroc, "ap": ap}.items():
        assert [*made[name].tolist(), pooled[name]] == pytest.approx(expected, abs=1e-6, nan_ok=True), name
    # Weights by images leave no class out.
    weighted = [0.933333, 0.875, NONE, 0.916667]
    found = [*made["auroc_weighted"].tolist(), pooled["auroc_weighted"]]
    assert found == pytest.approx(weighted, abs=1e-6, nan_ok=True)


def test_negatives_must_be_enough_as_well() -> None:
    """Of five images one is not of class 0: its area rests on that image."""
    images = ScoredBatch(torch.tensor(LOGITS[:5]), torch.tensor([0, 0, 0, 0, 1]))
    once = torch.ones(1, 5)
    assert with_support(METRICS["auroc"], 2).of_draws is not None
    assert METRICS["auroc"].of_draws(images, once).isfinite().all()  # type: ignore[misc]
    assert with_support(METRICS["auroc"], 2).of_draws(images, once).isnan().all()  # type: ignore[misc]


@pytest.mark.parametrize("least", [1, 3, 6])
@pytest.mark.parametrize("classes", [2, 5])
def test_many_images_agree_with_scikit_learn_by_class(least: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    weights = torch.tensor([0.05, 0.1, 0.15, 0.3, 0.4])[-classes:]
    y = torch.multinomial(weights, 40, replacement=True, generator=generator)
    logits = torch.randn(40, classes, generator=generator)
    p = logits.double().softmax(-1).numpy()
    expected: dict[str, list[float]] = {"auroc": [], "ap": []}
    for each in range(classes) if classes > 2 else [1]:
        own = y.numpy() == each
        if min(own.sum(), (~own).sum()) >= least:
            expected["auroc"].append(roc_auc_score(own, p[:, each]))
            expected["ap"].append(average_precision_score(own, p[:, each]))
    scores = ClientScores(1, classes, chosen_metrics("clinical", least))
    scores.update(logits.unsqueeze(0), y.unsqueeze(0), (0,))
    for name, values in expected.items():
        assert scores.compute()[name].item() == pytest.approx(np.mean(values) if values else NONE, nan_ok=True)
    present = [c for c in range(classes) if (y == c).any()]
    areas = [roc_auc_score(y.numpy() == c, p[:, c]) for c in present]
    weighted = np.average(areas, weights=[(y == c).sum() for c in present])
    assert scores.compute()["auroc_weighted"].item() == pytest.approx(weighted)
    assert len(scores.averaged_classes(least)[0]) == len(expected["auroc"])


def test_in_draws_a_class_counts_by_the_images_that_there_are() -> None:
    """Of the classes all have four images; a draw of some of them alone leaves none of the classes out."""
    some = np.array([[1, 0, 1, 2, 0, 1, 1, 0, 1, 1, 2, 1], [3, 3, 0, 0, 0, 0, 3, 0, 0, 0, 0, 3]], dtype="int32")
    assert np.bincount(np.repeat(LABELS, some[1]), minlength=3).tolist() == [6, 3, 3]
    for name in ("auroc", "ap"):
        plain, four = METRICS[name], with_support(METRICS[name], 4)
        assert values_in(four, TWELVE, some) == pytest.approx(values_in(plain, TWELVE, some))
        assert np.isnan(values_in(with_support(METRICS[name], 5), TWELVE, some)).all()
    # Of client 0, class 2 has one image: drawn three times, it stays out of the mean of classes 0 and 1.
    own = ScoredBatch(TWELVE.logits[:5], TWELVE.y[:5])
    times = np.array([[1, 1, 3, 1, 1]], dtype="int32")
    p = own.probabilities.numpy()
    areas = [roc_auc_score(own.y.numpy() == c, p[:, c], sample_weight=times[0]) for c in (0, 1)]
    assert values_in(with_support(METRICS["auroc"], 2), own, times) == pytest.approx(np.mean(areas))


def test_a_draw_without_the_image_that_has_no_prediction_has_a_value() -> None:
    logits = torch.tensor(LOGITS)
    logits[9, 0] = math.nan
    times = np.ones((2, 12), dtype="int32")
    times[1, 9] = 0
    rest = [n for n in range(12) if n != 9]
    made = values_in(METRICS["auroc"], ScoredBatch(logits, TWELVE.y), times)
    one = values_in(METRICS["auroc"], ScoredBatch(TWELVE.logits[rest], TWELVE.y[rest]), times[:1, rest])
    assert np.isnan(made[0])
    assert made[1] == pytest.approx(one[0])


def test_classes_in_a_mean_are_counted_from_the_values_by_class() -> None:
    for least, expected in {
        1: {POOLED_CLIENT: (0, 1, 2), 0: (0, 1, 2), 1: (0, 1), 2: ()},
        2: {POOLED_CLIENT: (0, 1, 2), 0: (0, 1), 1: (0, 1), 2: ()},
        5: {POOLED_CLIENT: (), 0: (), 1: (), 2: ()},
    }.items():
        found = averaged_classes(by_class(kept_images()), least)
        assert found == {("server", "test"): expected}
        own = {client: classes for client, classes in expected.items() if client >= 0}
        assert scored().averaged_classes(least) == own
    names = ["a", "b", "c"]
    alike = averaged_classes(by_class(kept_images()), 2)["server", "test"]
    assert not_alike(alike, names) == ""
    assert counts_in_words(alike) == "2 for 2 clients, 0 for 1 client; all images together 3"
    others = averaged_classes(by_class(kept_images()), 1)["server", "test"]
    assert not_alike(others, names) == (
        "AUROC and AP do not rank the clients: they average over different classes (a over 3 classes: 0, 1, 2 and "
        "b over 2 classes: 0, 1)."
    )


@pytest.mark.parametrize("value", ["0", "-1", "2.5"])
def test_a_wrong_number_is_refused_in_one_line(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    with pytest.raises(SystemExit):
        main(["fit", *configs, "--data.metrics=clinical", f"--data.min_support={value}"])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "min_support" in said
    assert "a whole number from 1" in said


def test_it_is_refused_where_no_metric_asks_for_it() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.min_support=5 says which classes auroc and ap are means of"):
        build("HeadTune", "--data.min_support=5")
    build("HeadTune", "--data.min_support=1")


def test_its_default_is_as_good_as_absent() -> None:
    old = {"data": {"metrics": "clinical"}}
    usual, other = ({"data": {"metrics": "clinical", "min_support": number}} for number in (1, 5))
    assert config_hash(usual) == config_hash(old) != config_hash(other)
    assert differences(old, usual) == []
    assert differences(old, other) == [("data.min_support", 1, 5)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of min_support 1 and one of 2, of the same images."""
    folder = tmp_path_factory.mktemp("results")
    for least in (1, 2):
        more = {"kept": kept_images(), "data": {"min_support": least}, "lr": least / 10}
        write_run(folder / "runs" / f"a{least}", "FedPer", 0, [0.6, 0.5, 2 / 3], **more)
    return folder


def test_readers_use_the_number_of_the_run(results: Path) -> None:
    for least, expected in {
        1: ("AUROC 0.944, mean over 3 of 3", True),
        2: ("AUROC 0.917, mean over 2 of 3", False),
    }.items():
        folder = results / "runs" / f"a{least}"
        (shown,) = scored_images("FedPer", read_run(folder))
        (said,) = [row["said"] for row in shown.roc if (row["client"], row["of"]) == (0, MEAN)]
        assert said == f"{expected[0]} classes"
        assert bool(shown.ranks) == expected[1]
        metric = stored_run(folder).metric("auroc")
        assert metric.of_images is not None
        assert metric.of_images(ScoredBatch(TWELVE.logits[:5], TWELVE.y[:5])) == pytest.approx(
            {1: 0.944444, 2: 0.916667}[least], abs=1e-6
        )


def test_the_page_says_where_clients_are_not_ranked(results: Path, tmp_path: Path) -> None:
    page = write_report(tmp_path / "page.html", results).path.read_text()
    assert page.count("AUROC and AP do not rank the clients: they average over different classes (amazon over 3") == 1


def test_the_page_says_what_keeps_images(tmp_path: Path) -> None:
    told = {"metrics": "clinical", "keep_predictions": "none"}
    write_run(tmp_path / "runs" / "a", "FedPer", 0, [0.6, 0.5, 2 / 3], data=told)
    page = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert "No predictions are stored of FedPer: run with <code>data.keep_predictions=last</code> for their" in page


@pytest.mark.parametrize(("number", "said"), [(2, []), (3, ["auroc_classes, test after aggregation: "])])
def test_only_of_more_than_two_classes_the_summary_says_over_how_many(number: int, said: list[str]) -> None:
    rows = [("server", "test", client, k, 5, 0.5) for client in (-1, 0) for k in range(number)]
    run = SimpleNamespace(
        has=lambda _: True,
        classes=pd.DataFrame(rows, columns=["point", "split", "client", "class", "support", "auroc"]),
        min_support=1,
        record=SimpleNamespace(summary={"server": {"test": {"auroc": {}}}}, client_names=["a"]),
    )
    lines = classes_of_means(run)  # type: ignore[arg-type]
    assert lines == [f"{line}3 for 1 client; all images together 3." for line in said]


def test_intervals_and_summary_have_the_number_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    given = ["fit", *configs, "--data.metrics=clinical", "--data.min_support=2", "--trainer.max_epochs=1"]
    main([*given, f"--run_dir={tmp_path / 'run'}"])
    run = stored_run(tmp_path / "run")
    assert run.problems == []
    (averaged,) = averaged_classes(run.classes, 2).values()
    stored = run.metrics.query("round == 1 and split == 'test' and metric == 'auroc'").set_index("client")["value"]
    for client, classes in averaged.items():  # of six images two or three of a class
        rows = run.classes[(run.classes["client"] == client) & run.classes["class"].isin(classes)]
        assert rows["auroc"].mean() == pytest.approx(stored.get(client, NONE), nan_ok=True), client
    assert {len(classes) for client, classes in averaged.items() if client >= 0} >= {0}
    capsys.readouterr()
    assert command(["show", str(tmp_path / "run"), "--intervals", "auroc"]) == 0
    out = capsys.readouterr().out
    assert "auroc_classes" in out
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    counts = {row[0]: row[2] for row in shown if len(row) > 3}
    for client, classes in averaged.items():  # of some clients of no class
        if client >= 0:
            assert counts[run.record.client_names[client]] == str(len(classes))
    assert command(["show", str(tmp_path / "run")]) == 0
    assert f"auroc_classes, test after aggregation: {counts_in_words(averaged)}." in " ".join(
        capsys.readouterr().out.split()
    )
    main(["test", f"--run_dir={tmp_path / 'run'}"])
    assert "auroc" in capsys.readouterr().out
