"""Matrices in pieces."""

import pytest
import torch

from pagemill.model.loading.few_rows import VALUES_AT_ONCE, VALUES_ELSEWHERE, few_rows


@pytest.mark.parametrize(
    ("width", "sizes"), [(1, [10]), (VALUES_AT_ONCE // 4, [4, 4, 2]), (VALUES_AT_ONCE + 1, [1] * 10)]
)
def test_all_rows_in_their_order(width: int, sizes: list[int]) -> None:
    matrix = torch.arange(20).view(10, 2)
    found = list(few_rows(matrix, width))
    assert [len(few) for few in found] == sizes
    assert torch.equal(torch.cat(found), matrix)


def test_none_of_none_and_more_on_other_devices() -> None:
    assert list(few_rows(torch.empty(0, 3), 5)) == []
    found = list(few_rows(torch.empty(10, 2, device="meta"), VALUES_ELSEWHERE // 8))
    assert [len(few) for few in found] == [8, 2]
