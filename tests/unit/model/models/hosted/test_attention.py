"""What attention of transformers may be called with."""

import pytest
import torch
from torch import nn

from pagemill.errors import ModelError
from pagemill.model.models.hosted.attention import attend, unknown


def test_arguments_that_may_change_a_result_are_unknown():
    assert unknown({"dropout": 0.0, "sliding_window": 8, "head_mask": None, "flag": False}) == []
    assert unknown({"position_bias": torch.ones(1), "flag": True}) == ["position_bias", "flag"]


def test_a_module_without_a_layer_attends_in_another_way_than_before():
    heads = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="Linear attends in a way that it did not when the model was tried out"):
        attend(nn.Linear(1, 1), heads, heads, heads)
