"""Llama 4, text: layers that see chunks of the context, turned, and layers that see all of it, not turned and scaled by
position; experts that get weighted inputs, and one more that all tokens share."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagemill.artifacts.config_fields import changed
from pagemill.errors import ModelError
from pagemill.model.kernels.moe import SILU
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.merged_experts import MergedExperts, MergedForm
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import DECODER_WEIGHTS, CausalLM
from pagemill.model.models.decoder import (
    AttentionTraits,
    DecoderAttention,
    GatedMLP,
    MixtureOfExperts,
    NormedLayer,
    rms_norms,
)
from pagemill.model.network.operations import Network, Value

_CHUNKED = "chunked_attention"
_FLOOR_SCALE = 8192
_ATTN_SCALE = 0.1


class Llama4Attention(DecoderAttention):
    """Where nothing is turned, queries grow with the logarithm of their positions."""

    def __init__(self, config: Mapping[str, Any], traits: AttentionTraits, *, ctx: LayerContext) -> None:
        super().__init__(config, traits, ctx=ctx)
        self._grows = traits.rope is None and config.get("attn_temperature_tuning") in (None, True, 1, 4)
        self._floor = float(config.get("floor_scale") or _FLOOR_SCALE)
        self._scale = float(config.get("attn_scale") or _ATTN_SCALE)

    def scaled_query(self, net: Network, query: Value) -> Value:
        return net.call(self._grown, query, net.positions, by_rows=True) if self._grows else query

    def _grown(self, query: Tensor, positions: Tensor) -> Tensor:
        steps = torch.floor((positions.float() + 1) / self._floor)
        return (query * (torch.log1p(steps) * self._scale + 1)[:, None, None]).to(query.dtype)


class Llama4ForCausalLM(CausalLM):
    """no_rope_layers has a 1 for each layer with rotary embedding, and a 0 for each without."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 500_000.0}
    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    plans_natively = False
    weights = WeightMap(
        stack={**DECODER_WEIGHTS.stack, "gate": ("router",)},
        strip_prefix="model.",
        ignore=DECODER_WEIGHTS.ignore,
        parents={"mlp": "feed_forward", "shared_experts": "shared_expert"},
    )

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        turns = self._turns(index)
        eps = config["rms_norm_eps"]
        normed = turns and bool(config.get("use_qk_norm", True))
        bias = bool(config.get("attention_bias"))
        kinds = config.get("layer_types")
        sees_chunks = kinds[index] == _CHUNKED if kinds else turns
        traits = AttentionTraits.of(
            config,
            qkv_bias=bias,
            out_bias=bias,
            rope="default" if turns else None,
            chunk_size=config.get("attention_chunk_size") if sees_chunks else None,
            qk_norm=(lambda heads, ctx: RMSNorm(heads.size, eps, ctx=ctx, weighted=False)) if normed else None,
            norms_after_rotary=True,
            paired=self.rotary_size(config, {}),
        )
        attention = Llama4Attention(config, traits, ctx=ctx.child("self_attn"))
        return NormedLayer(attention, self._mlp(index, ctx.child("mlp")), rms_norms(config), ctx=ctx)

    def _turns(self, index: int) -> bool:
        listed = self.config.get("no_rope_layers")
        if listed:
            if len(listed) < self.config["num_hidden_layers"]:
                raise ModelError(f"no_rope_layers has {len(listed)} entries, fewer than there are layers")
            return bool(listed[index])
        return (index + 1) % (self.config.get("no_rope_layer_interval") or 4) != 0

    def _mlp(self, index: int, ctx: LayerContext) -> GatedMLP | MixtureOfExperts:
        config = self.config
        step = config.get("interleave_moe_layer_step") or 1
        listed = config.get("moe_layers")
        mixes = index in listed if listed is not None else (index + 1) % step == 0
        if not mixes:
            return GatedMLP(changed(config, intermediate_size=config["intermediate_size_mlp"]), ctx=ctx)
        sizes = (self.hidden_size, config["intermediate_size"], self.num_experts)
        experts = MergedExperts(sizes, MergedForm(SILU, weighs_inputs=True), ctx=ctx.child("experts"))
        routing = Routing(config["num_experts_per_tok"], sigmoid=True)
        shared = GatedMLP(config, ctx=ctx.child("shared_experts"))
        return MixtureOfExperts(sizes, routing, "silu", ctx=ctx, experts=experts, shared=shared)
