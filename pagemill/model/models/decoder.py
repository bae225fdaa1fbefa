"""The usual decoder layer: attention and a gated MLP, each behind a norm. Knows no architecture by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pagemill.model.attention.interface import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.kernels.layer_plan import AttentionParts, PlanBuilder
from pagemill.model.kernels.linear import NO_GATE
from pagemill.model.kernels.ops import attention_inputs
from pagemill.model.kernels.product import Product
from pagemill.model.layers.activation import gate_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import ColumnLinear, QKVLinear, RowLinear
from pagemill.model.layers.moe.sparse_moe import SparseMoE
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import Rotary
from pagemill.model.models.causal_lm import NotPlannable, Rope, packed_of

Tables = Mapping[str, Rotary]
"""Rotary setting -> its tables."""


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

    def after_norm(
        self, norm: RMSNorm, hidden: Tensor | Product, residual: Tensor | None, rope: Rope, rows: Tensor | None = None
    ) -> tuple[Tensor | Product, Tensor]:
        """[T, E] -> [T, E] twice, or [L, E] of `rows`: (attention of norm(hidden + residual), hidden + residual)."""
        qkv, residual = norm.into(self.qkv_proj, hidden, residual)
        attended = self._attend(qkv, rope)
        if rows is not None:
            attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
        return self.o_proj(attended, to_norm=True), residual

    def _attend(self, qkv: Tensor, rope: Rope) -> Tensor:
        norms, target = None, self.attn.write_target()
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.q_norm.eps), (self.k_norm.weight, self.k_norm.eps)
        query, key, value = attention_inputs(
            qkv, self.qkv_proj.num_heads, self.traits.head_size, rope[self.traits.rope], norms, target
        )
        attended: Tensor = self.attn(query, key, value, written=target is not None)
        return attended.reshape(len(qkv), -1)

    def plan(self, builder: PlanBuilder, hidden: int, tables: Tables) -> int:
        """The same as operations. Raises NotPlannable."""
        native = self.attn.native()
        if native is None:
            raise NotPlannable(f"{self.attn.name} does not run natively")
        rotary = tables[self.traits.rope]
        norms = [None if norm is None else norm.native() for norm in (self.q_norm, self.k_norm)]
        parts = AttentionParts(self.attn.name, native, self.attn.cache, rotary.cos, rotary.sin, *norms)
        attended = builder.attention(builder.linear(hidden, packed_of(self.qkv_proj), "qkv"), parts, "attended")
        return builder.linear(attended, packed_of(self.o_proj), "hidden")


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size, inner, bias = config["hidden_size"], config["intermediate_size"], bool(config.get("mlp_bias"))
        what = "intermediate_size"
        self.gate = gate_of(config.get("hidden_act") or config.get("hidden_activation") or "silu")
        self.gate_up_proj = ColumnLinear(
            size, (inner, inner), bias=bias, ctx=ctx.child("gate_up_proj"), what=what, gate=self.gate
        )
        self.down_proj = RowLinear(inner, size, bias=bias, ctx=ctx.child("down_proj"), what=what)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        projected: Tensor = self.down_proj(self.gate_up_proj(hidden), self._gate_left(hidden))
        return projected

    def after_norm(
        self, norm: RMSNorm, hidden: Tensor | Product, residual: Tensor | None
    ) -> tuple[Tensor | Product, Tensor]:
        """(forward(norm(hidden + residual)), hidden + residual)."""
        inner, residual = norm.into(self.gate_up_proj, hidden, residual)
        return self.down_proj(inner, self._gate_left(residual), to_norm=True), residual

    def _gate_left(self, hidden: Tensor) -> str | None:
        """The activation, where the first layer does not include it."""
        return None if self.gate_up_proj.gates(hidden) else self.gate

    def plan(self, builder: PlanBuilder, hidden: int) -> int:
        """The same as operations. Raises NotPlannable."""
        gate_up = packed_of(self.gate_up_proj)
        if gate_up.struct.gate == NO_GATE:
            raise NotPlannable(f"{self.gate_up_proj.name} does not include its activation")
        return builder.linear(builder.linear(hidden, gate_up, "inner"), packed_of(self.down_proj), "hidden")


class DecoderLayer(nn.Module):
    """norm, attention, norm, MLP (`mlp`, by default a gated one); the residual sums are folded into the norms that
    follow them."""

    def __init__(
        self,
        config: Mapping[str, Any],
        traits: AttentionTraits,
        *,
        ctx: LayerContext,
        mlp: GatedMLP | SparseMoE | None = None,
    ) -> None:
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(size, eps, ctx=ctx.child("input_layernorm"))
        self.self_attn = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        self.post_attention_layernorm = RMSNorm(size, eps, ctx=ctx.child("post_attention_layernorm"))
        self.mlp = mlp or GatedMLP(config, ctx=ctx.child("mlp"))

    def forward(
        self, hidden: Tensor | Product, residual: Tensor | None, rope: Rope, rows: Tensor | None = None
    ) -> tuple[Tensor | Product, Tensor]:
        """[T, E] twice; `residual` None before the first layer. The last layer may be asked for some rows only."""
        hidden, residual = self.self_attn.after_norm(self.input_layernorm, hidden, residual, rope, rows)
        return self.mlp.after_norm(self.post_attention_layernorm, hidden, residual)

    def plan(self, builder: PlanBuilder, hidden: int, residual: int | None, tables: Tables) -> tuple[int, int]:
        """The same as operations. Raises NotPlannable."""
        if not isinstance(self.mlp, GatedMLP):
            raise NotPlannable(f"{type(self.mlp).__name__} has no plan")
        first, second = self.input_layernorm.native(), self.post_attention_layernorm.native()
        if residual is None:
            normed, residual = builder.norm(hidden, first, "normed"), hidden
        else:
            normed, residual = builder.add_norm(hidden, residual, first, "normed")
        attended = self.self_attn.plan(builder, normed, tables)
        normed, residual = builder.add_norm(attended, residual, second, "normed")
        return self.mlp.plan(builder, normed), residual
