"""Rows by their indices."""

import pytest
import torch

from pagemill.model.kernels.rows import rows_at


@pytest.mark.parametrize("count", [0, 1, 2, 16, 17])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rows_are_those_of_the_indices(count, kind):
    x = torch.arange(60.0).view(20, 3)
    indices = (torch.arange(count) * 7 % 20).to(kind)
    assert rows_at(x, indices).tolist() == [x[index].tolist() for index in indices.tolist()]
