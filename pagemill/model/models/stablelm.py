"""StableLM: Llama with LayerNorms and part of each head turned; of the larger models a LayerNorm of each head, and
attention and MLP of one input."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.head_norms import LayerNormOfEachHead
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import (
    AttentionTraits,
    DecoderAttention,
    GatedMLP,
    NormedLayer,
    NormPlaces,
    ParallelLayer,
    layer_norms,
)


class StableLmForCausalLM(CausalLM):
    """use_qkv_bias puts a bias on query, key and value."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.25}
    weights = WeightMap(
        stack=DECODER_WEIGHTS.stack,
        strip_prefix="model.",
        ignore=DECODER_WEIGHTS.ignore,
        numbered={"q_norm": "norms", "k_norm": "norms"},
        parents={"q_norm": "q_layernorm", "k_norm": "k_layernorm"},
    )

    def make_norm(self, ctx: LayerContext) -> LayerNorm:
        return LayerNorm(self.hidden_size, self.config["layer_norm_eps"], ctx=ctx)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        eps = config["layer_norm_eps"]
        traits = AttentionTraits.of(
            config,
            qkv_bias=bool(config.get("use_qkv_bias")),
            qk_norm=(lambda heads, ctx: LayerNormOfEachHead(heads, eps, ctx=ctx, apart=True))
            if config.get("qk_layernorm")
            else None,
        )
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        mlp = GatedMLP(config, ctx=ctx.child("mlp"))
        if config.get("use_parallel_residual"):
            return ParallelLayer(attention, mlp, layer_norms(config, eps), ctx=ctx, places=NormPlaces(before_mlp=None))
        return NormedLayer(attention, mlp, layer_norms(config, eps), ctx=ctx)
