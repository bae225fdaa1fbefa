"""Bamba: Mamba-2 and attention mixed, with an MLP in each layer; half of each head is turned."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderAttention, GatedMLP
from pagemill.model.models.jamba import HYBRID_WEIGHTS, HybridLayer
from pagemill.model.models.mixers import Mamba2, Mamba2Sizes, time_limits


def mamba2_sizes(config: Mapping[str, Any]) -> Mamba2Sizes:
    """From the names that fields have where Mamba-2 is mixed with attention."""
    return Mamba2Sizes(
        size=config["hidden_size"],
        num_heads=config["mamba_n_heads"],
        head_size=config["mamba_d_head"],
        state_size=config["mamba_d_state"],
        num_groups=config["mamba_n_groups"],
        conv_size=config["mamba_d_conv"],
        bias=bool(config.get("mamba_proj_bias")),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        eps=config["rms_norm_eps"],
        limits=time_limits(config),
    )


class BambaForCausalLM(CausalLM):
    """Attention in the layers that attn_layer_indices names."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.5}
    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    weights = HYBRID_WEIGHTS
    plans_natively = False

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        mixer: Mamba2 | DecoderAttention
        if index in (config.get("attn_layer_indices") or ()):
            bias = bool(config.get("attention_bias"))
            traits = AttentionTraits.of(config, qkv_bias=bias, out_bias=bias)
            mixer = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        else:
            mixer = Mamba2(mamba2_sizes(config), ctx=ctx.child("mamba"))
        return HybridLayer(config, mixer, GatedMLP(config, ctx=ctx.child("mlp")), ctx=ctx)
