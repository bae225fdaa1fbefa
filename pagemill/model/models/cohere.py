"""Command-R and Command-A (Cohere): attention and MLP of the same normed input, LayerNorms without biases, rotary
embedding of pairs of neighbours, scaled logits."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.head_norms import LayerNormOfEachHead
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import (
    AttentionTraits,
    DecoderAttention,
    GatedMLP,
    NormPlaces,
    ParallelLayer,
    layer_norms,
    layer_window,
)
from pagemill.model.network.operations import Network, Value

_LOGIT_SCALE = 0.0625
"""Of a config that does not say one."""
_PLACES = NormPlaces(before_mlp=None)


class CohereForCausalLM(CausalLM):
    """Full attention in every layer; use_qk_norm gives each head a LayerNorm of its own."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 500_000.0}
    ties_by_default = True

    def make_norm(self, ctx: LayerContext) -> LayerNorm:
        return LayerNorm(self.hidden_size, self.config["layer_norm_eps"], ctx=ctx, bias=False)

    def traits(self, index: int, **changes: Any) -> AttentionTraits:
        """Of the attention of a layer."""
        config = self.config
        bias = bool(config.get("attention_bias"))
        eps = config["layer_norm_eps"]
        if config.get("use_qk_norm"):
            changes["qk_norm"] = lambda heads, ctx: LayerNormOfEachHead(heads, eps, ctx=ctx)
        paired = self.rotary_size(config, {})
        return AttentionTraits.of(config, qkv_bias=bias, out_bias=bias, paired=paired, **changes)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        attention = DecoderAttention(self.config, self.traits(index), ctx=ctx.child("self_attn"))
        mlp = GatedMLP(self.config, ctx=ctx.child("mlp"))
        norms = layer_norms(self.config, self.config["layer_norm_eps"], bias=False)
        return ParallelLayer(attention, mlp, norms, ctx=ctx, places=_PLACES)

    def logits(self, net: Network, x: Value) -> Value:
        return net.scaled(super().logits(net, x), self.config.get("logit_scale", _LOGIT_SCALE))


class Cohere2ForCausalLM(CohereForCausalLM):
    """Three of four layers have a window; the others see everything, without regard to positions."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 10_000.0}

    def traits(self, index: int, **changes: Any) -> AttentionTraits:
        window = layer_window(self.config, index, period=4)
        return super().traits(index, window=window, rope=None if window is None else "default", **changes)
