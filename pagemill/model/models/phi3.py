"""Phi-3 and Phi-4: Llama whose checkpoints have query, key and value in one weight, and gate and up in another."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.loading.weight_map import WeightMap
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderLayer, GatedMLP


class Phi3ForCausalLM(CausalLM):
    """A window in every layer, where configured; long contexts by LongRoPE; part of each head turned in Phi-4-mini."""

    rope_defaults: ClassVar[Mapping[str, Any]] = {"original_max_position_embeddings": 4096}
    weights = WeightMap(strip_prefix="model.", ignore=("rotary_emb.inv_freq",))

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        traits = AttentionTraits.of(self.config, joined=True, window=self.config.get("sliding_window") or None)
        mlp = GatedMLP(self.config, ctx=ctx.child("mlp"), joined=True)
        return DecoderLayer(self.config, traits, ctx=ctx, mlp=mlp)
