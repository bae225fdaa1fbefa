"""Gemma 3, text: sliding-window and full layers with rotary settings of their own, four norms a layer, scaled
embeddings, and soft caps where the checkpoint has them."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.rotary import rope_settings
from pagemill.model.models.decoder import (
    AROUND,
    FULL,
    SLIDING,
    AttentionTraits,
    DecoderAttention,
    NormedLayer,
    layer_window,
    norm_of_each_head,
    rms_norms,
)
from pagemill.model.models.gemma2 import Gemma2ForCausalLM


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """The text model of Gemma 3."""

    score_cap: ClassVar[float | None] = None
    logit_cap: ClassVar[float | None] = None

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        if config.get("rope_parameters"):
            return {kind: rope_settings(config, kind) for kind in (SLIDING, FULL)}
        local = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 10_000.0)}
        return {SLIDING: local, FULL: rope_settings({"rope_theta": 1_000_000.0} | dict(config))}

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        window = layer_window(config, index, period=6)
        traits = AttentionTraits.of(
            config,
            scale=config["query_pre_attn_scalar"] ** -0.5,
            qkv_bias=bool(config.get("attention_bias")),
            out_bias=bool(config.get("attention_bias")),
            qk_norm=norm_of_each_head(config["rms_norm_eps"], offset=1.0),
            window=window,
            soft_cap=config.get("attn_logit_softcapping", self.score_cap),
            rope=FULL if window is None else SLIDING,
        )
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        return NormedLayer(attention, self.gated_mlp(ctx), rms_norms(config, offset=1.0), ctx=ctx, places=AROUND)
