"""OLMoE: experts in place of the MLP, and norms over all heads of query and of key."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.head_norms import RMSNormOfAllHeads
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderLayer, MixtureOfExperts


class OlmoeForCausalLM(CausalLM):
    """A softmax router; experts in every layer."""

    only: ClassVar[Mapping[str, Any]] = {"clip_qkv": False}
    weights = DECODER_WEIGHTS.with_experts("gate_proj", "up_proj", "down_proj")

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias"))
        eps = config["rms_norm_eps"]
        traits = AttentionTraits.of(
            config,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=lambda heads, ctx: RMSNormOfAllHeads(heads, eps, ctx=ctx),
        )
        routing = Routing(config["num_experts_per_tok"], renormalize=bool(config.get("norm_topk_prob")))
        sizes = (self.hidden_size, config["intermediate_size"], self.num_experts)
        experts = MixtureOfExperts(sizes, routing, config.get("hidden_act", "silu"), ctx=ctx.child("mlp"))
        return DecoderLayer(config, traits, ctx=ctx, mlp=experts)
