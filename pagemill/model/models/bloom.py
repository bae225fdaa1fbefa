"""Bloom: ALiBi in place of positions, a LayerNorm of the embeddings, and query, key and value of a head in turn."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.alibi import alibi_slopes
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import MLP, AttentionTraits, DecoderAttention, NormedLayer, layer_norms
from pagemill.model.network.operations import Network, Value


class BloomForCausalLM(CausalLM):
    """Biases in all linear layers but the output head, which is tied."""

    weights = WeightMap(
        stack={
            "embed_tokens": ("word_embeddings",),
            "embed_norm": ("word_embeddings_layernorm",),
            "qkv_proj": ("query_key_value",),
            "o_proj": ("dense",),
            "up_proj": ("dense_h_to_4h",),
            "down_proj": ("dense_4h_to_h",),
            "norm": ("ln_f",),
        },
        strip_prefix="transformer.",
        parents={"layers": "h", "self_attn": "self_attention"},
    )
    ties_by_default = True
    ends = ("embed_tokens", "embed_norm", "norm")
    only: ClassVar[Mapping[str, Any]] = {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False}

    def make_embeddings(self, ctx: LayerContext) -> None:
        super().make_embeddings(ctx)
        self.embed_norm = self.make_norm(ctx.child("embed_norm"))

    def embed(self, net: Network) -> Value:
        return net.norm(super().embed(net), self.embed_norm)

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    def make_norm(self, ctx: LayerContext) -> LayerNorm:
        return LayerNorm(self.hidden_size, self.config["layer_norm_eps"], ctx=ctx)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        traits = AttentionTraits.of(
            config,
            qkv_bias=True,
            out_bias=True,
            joined=True,
            grouped=True,
            rope=None,
            alibi_slopes=alibi_slopes(config["num_attention_heads"]),
        )
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        mlp = MLP(self.hidden_size, 4 * self.hidden_size, "gelu_new", bias=True, ctx=ctx.child("mlp"))
        return NormedLayer(attention, mlp, layer_norms(config, config["layer_norm_eps"]), ctx=ctx)
