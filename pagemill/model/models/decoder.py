"""The usual decoder layer: attention and a gated MLP, each behind a norm. Knows no architecture by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pagemill.model.attention.interface import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.activation import gate_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import ColumnLinear, QKVLinear, RowLinear
from pagemill.model.layers.moe.sparse_moe import SparseMoE
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.network.operations import Layer, Network, Value


@dataclass(frozen=True)
class AttentionTraits:
    """What differs between the attention of one layer and another's. Numbers of heads are those of the model."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    window: int | None = None
    soft_cap: float | None = None
    rope: str = "default"

    @classmethod
    def of(cls, config: Mapping[str, Any], **traits: Any) -> "AttentionTraits":
        """Sizes from config.json, everything else by keyword."""
        heads = config["num_attention_heads"]
        head_size = config.get("head_dim") or config["hidden_size"] // heads
        traits.setdefault("scale", head_size**-0.5)
        return cls(heads, config.get("num_key_value_heads") or heads, head_size, **traits)


class DecoderAttention(nn.Module):
    """qkv projection, optional norms of query and key, rotary, attention, output projection."""

    def __init__(self, config: Mapping[str, Any], traits: AttentionTraits, *, ctx: LayerContext) -> None:
        super().__init__()
        size, dim, heads = config["hidden_size"], traits.head_size, traits.num_heads
        self.traits = traits
        self.qkv_proj = QKVLinear(
            size, heads, traits.num_kv_heads, dim, bias=traits.qkv_bias, ctx=ctx.child("qkv_proj")
        )
        self.o_proj = RowLinear(
            heads * dim, size, bias=traits.out_bias, ctx=ctx.child("o_proj"), what="size of the attention heads"
        )
        self.q_norm = self.k_norm = None
        if traits.qk_norm:
            eps, offset = config["rms_norm_eps"], traits.norm_offset
            self.q_norm = RMSNorm(dim, eps, ctx=ctx.child("q_norm"), offset=offset)
            self.k_norm = RMSNorm(dim, eps, ctx=ctx.child("k_norm"), offset=offset)
        spec = AttentionLayerSpec(
            self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, dim, traits.scale, traits.window, traits.soft_cap
        )
        name = ctx.child("attn").name
        self.attn = Attention(spec, name=name, backend=ctx.attention(spec, name))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        qkv = net.linear(x, self.qkv_proj)
        query, key, value = net.heads(qkv, self.qkv_proj.num_heads, self.traits.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = net.norm(query, self.q_norm), net.norm(key, self.k_norm)
        query, key = net.rotary(query, self.traits.rope), net.rotary(key, self.traits.rope)
        return net.linear(net.attend(query, key, value, self.attn), self.o_proj)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size, inner, bias = config["hidden_size"], config["intermediate_size"], bool(config.get("mlp_bias"))
        what = "intermediate_size"
        self.activation = gate_of(config.get("hidden_act") or config.get("hidden_activation") or "silu")
        self.gate_up_proj = ColumnLinear(size, (inner, inner), bias=bias, ctx=ctx.child("gate_up_proj"), what=what)
        self.down_proj = RowLinear(inner, size, bias=bias, ctx=ctx.child("down_proj"), what=what)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        return net.linear(net.gated(net.linear(x, self.gate_up_proj), self.activation), self.down_proj)


class MixtureOfExperts(SparseMoE):
    """Experts, and an MLP that all tokens share, where there is one."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        routing: Routing,
        activation: str,
        *,
        ctx: LayerContext,
        shared: GatedMLP | None = None,
        corrected: bool = False,
    ) -> None:
        """As for SparseMoE."""
        super().__init__(sizes, routing, activation, ctx=ctx, corrected=corrected)
        self.shared_experts = shared

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixed = net.call(self, x, by_rows=not self.exchanges)
        return mixed if self.shared_experts is None else mixed + self.shared_experts.operations(net, x)


class PreNormLayer(nn.Module):
    """Attention and an MLP, each behind a norm, and added to what it was computed from."""

    def __init__(self, config: Mapping[str, Any], attention: Layer, mlp: Layer, *, ctx: LayerContext) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(size, eps, ctx=ctx.child("input_layernorm"))
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, ctx=ctx.child("post_attention_layernorm"))
        self.mlp = mlp

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        x = x + self.self_attn.operations(net, net.norm(x, self.input_layernorm))
        return x + self.mlp.operations(net, net.norm(x, self.post_attention_layernorm))


class DecoderLayer(PreNormLayer):
    """The usual attention, and the usual MLP or another one."""

    def __init__(
        self, config: Mapping[str, Any], traits: AttentionTraits, *, ctx: LayerContext, mlp: Layer | None = None
    ) -> None:
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        super().__init__(config, attention, mlp or GatedMLP(config, ctx=ctx.child("mlp")), ctx=ctx)
