"""Mistral: Llama with a sliding window in every layer, when the checkpoint has one."""

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderLayer

_WINDOW = 4096
"""Of a config that does not say one."""


class MistralForCausalLM(CausalLM):
    """Every layer sees the last `sliding_window` tokens; null means all."""

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        traits = AttentionTraits.of(self.config, window=self.config.get("sliding_window", _WINDOW) or None)
        return DecoderLayer(self.config, traits, ctx=ctx)
