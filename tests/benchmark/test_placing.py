"""Copies of a table's rows."""

import pytest
import torch

from benchmark.placing import picked


@pytest.mark.parametrize("kind", [torch.uint8, torch.int64, torch.float32, torch.bool])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2, 2), (4, 0)])
@pytest.mark.parametrize("index", [(), (6,), (2, 3), (2, 1, 4), (0,)])
def test_rows_are_those_of_indexing(kind: torch.dtype, shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    table, at = torch.randint(0, 2, (7, *shape)).to(kind), torch.randint(0, 7, index)
    rows = picked(table, at)
    assert (rows.shape, rows.dtype) == ((*index, *shape), kind)
    assert torch.equal(rows, table[at])


def test_rows_are_copies_and_a_table_need_not_be_contiguous() -> None:
    table = torch.arange(24).view(4, 6).T
    rows = picked(table, torch.tensor([[5, 0], [0, 5]]))
    assert torch.equal(rows, table[torch.tensor([[5, 0], [0, 5]])])
    rows.zero_()
    assert table[5].tolist() == [5, 11, 17, 23]


def test_an_index_outside_of_the_table_is_an_error() -> None:
    with pytest.raises(IndexError):
        picked(torch.zeros(3, 2), torch.tensor([-1]))
