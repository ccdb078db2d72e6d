"""Token routing: room, turns and clusters by hand, k-means token by token in loops, and all assignments tried."""

from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.seeds import torch_generator
from methods.token_routing import (
    bounded_clusters,
    capacities,
    matched_clusters,
    orthonormal_keys,
    routing_weights,
    start_tokens,
    take_in_turn,
)


def drawn(*shape: int, key: str = "tokens") -> Tensor:
    return torch.randn(shape, generator=torch_generator(key))


def starts(images: int, tokens: int, clusters: int) -> Tensor:
    """Start tokens of some images."""
    return start_tokens(drawn(images, 3, 4, 4, key="images"), tokens, clusters, 0)


def by_loops(tokens: Tensor, start: list[int], room: list[int]) -> tuple[Tensor, list[int]]:
    """Cluster the tokens [N, v] of one image, one after the other."""
    tokens = tokens.double()
    centres, penalties = [tokens[at] for at in start], [0.0] * len(start)
    for _ in range(100):
        distances = [[float((x - c).norm()) for c in centres] for x in tokens]
        costs = [[d + p for d, p in zip(row, penalties, strict=True)] for row in distances]
        members: list[list[int]] = [[] for _ in start]
        for i in sorted(range(len(tokens)), key=lambda i: min(costs[i])):
            cluster = costs[i].index(min(costs[i]))
            if len(members[cluster]) < room[cluster]:
                members[cluster].append(i)
        far = sorted(range(len(tokens)), key=lambda i: -min(distances[i]))
        moved = []
        for cluster, own in enumerate(members):
            penalties[cluster] += 1e-4 * (len(own) - room[cluster])
            if own:
                moved.append(tokens[own].mean(0))
            else:
                moved.append(tokens[far.pop(0)])
                penalties[cluster] = 0.0
        if sum(float((a - b).norm()) for a, b in zip(moved, centres, strict=True)) / len(centres) < 1e-4:
            break
        centres = moved
    return torch.stack(centres), [len(own) for own in members]


def test_the_room_of_clusters_by_hand() -> None:
    assert capacities(197, 8, 1) == [25] * 5 + [24] * 3
    assert capacities(197, 8, 2) == [49] * 5 + [48] * 3
    assert capacities(3, 3, 1) == [1, 1, 1]


def test_turns_by_hand() -> None:
    costs = torch.tensor([[3.0, 9.0], [1.0, 9.0], [2.0, 9.0], [9.0, 4.0]])
    goes = take_in_turn(torch.stack([costs, costs.flip(0)]), torch.tensor([2, 1]))
    first = torch.tensor([[0, 0], [1, 0], [1, 0], [0, 1]]).bool()  # token 0 comes last to a full cluster
    assert torch.equal(goes, torch.stack([first, first.flip(0)]))


def test_clusters_by_hand() -> None:
    tokens = torch.tensor([[[0.0], [1.0], [10.0], [11.0]], [[0.0], [0.0], [10.0], [11.0]]])
    # The second image's centres start at one place: one of them takes two tokens, the other starts anew at 11.
    centres, sizes = bounded_clusters(tokens, torch.tensor([[0, 2], [0, 1]]), [2, 2])
    torch.testing.assert_close(centres.squeeze(2), torch.tensor([[0.5, 10.5], [0.0, 10.5]]).double())
    assert sizes.tolist() == [[2, 2], [2, 2]]
    centres, sizes = bounded_clusters(tokens[:1], torch.tensor([[0, 1]]), [1, 3])
    assert sizes.tolist() == [[1, 2]]  # 1 prefers the full cluster, and is dropped
    torch.testing.assert_close(centres.squeeze(2), torch.tensor([[0.0, 10.5]]).double())


@pytest.mark.parametrize("factor", [1, 2])
def test_clusters_token_by_token(factor: int) -> None:
    tokens, start, room = drawn(6, 30, 5), starts(6, 30, 4), capacities(30, 4, factor)
    tokens[1, 3:20] = tokens[1, 3]  # most alike: some clusters stay empty
    centres, sizes = bounded_clusters(tokens, start, room)
    for image, first in enumerate(start.tolist()):
        expected, counts = by_loops(tokens[image], first, room)
        torch.testing.assert_close(centres[image], expected)
        assert sizes[image].tolist() == counts
    assert (sizes <= torch.tensor(room)).all()


def test_of_all_assignments_the_best_is_taken() -> None:
    centres, keys = drawn(5, 4, 6), orthonormal_keys(4, 6)
    torch.testing.assert_close(keys @ keys.T, torch.eye(4))
    cosines = keys @ F.normalize(centres, dim=2).mT  # [B, key, cluster]
    for image, made in enumerate(matched_clusters(centres, keys).tolist()):
        best = max(permutations(range(4)), key=lambda of: sum(cosines[image, k, c] for k, c in enumerate(of)))
        assert made == list(best)


def test_weights_are_shares_that_depend_on_the_image_and_the_keys() -> None:
    tokens, start, keys = drawn(6, 30, 8), starts(6, 30, 4), orthonormal_keys(4, 8)
    for factor in (1, 2):
        weights = routing_weights(tokens, start, keys, factor)
        assert weights.dtype == torch.float32
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(1), torch.ones(6))
        other = torch.tensor([2, 0, 3, 1])
        assert torch.equal(routing_weights(tokens, start, keys[other], factor), weights[:, other])
        alone = [routing_weights(tokens[[i]], start[[i]], keys, factor) for i in range(6)]
        assert torch.equal(torch.cat(alone), weights)
    assert torch.equal(routing_weights(tokens, start[:, :1], keys[:1], 1), torch.ones(6, 1))


def test_start_tokens_are_the_images_own() -> None:
    images = drawn(6, 3, 4, 4, key="images")
    made = start_tokens(images, 30, 4, 0)
    assert all(len(set(row)) == 4 for row in made.tolist())
    assert len({tuple(row) for row in made.tolist()}) == 6
    order = torch.tensor([4, 0, 2])
    assert torch.equal(start_tokens(images[order].double() + 1e-7, 30, 4, 0), made[order])
    assert not torch.equal(start_tokens(images, 30, 4, 1), made)
