"""EXAONE 4: norms after attention and MLP instead of before, norms of query and key; where layers with a window are
mixed with others, those have no rotary embedding."""

from torch import nn

from pagemill.artifacts.config_fields import changed
from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AFTER, AttentionTraits, DecoderLayer, layer_window, norm_of_each_head

_WINDOW = 4096
"""Of a config that does not say one."""


class Exaone4ForCausalLM(CausalLM):
    """Full attention and rotary embedding everywhere, where sliding_window is null."""

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = changed(self.config, sliding_window=self.config.get("sliding_window", _WINDOW))
        mixes = config.get("sliding_window") is not None
        window = layer_window(config, index, period=4) if mixes else None
        turns = not mixes or window is not None
        norm = norm_of_each_head(config["rms_norm_eps"])
        traits = AttentionTraits.of(config, qk_norm=norm, window=window, rope="default" if turns else None)
        return DecoderLayer(config, traits, ctx=ctx, places=AFTER)
