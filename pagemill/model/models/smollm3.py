"""SmolLM3: Llama of which every fourth layer has no rotary embedding."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.errors import ModelError
from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderLayer


class SmolLM3ForCausalLM(CausalLM):
    """no_rope_layers has a 1 for each layer with rotary embedding, and a 0 for each without."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 2_000_000.0}
    ties_by_default = True

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        bias = bool(config.get("attention_bias"))
        traits = AttentionTraits.of(
            config,
            qkv_bias=bias,
            out_bias=bias,
            rope="default" if self._turns(index) else None,
            window=self._window(index),
        )
        return DecoderLayer(config, traits, ctx=ctx)

    def _turns(self, index: int) -> bool:
        listed = self.config.get("no_rope_layers")
        if listed:
            if len(listed) < self.config["num_hidden_layers"]:
                raise ModelError(f"no_rope_layers has {len(listed)} entries, fewer than there are layers")
            return bool(listed[index])
        return (index + 1) % (self.config.get("no_rope_layer_interval") or 4) != 0

    def _window(self, index: int) -> int | None:
        kinds = self.config.get("layer_types")
        slides = (
            kinds[index] == "sliding_attention"
            if kinds
            else bool(self.config.get("use_sliding_window")) and not self._turns(index)
        )
        return self.config.get("sliding_window") if slides else None
