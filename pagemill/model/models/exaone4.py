"""EXAONE 4: norms after attention and MLP instead of before, norms of query and key; where layers with a window are
mixed with others, those have no rotary embedding."""

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AFTER, AttentionTraits, DecoderLayer, layer_window, norm_of_each_head


class Exaone4ForCausalLM(CausalLM):
    """Full attention and rotary embedding everywhere, without a sliding_window."""

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        config = self.config
        mixes = config.get("sliding_window") is not None
        window = layer_window(config, index, period=4) if mixes else None
        turns = not mixes or window is not None
        norm = norm_of_each_head(config["rms_norm_eps"])
        traits = AttentionTraits.of(config, qk_norm=norm, window=window, rope="default" if turns else None)
        return DecoderLayer(config, traits, ctx=ctx, places=AFTER)
