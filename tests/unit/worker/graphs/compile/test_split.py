"""Cutting a traced model at operations."""

import torch
from torch.fx import symbolic_trace

from pagemill.config.graph_config import ATTENTION_OP
from pagemill.model.attention import op
from pagemill.worker.graphs.compile.split import op_name, split

assert op.attention is not None


class Model(torch.nn.Module):
    """Three layers; the residual skips attention."""

    def forward(self, x):
        for index in range(3):
            attended = torch.ops.pagemill.attention(x * 2, x, None, f"layers.{index}")
            x = torch.sigmoid(attended) + x
        return x


def trace():
    return symbolic_trace(Model())


def test_a_model_is_cut_before_and_after_every_call():
    parts = split(trace(), [ATTENTION_OP])
    assert [piece.cut for piece in parts.pieces] == [False, True, False, True, False, True, False]


def test_a_cut_holds_the_operation_and_nothing_else():
    cuts = [piece for piece in split(trace(), [ATTENTION_OP]).pieces if piece.cut]
    for cut in cuts:
        assert [op_name(node) for node in cut.graph.graph.nodes if node.op == "call_function"] == [ATTENTION_OP]


def test_without_operations_there_is_one_piece():
    assert [piece.cut for piece in split(trace(), []).pieces] == [False]


def test_other_operations_can_be_cut_at():
    parts = split(trace(), ["aten::sigmoid"])
    assert len(parts.pieces) == 1
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: torch.sigmoid(x + 1) * 2)(torch.zeros(2))
    assert [piece.cut for piece in split(graph, ["aten::sigmoid"]).pieces] == [False, True, False]


def test_the_pieces_compute_what_the_model_does():
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (torch.sigmoid(x + 1) * 2, x - 1))(torch.zeros(2))
    parts = split(graph, ["aten::sigmoid"])
    x = torch.tensor([0.5, -3.0])
    for got, want in zip(parts.module(x), graph(x), strict=True):
        assert torch.equal(got, want)
