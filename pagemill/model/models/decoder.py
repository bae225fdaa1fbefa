"""The usual decoder layer: attention and a gated MLP, each behind a norm. Knows no architecture by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.distributed.split import split_heads
from pagemill.model.kernels.routing import Routing
from pagemill.model.kernels.streams import WeighedRows
from pagemill.model.layers.activation import activation_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.head_norms import Heads
from pagemill.model.layers.linear import (
    ColumnLinear,
    HeadRows,
    JoinedColumnLinear,
    JoinedQKVLinear,
    Linear,
    QKVLinear,
    RowLinear,
)
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.layers.moe.router import Router
from pagemill.model.layers.norm import AnyNorm, LayerNorm, NormMaker, RMSNorm
from pagemill.model.network.operations import Layer, Network, Value

SLIDING = "sliding_attention"
FULL = "full_attention"
HeadNormMaker: TypeAlias = Callable[[Heads, LayerContext], nn.Module]
"""Makes the norm of queries, or of keys: a norm of each head alike, or any module, [T, H, D] -> [T, H, D]."""


@dataclass(frozen=True)
class AttentionTraits:
    """What differs between the attention of one layer and another's. Numbers of heads are those of the model."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: HeadNormMaker | None = None
    v_norm: HeadNormMaker | None = None
    norms_after_rotary: bool = False
    window: int | None = None
    chunk_size: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    """Whether each head has a learnt logit that takes its share of the softmax."""
    alibi_slopes: tuple[float, ...] | None = None
    """Of each head: what a position's distance costs."""
    rope: str | None = "default"
    """Which of the model's rotary tables; None where nothing is turned."""
    paired: int = 0
    """So many of a head's elements are pairs of neighbours to rotary embedding, in a checkpoint."""
    joined: bool = False
    """Whether a checkpoint has query, key and value in one weight."""
    grouped: bool = False
    """Whether it has there, for each key head, its query heads, then that, then its value."""
    kv_owner: str | None = None
    """The name of the attention layer before this one whose keys and values are read; None: this one has its own."""
    key_is_value: bool = False
    """Whether values are the projected keys, before norm and rotary embedding."""

    @classmethod
    def of(cls, config: Mapping[str, Any], **traits: Any) -> "AttentionTraits":
        """Sizes from config.json, everything else by keyword."""
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        traits.setdefault("scale", head_size**-0.5)
        return cls(heads, config.get("num_key_value_heads") or heads, head_size, **traits)

    def layout(self) -> HeadRows:
        """How a checkpoint has the heads."""
        return HeadRows(self.head_size, self.paired, self.joined, self.grouped)


def layer_window(config: Mapping[str, Any], index: int, period: int) -> int | None:
    """The window of a layer: of those that layer_types says, else sliding_window_pattern: a number n for all but each
    n-th, by default `period`, or letters like LLLG, L for a window. None: it sees everything."""
    kinds = config.get("layer_types")
    pattern = config.get("sliding_window_pattern") or period
    if kinds:
        slides = kinds[index] == SLIDING
    elif isinstance(pattern, str):
        slides = pattern[index % len(pattern)] == "L"
    else:
        slides = (index + 1) % pattern != 0
    return int(config["sliding_window"]) or None if slides else None


def norm_of_each_head(eps: float, offset: float = 0.0) -> HeadNormMaker:
    """An RMSNorm with one weight for all heads."""
    return lambda heads, ctx: RMSNorm(heads.size, eps, ctx=ctx, offset=offset)


class DecoderAttention(nn.Module):
    """qkv projection, optional norms of query and key, rotary, attention, output projection."""

    def __init__(self, config: Mapping[str, Any], traits: AttentionTraits, *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        dim = traits.head_size
        heads = traits.num_heads
        kv_heads = traits.num_kv_heads
        self.traits = traits
        layout = traits.layout()
        self.qkv_proj = self._projection(size, layout, ctx.child("qkv_proj"))
        self.o_proj = RowLinear(
            heads * dim, size, bias=traits.out_bias, ctx=ctx.child("o_proj"), what="size of the attention heads"
        )
        here = split_heads(heads, kv_heads, ctx.groups.tp.rank, ctx.groups.tp.size)
        of_query = Heads(heads, here.query, dim, layout.order)
        of_key = Heads(kv_heads, here.kv, dim, layout.order)
        own_kv = traits.kv_owner is None
        self.q_norm = traits.qk_norm(of_query, ctx.child("q_norm")) if traits.qk_norm else None
        self.k_norm = traits.qk_norm(of_key, ctx.child("k_norm")) if traits.qk_norm and own_kv else None
        self.v_norm = traits.v_norm(of_key, ctx.child("v_norm")) if traits.v_norm and own_kv else None
        slopes = traits.alibi_slopes
        spec = AttentionLayerSpec(
            len(here.query),
            len(here.kv),
            dim,
            traits.scale,
            traits.window,
            traits.soft_cap,
            traits.chunk_size,
            traits.sinks,
            None if slopes is None else tuple(slopes[head] for head in here.query),
        )
        name = ctx.child("attn").name
        self.attn = Attention(spec, name=name, backend=ctx.attention(spec, name), kv_owner=traits.kv_owner)

    def _projection(self, size: int, layout: HeadRows, ctx: LayerContext) -> QKVLinear | JoinedQKVLinear:
        traits = self.traits
        heads = traits.num_heads, traits.num_kv_heads
        if traits.joined:
            return JoinedQKVLinear(size, *heads, layout, bias=traits.qkv_bias, ctx=ctx)
        own = 2 if traits.key_is_value else 3
        num_parts = own if traits.kv_owner is None else 1
        return QKVLinear(size, *heads, layout, bias=traits.qkv_bias, ctx=ctx, num_parts=num_parts)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        projected = net.linear(x, self.qkv_proj)
        if self.traits.kv_owner is not None:
            query = self._turned(net, net.per_head(projected, self.qkv_proj.num_heads), self.q_norm)
            attended = net.attend_shared(self.scaled_query(net, query), self.attn)
        else:
            query, key, value = self._split(net, projected)
            query = self.scaled_query(net, self._turned(net, query, self.q_norm))
            key = self._turned(net, key, self.k_norm)
            attended = net.attend(query, key, _norm_heads(net, value, self.v_norm), self.attn)
        return net.linear(attended, self.o_proj)

    def scaled_query(self, net: Network, query: Value) -> Value:
        """What is done to queries, [T, H, D], at last: by default, nothing."""
        return query

    def _split(self, net: Network, projected: Value) -> tuple[Value, Value, Value]:
        heads = self.qkv_proj.num_heads
        if not self.traits.key_is_value:
            return net.heads(projected, heads, self.traits.head_size)
        kv_heads = self.qkv_proj.num_kv_heads
        size = self.traits.head_size
        query, key = net.split(projected, heads * size, kv_heads * size)
        key = net.per_head(key, kv_heads)
        return net.per_head(query, heads), key, key

    def _turned(self, net: Network, heads: Value, norm: nn.Module | None) -> Value:
        """Queries or keys, normed and turned."""
        rope = self.traits.rope
        if not self.traits.norms_after_rotary:
            heads = _norm_heads(net, heads, norm)
        if rope is not None:
            heads = net.rotary(heads, rope)
        return _norm_heads(net, heads, norm) if self.traits.norms_after_rotary else heads


def _norm_heads(net: Network, heads: Value, norm: nn.Module | None) -> Value:
    if norm is None:
        return heads
    return net.norm(heads, norm) if isinstance(norm, AnyNorm) else net.call(norm, heads, by_rows=True)


class GatedMLP(nn.Module):
    """The gated feed-forward block of a decoder layer: down(act(gate(x)) * up(x))."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext, joined: bool = False) -> None:
        """`joined`: whether a checkpoint has gate and up in one weight."""
        super().__init__()
        size = config["hidden_size"]
        inner = config["intermediate_size"]
        bias = bool(config.get("mlp_bias"))
        what = "intermediate_size"
        self.activation = activation_of(config.get("hidden_act") or config.get("hidden_activation") or "silu")
        linear = JoinedColumnLinear if joined else ColumnLinear
        self.gate_up_proj: Linear = linear(size, (inner, inner), bias=bias, ctx=ctx.child("gate_up_proj"), what=what)
        self.down_proj = RowLinear(inner, size, bias=bias, ctx=ctx.child("down_proj"), what=what)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        return net.linear(net.gated(net.linear(x, self.gate_up_proj), self.activation), self.down_proj)


class MLP(nn.Module):
    """The feed-forward block of a decoder layer without a gate: down(act(up(x))), where asked for with biases."""

    def __init__(self, size: int, inner_size: int, activation: str, *, bias: bool, ctx: LayerContext) -> None:
        """Raises ModelError for an activation that is not known, ConfigError when inner_size cannot be split."""
        super().__init__()
        what = "intermediate_size"
        self.activation = activation_of(activation)
        self.up_proj = ColumnLinear(size, (inner_size,), bias=bias, ctx=ctx.child("up_proj"), what=what)
        self.down_proj = RowLinear(inner_size, size, bias=bias, ctx=ctx.child("down_proj"), what=what)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        return net.linear(net.activated(net.linear(x, self.up_proj), self.activation), self.down_proj)


_WEIGHED = WeighedRows()


class MixtureOfExperts(nn.Module):
    """Experts, and an MLP that all tokens share, where there is one."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        routing: Routing,
        activation: str,
        *,
        ctx: LayerContext,
        shared: GatedMLP | None = None,
        gates_shared: bool = False,
        experts: Experts | None = None,
        router_bias: bool = False,
        corrected: bool = False,
    ) -> None:
        """`sizes`: of a token, of an expert's inside, and how many experts the model has. `gates_shared`: whether
        a number of each token, between 0 and 1, weights what all share. `experts`: others than the usual.
        `corrected`: see Router.
        Raises ConfigError when the experts cannot be split over the ranks."""
        super().__init__()
        size, inner_size, num_experts = sizes
        self.gate = Router(size, num_experts, routing, ctx=ctx.child("gate"), corrected=corrected, bias=router_bias)
        self.experts = experts or Experts(size, inner_size, num_experts, activation, ctx=ctx.child("experts"))
        self.shared_experts = shared
        self.shared_expert_gate = (
            Linear(size, (1,), bias=False, ctx=ctx.child("shared_expert_gate")) if gates_shared else None
        )

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixed = net.experts(x, self.gate, self.experts)
        if self.shared_experts is None:
            return mixed
        shared = self.shared_experts.operations(net, x)
        if self.shared_expert_gate is not None:
            shared = net.call(_WEIGHED, shared, net.linear(x, self.shared_expert_gate), by_rows=True)
        return mixed + shared


def has_experts(config: Mapping[str, Any], num_experts: int, index: int) -> bool:
    """Whether a layer has them where decoder_sparse_step says that each n-th layer does, and mlp_only_layers which
    others do not."""
    step = config.get("decoder_sparse_step") or 1
    return num_experts > 0 and index not in (config.get("mlp_only_layers") or ()) and (index + 1) % step == 0


@dataclass(frozen=True)
class NormPlaces:
    """Which norms a layer has, by their names; None: no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


BEFORE = NormPlaces()
AFTER = NormPlaces(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = NormPlaces(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


class NormedLayer(nn.Module):
    """Attention and an MLP, with norms before or after them, each added to what it was computed from."""

    def __init__(
        self,
        attention: Layer,
        mlp: Layer,
        make_norm: NormMaker,
        *,
        ctx: LayerContext,
        places: NormPlaces = BEFORE,
        multiplier: float | None = None,
    ) -> None:
        """`multiplier`: of what attention and MLP give."""
        super().__init__()
        self.places = places
        self.multiplier = multiplier
        for name in (places.before_attention, places.after_attention, places.before_mlp, places.after_mlp):
            if name is not None:
                self.add_module(name, make_norm(ctx.child(name)))
        self.self_attn = attention
        self.mlp = mlp

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        places = self.places
        attended = self.self_attn.operations(net, self.normed(net, x, places.before_attention))
        x = x + net.scaled(self.normed(net, attended, places.after_attention), self.multiplier)
        inner = self.mlp.operations(net, self.normed(net, x, places.before_mlp))
        return x + net.scaled(self.normed(net, inner, places.after_mlp), self.multiplier)

    def normed(self, net: Network, x: Value, name: str | None) -> Value:
        """The norm of this name of x; x itself where there is none."""
        return x if name is None else net.norm(x, getattr(self, name))


class ParallelLayer(NormedLayer):
    """Attention and an MLP of the same input, behind one norm or one each, both added to it."""

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        first = self.normed(net, x, self.places.before_attention)
        attended = x + net.scaled(self.self_attn.operations(net, first), self.multiplier)
        second = first if self.places.before_mlp is None else self.normed(net, x, self.places.before_mlp)
        return attended + net.scaled(self.mlp.operations(net, second), self.multiplier)


def rms_norms(config: Mapping[str, Any], offset: float = 0.0) -> NormMaker:
    """RMS norms of hidden states."""
    size = config["hidden_size"]
    eps = config["rms_norm_eps"]
    return lambda ctx: RMSNorm(size, eps, ctx=ctx, offset=offset)


def layer_norms(config: Mapping[str, Any], eps: float, *, bias: bool = True) -> NormMaker:
    """LayerNorms of hidden states."""
    size = config["hidden_size"]
    return lambda ctx: LayerNorm(size, eps, ctx=ctx, bias=bias)


class DecoderLayer(NormedLayer):
    """The usual attention behind an RMSNorm, and the usual MLP or another one."""

    def __init__(
        self,
        config: Mapping[str, Any],
        traits: AttentionTraits,
        *,
        ctx: LayerContext,
        mlp: Layer | None = None,
        places: NormPlaces = BEFORE,
        multiplier: float | None = None,
    ) -> None:
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        mlp = mlp or GatedMLP(config, ctx=ctx.child("mlp"))
        super().__init__(attention, mlp, rms_norms(config), ctx=ctx, places=places, multiplier=multiplier)
