"""MLP speculators: each head is given what the one before made of the hidden state, and the token that it guessed
(Wertheimer et al., arXiv 2404.19124).

Letters in shapes: L rows, E hidden size, I inner size.
"""

import dataclasses
import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagemill.config.facts import ModelFacts
from pagemill.model.layers.context import LayerContext
from pagemill.model.layers.embedding import Embedding, OutputHead
from pagemill.model.layers.linear import Linear
from pagemill.model.layers.norm import RMSNorm
from pagemill.model.loading.stored import LayerTensor
from pagemill.model.loading.weight_map import Target, WeightMap
from pagemill.model.models.row_heads import RowHeads, side_by_side
from pagemill.utils.text import index_of

_EPS: Final = 1e-6
"""Of all norms; checkpoints do not say it."""
_ALIKE: Final = ("emb", "proj", "ln", "head")
"""What each head has, in this order."""


@dataclasses.dataclass(frozen=True)
class SpeculatorNames(WeightMap):
    """proj.I and the like; tied ones may be saved under each of their names."""

    strip_prefix: str = "speculator."
    tied: bool = False

    def target(self, name: str) -> Target | None:
        found = super().target(name)
        if found is None or not self.tied:
            return found
        kind, _, place = found.layer.partition(".")
        index = index_of(place)
        return None if kind in _ALIKE and index is not None and index > _last(kind) else found


def _last(kind: str) -> int:
    """The last of a kind that is not the same as the one before, where they are tied: the first head's projection has
    an input of another size."""
    return 1 if kind == "proj" else 0


class ShiftedNorm(RMSNorm):
    """x / rms(x) * weight + bias."""

    def __init__(self, size: int, ctx: LayerContext) -> None:
        super().__init__(size, _EPS, ctx=ctx)
        self.bias = torch.empty(0)

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        return (*super().checkpoint_tensors(), LayerTensor.whole("bias", (self.size,)))

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        if kind == "bias":
            self.bias = tensor.to(self.dtype)
        else:
            super().load(kind, shard, tensor)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x, residual) + self.bias


class MLPSpeculator(RowHeads):
    """Guesses depend on the tokens guessed before them."""

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        self._tied = bool(facts.hf_config["tie_weights"])
        self.weights = SpeculatorNames(tied=self._tied)  # type: ignore[misc]  # as the checkpoint says
        super().__init__(facts, max_model_len, ctx)

    def make_heads(self, ctx: LayerContext) -> None:
        size, inner, count = self.hidden_size, int(self.config["inner_dim"]), self.num_heads
        # So the state has the same share in what the next head is given as in what the last one is.
        state_weight = 0.5 ** (0.5 / count)
        self._embedding_scale = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight
        self.ln0 = RMSNorm(size, _EPS, ctx=ctx.child("ln0"), weighted=False) if self.config["scale_input"] else None

        def made(kind: str, index: int) -> nn.Module:
            own = ctx.child(f"{kind}.{index}")
            if kind == "emb":
                return Embedding(self.vocab_size, inner, ctx=own)
            if kind == "proj":
                return Linear(inner if index else size, (inner,), bias=False, ctx=own)
            return ShiftedNorm(inner, own) if kind == "ln" else OutputHead(inner, self.vocab_size, ctx=own)

        for kind in _ALIKE:
            most = min(count, _last(kind) + 1) if self._tied else count
            setattr(self, kind, nn.ModuleList([made(kind, index) for index in range(most)]))

    def guess(self, hidden: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        state = hidden if self.ln0 is None else self.ln0(hidden) / math.sqrt(2)
        best: list[tuple[Tensor, Tensor]] = []
        for index in range(count):
            embed, project, norm, head = (self._of(kind, index) for kind in _ALIKE)
            state = functional.gelu(norm(project(state) + embed(tokens) * self._embedding_scale))
            logits, tokens = head(state).max(dim=-1)
            best.append((logits, tokens))
        return side_by_side(best)

    def _of(self, kind: str, index: int) -> Any:
        """What a head has of a kind."""
        return getattr(self, kind)[min(index, _last(kind)) if self._tied else index]
