"""EAGLE and EAGLE-3 heads: one decoder layer, or a few, on hidden states of the model whose tokens they guess (Li et
al., arXiv 2401.15077 and 2503.01840)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from pagemill.config.facts import ModelFacts
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import Embedding, OutputHead
from pagemill.model.layers.linear import HeadRows, JoinedQKVLinear, Linear, QKVLinear
from pagemill.model.layers.norm import AnyNorm, RMSNorm
from pagemill.model.models.causal_lm import DECODER_WEIGHTS
from pagemill.model.models.decoder import (
    BEFORE,
    SLIDING,
    AttentionTraits,
    DecoderAttention,
    DecoderLayer,
    GatedMLP,
    rms_norms,
)
from pagemill.model.models.draft_head import DraftHead, TokenOffsets, flag, own_parts
from pagemill.model.network.operations import Network, Value

EAGLE_WEIGHTS: Final = dataclasses.replace(
    DECODER_WEIGHTS, ignore=(*DECODER_WEIGHTS.ignore, "t2d"), parents={"layers.0": "midlayer"}
)


class EagleHead(DraftHead):
    """The first layer has no norm before its attention, nothing comes after the last one, and the output head is the
    model's."""

    weights = EAGLE_WEIGHTS

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        super().__init__(facts, max_model_len, ctx, **own_parts(facts.hf_config))

    def make_embeddings(self, ctx: LayerContext) -> None:
        size = self.hidden_size
        if self.own_embeddings:
            self.embed_tokens = Embedding(self.config["vocab_size"], size, ctx=ctx.child("embed_tokens"))
        self.fc = Linear(2 * size, (size,), bias=flag(self.config, "bias"), ctx=ctx.child("fc"))

    def embed(self, net: Network) -> Value:
        return net.linear(net.inputs, self.fc)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        traits = _traits(self.config, index)
        places = dataclasses.replace(BEFORE, before_attention=None) if index == 0 else BEFORE
        return DecoderLayer(self.config, traits, ctx=ctx, places=places)

    def make_end(self, ctx: LayerContext) -> None:
        if self.has_head:
            self.lm_head = OutputHead(self.hidden_size, self.vocab_size, ctx=ctx.child("lm_head"))

    def end(self, net: Network, x: Value) -> Value:
        return x


class WideAttention(DecoderAttention):
    """Attention on inputs of twice the hidden size."""

    def _projection(self, size: int, layout: HeadRows, ctx: LayerContext) -> QKVLinear | JoinedQKVLinear:
        return super()._projection(2 * size, layout, ctx)


class Eagle3Layer(nn.Module):
    """The first layer: attention on embeddings and hidden states side by side, each behind a norm of its own."""

    def __init__(self, config: Mapping[str, Any], traits: AttentionTraits, *, ctx: LayerContext) -> None:
        super().__init__()
        make_norm = rms_norms(config)
        self._size = config["hidden_size"]
        self._adds_normed = flag(config, "norm_before_residual")
        self.input_layernorm = make_norm(ctx.child("input_layernorm"))
        self.hidden_norm = make_norm(ctx.child("hidden_norm"))
        self.self_attn = WideAttention(config, traits, ctx=ctx.child("self_attn"))
        self.post_attention_layernorm = make_norm(ctx.child("post_attention_layernorm"))
        self.mlp = GatedMLP(config, ctx=ctx.child("mlp"))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, 2 * E] -> [T, E]."""
        embeddings, hidden = net.split(x, self._size, self._size)
        normed = net.norm(hidden, self.hidden_norm)
        both = net.join(net.norm(embeddings, self.input_layernorm), normed)
        x = self.self_attn.operations(net, both) + (normed if self._adds_normed else hidden)
        return x + self.mlp.operations(net, net.norm(x, self.post_attention_layernorm))


class Eagle3Head(EagleHead):
    """Hidden states of several layers of the model become one of the head's, which has an output head of its own, as a
    rule for some of the tokens only."""

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        super().__init__(facts, max_model_len, ctx)
        self.reads_layers = tuple(self.config["eagle_aux_hidden_state_layer_ids"])
        if flag(self.config, "maps_vocabulary"):
            self.offsets = TokenOffsets(self.vocab_size, self.config["vocab_size"])

    def make_embeddings(self, ctx: LayerContext) -> None:
        config = self.config
        size = self.hidden_size
        eps = config["rms_norm_eps"]
        count = len(config["eagle_aux_hidden_state_layer_ids"])
        read = int(config.get("target_hidden_size") or size)
        if self.own_embeddings:
            self.embed_tokens = Embedding(config["vocab_size"], size, ctx=ctx.child("embed_tokens"))
        self.fc = Linear(count * read, (size,), bias=flag(config, "fc_bias"), ctx=ctx.child("fc"))
        self.input_norm = (
            RMSNorm(count * read, eps, ctx=ctx.child("input_norm")) if flag(config, "norm_before_fc") else None
        )
        self.fc_norm: nn.ModuleList | None = None
        if flag(config, "fc_norm"):
            self.fc_norm = nn.ModuleList(
                [RMSNorm(read, eps, ctx=ctx.child(f"fc_norm.{index}")) for index in range(count)]
            )

    def embed(self, net: Network) -> Value:
        return net.inputs

    def fuse(self, net: Network, x: Value) -> Value:
        if self.input_norm is not None:
            x = net.norm(x, self.input_norm)
        if self.fc_norm is not None:
            norms = [norm for norm in self.fc_norm if isinstance(norm, AnyNorm)]
            parts = net.split(x, *(norm.size for norm in norms))
            x = net.join(*(net.norm(part, norm) for part, norm in zip(parts, norms, strict=True)))
        return net.linear(x, self.fc)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        traits = _traits(self.config, index)
        return Eagle3Layer(self.config, traits, ctx=ctx) if index == 0 else DecoderLayer(self.config, traits, ctx=ctx)

    def make_end(self, ctx: LayerContext) -> None:
        super().make_end(ctx)
        self.norm = self.make_norm(ctx.child("norm"))

    def end(self, net: Network, x: Value) -> Value:
        return net.norm(x, self.norm) if flag(self.config, "norm_output") else x

    def logits(self, net: Network, x: Value) -> Value:
        return super().logits(net, x if flag(self.config, "norm_output") else net.norm(x, self.norm))


def _traits(config: Mapping[str, Any], index: int) -> AttentionTraits:
    """Llama's attention, with a window where layer_types says so."""
    bias = flag(config, "attention_bias")
    kinds = config.get("layer_types") or ()
    window = int(config["sliding_window"]) if len(kinds) > index and kinds[index] == SLIDING else None
    return AttentionTraits.of(config, qkv_bias=bias, out_bias=bias, window=window)
