"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts in place of the MLP, and one more that all tokens share, weighted by a
gate of its own."""

import dataclasses

from torch import nn

from pagemill.artifacts.config_fields import changed
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderLayer, GatedMLP, MixtureOfExperts, has_experts
from pagemill.model.models.qwen2 import layer_window

_EXPERTS = DECODER_WEIGHTS.with_experts("gate_proj", "up_proj", "down_proj")


class Qwen2MoeForCausalLM(CausalLM):
    """A softmax router; experts in all layers or in some."""

    weights = dataclasses.replace(_EXPERTS, parents={**_EXPERTS.parents, "shared_experts": "shared_expert"})

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("qkv_bias", True))
        traits = AttentionTraits.of(config, qkv_bias=bias, window=layer_window(config, index))
        mixes = has_experts(config, self.num_experts, index)
        return DecoderLayer(config, traits, ctx=ctx, mlp=self._experts(ctx.child("mlp")) if mixes else None)

    def _experts(self, ctx: LayerContext) -> MixtureOfExperts:
        config = self.config
        routing = Routing(config["num_experts_per_tok"], renormalize=bool(config.get("norm_topk_prob")))
        sizes = (self.hidden_size, config["moe_intermediate_size"], self.num_experts)
        inner = changed(config, intermediate_size=config["shared_expert_intermediate_size"])
        shared = GatedMLP(inner, ctx=ctx.child("shared_experts"))
        return MixtureOfExperts(
            sizes, routing, config.get("hidden_act", "silu"), ctx=ctx, shared=shared, gates_shared=True
        )
