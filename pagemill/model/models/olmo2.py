"""OLMo 2 and OLMo 3: norms after attention and MLP instead of before, and over all heads of query and of key."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.head_norms import RMSNormOfAllHeads
from pagemill.model.layers.rotary import rope_settings
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AFTER, FULL, SLIDING, AttentionTraits, DecoderLayer, layer_window


class Olmo2ForCausalLM(CausalLM):
    """Full attention in every layer."""

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        return DecoderLayer(self.config, self.traits(index), ctx=ctx, places=AFTER)

    def traits(self, index: int, **changes: Any) -> AttentionTraits:
        """Of the attention of a layer."""
        bias = bool(self.config.get("attention_bias"))
        eps = self.config["rms_norm_eps"]
        return AttentionTraits.of(
            self.config,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=lambda heads, ctx: RMSNormOfAllHeads(heads, eps, ctx=ctx),
            **changes,
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three of four layers have a window, and no scaling of rotary frequencies."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 500_000.0}

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        if SLIDING in (config.get("rope_parameters") or {}):
            return {kind: rope_settings(config, kind, self.rope_defaults) for kind in (SLIDING, FULL)}
        full = rope_settings(config, defaults=self.rope_defaults)
        return {SLIDING: {"rope_type": "default", "rope_theta": full["rope_theta"]}, FULL: full}

    def traits(self, index: int, **changes: Any) -> AttentionTraits:
        window = layer_window(self.config, index, period=4)
        return super().traits(index, window=window, rope=FULL if window is None else SLIDING, **changes)
