"""The layer of DeepSeek-V3 that predicts one token more (arXiv 2412.19437, section 2.2): it lies behind the last layer
in the checkpoint of the model itself, with which it shares embedding and output head."""

from typing import NamedTuple

from torch import nn

from pagemill.config.facts import ModelFacts
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.models.deepseek_v2 import DeepseekV3ForCausalLM
from pagemill.model.models.draft_head import DraftHead
from pagemill.model.network.operations import Network, Value


class SharedHead(nn.Module):
    """What comes before the output head."""

    def __init__(self, size: int, eps: float, *, ctx: LayerContext) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps, ctx=ctx.child("norm"))


class _OwnParts(NamedTuple):
    """What the layer has beside a usual one, by the names in a checkpoint."""

    enorm: RMSNorm
    hnorm: RMSNorm
    eh_proj: Linear
    shared_head: SharedHead


class DeepseekV3MTPHead(DraftHead, DeepseekV3ForCausalLM):
    """The first of such layers, if there are several: it guesses one token after another."""

    weights = DeepseekV3ForCausalLM.weights

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        super().__init__(facts, max_model_len, ctx, own_embeddings=False, own_head=False)

    @property
    def _place(self) -> str:
        return f"layers.{self.config['num_hidden_layers']}"

    def make_parts(self, layers: range, max_model_len: int, ctx: LayerContext) -> None:
        count = self.config["num_hidden_layers"]
        super().make_parts(range(count, count + 1), max_model_len, ctx)

    def make_embeddings(self, ctx: LayerContext) -> None:
        pass

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        layer = super().make_layer(index, ctx)
        size = self.hidden_size
        eps = self.config["rms_norm_eps"]
        own = _OwnParts(
            RMSNorm(size, eps, ctx=ctx.child("enorm")),
            RMSNorm(size, eps, ctx=ctx.child("hnorm")),
            Linear(2 * size, (size,), bias=False, ctx=ctx.child("eh_proj")),
            SharedHead(size, eps, ctx=ctx.child("shared_head")),
        )
        for name, module in own._asdict().items():
            layer.add_module(name, module)
        self._own = own  # a tuple, and no second place of the same modules
        return layer

    def make_end(self, ctx: LayerContext) -> None:
        pass

    def embed(self, net: Network) -> Value:
        own = self._own
        embeddings, hidden = net.split(net.inputs, self.hidden_size, self.hidden_size)
        both = net.join(net.norm(embeddings, own.enorm), net.norm(hidden, own.hnorm))
        return net.linear(both, own.eh_proj)

    def end(self, net: Network, x: Value) -> Value:
        return x

    def logits(self, net: Network, x: Value) -> Value:
        return super().logits(net, net.norm(x, self._own.shared_head.norm))

    def elsewhere(self, layer: str) -> bool:
        """All layers but its own are the model's, and what both have is taken from there."""
        own = f"{self._place}."
        return not layer.startswith(own) or layer in (f"{own}embed_tokens", f"{own}shared_head.head")
