"""Clinical metrics and statistics over clients against numbers of scikit-learn, torchmetrics, NumPy and by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, cohen_kappa_score, matthews_corrcoef, roc_auc_score
from three_clients import scored
from torchmetrics.functional.classification import multiclass_auroc, multiclass_calibration_error

from benchmark.engine.scores import ClientScores
from benchmark.metrics import METRICS, SETS, STATISTICS, metrics_of
from benchmark.run.scores import SIDE_BY_SIDE, print_scores

NONE = math.nan
#: all but that of runs with hostile clients
OF_EVALUATIONS = [name for name in METRICS if METRICS[name].first_in in SETS]
#: per metric of three clients, and of all their images; from scikit-learn 1.9.1 and torchmetrics 1.9.0, or by hand from
#: the confusion [1,0,1][1,1,0][0,0,1] | [1,1,0][0,1,1][0,0,0] | [0,0,0][0,0,0][1,0,2]
EXPECTED = {
    "sensitivity": ([2 / 3, 0.5, 2 / 3], (0.5 + 0.5 + 0.75) / 3),
    "specificity": ([(2 / 3 + 1 + 0.75) / 3, (1 + 0.5 + 0.75) / 3, (2 / 3 + 1) / 2], (0.75 + 0.875 + 0.75) / 3),
    "ppv": ([(0.5 + 1 + 0.5) / 3, (1 + 0.5 + 0) / 3, (0 + 1) / 2], (0.5 + 2 / 3 + 0.6) / 3),
    "npv": ([(2 / 3 + 0.75 + 1) / 3, (2 / 3 + 0.5 + 1) / 3, (1 + 1 + 0) / 3], (0.75 + 7 / 9 + 6 / 7) / 3),
    "kappa": ([0.411765, 0.2, 0.0], 0.375),
    "mcc": ([0.437500, 0.223607, NONE], 0.378968),
    # per class .833333 1 1 | 1 .75 - | -, and .833333 1 1 | 1 .833333 -; the mean over classes that occur
    "auroc": ([0.944444, 0.875, NONE], 0.916667),
    "auroc_weighted": ([0.933333, 0.875, NONE], 0.916667),
    "ap": ([0.944444, 0.916667, NONE], 0.873611),
    "ece": ([0.391296, 0.356524, 0.294127], 0.355413),
    "brier": ([0.407132, 0.407221, 0.296906], 0.379605),
}


@pytest.mark.parametrize("metric", EXPECTED)
def test_three_clients_and_all_their_images_are_as_computed_elsewhere(metric: str) -> None:
    of_clients, of_all = EXPECTED[metric]
    scores = scored()
    assert scores.compute()[metric].tolist() == pytest.approx(of_clients, abs=1e-6, nan_ok=True)
    assert scores.pooled()[metric] == pytest.approx(of_all, abs=1e-6)


def test_counts_do_not_depend_on_order_or_batches() -> None:
    whole, parts = scored(), scored((2, 0, 1), at_once=2)
    for name, values in whole.compute().items():
        if name != "loss":  # a sum of floating-point numbers
            torch.testing.assert_close(parts.compute()[name], values, rtol=0, atol=0, equal_nan=True)
    assert parts.pooled() == whole.pooled()


@pytest.mark.parametrize("seed", range(4))
def test_many_images_agree_with_scikit_learn_and_torchmetrics(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, y = torch.randn(1, 300, 4, generator=generator), torch.randint(0, 4, (1, 300), generator=generator)
    scores = ClientScores(2, 4, "clinical")
    scores.update(logits, y, (0,))
    made = {name: values[0].item() for name, values in scores.compute().items()}
    truth, guess = y[0].numpy(), logits[0].argmax(-1).numpy()
    assert made["kappa"] == pytest.approx(cohen_kappa_score(truth, guess))
    assert made["mcc"] == pytest.approx(matthews_corrcoef(truth, guess))
    p = logits[0].double().softmax(-1)
    expected = multiclass_calibration_error(p, y[0], num_classes=4, n_bins=15, norm="l1").item()
    assert made["ece"] == pytest.approx(expected, abs=1e-6)
    assert made["auroc"] == pytest.approx(roc_auc_score(truth, p.numpy(), multi_class="ovr"))
    assert made["ap"] == pytest.approx(average_precision_score(np.eye(4)[truth], p.numpy()))
    assert made["auroc"] == pytest.approx(multiclass_auroc(p, y[0], 4).item(), abs=1e-6)
    assert made["auroc_weighted"] == pytest.approx(roc_auc_score(truth, p, multi_class="ovr", average="weighted"))
    onehot = np.eye(4)[truth]
    assert made["brier"] == pytest.approx(((p.numpy() - onehot) ** 2).sum(1).mean(), abs=1e-9)
    assert made["sensitivity"] == pytest.approx(made["balanced_accuracy"])


def test_clients_without_predictions_or_images_have_no_calibration() -> None:
    scores = ClientScores(3, 3, "clinical")
    logits = torch.tensor([[[2.0, 0, 0], [math.nan, 0, 0]], [[2.0, 0, 0], [0, 3.0, 0]]])
    scores.update(logits, torch.tensor([[0, 1], [0, 1]]), (0, 1))
    made = scores.compute()
    for name in ("ece", "brier", "auroc", "auroc_weighted", "ap"):
        assert made[name].isnan().tolist() == [True, False, True]
    assert made["sensitivity"][:2].tolist() == [0.5, 1.0]
    assert made["ppv"][:2].tolist() == [1.0, 1.0]
    assert made["kappa"][0].item() == pytest.approx(cohen_kappa_score([0, 1], [0, 3]))
    assert all(values[2].isnan() for values in made.values())


def test_the_second_of_two_classes_is_ranked_over_ranks_of_processes() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, y = torch.randn(3, 40, 2, generator=generator), torch.randint(0, 2, (3, 40), generator=generator)
    logits[:, :, 1] = logits[:, :, 1].round()  # ties
    logits[:, :, 0] = 0.0
    whole, first, second = (ClientScores(3, 2, "clinical") for _ in range(3))
    whole.update(logits, y, (0, 1, 2))
    made = whole.compute()["auroc"]
    for client in range(3):
        p = logits[client].double().softmax(-1)[:, 1].numpy()
        assert made[client].item() == pytest.approx(roc_auc_score(y[client].numpy(), p))
    second.update(logits[[2]], y[[2]], (2,))
    first.update(logits[[1, 0]], y[[1, 0]], (1, 0))
    first.add((2,), second.counted((2,)))
    first.keep(second.kept.of([2]))
    assert torch.equal(first.compute()["auroc"], made)
    assert first.pooled() == whole.pooled()


ELEVEN = np.array([0.9, 0.8, 0.6, 0.7, 0.5, 0.95, 0.85, 0.4, 0.75, 0.65, 0.55])
THREE = np.array([0.6, 0.5, 2 / 3])


@pytest.mark.parametrize(
    ("name", "of_three", "of_eleven"),
    [
        ("p10", 0.52, 0.5),
        ("p50", 0.6, 0.7),
        ("gini", 0.062893, 0.136661),
        ("jain", 0.986653, 0.946239),
        ("std", 0.083887, 0.173860),
    ],
)
def test_statistics_over_clients_are_those_of_numpy_and_of_the_formula(
    name: str, of_three: float, of_eleven: float
) -> None:
    of = STATISTICS[name].of
    assert of is not None
    assert of(THREE, False) == pytest.approx(of_three, abs=1e-6)
    assert of(ELEVEN[::-1].copy(), False) == pytest.approx(of_eleven, abs=1e-6)


def test_gini_and_jain_of_equal_clients_of_scaled_ones_and_of_nothing() -> None:
    gini, jain = STATISTICS["gini"].of, STATISTICS["jain"].of
    assert gini is not None
    assert jain is not None
    assert (gini(np.full(5, 0.7), False), jain(np.full(5, 0.7), False)) == pytest.approx((0, 1))
    assert gini(3 * ELEVEN, False) == pytest.approx(gini(ELEVEN, False))
    assert gini(ELEVEN + 1, False) < gini(ELEVEN, False)
    by_pairs = np.abs(ELEVEN[:, None] - ELEVEN).sum() / (2 * 11**2 * ELEVEN.mean())
    assert gini(ELEVEN, False) == pytest.approx(by_pairs)
    assert math.isnan(gini(np.zeros(3), False))
    assert math.isnan(jain(np.zeros(3), False))


def test_basic_has_the_four_and_clinical_all() -> None:
    assert [metric.name for metric in metrics_of("basic")] == ["accuracy", "balanced_accuracy", "macro_f1", "loss"]
    assert metrics_of("clinical") == tuple(METRICS[name] for name in OF_EVALUATIONS)


def test_many_metrics_are_printed_in_tables_that_a_narrow_terminal_shows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_scores({(1, "server", "test", m): v for m, v in scored().compute().items()}, ["north", "south", "east"])
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    assert said.count("test images, after aggregation") == math.ceil(len(OF_EVALUATIONS) / SIDE_BY_SIDE)
    assert all(metric.replace("_", " ") in said for metric in OF_EVALUATIONS)
