"""Llama 4, text: layers that see chunks of the context, turned, and layers that see all of it, not turned and scaled by
position; experts that get weighted inputs, and one more that all tokens share."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.artifacts.config_fields import changed
from pagemill.errors import ModelError
from pagemill.model.kernels.moe import SILU
from pagemill.model.kernels.routing import Routing
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.moe.merged_experts import MergedExperts, MergedForm
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.query_growth import QueryGrowth
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


def _growth(config: Mapping[str, Any], max_model_len: int) -> QueryGrowth | None:
    """Of queries that are not turned; None where the config says that there is none."""
    if config.get("attn_temperature_tuning") not in (None, True, 1, 4):
        return None
    step = float(config.get("floor_scale") or _FLOOR_SCALE)
    if step < 1 or not step.is_integer():
        raise ModelError(f"floor_scale={step!r} is not supported: it is to be a whole number above 0")
    return QueryGrowth(int(step), float(config.get("attn_scale") or _ATTN_SCALE), max_model_len)


class Llama4Attention(DecoderAttention):
    """Where nothing is turned, queries grow with the logarithm of their positions."""

    def __init__(
        self, config: Mapping[str, Any], traits: AttentionTraits, growth: QueryGrowth | None, *, ctx: LayerContext
    ) -> None:
        super().__init__(config, traits, ctx=ctx)
        self._growth = growth if traits.rope is None else None

    def scaled_query(self, net: Network, query: Value) -> Value:
        return query if self._growth is None else net.call(self._growth, query, net.positions, by_rows=True)


class Llama4ForCausalLM(CausalLM):
    """no_rope_layers has a 1 for each layer with rotary embedding, and a 0 for each without."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 500_000.0}
    only: ClassVar[Mapping[str, Any]] = {"hidden_act": "silu"}
    weights = WeightMap(
        stack={**DECODER_WEIGHTS.stack, "gate": ("router",)},
        strip_prefix="model.",
        ignore=DECODER_WEIGHTS.ignore,
        parents={"mlp": "feed_forward", "shared_experts": "shared_expert"},
    )

    def make_parts(self, layers: range, max_model_len: int, ctx: LayerContext) -> None:
        """Raises ModelError for a floor_scale that is no whole number."""
        self._growth = _growth(self.config, max_model_len)
        super().make_parts(layers, max_model_len, ctx)

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
        attention = Llama4Attention(config, traits, self._growth, ctx=ctx.child("self_attn"))
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
