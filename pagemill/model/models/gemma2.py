"""Gemma 2: sliding-window and full layers in turn, four norms a layer, and soft caps on scores and logits."""

from typing import ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.models.decoder import (
    AROUND,
    AttentionTraits,
    DecoderAttention,
    NormedLayer,
    layer_window,
    rms_norms,
)
from pagemill.model.models.gemma import GemmaForCausalLM
from pagemill.model.network.operations import Network, Value


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Queries are scaled by query_pre_attn_scalar."""

    knows_gelu = True
    score_cap: ClassVar[float | None] = 50.0
    """Of scores, where a config does not say one; null says none."""
    logit_cap: ClassVar[float | None] = 30.0
    """The same, of logits."""

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias"))
        traits = AttentionTraits.of(
            config,
            scale=config["query_pre_attn_scalar"] ** -0.5,
            qkv_bias=bias,
            out_bias=bias,
            window=layer_window(config, index, period=2),
            soft_cap=config.get("attn_logit_softcapping", self.score_cap),
        )
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        return NormedLayer(attention, self.gated_mlp(ctx), rms_norms(config, offset=1.0), ctx=ctx, places=AROUND)

    def logits(self, net: Network, x: Value) -> Value:
        return net.soft_cap(super().logits(net, x), self.config.get("final_logit_softcapping", self.logit_cap))
