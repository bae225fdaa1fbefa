"""`DraftHead`: a few layers that guess tokens from what another model computes. Knows no layout of a checkpoint.

Letters in shapes: T tokens, N layers of the other model whose states are read, E hidden size, D rows of the head.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.layers.embedding import Embedding, OutputHead
from pagemill.model.loading.part import whole
from pagemill.model.loading.stored import LayerTensor, LoadableLayer, StoredTensor
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.network.operations import Network, Value
from pagemill.model.network.program import Program


class TokenOffsets(nn.Module):
    """Of a head with a smaller vocabulary: its token i is token i + offsets[i] of the model."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        super().__init__()
        self.tokens: Tensor = torch.empty(0)
        """[D] int64: tokens of the model."""
        self._shape = (num_tokens,)
        self._offsets = range(vocab_size - num_tokens + 1)

    def checkpoint_tensors(self) -> tuple[LayerTensor, ...]:
        """The checkpoint's d2t, of integers."""
        stored = StoredTensor("d2t", self._shape, (torch.int64, torch.int32), values=self._offsets)
        return (LayerTensor(stored, 0, whole("d2t", self._shape)),)

    def load(self, kind: str, shard: int, tensor: Tensor) -> None:
        """Take the checkpoint tensor."""
        self.tokens = tensor.long() + torch.arange(len(tensor), device=tensor.device)


def own_parts(config: Mapping[str, Any]) -> dict[str, bool]:
    """What `DraftHead` wants to know of a checkpoint."""
    return {name: flag(config, name) for name in ("own_embeddings", "own_head")}


class DraftHead(CausalLM):
    """Its network takes [T, 2 * E], embeddings of the tokens that follow and hidden states beside them, and gives
    [T, E], which are hidden states of the next step of a guess; `compute_logits` takes these."""

    reads_layers: tuple[int, ...] = ()
    """Of the other model: hidden states are what these layers read, side by side; empty: what is behind its last
    norm."""
    lm_head: OutputHead
    embed_tokens: Embedding

    def __init__(self, *args: Any, own_embeddings: bool, own_head: bool, **kwargs: Any) -> None:
        """What is not its own is the other model's."""
        self.own_embeddings = own_embeddings
        self.predicts = own_head  # type: ignore[misc]  # without, there are no logits before `share`
        super().__init__(*args, **kwargs)
        self.offsets: TokenOffsets | None = None
        self._fusion: Program | None = None

    def fuse(self, net: Network, x: Value) -> Value:
        """The operations on hidden states of the other model, [T, N * E'], that give [T, E]: by default none."""
        return x

    def finish_loading(self) -> None:
        super().finish_loading()
        net = Network()
        net.result = self.fuse(net, net.inputs)
        self._fusion = Program(net) if net.operations else None

    def loadable(self) -> dict[str, LoadableLayer]:
        layers = super().loadable()
        if self.offsets is not None:
            layers[""] = layers.pop("offsets")
        return layers

    def share(self, model: CausalLM) -> None:
        """Take what is not its own from the model whose tokens it guesses. Raises ModelError where that has no such
        thing to give."""
        for name, own in (("embed_tokens", self.own_embeddings), ("lm_head", self.has_head)):
            if own:
                continue
            layer = getattr(model, name, None)
            if layer is None:
                raise ModelError(f"has no {name} of its own, and a {type(model).__name__} gives none")
            setattr(self, name, layer)
        if not self.has_head:
            net = Network()
            net.result = self.logits(net, net.inputs)
            self._head_program = Program(net)

    def fused(self, hidden: Tensor) -> Tensor:
        """[T, N * E'] of the other model -> [T, E]."""
        return hidden if self._fusion is None else self._fusion.run(hidden)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """[T] int64 tokens, [T, E] hidden states before them, [T] int64 positions of these -> [T, E]; of `rows`,
        [L, E]."""
        result: Tensor = self(torch.cat((self.embed_tokens(tokens), hidden), dim=-1), positions, rows)
        return result

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[L, E] -> [L] most likely tokens of the model, int64, and their logits."""
        logits, tokens = self.compute_logits(hidden).max(dim=-1)
        return tokens if self.offsets is None else self.offsets.tokens[tokens], logits


def flag(config: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false where there is none."""
    return bool(config.get(name))
