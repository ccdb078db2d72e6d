import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score

from benchmark.engine.scores import ClientScores


def test_hand_counted() -> None:
    scores = ClientScores(num_clients=3, num_classes=2)
    logits = torch.tensor([[[2.0, 0.0], [0.0, 2.0], [2.0, 0.0]], [[0.0, 2.0], [0.0, 2.0], [0.0, 2.0]]])
    scores.update(logits, torch.tensor([[0, 1, 1], [1, -100, -100]]), (2, 0))
    made = scores.compute()
    assert made["accuracy"][[0, 2]].tolist() == pytest.approx([1.0, 2 / 3])
    assert made["balanced_accuracy"][[0, 2]].tolist() == pytest.approx([1.0, 3 / 4])
    assert made["macro_f1"][[0, 2]].tolist() == pytest.approx([1.0, 2 / 3])
    hit, miss = np.log1p(np.exp(-2)), np.log1p(np.exp(2))
    assert made["loss"][[0, 2]].tolist() == pytest.approx([hit, (2 * hit + miss) / 3])
    assert made["accuracy"][1].isnan()


def test_what_has_no_largest_logit_counts_as_wrong_and_makes_the_loss_undefined() -> None:
    scores = ClientScores(num_clients=2, num_classes=3)
    nan, inf = float("nan"), float("inf")
    rows = [[2.0, 0, 0], [nan, nan, nan], [0, inf, 0], [-inf, -inf, -inf], [0, 5.0, -inf]]
    y = torch.tensor([[0, 0, 1, 2, 1], [0, 0, -100, -100, 1]])
    clean = torch.tensor([rows[0], rows[0], rows[1], rows[3], rows[4]])
    scores.update(torch.stack([torch.tensor(rows), clean]), y, (0, 1))
    made = scores.compute()
    assert made["accuracy"].tolist() == pytest.approx([2 / 5, 1.0])
    # class 0: one of two; class 1: one of two; class 2: none of one. Nothing was taken for another class.
    assert made["balanced_accuracy"].tolist() == pytest.approx([1 / 3, 1.0])
    assert made["macro_f1"].tolist() == pytest.approx([(2 / 3 + 2 / 3 + 0) / 3, 1.0])
    assert made["loss"].isnan().tolist() == [True, False]
    assert scores.images().tolist() == [5, 3]
    assert scores.without_prediction().tolist() == [3, 0]


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_scikit_learn_however_it_is_batched(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 30, 5, generator=generator)
    y = torch.randint(0, 4, (4, 30), generator=generator)  # class 4 never occurs but is predicted
    y[1, 20:] = -100
    whole, parts = ClientScores(4, 5), ClientScores(4, 5)
    whole.update(logits, y, (0, 1, 2, 3))
    for clients in ((3, 1), (0, 2)):
        for rows in (slice(0, 7), slice(7, 30)):
            parts.update(logits[list(clients), rows], y[list(clients), rows], clients)
    for name, values in whole.compute().items():
        torch.testing.assert_close(parts.compute()[name], values)
    made = whole.compute()
    for client in range(4):
        real = y[client] >= 0
        truth, guess = y[client][real].numpy(), logits[client].argmax(-1)[real].numpy()
        assert made["accuracy"][client].item() == pytest.approx(accuracy_score(truth, guess))
        assert made["macro_f1"][client].item() == pytest.approx(
            f1_score(truth, guess, labels=np.unique(truth), average="macro")
        )
        present = np.isin(guess, truth)
        if present.all():
            assert made["balanced_accuracy"][client].item() == pytest.approx(balanced_accuracy_score(truth, guess))
