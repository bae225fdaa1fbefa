"""Gemma 3, text: sliding-window and full layers with rotary settings of their own, four norms a layer, scaled
embeddings, and soft caps where the checkpoint has them."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import rope_settings
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderAttention, GatedMLP
from pagemill.model.network.operations import Network, Value

SLIDING = "sliding_attention"
FULL = "full_attention"


class Gemma3Layer(nn.Module):
    """A norm before and after attention, and before and after the MLP; sums are of what the latter give."""

    def __init__(self, config: Mapping[str, Any], traits: AttentionTraits, *, ctx: LayerContext) -> None:
        super().__init__()

        def norm(name: str) -> RMSNorm:
            return RMSNorm(config["hidden_size"], config["rms_norm_eps"], ctx=ctx.child(name), offset=1.0)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(config, ctx=ctx.child("mlp"))
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        attended = self.self_attn.operations(net, net.norm(x, self.input_layernorm))
        x = x + net.norm(attended, self.post_attention_layernorm)
        inner = self.mlp.operations(net, net.norm(x, self.pre_feedforward_layernorm))
        return x + net.norm(inner, self.post_feedforward_layernorm)


class Gemma3ForCausalLM(CausalLM):
    """The text model of Gemma 3."""

    norm_offset = 1.0
    ties_by_default = True

    def embedding_scale(self, size: int) -> float | None:
        return math.sqrt(size)

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        if config.get("rope_parameters"):
            return {kind: rope_settings(config, kind) for kind in (SLIDING, FULL)}
        local = {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", 10_000.0)}
        return {SLIDING: local, FULL: rope_settings({"rope_theta": 1_000_000.0} | dict(config))}

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        kinds = config.get("layer_types")
        pattern = config.get("sliding_window_pattern", 6)
        kind = kinds[index] if kinds else (SLIDING if (index + 1) % pattern else FULL)
        traits = AttentionTraits.of(
            config,
            scale=config["query_pre_attn_scalar"] ** -0.5,
            qkv_bias=bool(config.get("attention_bias")),
            out_bias=bool(config.get("attention_bias")),
            qk_norm=True,
            norm_offset=1.0,
            window=config["sliding_window"] if kind == SLIDING else None,
            soft_cap=config.get("attn_logit_softcapping"),
            rope=kind,
        )
        return Gemma3Layer(config, traits, ctx=ctx)

    def logits(self, net: Network, x: Value) -> Value:
        return net.soft_cap(super().logits(net, x), self.config.get("final_logit_softcapping"))
