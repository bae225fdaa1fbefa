"""Medusa heads: each a few residual blocks and an output head, on the same hidden state (Cai et al., arXiv 2401.10774).

Letters in shapes: L rows, E hidden size.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.config.facts import ModelFacts
from pagemill.errors import ModelError
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import OutputHead
from pagemill.model.layers.linear import Linear
from pagemill.model.loading.weight_map import Target, WeightMap
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.row_heads import RowHeads, side_by_side

OWN: Final = "own"
SHARED: Final = "shared"
OF_MODEL: Final = "of the model"
"""Whose the output heads are: one of each head, one of all heads, or that of the model."""
_PREFIXES: Final = ("medusa_heads.", "medusa_head.")
_SHARED_NAME: Final = "lm_heads.0"


@dataclass(frozen=True)
class MedusaNames(WeightMap):
    """Layer J of head I is I.J.linear where it was published first, and its output head I.N after N layers; elsewhere
    blocks.I.layers.J and lm_heads.I, as here."""

    num_layers: int | None = None
    """Of a head, where names are numbers."""
    shared: bool = False
    """Whether there is one output head, lm_head, which may be named as that of the first head."""

    def target(self, name: str) -> Target | None:
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        target = super().target(name)
        if target is None:
            return None
        layer = target.layer
        head, _, place = layer.partition(".")
        if self.num_layers is not None and head.isdecimal():
            layer = f"lm_heads.{head}" if place == str(self.num_layers) else layer
            layer = f"blocks.{head}.layers.{place.removesuffix('.linear')}" if place.endswith(".linear") else layer
        if self.shared and layer.startswith("lm_heads."):
            return replace(target, layer="lm_head") if layer == _SHARED_NAME else None
        return replace(target, layer=layer)

    def source_module(self, layer: str, shard: int) -> str:
        layer = _SHARED_NAME if self.shared and layer == "lm_head" else layer
        if self.num_layers is None:
            return layer
        kind, head, *place = layer.split(".")
        return f"{head}.{place[-1]}.linear" if kind == "blocks" else f"{head}.{self.num_layers}"


class Block(nn.Module):
    """[L, E] -> [L, E]: to what it is given, each layer adds what it makes of that."""

    def __init__(self, size: int, num_layers: int, bias: bool, ctx: LayerContext) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [Linear(size, (size,), bias=bias, ctx=ctx.child(f"layers.{index}")) for index in range(num_layers)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


class MedusaHeads(RowHeads):
    """A head knows no token but those that the hidden state stands for: guesses do not depend on each other."""

    lm_head: OutputHead

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        config = facts.hf_config
        self.whose = str(config["output_heads"])
        layers = int(config["num_block_layers"])
        self.weights = MedusaNames(  # type: ignore[misc]  # one checkpoint has other names than the next
            num_layers=layers if config["numbered_names"] else None, shared=self.whose == SHARED
        )
        super().__init__(facts, max_model_len, ctx)

    def make_heads(self, ctx: LayerContext) -> None:
        config = self.config
        size = self.hidden_size
        numbers = range(self.num_heads)
        layers = int(config["num_block_layers"])
        bias = bool(config["medusa_fc_bias"])
        self.blocks = nn.ModuleList([Block(size, layers, bias, ctx.child(f"blocks.{index}")) for index in numbers])
        if self.whose == SHARED:
            self.lm_head = OutputHead(size, self.vocab_size, ctx=ctx.child("lm_head"))
        if self.whose == OWN:
            self.lm_heads = nn.ModuleList(
                [OutputHead(size, self.vocab_size, ctx=ctx.child(f"lm_heads.{index}")) for index in numbers]
            )

    def share(self, model: CausalLM) -> None:
        if self.whose != OF_MODEL:
            return
        if not model.has_head:
            raise ModelError("has no output heads, and the model gives none")
        self.lm_head = model.lm_head

    def guess(self, hidden: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        states = [block(hidden) for block in self.blocks[:count]]
        if self.whose == OWN:
            return side_by_side([head(x).max(dim=-1) for head, x in zip(self.lm_heads, states, strict=False)])
        # One output head, which is read once.
        logits, guesses = self.lm_head(torch.cat(states)).max(dim=-1)
        return guesses.view(len(states), -1).T, logits.view(len(states), -1).T
