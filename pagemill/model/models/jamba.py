"""Jamba: Mamba and attention mixed, with experts in some layers, and no positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderAttention, GatedMLP, MixtureOfExperts
from pagemill.model.models.mixers import Mamba, Mamba2, MambaSizes
from pagemill.model.network.operations import Layer, Network, Value

HYBRID_WEIGHTS = dataclasses.replace(
    DECODER_WEIGHTS.with_experts("gate_proj", "up_proj", "down_proj", mlp="feed_forward"),
    stack={
        **DECODER_WEIGHTS.stack,
        "mamba.gated_norm": ("norm",),
        "norm": ("final_layernorm",),
        "gate": ("router",),
    },
)


class HybridLayer(nn.Module):
    """Attention or a mixer, and an MLP or experts, each behind a norm."""

    def __init__(
        self,
        config: Mapping[str, Any],
        mixer: Mamba | Mamba2 | DecoderAttention,
        mlp: Layer,
        *,
        ctx: LayerContext,
    ) -> None:
        super().__init__()
        size = config["hidden_size"]
        eps = config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(size, eps, ctx=ctx.child("input_layernorm"))
        self.pre_ff_layernorm = RMSNorm(size, eps, ctx=ctx.child("pre_ff_layernorm"))
        if isinstance(mixer, DecoderAttention):
            self.self_attn = mixer
        else:
            self.mamba = mixer
        self.mlp = mlp

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        mixer = self.self_attn if hasattr(self, "self_attn") else self.mamba
        x = x + mixer.operations(net, net.norm(x, self.input_layernorm))
        return x + self.mlp.operations(net, net.norm(x, self.pre_ff_layernorm))


class JambaForCausalLM(CausalLM):
    """Attention in every attn_layer_period-th layer, experts in every expert_layer_period-th."""

    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    weights = HYBRID_WEIGHTS
    plans_natively = False

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        mixer: Mamba | DecoderAttention
        if index % config["attn_layer_period"] == config["attn_layer_offset"]:
            mixer = DecoderAttention(config, AttentionTraits.of(config, rope=None), ctx=ctx.child("self_attn"))
        else:
            mixer = Mamba(self._sizes(), ctx=ctx.child("mamba"))
        return HybridLayer(config, mixer, self._mlp(index, ctx.child("mlp")), ctx=ctx)

    def _sizes(self) -> MambaSizes:
        config = self.config
        return MambaSizes(
            size=self.hidden_size,
            inner_size=config["mamba_expand"] * self.hidden_size,
            state_size=config["mamba_d_state"],
            rank=config["mamba_dt_rank"],
            conv_size=config["mamba_d_conv"],
            bias=bool(config.get("mamba_proj_bias")),
            conv_bias=bool(config.get("mamba_conv_bias", True)),
            norm_eps=config["rms_norm_eps"],
        )

    def _mlp(self, index: int, ctx: LayerContext) -> Layer:
        config = self.config
        if self.num_experts < 2 or index % config["expert_layer_period"] != config["expert_layer_offset"]:
            return GatedMLP(config, ctx=ctx)
        sizes = (self.hidden_size, config["intermediate_size"], self.num_experts)
        routing = Routing(config["num_experts_per_tok"], renormalize=False)
        return MixtureOfExperts(sizes, routing, config.get("hidden_act", "silu"), ctx=ctx)
