"""Networks whose operations give a row the same bits in any batch, and others, which are refused by name."""

from types import SimpleNamespace

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.model.attention.layer import Attention
from pagemill.model.layers.moe.merged_experts import MergedExperts
from pagemill.model.layers.norm import LayerNorm, RMSNorm
from pagemill.model.layers.rotary import Rotary
from pagemill.model.network.operations import ApplyExperts, Network, Rotate, Value
from pagemill.model.network.row_wise import require_row_wise, require_shown

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


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_what_has_been_shown_on_gpus(normed: bool, tied: bool) -> None:
    net = Network()
    query, key, value = Value(net), Value(net), Value(net)
    if normed:
        query, key = (net.norm(part, RMSNorm(8, 1e-5, ctx=CONTEXT)) for part in (query, key))
    turned = []
    for part in (query, key):
        turned.append(Value(net))
        net.operations.append(Rotate((part, Value(net), Value(net)), (turned[-1],), object.__new__(Rotary)))
    net.attend(*turned, value, object.__new__(Attention))
    if normed and not tied:
        require_shown(net, tied)
        return
    lacks = [*(() if normed else ("norms of query and key heads",)), *(("an output head of its own",) if tied else ())]
    with pytest.raises(ConfigError, match=f"this one has not {', nor '.join(lacks)}: in another batch"):
        require_shown(net, tied)


def test_what_is_not() -> None:
    net = Network()
    net.norm(net.inputs, LayerNorm(8, 1e-5, ctx=CONTEXT))
    net.call(torch.cumsum, net.inputs)
    with pytest.raises(ConfigError, match=r"deterministic=True does not cover .*: Call, LayerNorm; leave out"):
        require_row_wise(net)
