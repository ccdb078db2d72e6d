"""Nearest class mean and ridge regression, against numbers by hand and the images of all clients in one place."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit, learned, terms

from benchmark.contract import Stage
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Terms, Uploads
from methods.nearestclassmean import SumRule

FEW = ("--data.partition=federation.Few", "--data.clients_per_round=6")


def together(conf: str, *options: str, rounds: int = 1):  # type: ignore[no-untyped-def]
    """A trained method, and features [n, d] and labels [n] of all training images of the clients that train."""
    method, data = build(conf, *FEW, *options)
    fit(method, data, rounds)
    rows = torch.cat([torch.from_numpy(data.splits.train[k]) for k in data.federation.terms.training_clients])
    x = data.transform(data.pool.images[rows], None)
    return method, data, method.backbone(x).detach().double(), data.pool.labels[rows]


def test_means_weight_images_and_not_clients() -> None:
    rule = SumRule()
    shared = {"sums": torch.zeros(2, 2), "counts": torch.zeros(2)}
    rule.start(shared, Terms(0, 2, (0, 1), (), 2, 4, False, 4, 2, 4, 4))
    sent = {
        "sums": torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [3.0, 0.0]]]),
        "counts": torch.tensor([[2.0, 0.0], [1.0, 3.0]]),
    }
    uploads = Uploads((0, 1), sent, torch.tensor([2.0, 4.0], dtype=torch.float64))
    for _ in range(2):  # what a client sends again changes nothing
        made = rule.aggregate(Round(1, (0, 1), 0), shared, uploads)
        means = made["sums"] / made["counts"].unsqueeze(1)
        torch.testing.assert_close(means, torch.tensor([[2 / 3, 1 / 3], [1.0, 0.0]]))


def test_means_of_all_images() -> None:
    method, data, features, labels = together("NearestClassMean")
    f = F.normalize(features, dim=-1)
    for c in labels.unique().tolist():
        torch.testing.assert_close(method.sums[c].double(), f[labels == c].sum(0), atol=1e-4, rtol=1e-4)
        assert method.counts[c] == (labels == c).sum()
    rows = torch.from_numpy(
        data.splits.held_out["test"][0] if hasattr(data.splits, "held_out") else data.splits.test[0]
    )
    x = data.transform(data.pool.images[rows], None)
    expected = F.normalize(method.backbone(x).double(), dim=-1) @ F.normalize(method.sums.double(), dim=-1).T
    right = (expected.argmax(1) == data.pool.labels[rows]).double().mean()
    (scores,) = (v for n, v in learned(method).items() if n == "metric.1/server/test/accuracy")
    torch.testing.assert_close(scores[0].double(), right)


def test_own_means_send_nothing_and_choose_among_own_classes() -> None:
    method, data, _, _ = together("NearestClassMean", "--model.init_args.means=own", "--model.init_args.prior=true")
    assert method.roles.shared == ()
    (scores,) = (v for n, v in learned(method).items() if n == "metric.1/server/test/accuracy")
    rows, held = torch.from_numpy(data.splits.train[0]), torch.from_numpy(data.splits.test[0])
    labels = data.pool.labels[rows]
    f, g = (F.normalize(method.backbone(data.transform(data.pool.images[r], None)), dim=-1) for r in (rows, held))
    own = labels.unique()
    means = F.normalize(torch.stack([f[labels == c].sum(0) for c in own]), dim=-1)
    right = (own[(g @ means.T).argmax(1)] == data.pool.labels[held]).double().mean()
    torch.testing.assert_close(scores[0].double(), right)


def test_clients_without_images_are_told_apart_by_the_means_of_all() -> None:
    method, *_ = together("NearestClassMean", "--model.init_args.prior=true")
    nobody = SimpleNamespace(class_counts=torch.zeros(method.num_classes), own_images={})
    assert torch.equal(method.prepare(nobody, Stage.EVALUATE, "test")["there"], method.counts > 0)
    rule = build("NearestClassMean", "--model.init_args.means=own")[0].make_server()
    rule.start({}, terms(4))
    with pytest.raises(ConfigurationError, match=r"means=own .*, and clients \[3\] have none; take means=global"):
        rule.start({}, replace(terms(4), testers={"unseen": (3,)}))


def test_a_class_that_nobody_has_is_never_the_nearest() -> None:
    method, _ = build("NearestClassMean")
    with torch.no_grad():
        method.counts[1:3] = 4.0
        x = torch.rand(2, 3, *([32] * 2))
        away = -F.normalize(method.backbone(x)).sum(0)
        method.sums[1:3] = away  # farther away than a mean of zeros
        assert method(x).argmax(1).tolist() == [1, 1]


def test_ridge_regression_is_that_of_all_images_in_one_place() -> None:
    method, _, f, labels = together("FederatedRidge", "--model.init_args.lam=0.1")
    targets = F.one_hot(labels, method.num_classes).double()
    share = targets.mean(0)
    gram = f.T @ f
    weight = torch.linalg.solve(
        gram + 0.1 * gram.diagonal().mean() * torch.eye(len(gram)).double(), f.T @ (targets - share)
    )
    torch.testing.assert_close(method.weight.double(), weight, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(method.share.double(), share, atol=1e-6, rtol=0)
