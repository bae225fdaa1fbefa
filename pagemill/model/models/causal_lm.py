"""`CausalLM`: what every decoder has in common - embedding, layers, final norm, output head, rotary tables."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagemill.config.facts import ModelFacts
from pagemill.model.attention.interface import CacheLayer
from pagemill.model.attention.layer import Attention
from pagemill.model.attention.state_layer import StateLayer
from pagemill.model.distributed.split import stage_layers
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import Embedding, OutputHead
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.layers.rotary import Rotary, make_rotary, rope_settings
from pagemill.model.loading.weight_map import WeightMap

Rope = Mapping[str, tuple[Tensor, Tensor]]
"""Rotary setting -> (cos, sin) of this step's positions, each [T, D]."""

DECODER_WEIGHTS = WeightMap(
    stack={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    strip_prefix="model.",
    ignore=("rotary_emb.inv_freq",),
)


class CausalLM(nn.Module):
    """A decoder that predicts the next token. Subclasses say how a layer is made and what differs.

    Of a pipeline stage, it is consecutive layers; the first stage has the embedding too, the last one the final norm
    and the output head. What passes between stages is the sum of hidden states and residual, [T, E].

    Letters in shapes: T tokens, L sampled rows, E hidden size, V vocabulary, D head size.
    """

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS
    norm_offset: ClassVar[float] = 0.0

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        super().__init__()
        config = facts.hf_config
        size, vocab_size, eps = config["hidden_size"], facts.vocab_size, config["rms_norm_eps"]
        self.config = config
        self.tied = bool(config.get("tie_word_embeddings", self.ties_by_default))
        self.hidden_size = int(size)
        self.dtype = ctx.dtype
        stage, num_stages = ctx.groups.pp.rank, ctx.groups.pp.size
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first:
            scale = self.embedding_scale(size)
            self.embed_tokens = Embedding(vocab_size, size, ctx=ctx.child("embed_tokens"), scale=scale)
        self.layers = nn.ModuleDict(
            {
                str(index): self.make_layer(index, ctx.child(f"layers.{index}"))
                for index in stage_layers(config["num_hidden_layers"], stage, num_stages)
            }
        )
        if self.is_last:
            self.norm = RMSNorm(size, eps, ctx=ctx.child("norm"), offset=self.norm_offset)
            self.lm_head = OutputHead(size, vocab_size, ctx=ctx.child("lm_head"))
        self.rotaries: dict[str, Rotary] = {
            kind: make_rotary(settings, self.head_size(config), max_model_len, ctx.dtype)
            for kind, settings in self.rope_kinds(config).items()
        }

    ties_by_default: ClassVar[bool] = False

    @staticmethod
    def head_size(config: Mapping[str, Any]) -> int:
        """D, given or implied."""
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def embedding_scale(self, size: int) -> float | None:
        """Factor on embeddings; None for none."""
        return None

    def rope_kinds(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Name -> rotary settings, for every setting that some layer uses."""
        return {"default": rope_settings(config)}

    def make_layer(self, index: int, ctx: LayerContext) -> nn.Module:
        """A decoder layer: forward(hidden, residual, rope) -> (hidden, residual)."""
        raise TypeError(f"{type(self).__name__} does not say how its layers are made")

    def cache_layers(self) -> dict[str, CacheLayer]:
        """Every layer that keeps something of a request, by name, in layer order."""
        return {module.name: module for module in self.modules() if isinstance(module, (Attention, StateLayer))}

    def loadable(self) -> dict[str, nn.Module]:
        """Checkpoint layer -> the layer that takes its tensors. A tied head is loaded from the embedding's, or takes
        the embedding's weight when both are here."""
        layers = {name: module for name, module in self.named_modules() if hasattr(module, "expected")}
        if self.tied and self.is_last:
            layers.setdefault("embed_tokens", layers.pop("lm_head"))
        return layers

    def elsewhere(self, layer: str) -> bool:
        """Whether a checkpoint layer belongs to another stage, or is a head of its own that a tied model ignores."""
        if layer in ("embed_tokens", "norm"):
            return True
        if layer == "lm_head":
            return self.tied or not self.is_last
        head, _, rest = layer.partition(".")
        index = rest.partition(".")[0]
        is_layer = head == "layers" and index.isdecimal() and int(index) < self.config["num_hidden_layers"]
        return is_layer and index not in self.layers

    def finish_loading(self) -> None:
        """Called once, after the last weight: the head takes the embedding's weight when they are tied."""
        if self.tied and self.is_first and self.is_last and self.embed_tokens.weight is not None:
            self.lm_head.take(self.embed_tokens.weight)

    def forward(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """[T] int64 token ids, on a later stage [T, E] from the stage before it; [T] int64 -> [T, E], for the next
        stage or, from the last one, for `compute_logits`."""
        rope = {kind: rotary.at(positions) for kind, rotary in self.rotaries.items()}
        hidden, residual = self.embed_tokens(inputs) if self.is_first else inputs, None
        for layer in self.layers.values():
            hidden, residual = layer(hidden, residual, rope)
        if self.is_last:
            return self.last_norm(hidden, residual)
        return hidden if residual is None else hidden + residual

    def last_norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """The final norm, of hidden plus what the last layer left for it to add."""
        return self.norm(hidden) if residual is None else self.norm.add_forward(hidden, residual)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[L, E] -> [L, V] float32, the same on every tensor-parallel rank. The last stage only."""
        logits: Tensor = self.lm_head(hidden).to(torch.float32)
        return logits
