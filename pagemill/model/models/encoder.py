"""`Encoder`: what models have in common whose tokens see each other in both directions, and that predict none."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.distributed.split import even_split
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import ColumnLinear, JoinedColumnLinear, Linear, RowLinear
from pagemill.model.models.causal_lm import CausalLM, is_of_other_stage
from pagemill.model.network.operations import Network, Value

_ENDS = (
    *("embed_tokens", "embed_positions", "embed_types", "embed_norm", "norm"),
    *("pooler", "cls", "lm_head", "classifier", "head", "decoder", "linear", "score"),
)
"""Layers of the first stage or the last one, and heads."""


class Encoder(CausalLM):
    """A `CausalLM` without an output head, whose attention layers keep nothing. Of a pipeline stage, as there."""

    predicts = False

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    def make_end(self, ctx: LayerContext) -> None:
        """Nothing comes after the last layer."""

    def end(self, net: Network, x: Value) -> Value:
        return x

    def elsewhere(self, layer: str) -> bool:
        """Heads that are not asked for are not loaded; nor are, of another pipeline stage, its layers."""
        if layer.partition(".")[0] in _ENDS:
            return True
        return is_of_other_stage(layer, self.config["num_hidden_layers"], self.layers)


class EncoderAttention(nn.Module):
    """qkv projection, rotary embedding where there is one, attention in both directions, output projection."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        ctx: LayerContext,
        bias: bool,
        window: int | None = None,
        rope: str | None = None,
        joined: bool = False,
    ) -> None:
        """`window`: the largest distance of what a token sees. `rope`: which of the model's rotary tables. `joined`:
        whether a checkpoint has query, key and value in one weight."""
        super().__init__()
        size = config["hidden_size"]
        heads = config["num_attention_heads"]
        self.head_size = size // heads
        self.rope = rope
        self.num_heads = len(even_split(heads, ctx.groups.tp.rank, ctx.groups.tp.size, "num_attention_heads"))
        what = "size of the attention heads"
        kind = JoinedColumnLinear if joined else ColumnLinear
        parts = (heads * self.head_size,) * 3
        self.qkv_proj: Linear = kind(size, parts, bias=bias, ctx=ctx.child("qkv_proj"), what=what)
        self.o_proj = RowLinear(heads * self.head_size, size, bias=bias, ctx=ctx.child("o_proj"), what=what)
        spec = AttentionLayerSpec(
            self.num_heads,
            self.num_heads,
            self.head_size,
            self.head_size**-0.5,
            window,
            bidirectional=True,
        )
        name = ctx.child("attn").name
        self.attn = Attention(spec, name=name, backend=ctx.attention(spec, name))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        query, key, value = net.heads(net.linear(x, self.qkv_proj), self.num_heads, self.head_size)
        if self.rope is not None:
            query = net.rotary(query, self.rope)
            key = net.rotary(key, self.rope)
        return net.linear(net.attend(query, key, value, self.attn), self.o_proj)
