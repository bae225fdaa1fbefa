"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in all layers or in some."""

from torch import nn

from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import (
    AttentionTraits,
    DecoderLayer,
    MixtureOfExperts,
    has_experts,
    norm_of_each_head,
)
from pagemill.model.models.qwen2 import layer_window


class Qwen3MoeForCausalLM(CausalLM):
    """Norms of query and key; a softmax router, whose weights may be made to add up to 1."""

    weights = DECODER_WEIGHTS.with_experts("gate_proj", "up_proj", "down_proj")

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias"))
        window = layer_window(config, index)
        norm = norm_of_each_head(config["rms_norm_eps"])
        traits = AttentionTraits.of(config, qk_norm=norm, qkv_bias=bias, out_bias=bias, window=window)
        mixes = has_experts(config, self.num_experts, index)
        return DecoderLayer(config, traits, ctx=ctx, mlp=self._experts(ctx.child("mlp")) if mixes else None)

    def _experts(self, ctx: LayerContext) -> MixtureOfExperts:
        config = self.config
        routing = Routing(config["num_experts_per_tok"], renormalize=bool(config.get("norm_topk_prob")))
        sizes = (config["hidden_size"], config["moe_intermediate_size"], self.num_experts)
        return MixtureOfExperts(sizes, routing, config.get("hidden_act", "silu"), ctx=ctx)
