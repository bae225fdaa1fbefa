"""Phi-1, 1.5 and 2: attention and a plain MLP of one LayerNorm's output, part of each head turned, and biases."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import (
    MLP,
    AttentionTraits,
    DecoderAttention,
    NormPlaces,
    ParallelLayer,
    layer_norms,
)


class PhiForCausalLM(CausalLM):
    """The output head has a bias, too."""

    # A head that is the embedding and has a bias of its own is read nowhere.
    only: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": False}
    rope_defaults: ClassVar[Mapping[str, Any]] = {"partial_rotary_factor": 0.5}
    weights = WeightMap(
        stack={
            "qkv_proj": DECODER_WEIGHTS.stack["qkv_proj"],
            "q_norm": ("q_layernorm",),
            "k_norm": ("k_layernorm",),
            "o_proj": ("dense",),
            "up_proj": ("fc1",),
            "down_proj": ("fc2",),
            "norm": ("final_layernorm",),
        },
        strip_prefix="model.",
        ignore=DECODER_WEIGHTS.ignore,
    )
    head_bias = True

    def make_norm(self, ctx: LayerContext) -> LayerNorm:
        return LayerNorm(self.hidden_size, self.config["layer_norm_eps"], ctx=ctx)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        eps = config["layer_norm_eps"]
        normed = bool(config.get("qk_layernorm"))
        traits = AttentionTraits.of(
            config,
            qkv_bias=True,
            out_bias=True,
            qk_norm=(lambda heads, ctx: LayerNorm(heads.size, eps, ctx=ctx)) if normed else None,
        )
        attention = DecoderAttention(config, traits, ctx=ctx.child("self_attn"))
        act = config.get("hidden_act") or "gelu_new"
        mlp = MLP(self.hidden_size, config["intermediate_size"], act, bias=True, ctx=ctx.child("mlp"))
        return ParallelLayer(attention, mlp, layer_norms(config, eps), ctx=ctx, places=NormPlaces(before_mlp=None))
