"""FedPLOT: one context, equal contexts, a flat plan, and a naive loop of Sinkhorn's iteration."""

import pytest
import torch
from live_client import constructed, mini_batch
from text_prompts import run

from benchmark.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def logits_of(method: object, batch: object) -> torch.Tensor:
    return method.logits(batch.features["image"], method.text_features("test"))  # type: ignore[attr-defined]


def mean_similarity(method: object, batch: object) -> torch.Tensor:
    """The logits of a plan that treats all patches and contexts alike."""
    patches, classes = batch.features["image"], method.text_features("test")  # type: ignore[attr-defined]
    return (
        method.clip.logit_scale
        * torch.einsum("bme,jce->bc", patches, classes)
        / (  # type: ignore[attr-defined]
            patches.shape[1] * classes.shape[0]
        )
    )


@pytest.mark.parametrize("eps", [0.01, 0.1, 10.0])
def test_one_context_is_compared_with_the_mean_patch(eps: float) -> None:
    method = constructed("FedPLOT", num_prompts=1, eps=eps)
    batch = mini_batch(method)
    torch.testing.assert_close(logits_of(method, batch), mean_similarity(method, batch), rtol=1e-4, atol=1e-4)


def test_equal_contexts_are_one() -> None:
    method = constructed("FedPLOT", num_prompts=3)
    method.context.copy_(method.context[:1].expand_as(method.context))
    batch = mini_batch(method)
    torch.testing.assert_close(logits_of(method, batch), mean_similarity(method, batch), rtol=1e-4, atol=1e-4)


def test_a_great_entropy_makes_the_plan_flat() -> None:
    method = constructed("FedPLOT", eps=1e4)
    batch = mini_batch(method)
    torch.testing.assert_close(logits_of(method, batch), mean_similarity(method, batch), rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_sinkhorns_iteration_image_by_image() -> None:
    method = constructed("FedPLOT", eps=0.2, iterations=100)
    batch = mini_batch(method, 0, 3)
    classes = method.text_features("test").double()
    for image, row in zip(batch.features["image"].double(), logits_of(method, batch), strict=True):
        for c in range(8):
            s = image @ classes[:, c].T
            kernel = torch.exp(-(1 - s) / 0.2)
            left, right = torch.ones(len(s), dtype=torch.double), torch.ones(3, dtype=torch.double)
            for _ in range(100):
                left = 1 / len(s) / (kernel @ right)
                right = 1 / 3 / (kernel.T @ left)
            plan = left[:, None] * kernel * right
            expected = method.clip.logit_scale.double() * (plan * s).sum()
            torch.testing.assert_close(row[c].double(), expected, rtol=1e-4, atol=1e-3)


def test_an_images_logits_do_not_depend_on_its_batch() -> None:
    method = constructed("FedPLOT")
    whole, part = mini_batch(method, 0, 8), mini_batch(method, 0, 2)
    torch.testing.assert_close(logits_of(method, whole)[:2], logits_of(method, part), rtol=1e-5, atol=1e-5)


def test_all_contexts_are_sent_and_start_apart() -> None:
    method = run("FedPLOT")
    made = method.server.traffic.per_client()
    assert made["up_floats"] == made["down_floats"] == 3 * 3 * method.clip.text_width
    start = constructed("FedPLOT").context
    assert start.std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.allclose(start[0], start[1])


def test_words_to_start_from_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="init_words would make all prompts alike"):
        constructed("FedPLOT", init_words="a photo of a")
