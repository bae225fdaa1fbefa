"""Mixtral: Mistral with experts in place of the MLP in every layer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderLayer, MixtureOfExperts


class MixtralForCausalLM(CausalLM):
    """A softmax router, whose weights add up to 1."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 1_000_000.0}
    weights = DECODER_WEIGHTS.with_experts("w1", "w3", "w2", mlp="block_sparse_moe")

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        traits = AttentionTraits.of(config, window=config.get("sliding_window") or None)
        routing = Routing(config["num_experts_per_tok"], renormalize=True)
        sizes = (config["hidden_size"], config["intermediate_size"], self.num_experts)
        experts = MixtureOfExperts(sizes, routing, config.get("hidden_act", "silu"), ctx=ctx.child("mlp"))
        return DecoderLayer(config, traits, ctx=ctx, mlp=experts)
