"""`RowHeads`: heads that guess the tokens after one hidden state of another model. They have no layers that attend, and
keep nothing of a request. Knows no layout of a checkpoint.

Letters in shapes: L rows, E hidden size, K guesses.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from pagemill.catalog.heads import NUM_ROW_HEADS
from pagemill.config.facts import ModelFacts
from pagemill.model.layers.context import LayerContext
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.network.operations import Network


class RowHeads(CausalLM):
    """One for each token that may be guessed, the first for the one after the token that the model has sampled."""

    predicts: ClassVar[bool] = False
    plans_natively: ClassVar[bool] = False

    def __init__(self, facts: ModelFacts, max_model_len: int, ctx: LayerContext) -> None:
        self.num_heads = int(facts.hf_config[NUM_ROW_HEADS])
        super().__init__(facts, max_model_len, ctx)

    def make_parts(self, layers: range, max_model_len: int, ctx: LayerContext) -> None:
        self.make_heads(ctx)

    def make_heads(self, ctx: LayerContext) -> None:
        """Make what `guess` computes with."""
        raise TypeError(f"{type(self).__name__} does not say how its heads are made")

    def elsewhere(self, layer: str) -> bool:
        return False

    def finish_loading(self) -> None:
        """There are no layers, so no network that would become a program."""

    def guess(self, hidden: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """[L, E] of the model, behind its last norm; [L] int64, the tokens that it sampled from these -> [L, K] int64
        tokens, the most likely ones of the first `count` heads, and [L, K] their logits."""
        raise TypeError(f"{type(self).__name__} guesses nothing")

    def share(self, model: CausalLM) -> None:
        """Take what is not its own from the model whose tokens are guessed: by default, nothing. Raises ModelError
        where that has no such thing to give."""

    def _write_network(self) -> Network:
        net = Network()
        net.result = net.inputs
        return net


def side_by_side(best: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Of each head, [L] logits and [L] tokens -> [L, K] tokens and [L, K] logits."""
    return torch.stack([tokens for _, tokens in best], 1), torch.stack([logits for logits, _ in best], 1)
