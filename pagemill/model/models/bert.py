"""BERT, RoBERTa and XLM-RoBERTa: learnt positions, and a LayerNorm after every sum."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.forward_context import current_forward
from pagemill.model.layers.activation import activation_of
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import EmbeddingSum, PositionEmbedding
from pagemill.model.layers.linear import ColumnLinear, RowLinear
from pagemill.model.layers.norm import LayerNorm
from pagemill.model.layers.pooling_head import HeadLayer
from pagemill.model.loading.renamed_map import RenamedMap
from pagemill.model.models.encoder import Encoder, EncoderAttention
from pagemill.model.network.operations import Network, Value

_STACK = {"qkv_proj": ("query", "key", "value")}
_RENAMES = (
    (".embeddings.word_embeddings.", ".embed_tokens."),
    (".embeddings.position_embeddings.", ".embed_positions."),
    (".embeddings.token_type_embeddings.", ".embed_types."),
    (".embeddings.LayerNorm.", ".embed_norm."),
    (".encoder.layer.", ".layers."),
    (".attention.self.", ".self_attn."),
    (".attention.output.dense.", ".self_attn.o_proj."),
    (".attention.output.LayerNorm.", ".attention_norm."),
    (".intermediate.dense.", ".up_proj."),
    (".output.dense.", ".down_proj."),
    (".output.LayerNorm.", ".output_norm."),
)
_ALIASES = ((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias"))


class BertLayer(nn.Module):
    """Attention and a plain MLP, each added to what it was computed from, and then normed."""

    def __init__(self, config: Mapping[str, Any], *, ctx: LayerContext) -> None:
        super().__init__()
        size = config["hidden_size"]
        inner = config["intermediate_size"]
        eps = config["layer_norm_eps"]
        what = "intermediate_size"
        self.activation = activation_of(config.get("hidden_act") or "gelu")
        self.self_attn = EncoderAttention(config, ctx=ctx.child("self_attn"), bias=True)
        self.attention_norm = LayerNorm(size, eps, ctx=ctx.child("attention_norm"))
        self.up_proj = ColumnLinear(size, (inner,), bias=True, ctx=ctx.child("up_proj"), what=what)
        self.down_proj = RowLinear(inner, size, bias=True, ctx=ctx.child("down_proj"), what=what)
        self.output_norm = LayerNorm(size, eps, ctx=ctx.child("output_norm"))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        x = net.norm(x + self.self_attn.operations(net, x), self.attention_norm)
        inner = net.activated(net.linear(x, self.up_proj), self.activation)
        return net.norm(x + net.linear(inner, self.down_proj), self.output_norm)


def _token_types() -> Tensor | None:
    return current_forward().token_types


class BertModel(Encoder):
    """Embeddings of tokens, positions and types of tokens (of the first text, or the second) are added up and
    normed."""

    weights = RenamedMap(
        stack=_STACK, strip_prefix="bert.", ignore=("position_ids",), renames=_RENAMES, aliases=_ALIASES
    )

    def make_embeddings(self, ctx: LayerContext) -> None:
        config = self.config
        kind = config.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise ModelError(f"position_embedding_type={kind!r} is not supported: it is to be 'absolute'")
        super().make_embeddings(ctx)
        first = self.first_position(config)
        num_positions = config["max_position_embeddings"] - first
        self.embed_positions = PositionEmbedding(
            num_positions, self.hidden_size, ctx=ctx.child("embed_positions"), first=first
        )
        num_types = config.get("type_vocab_size", 2)
        self.embed_types = PositionEmbedding(num_types, self.hidden_size, ctx=ctx.child("embed_types"))
        self.embed_norm = LayerNorm(self.hidden_size, config["layer_norm_eps"], ctx=ctx.child("embed_norm"))

    @staticmethod
    def first_position(config: Mapping[str, Any]) -> int:
        """The row of the table of positions that is position 0."""
        return 0

    def embed(self, net: Network) -> Value:
        summed = EmbeddingSum(self.embed_tokens, self.embed_positions, self.embed_types, _token_types)
        return net.norm(net.embed(net.inputs, summed, net.positions), self.embed_norm)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        return BertLayer(self.config, ctx=ctx)

    def head_layers(self, num_labels: int, per_token: bool) -> Sequence[HeadLayer]:
        last = HeadLayer("classifier", num_labels)
        dense = HeadLayer("pooler.dense", self.hidden_size, activation="tanh", inside=True)
        return (last,) if per_token else (dense, last)


class RobertaModel(BertModel):
    """Positions begin behind the padding's, and tokens are of one type."""

    weights = RenamedMap(
        stack=_STACK, strip_prefix="roberta.", ignore=("position_ids",), renames=_RENAMES, aliases=_ALIASES
    )

    @staticmethod
    def first_position(config: Mapping[str, Any]) -> int:
        padding = config.get("pad_token_id")
        return (1 if padding is None else int(padding)) + 1

    def head_layers(self, num_labels: int, per_token: bool) -> Sequence[HeadLayer]:
        if per_token:
            return (HeadLayer("classifier", num_labels),)
        dense = HeadLayer("classifier.dense", self.hidden_size, activation="tanh")
        return dense, HeadLayer("classifier.out_proj", num_labels)
