"""The usual decoder layer: attention and a gated MLP, each behind a norm. Knows no architecture by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.activation import activation_of, gate_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import ColumnLinear, HeadwiseQKVLinear, QKVLinear, RowLinear
from pagemill.model.layers.moe.experts import Experts
from pagemill.model.layers.moe.router import Router
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
    rope: str | None = "default"
    """Which of the model's rotary tables; None where nothing is turned."""
    headwise: bool = False
    """Whether a checkpoint has query, key and value of each head next to each other in one weight."""

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
        size = config["hidden_size"]
        dim = traits.head_size
        heads = traits.num_heads
        self.traits = traits
        place = ctx.child("qkv_proj")
        bias = traits.qkv_bias
        self.qkv_proj: QKVLinear | HeadwiseQKVLinear = (
            HeadwiseQKVLinear(size, heads, dim, bias=bias, ctx=place)
            if traits.headwise
            else QKVLinear(size, heads, traits.num_kv_heads, dim, bias=bias, ctx=place)
        )
        self.o_proj = RowLinear(
            heads * dim, size, bias=traits.out_bias, ctx=ctx.child("o_proj"), what="size of the attention heads"
        )
        self.q_norm = self.k_norm = None
        if traits.qk_norm:
            eps = config["rms_norm_eps"]
            offset = traits.norm_offset
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
            query = net.norm(query, self.q_norm)
            key = net.norm(key, self.k_norm)
        if self.traits.rope is not None:
            query = net.rotary(query, self.traits.rope)
            key = net.rotary(key, self.traits.rope)
        return net.linear(net.attend(query, key, value, self.attn), self.o_proj)


class GatedMLP(nn.Module):
    """The gated feed-forward block of a decoder layer: down(act(gate(x)) * up(x))."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        inner = config["intermediate_size"]
        bias = bool(config.get("mlp_bias"))
        what = "intermediate_size"
        self.activation = gate_of(config.get("hidden_act") or config.get("hidden_activation") or "silu")
        self.gate_up_proj = ColumnLinear(size, (inner, inner), bias=bias, ctx=ctx.child("gate_up_proj"), what=what)
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
        corrected: bool = False,
    ) -> None:
        """`sizes`: of a token, of an expert's inside, and how many experts the model has. `corrected`: see Router.
        Raises ConfigError when the experts cannot be split over the ranks."""
        super().__init__()
        size, inner_size, num_experts = sizes
        self.gate = Router(size, num_experts, routing, ctx=ctx.child("gate"), corrected=corrected)
        self.experts = Experts(size, inner_size, num_experts, activation, ctx=ctx.child("experts"))
        self.shared_experts = shared

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixed = net.experts(x, self.gate, self.experts)
        return mixed if self.shared_experts is None else mixed + self.shared_experts.operations(net, x)


class PreNormLayer(nn.Module):
    """Attention and an MLP, each behind a norm, and added to what it was computed from."""

    def __init__(self, config: Mapping[str, Any], attention: Layer, mlp: Layer, *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        eps = config["rms_norm_eps"]
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
