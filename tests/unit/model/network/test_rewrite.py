"""What is fused, and what must not be."""

from typing import Any

from pagemill.model.network.operations import (
    Add,
    Attend,
    Call,
    Gate,
    Multiply,
    Network,
    Norm,
    Select,
    SplitHeads,
    Value,
)
from pagemill.model.network.rewrite import (
    AddNorm,
    Graph,
    HeadsAttend,
    NormChain,
    fuse_attention,
    fuse_gates,
    fuse_norms,
    fuse_sums,
    include_gates,
    select_rows,
)


class Part:
    """A layer, as far as rewrites look."""

    sums_over = None
    gate: str | None = None


def layer() -> Any:
    return Part()


def kinds(graph: Graph) -> list[type]:
    return [type(op) for op in graph.operations]


def fused(net: Network, result: Value) -> Graph:
    graph = Graph(net.operations, result)
    for fuse in (fuse_gates, fuse_attention, fuse_sums, fuse_norms):
        graph = fuse(graph)
    return graph


def block(net: Network, x: Value) -> Value:
    """Norm, projection, attention, projection, sum; norm, gated MLP, sum."""
    query, key, value = net.heads(net.linear(net.norm(x, layer()), layer()), 4, 8)
    turned = net.rotary(query, "default"), net.rotary(key, "default")
    x = x + net.linear(net.attend(*turned, value, layer()), layer())
    return x + net.linear(net.gated(net.linear(net.norm(x, layer()), layer()), "silu"), layer())


def test_a_decoder_layer_becomes_three_operations_and_a_table():
    net = Network({"default": layer()})
    x = block(net, block(net, net.inputs))
    graph = fused(net, net.norm(x, layer()))
    assert [kind.__name__ for kind in kinds(graph)] == [
        *("NormChain", "RotaryTable", "HeadsAttend", "NormChain"),
        *("NormChain", "HeadsAttend", "NormChain", "NormChain"),
    ]
    chains = [op for op in graph.operations if isinstance(op, NormChain)]
    assert [(op.before is not None, len(op.inputs), op.after is not None) for op in chains] == [
        (False, 1, True), (True, 2, True), (True, 2, True), (True, 2, True), (True, 2, False)
    ]  # fmt: skip
    assert chains[2].before is not None and chains[2].before.gate == "silu"


def test_gates_are_included_by_the_layer_before_them_if_nothing_else_reads_it():
    net, alone, shared = Network({}), layer(), layer()
    first, second = net.linear(net.inputs, alone), net.linear(net.inputs, shared)
    net.result = net.linear(net.gated(first, "silu"), layer()) + net.linear(net.gated(second, "silu"), layer()) + second
    include_gates(net)
    assert (alone.gate, shared.gate) == ("silu", None)


def test_a_layer_that_is_used_in_two_ways_includes_no_gate():
    net, twice = Network({}), layer()
    gated = net.linear(net.gated(net.linear(net.inputs, twice), "silu"), layer())
    net.result = gated + net.linear(net.inputs, twice)
    include_gates(net)
    assert twice.gate is None


def test_a_gate_that_no_linear_layer_reads_is_applied_by_itself():
    net, before = Network({}), layer()
    net.result = net.gated(net.linear(net.inputs, before), "silu")
    include_gates(net)
    assert before.gate is None
    assert kinds(fused(net, net.result)) == [Multiply, Gate]


def test_what_is_read_again_is_not_written_over():
    """A sum takes the place of the other one of its parts, or of none."""
    net = Network({})
    x, other = net.norm(net.inputs, layer()), net.linear(net.inputs, layer())
    first = net.norm(x + other, layer())
    graph = fused(net, net.norm(x + first, layer()))
    sums = [op for op in graph.operations if isinstance(op, AddNorm | NormChain) and len(op.inputs) == 2]
    assert [op.inputs[1] for op in sums] == [other, x]
    net = Network({})
    x, other = net.norm(net.inputs, layer()), net.linear(net.inputs, layer())
    first = net.norm(x + other, layer())
    graph = fused(net, net.call(max, first, x, other))
    assert Add in kinds(graph) and AddNorm not in kinds(graph)


def test_what_a_call_gives_is_not_written_over():
    """It may be part of something that is read later."""
    net = Network({})
    part = net.call(lambda x: x, net.inputs)
    normed = net.norm(part + net.inputs, layer())
    assert AddNorm not in kinds(fused(net, normed + net.inputs))


def test_heads_that_are_used_otherwise_are_left_alone():
    net = Network({"default": layer()})
    query, key, value = net.heads(net.inputs, 4, 8)
    attended = net.attend(net.rotary(query, "default"), net.rotary(key, "default"), value, layer())
    assert HeadsAttend in kinds(fused(net, attended))
    assert HeadsAttend not in kinds(fused(net, net.call(max, attended, value)))
    net = Network({})
    attended = net.attend(*net.heads(net.inputs, 4, 8), layer())
    assert kinds(fused(net, attended)) == [SplitHeads, Attend], "learned positions turn nothing"


def test_rows_are_selected_after_the_last_attention():
    net = Network({"default": layer()})
    net.result = net.norm(block(net, net.inputs), layer())
    graph = select_rows(Graph(net.operations, net.result))
    names = [kind.__name__ for kind in kinds(graph)]
    assert names[names.index("Attend") + 1 :] == [
        *("Select", "Multiply", "Select", "Add", "Norm", "Multiply", "Gate", "Multiply", "Add", "Norm")
    ]
    assert names.count("Select") == 2


def test_rows_are_selected_after_what_needs_all_of_them():
    for by_rows, wanted in ((False, [Call, Select, Norm]), (True, [Select, Call, Norm])):
        net = Network({})
        result = net.norm(net.call(lambda x: x, net.inputs, by_rows=by_rows), layer())
        graph = select_rows(Graph(net.operations, result))
        assert kinds(graph) == wanted
        assert graph.operations[0].inputs[0] is net.inputs
