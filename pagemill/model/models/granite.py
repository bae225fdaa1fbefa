"""Granite 3: Llama with factors on embeddings, scores, what layers add, and logits."""

from torch import nn

from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.decoder import AttentionTraits, DecoderLayer
from pagemill.model.network.operations import Network, Value


class GraniteForCausalLM(CausalLM):
    """attention_bias puts a bias on all four projections."""

    def embedding_scale(self, size: int) -> float | None:
        return float(self.config.get("embedding_multiplier") or 1.0)

    def traits(self) -> AttentionTraits:
        """Of the attention of every layer."""
        bias = bool(self.config.get("attention_bias"))
        scale = float(self.config.get("attention_multiplier") or 1.0)
        return AttentionTraits.of(self.config, scale=scale, qkv_bias=bias, out_bias=bias)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        return DecoderLayer(self.config, self.traits(), ctx=ctx, multiplier=self.config.get("residual_multiplier"))

    def logits(self, net: Network, x: Value) -> Value:
        return net.scaled(super().logits(net, x), 1 / (self.config.get("logits_scaling") or 1.0))
