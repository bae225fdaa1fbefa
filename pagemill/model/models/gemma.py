"""Gemma 1: Llama with scaled embeddings, norms whose weights are stored less 1, and GELU in its tanh form."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.artifacts.config_fields import changed
from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderAttention, GatedMLP, NormedLayer, rms_norms


class GemmaForCausalLM(CausalLM):
    """Full attention in every layer; the output head is tied."""

    norm_offset = 1.0
    ties_by_default = True
    only: ClassVar[Mapping[str, Any]] = {"use_bidirectional_attention": False}
    knows_gelu: ClassVar[bool] = False
    """Whether hidden_activation of gelu is that, and not its tanh form."""

    def embedding_scale(self, size: int) -> float | None:
        return math.sqrt(size)

    def gated_mlp(self, ctx: LayerContext) -> GatedMLP:
        """The feed-forward block. Files that say gelu were trained with its tanh form."""
        said = self.config.get("hidden_activation") or self.config.get("hidden_act")
        is_tanh = said is None or (said == "gelu" and not (self.knows_gelu and self.config.get("hidden_activation")))
        activation = "gelu_pytorch_tanh" if is_tanh else said
        return GatedMLP(changed(self.config, hidden_act=activation), ctx=ctx.child("mlp"))

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        bias = bool(self.config.get("attention_bias"))
        traits = AttentionTraits.of(self.config, qkv_bias=bias, out_bias=bias)
        attention = DecoderAttention(self.config, traits, ctx=ctx.child("self_attn"))
        return NormedLayer(attention, self.gated_mlp(ctx), rms_norms(self.config, offset=1.0), ctx=ctx)
