"""What a checkpoint's tensors are made of: each form of numbers that say where they come from."""

import pytest
import torch

from pagemill.artifacts.gguf_family import Piece
from pagemill.artifacts.gguf_file import GgufTensor
from pagemill.errors import ModelError
from pagemill.model.loading.sources.gguf_forms import FORMS, made_shape

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1, "hidden_size": 4}


def make(form, config, *parts):
    return FORMS[form].make(config, parts)


def test_rows_of_each_key_head_come_together():
    joined = torch.tensor([10, 11, 20, 21, 1, 2, 3, 4])  # queries of two heads, keys, values
    assert make("grouped_rows", HEADS, joined).tolist() == [10, 11, 1, 3, 20, 21, 2, 4]
    assert [make(f"{name}_rows", HEADS, joined).tolist() for name in "qkv"] == [[10, 11, 20, 21], [1, 2], [3, 4]]


def test_rows_of_a_delta_net():
    config = {"linear_num_key_heads": 2, "linear_key_head_dim": 1}
    joined = torch.tensor([[1], [2], [3], [4], [5], [6], [7], [8]])  # queries, keys, two values of each
    gates = torch.tensor([[50], [60], [70], [80]])
    assert make("delta_rows", config, joined, gates).flatten().tolist() == [1, 3, 5, 6, 50, 60, 2, 4, 7, 8, 70, 80]


def test_latent_heads_are_keys_then_values():
    keys = torch.arange(12).view(2, 3, 2)  # [H, R, key]
    values = -torch.arange(6).view(2, 1, 3)
    expected = torch.cat([torch.cat([key.T, value]) for key, value in zip(keys, values, strict=True)])
    assert make("latent_heads", {}, keys, values).equal(expected)


def test_experts_beside_and_behind_each_other():
    gate = torch.arange(6).view(1, 2, 3)
    up = 10 + gate
    assert make("paired_experts", {}, gate, up)[0].T.tolist() == [[0, 1, 2], [10, 11, 12], [3, 4, 5], [13, 14, 15]]
    assert make("joined_experts", {}, gate, up)[0].T.tolist() == [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 14, 15]]
    assert make("paired_biases", {}, gate[0], up[0]).tolist() == [[0, 10, 1, 11, 2, 12], [3, 13, 4, 14, 5, 15]]


def test_decays_are_logarithms():
    stored = -torch.exp(torch.tensor([[0.5], [-1.0]]))
    torch.testing.assert_close(make("flat_decay", {}, stored), torch.tensor([0.5, -1.0]))


def test_parts_that_do_not_fit_are_named():
    tensor = GgufTensor("blk.0.attn_qkv.weight", (9, 4), 0, 0, 144)
    with pytest.raises(ModelError, match=r"blk.0.attn_qkv.weight of shape \(9, 4\): no h.0.qkv.weight can be made"):
        made_shape(Piece("h.0.qkv.weight", (tensor,), "grouped_rows"), HEADS)
