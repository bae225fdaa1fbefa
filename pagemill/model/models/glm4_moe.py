"""GLM-4.5 and 4.6: DeepSeek-V3's experts and router, with the usual attention, of which part of each head is turned."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderAttention, norm_of_each_head
from pagemill.model.models.deepseek_v2 import DeepseekV3ForCausalLM
from pagemill.model.network.operations import Layer


class Glm4MoeForCausalLM(DeepseekV3ForCausalLM):
    """use_qk_norm puts norms on query and key; attention_bias biases on query, key and value."""

    plans_natively = True
    rope_defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.5}
    weights = DECODER_WEIGHTS.with_experts("gate_proj", "up_proj", "down_proj")

    @staticmethod
    def rotary_size(config: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
        return CausalLM.rotary_size(config, settings)

    def attention(self, ctx: LayerContext) -> Layer:
        config = self.config
        norm = norm_of_each_head(config["rms_norm_eps"]) if config.get("use_qk_norm") else None
        traits = AttentionTraits.of(config, qkv_bias=bool(config.get("attention_bias")), qk_norm=norm)
        return DecoderAttention(config, traits, ctx=ctx)
