"""GLM-4: half of each head turned, as pairs of neighbours; gate and up in one weight; norms before and, of the 0414
models, after attention and MLP."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import BEFORE, AttentionTraits, DecoderLayer, GatedMLP, NormPlaces


class GlmForCausalLM(CausalLM):
    """Biases on query, key and value."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.5}
    weights = WeightMap(
        stack={"qkv_proj": DECODER_WEIGHTS.stack["qkv_proj"]},
        strip_prefix="model.",
        ignore=("rotary_emb.inv_freq",),
    )
    places = BEFORE

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        paired = self.rotary_size(config, self.rope_kinds(config)["default"])
        traits = AttentionTraits.of(config, qkv_bias=bool(config.get("attention_bias")), paired=paired)
        mlp = GatedMLP(config, ctx=ctx.child("mlp"), joined=True)
        return DecoderLayer(config, traits, ctx=ctx, mlp=mlp, places=self.places)


class Glm4ForCausalLM(GlmForCausalLM):
    """Norms after attention and MLP, too."""

    places = NormPlaces("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
