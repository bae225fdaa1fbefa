"""ModernBERT: rotary positions, layers that see a window in turn with those that see all, and a gated MLP (Warner et
al., 2024)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from pagemill.model.layers.activation import activation_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import JoinedColumnLinear, RowLinear
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.layers.pooling_head import HeadLayer
from pagemill.model.layers.rotary import rope_settings
from pagemill.model.loading.renamed_map import RenamedMap
from pagemill.model.models.encoder import Encoder, EncoderAttention
from pagemill.model.network.operations import Network, Value

SLIDING = "sliding_attention"
FULL = "full_attention"


def layer_kind(config: Mapping[str, Any], index: int) -> str:
    """full_attention or sliding_attention."""
    kinds = config.get("layer_types")
    if kinds:
        return str(kinds[index])
    return SLIDING if index % (config.get("global_attn_every_n_layers") or 3) else FULL


def _norm(config: Mapping[str, Any], ctx: LayerContext) -> LayerNorm:
    bias = bool(config.get("norm_bias"))
    return LayerNorm(config["hidden_size"], config.get("norm_eps") or 1e-5, ctx=ctx, bias=bias)


class ModernBertLayer(nn.Module):
    """Attention and a gated MLP, each behind a norm, and added to what it was computed from; the first layer's input
    is normed already."""

    def __init__(self, config: Mapping[str, Any], index: int, *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        inner = config["intermediate_size"]
        bias = bool(config.get("mlp_bias"))
        kind = layer_kind(config, index)
        what = "intermediate_size"
        self.activation = activation_of(config.get("hidden_activation") or "gelu")
        self.attn_norm = _norm(config, ctx.child("attn_norm")) if index else None
        window = (config.get("local_attention") or 128) // 2 if kind == SLIDING else None
        self.attn = EncoderAttention(
            config,
            ctx=ctx.child("attn"),
            bias=bool(config.get("attention_bias")),
            window=window,
            rope=kind,
            joined=True,
        )
        self.mlp_norm = _norm(config, ctx.child("mlp_norm"))
        self.gate_up_proj = JoinedColumnLinear(
            size, (inner, inner), bias=bias, ctx=ctx.child("gate_up_proj"), what=what
        )
        self.down_proj = RowLinear(inner, size, bias=bias, ctx=ctx.child("down_proj"), what=what)

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        x = x + self.attn.operations(net, x if self.attn_norm is None else net.norm(x, self.attn_norm))
        both = net.linear(net.norm(x, self.mlp_norm), self.gate_up_proj)
        return x + net.linear(net.gated(both, self.activation, apart=True), self.down_proj)


class ModernBertModel(Encoder):
    """Embeddings are normed; so is what the last layer gives."""

    weights = RenamedMap(
        strip_prefix="model.",
        renames=(
            (".embeddings.tok_embeddings.", ".embed_tokens."),
            (".embeddings.norm.", ".embed_norm."),
            (".final_norm.", ".norm."),
            (".attn.Wqkv.", ".attn.qkv_proj."),
            (".attn.Wo.", ".attn.o_proj."),
            (".mlp.Wi.", ".gate_up_proj."),
            (".mlp.Wo.", ".down_proj."),
        ),
    )

    def make_embeddings(self, ctx: LayerContext) -> None:
        super().make_embeddings(ctx)
        self.embed_norm = _norm(self.config, ctx.child("embed_norm"))

    def embed(self, net: Network) -> Value:
        return net.norm(super().embed(net), self.embed_norm)

    def make_end(self, ctx: LayerContext) -> None:
        self.norm = _norm(self.config, ctx.child("norm"))

    def end(self, net: Network, x: Value) -> Value:
        return net.norm(x, self.norm)

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        thetas = {FULL: config.get("global_rope_theta"), SLIDING: config.get("local_rope_theta")}
        used = {layer_kind(config, index) for index in range(config["num_hidden_layers"])}
        if config.get("rope_parameters"):
            return {kind: rope_settings(config, kind) for kind in sorted(used)}
        defaults = {FULL: 160_000.0, SLIDING: 10_000.0}
        return {kind: {"rope_type": "default", "rope_theta": thetas[kind] or defaults[kind]} for kind in sorted(used)}

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        return ModernBertLayer(self.config, index, ctx=ctx)

    def head_layers(self, num_labels: int, per_token: bool) -> Sequence[HeadLayer]:
        config = self.config
        dense = HeadLayer(
            "head.dense",
            self.hidden_size,
            bool(config.get("classifier_bias")),
            activation_of(config.get("classifier_activation") or "gelu"),
            "head.norm",
            config.get("norm_eps") or 1e-5,
            bool(config.get("norm_bias")),
        )
        return dense, HeadLayer("classifier", num_labels)
