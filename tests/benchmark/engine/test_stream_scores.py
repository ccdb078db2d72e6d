"""Scores that tell own images from foreign ones, against scikit-learn and numbers that were computed elsewhere."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve
from three_clients import HELD, LOGITS

from benchmark.engine.plan.work import Shown
from benchmark.engine.scores import ClientScores
from benchmark.engine.stream_scores import StreamScores
from benchmark.formulas import Separation, in_distribution_scores, separation
from benchmark.masked import IGNORE
from benchmark.metrics import METRICS, OOD_SCORES, ood_name

FOREIGN = [(0.5, 0.4, 0.3), (1.8, 0.2, 0.1), (0.0, 0.1, -0.1), (0.7, 0.6, -1.0)]
#: AUROC, FPR at a TPR of 95 %, area under precision and recall of own and of foreign images: of the twelve images of
#: three_clients against these four.
ORACLE = {
    "msp": (0.770833, 0.5, 0.907583, 0.708333),
    "energy": (0.812500, 0.25, 0.908600, 0.826923),
    "maxlogit": (0.812500, 0.25, 0.909134, 0.826923),
}


def of_scikit_learn(own: np.ndarray, foreign: np.ndarray) -> tuple[float, ...]:
    """The four numbers; FPR at the first threshold at which 95 % of the own images pass."""
    known, scores = np.r_[np.ones(len(own)), np.zeros(len(foreign))], np.r_[own, foreign]
    fpr, tpr, _ = roc_curve(known, scores, drop_intermediate=False)
    return (
        roc_auc_score(known, scores),
        fpr[np.argmax(tpr >= 0.95)],
        average_precision_score(known, scores),
        average_precision_score(1 - known, -scores),
    )


@pytest.mark.parametrize("score", OOD_SCORES)
def test_twelve_images_against_four(score: str) -> None:
    own, foreign = (in_distribution_scores(torch.tensor(logits))[score] for logits in (LOGITS, FOREIGN))
    assert own.dtype == torch.float64
    assert separation(own, foreign) == pytest.approx(ORACLE[score], abs=5e-7)
    # Foreign images as the known ones, with the scores turned round: areas change places.
    turned = separation(-foreign, -own)
    assert (turned.ood_auroc, turned.aupr_in, turned.aupr_out) == pytest.approx(
        (ORACLE[score][0], ORACLE[score][3], ORACLE[score][2]), abs=5e-7
    )


@pytest.mark.parametrize("seed", range(6))
def test_scores_with_ties_are_as_scikit_learn_has_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for own, foreign in ((20, 7), (60, 100), (3, 1), (1, 1)):
        levels = rng.integers(2, 40)
        first, second = rng.integers(0, levels, own) / 8, rng.integers(0, levels, foreign) / 8 - seed / 8
        made = separation(torch.from_numpy(first), torch.from_numpy(second))
        assert made == pytest.approx(of_scikit_learn(first, second), abs=1e-12)


def test_the_scores_are_what_they_are_called() -> None:
    made = in_distribution_scores(torch.tensor([[2.0, 0.5, -1.0], [60.0, 0.0, 0.0]]))
    assert made["msp"].tolist() == pytest.approx([0.785597, 1.0], abs=5e-7)
    assert made["energy"][0].item() == pytest.approx(math.log(math.exp(2) + math.exp(0.5) + math.exp(-1)))
    assert made["maxlogit"].tolist() == [2.0, 60.0]
    nowhere = in_distribution_scores(torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]]))
    assert all(score.isnan().all() for score in nowhere.values())


def scored(order: tuple[int, ...] = (0, 1, 2), at_once: int = 6, foreign_first: bool = False) -> ClientScores:
    """The images of three clients, and the foreign ones by the models of all three, so many at a time."""
    scores = ClientScores(3, 3, stream=True)
    for client in order:
        parts = [(LOGITS[slice(*HELD[client])], False), (FOREIGN, True)]
        for images, foreign in reversed(parts) if foreign_first else parts:
            for start in range(0, len(images), at_once):
                some = torch.tensor(images[start : start + at_once])
                logits, y = torch.zeros(1, at_once, 3), torch.full((1, at_once), IGNORE)
                logits[0, : len(some)], y[0, : len(some)] = some, 0
                scores.update(logits, y, (client,), shown=Shown.FOREIGN if foreign else Shown.OWN)
    return scores


def test_clients_and_all_together_whatever_the_batches_and_their_order() -> None:
    scores = scored()
    values, pooled = scores.compute(), scores.pooled()
    foreign = in_distribution_scores(torch.tensor(FOREIGN))
    for score in OOD_SCORES:
        own = in_distribution_scores(torch.tensor(LOGITS))[score].numpy()
        others = foreign[score].numpy()
        names = [ood_name(metric, score) for metric in Separation._fields]
        for client, (begin, end) in enumerate(HELD):
            expected = of_scikit_learn(own[begin:end], others)
            assert [values[name][client].item() for name in names] == pytest.approx(expected, abs=1e-12)
        expected = of_scikit_learn(own, np.tile(others, 3))
        assert [pooled[name] for name in names] == pytest.approx(expected, abs=1e-12)
    for other in (scored((2, 0, 1)), scored(at_once=1), scored((1, 2, 0), 2, foreign_first=True)):
        assert other.pooled() == pooled
        for name, of in other.compute().items():
            assert torch.equal(of, values[name]), name
    assert {name for name in values if METRICS[name].first_in == "ood"} == {
        *("ood_auroc", "fpr95", "aupr_in", "aupr_out"),
        *("ood_auroc_energy", "fpr95_energy", "aupr_in_energy", "aupr_out_energy"),
        *("ood_auroc_maxlogit", "fpr95_maxlogit", "aupr_in_maxlogit", "aupr_out_maxlogit"),
    }
    assert [name for name in values if METRICS[name].lower_is_better and name != "loss"] == [
        *("fpr95", "fpr95_energy", "fpr95_maxlogit")
    ]


def test_foreign_images_count_for_no_other_metric() -> None:
    with_them, without = scored(), ClientScores(3, 3)
    for client, (begin, end) in enumerate(HELD):
        without.update(torch.tensor([LOGITS[begin:end]]), torch.zeros(1, end - begin, dtype=torch.int64), (client,))
    values = with_them.compute()
    for name, expected in without.compute().items():
        assert torch.equal(values[name], expected), name
    assert torch.equal(with_them.images(), without.images())


def test_a_client_without_images_or_with_one_that_has_no_score_has_no_value() -> None:
    scores = ClientScores(3, 2, stream=True)
    good, bad = [[2.0, 0.0]], [[math.nan, 0.0]]
    scores.update(torch.tensor([good, bad]), torch.zeros(2, 1, dtype=torch.int64), (0, 1))
    scores.update(torch.tensor([good, good]), torch.zeros(2, 1, dtype=torch.int64), (0, 1), shown=Shown.FOREIGN)
    assert scores.compute()["ood_auroc"].isnan().tolist() == [False, True, True]
    assert math.isnan(scores.pooled()["ood_auroc"])


def test_rows_come_through_columns_as_they_were() -> None:
    stream = scored().stream
    assert stream is not None
    columns = stream.columns("stream/")
    other = StreamScores()
    other.add(stream.read(columns, "stream/"))
    assert other.pooled() == stream.pooled()
    one = StreamScores()
    one.add(stream.of((1,)))
    assert one.rows.client.unique().tolist() == [1]
    assert len(one.rows.client) == 4 + 4
