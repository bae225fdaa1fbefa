"""DFlash: a few layers that guess all tokens of a block in one pass, which see each other (arXiv 2602.06036).

In place of tokens that are not known yet they are given one of their own. What they see of the text before the block
is not computed from its tokens: keys and values are projections of what layers of the other model give.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from torch import Tensor, nn

from pagemill.catalog.heads import BLOCK_SIZE
from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.distributed.split import split_heads
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import Embedding, OutputHead
from pagemill.model.layers.linear import Linear, RowLinear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.models.causal_lm import DECODER_WEIGHTS
from pagemill.model.models.decoder import SLIDING, AttentionTraits, GatedMLP, NormedLayer, rms_norms
from pagemill.model.models.draft_head import DraftHead, TokenOffsets, flag, own_parts
from pagemill.model.network.operations import Network, Value
from pagemill.model.network.program import Program

_ROPE: Final = "default"


class BlockAttention(nn.Module):
    """Attention of a block's tokens to the text before it and to each other, with norms of query and key."""

    def __init__(self, config: Mapping[str, Any], index: int, *, ctx: LayerContext) -> None:
        super().__init__()
        self.causal, window = _sight(config, index)
        """`causal`: whether a token of the block sees none behind it."""
        traits = AttentionTraits.of(config)
        size = config["hidden_size"]
        dim = traits.head_size
        bias = flag(config, "attention_bias")
        here = split_heads(traits.num_heads, traits.num_kv_heads, ctx.groups.tp.rank, ctx.groups.tp.size)
        of_query, of_key = (range(part.start * dim, part.stop * dim) for part in (here.query, here.kv))
        whole = traits.num_kv_heads * dim
        self.q_proj = Linear(size, (traits.num_heads * dim,), bias=bias, ctx=ctx.child("q_proj"), rows=[of_query])
        self.kv_proj = Linear(size, (whole, whole), bias=bias, ctx=ctx.child("kv_proj"), rows=[of_key, of_key])
        self.o_proj = RowLinear(
            traits.num_heads * dim, size, bias=bias, ctx=ctx.child("o_proj"), what="size of the attention heads"
        )
        eps = config["rms_norm_eps"]
        self.q_norm = RMSNorm(dim, eps, ctx=ctx.child("q_norm"))
        self.k_norm = RMSNorm(dim, eps, ctx=ctx.child("k_norm"))
        spec = AttentionLayerSpec(len(here.query), len(here.kv), dim, traits.scale, window)
        name = ctx.child("attn").name
        self.attn = Attention(spec, name=name, backend=ctx.attention(spec, name))

    def operations(self, net: Network, x: Value) -> Value:
        """[T, E] -> [T, E]."""
        query = net.per_head(net.linear(x, self.q_proj), self.attn.spec.num_heads)
        query = net.rotary(net.norm(query, self.q_norm), _ROPE)
        key, value = self._keys_values(net, x)
        return net.linear(net.attend(query, key, value, self.attn), self.o_proj)

    def store(self, net: Network, x: Value) -> Value:
        """The operations by which keys and values of [T, E] go to the cache; x again."""
        return net.call(self._store, *self._keys_values(net, x), x)

    def _keys_values(self, net: Network, x: Value) -> tuple[Value, Value]:
        spec = self.attn.spec
        size = spec.num_kv_heads * spec.head_size
        key, value = (
            net.per_head(part, spec.num_kv_heads) for part in net.split(net.linear(x, self.kv_proj), size, size)
        )
        return net.rotary(net.norm(key, self.k_norm), _ROPE), value

    def _store(self, key: Tensor, value: Tensor, x: Tensor) -> Tensor:
        self.attn.store(key, value)
        return x


class DFlashHead(DraftHead):
    """Its network takes [T, E], embeddings of blocks, and gives [T, E] for `compute_logits`; `keep` must have run for
    every position before a block."""

    weights = replace(
        DECODER_WEIGHTS,
        stack={"kv_proj": ("k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
        ignore=(*DECODER_WEIGHTS.ignore, "t2d", "verifier_norm.weight", "verifier_lm_head.weight"),
    )

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        config = facts.hf_config
        super().__init__(facts, max_model_len, ctx, **own_parts(config))
        self.reads_layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
        self.block_size = int(config[BLOCK_SIZE])
        self.mask_token = int(config["mask_token_id"])
        self._scale = float(config.get("input_embedding_scale") or 1.0)
        self._storing: Program | None = None
        if flag(config, "maps_vocabulary"):
            self.offsets = TokenOffsets(self.vocab_size, config["vocab_size"])

    def make_embeddings(self, ctx: LayerContext) -> None:
        config = self.config
        size = self.hidden_size
        if self.own_embeddings:
            self.embed_tokens = Embedding(config["vocab_size"], size, ctx=ctx.child("embed_tokens"))
        read = len(config["eagle_aux_hidden_state_layer_ids"]) * int(config.get("target_hidden_size") or size)
        self.fc = Linear(read, (size,), bias=False, ctx=ctx.child("fc"))
        self.hidden_norm = RMSNorm(size, config["rms_norm_eps"], ctx=ctx.child("hidden_norm"))

    def embed(self, net: Network) -> Value:
        return net.inputs

    def fuse(self, net: Network, x: Value) -> Value:
        return net.norm(net.linear(x, self.fc), self.hidden_norm)

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        attention = BlockAttention(self.config, index, ctx=ctx.child("self_attn"))
        mlp = GatedMLP(self.config, ctx=ctx.child("mlp"))
        return NormedLayer(attention, mlp, rms_norms(self.config), ctx=ctx)

    def make_end(self, ctx: LayerContext) -> None:
        self.norm = self.make_norm(ctx.child("norm"))
        if self.has_head:
            self.lm_head = OutputHead(self.hidden_size, self.vocab_size, ctx=ctx.child("lm_head"))

    def finish_loading(self) -> None:
        super().finish_loading()
        net = Network(self.rotaries)
        net.result = net.inputs
        for attention in self._attentions():
            net.result = attention.store(net, net.result)
        self._storing = Program(net)

    def _native_plan(self) -> None:
        """None: rows of a step read what others of them write, which a native call of all layers does not wait for."""

    def causal_layers(self) -> dict[str, bool]:
        """Name of each attention layer -> whether tokens of a block see none behind them."""
        return {attention.attn.name: attention.causal for attention in self._attentions()}

    def keep(self, hidden: Tensor, positions: Tensor) -> None:
        """[T, N * E'] of the other model, and [T] int64 positions: what the layers see of them goes to the cache."""
        if self._storing is None:
            raise ModelError("the head has no weights yet")
        self._storing.run(self.fused(hidden), positions)

    def guess(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """[T] int64 tokens of blocks and their positions -> [L, E] of `rows`, for `best`."""
        embedded = self.embed_tokens.unscaled(tokens)
        if self._scale != 1.0:
            embedded = embedded * self._scale
        found: Tensor = self(embedded, positions, rows)
        return found

    def _attentions(self) -> list[BlockAttention]:
        return [part for layer in self.layers.values() for part in layer.children() if isinstance(part, BlockAttention)]


def _sight(config: Mapping[str, Any], index: int) -> tuple[bool, int | None]:
    """Whether a layer's tokens see none behind them, and its window. Where nothing is said, those of layers with a
    window do not. Raises ModelError for a window in both directions."""
    kinds = config.get("layer_types") or ()
    slides = kinds[index] == SLIDING if len(kinds) > index else flag(config, "use_swa")
    window = config.get("swa_window_size") or config.get("sliding_window")
    said = config.get("is_causal")
    said = config.get("causal") if said is None else said
    causal = slides and not flag(config, "sliding_window_non_causal") if said is None else bool(said)
    if not slides:
        return causal, None
    if not causal:
        raise ModelError(f"layer {index} sees what follows and has a window, which is not supported: leave it out")
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"layer {index} is of kind {SLIDING}, and config.json has no sliding_window")
    return causal, window
