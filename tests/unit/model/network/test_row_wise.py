"""Networks whose operations give a row the same bits in any batch, and others, which are refused by name."""

from types import SimpleNamespace

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.model.layers.moe.merged_experts import MergedExperts
from pagemill.model.layers.norm import LayerNorm, RMSNorm
from pagemill.model.network.operations import ApplyExperts, Network, Value
from pagemill.model.network.row_wise import require_row_wise

CONTEXT = SimpleNamespace(name="norm", dtype=torch.float32)


def test_what_is_covered() -> None:
    net = Network()
    normed = net.norm(net.inputs, RMSNorm(8, 1e-5, ctx=CONTEXT))
    net.soft_cap(net.gated(net.add(normed, net.inputs), "silu"), 3.0)
    require_row_wise(net)


def test_experts_in_one_tensor_are_not() -> None:
    net = Network()
    experts = object.__new__(MergedExperts)
    net.operations.append(ApplyExperts((net.inputs,), (Value(net),), experts))
    with pytest.raises(ConfigError, match="experts in one tensor; leave out"):
        require_row_wise(net)


def test_what_is_not() -> None:
    net = Network()
    net.norm(net.inputs, LayerNorm(8, 1e-5, ctx=CONTEXT))
    net.call(torch.cumsum, net.inputs)
    with pytest.raises(ConfigError, match=r"deterministic=True does not cover .*: Call, LayerNorm; leave out"):
        require_row_wise(net)
