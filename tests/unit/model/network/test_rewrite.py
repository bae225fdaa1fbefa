"""What is fused, and what must not be."""

from typing import Any

import pytest

from pagemill.model.network.operations import (
    Activate,
    Add,
    Call,
    Gate,
    Multiply,
    Network,
    Norm,
    RotaryTable,
    Select,
    Value,
)
from pagemill.model.network.rewrite import (
    AddNorm,
    AttendSelected,
    ChainPair,
    Graph,
    HeadsAttend,
    LatentAttend,
    MultiplyActivate,
    NormChain,
    fuse_activations,
    fuse_attention,
    fuse_chains,
    fuse_gates,
    fuse_norms,
    fuse_selection,
    fuse_sums,
    include_gates,
    select_rows,
)


class Part:
    """A layer, as far as rewrites look."""

    centers = False
    sums_over = None
    gate: str | None = None


def layer() -> Any:
    return Part()


def kinds(graph: Graph) -> list[type]:
    return [type(op) for op in graph.operations]


def fused(net: Network, result: Value, *, selects: bool = False) -> Graph:
    graph = Graph(net.operations, result)
    graph = select_rows(graph) if selects else graph
    for fuse in (fuse_gates, fuse_attention, fuse_selection, fuse_sums, fuse_norms):
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


def test_what_is_between_two_attentions_becomes_one_operation():
    net = Network({"default": layer()})
    x = block(net, block(net, block(net, net.inputs)))
    graph = fuse_chains(fused(net, net.norm(x, layer())))
    assert [kind.__name__ for kind in kinds(graph)] == [
        *("NormChain", "RotaryTable", "HeadsAttend", "ChainPair", "HeadsAttend", "ChainPair"),
        *("HeadsAttend", "NormChain", "NormChain"),
    ]
    pairs = [op for op in graph.operations if isinstance(op, ChainPair)]
    assert all(pair.first.outputs == pair.second.inputs for pair in pairs)
    assert pairs[1].inputs[1] is pairs[0].outputs[1]


def test_what_is_read_between_two_attentions_is_made_apart():
    for is_read in (False, True):
        net = Network({"default": layer()})
        inner = net.linear(net.norm(net.inputs + net.linear(net.inputs, layer()), layer()), layer())
        first = net.operations[1].outputs[0]
        x = first + net.linear(net.gated(inner, "silu"), layer())
        result = net.linear(net.norm(x, layer()), layer())
        graph = fuse_chains(fused(net, net.call(max, x, result, inner) if is_read else net.call(max, x, result)))
        assert (ChainPair in kinds(graph)) != is_read


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
    assert kinds(fused(net, attended)) == [HeadsAttend], "learned positions turn nothing"


def latent(net: Network, x: Value, heads: int = 4) -> tuple[Value, Value]:
    """Attention over latent vectors, and what is kept of each token."""
    query = net.rotary(net.per_head(net.linear(x, layer()), heads), "default")
    turned, plain = net.split(net.linear(x, layer()), 8, 32)
    kept = net.rotary(net.per_head(net.join(turned, net.norm(plain, layer())), 1), "default")
    absorbed = layer()
    return net.expand(net.attend(net.absorb(query, absorbed), kept, kept, layer()), absorbed), kept


@pytest.mark.parametrize("selects", [False, True])
def test_latent_attention_is_one_operation(selects):
    net = Network({"default": layer()})
    attended, _ = latent(net, net.inputs)
    graph = fused(net, attended, selects=selects)
    assert kinds(graph) == [Multiply, RotaryTable, Multiply, AttendSelected if selects else LatentAttend]
    assert graph.operations[3].inputs[:2] == (graph.operations[0].outputs[0], graph.operations[2].outputs[0])
    assert (graph.operations[3].inputs[-1] is net.rows) == selects


def test_latent_attention_whose_values_are_made_by_another_layer_is_left_alone():
    net = Network({"default": layer()})
    latent(net, net.inputs)
    expand = net.operations.pop()
    assert LatentAttend not in kinds(fused(net, net.expand(expand.inputs[0], layer())))


def test_latent_vectors_that_are_read_otherwise_are_left_alone():
    net = Network({"default": layer()})
    attended, kept = latent(net, net.inputs)
    assert LatentAttend not in kinds(fused(net, net.call(max, attended, kept)))
    net = Network({"default": layer()})
    attended, _ = latent(net, net.inputs)
    projected = net.operations[0].outputs[0]
    assert LatentAttend not in kinds(fused(net, net.call(max, attended, projected))), "it would be written over"


def test_a_value_ends_with_its_last_reader():
    net = Network({})
    used = net.linear(net.inputs, layer())
    unused = net.linear(used, layer())
    result = used + used
    graph = Graph(net.operations, result)
    first, second, add = net.operations
    assert [graph.ends_at(op) for op in (first, second, add)] == [[net.inputs], [unused], [used]]
    assert graph.may_overwrite(used, add) and not graph.may_overwrite(used, second)
    assert not graph.may_overwrite(result, add)


def test_a_norm_with_mean_and_bias_takes_the_sum_before_it_and_no_linear_layer():
    net, centered = Network({}), layer()
    centered.centers = True
    x = net.linear(net.inputs, layer()) + net.inputs
    net.result = net.linear(net.activated(net.linear(net.norm(x, centered), layer()), "gelu"), layer())
    assert kinds(fused(net, net.result)) == [Multiply, AddNorm, Multiply, Activate, Multiply]
    assert kinds(select_rows(Graph(net.operations, net.result)))[0] is Select


def test_a_plain_activation_goes_with_the_linear_layer_before_it():
    net = Network({})
    inner = net.activated(net.linear(net.inputs, layer()), "relu")
    graph = fuse_activations(Graph(net.operations, net.linear(inner, layer())))
    assert kinds(graph) == [MultiplyActivate, Multiply]
    assert graph.operations[0].outputs == (inner,)
    net = Network({})
    product = net.linear(net.inputs, layer())
    graph = fuse_activations(Graph(net.operations, net.activated(product, "relu") + product))
    assert kinds(graph) == [Multiply, Activate, Add], "the product is read as it is, too"


def test_attention_without_rotary_embedding():
    for normed in (False, True):
        net = Network({})
        query, key, value = net.heads(net.linear(net.inputs, layer()), 4, 8)
        if normed:
            query = net.norm(query, layer())
            key = net.norm(key, layer())
        graph = fused(net, net.linear(net.attend(query, key, value, layer()), layer()))
        assert kinds(graph) == [Multiply, HeadsAttend, Multiply]
        assert graph.operations[1].rotary is None
        assert len(graph.operations[1].norms) == 2 * normed


def test_attention_whose_rows_are_selected():
    for read_twice in (False, True):
        net = Network({})
        query, key, value = net.heads(net.linear(net.inputs, layer()), 4, 8)
        attended = net.attend(query, key, value, layer())
        result = net.linear(attended, layer())
        if read_twice:
            result = result + net.call(max, attended)
        graph = fused(net, result, selects=True)
        assert (AttendSelected in kinds(graph)) != read_twice
        if not read_twice:
            assert graph.operations[1].inputs == (*graph.operations[1].attend.inputs, net.rows)


def test_experts_are_routed_applied_and_summed_over_ranks():
    """Rows stay apart, unless tokens are exchanged with other replicas."""
    together, apart = layer(), layer()
    together.exchange = apart.exchange = None
    together.sums_over = "ranks"
    exchanging = layer()
    exchanging.exchange = "replicas"
    names = {}
    for name, part in (("together", together), ("apart", apart), ("exchanging", exchanging)):
        net = Network({})
        net.result = net.experts(net.inputs, layer(), part)
        names[name] = [kind.__name__ for kind in kinds(select_rows(Graph(net.operations, net.result)))]
    assert names == {
        "together": ["Select", "Route", "ApplyExperts", "AllReduce"],
        "apart": ["Select", "Route", "ApplyExperts"],
        "exchanging": ["Route", "GatherTokens", "ApplyExperts", "ReturnTokens", "Select"],
    }


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
