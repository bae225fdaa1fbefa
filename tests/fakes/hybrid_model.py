"""A model with every kind of layer that keeps something, small and random, and the same computed naively.

Full, sliding and chunked attention, one layer that reads the sliding one's keys and values, and two recurrent layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pagemill.catalog.attention import ATTENTION
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.layer import Attention
from pagemill.model.attention.state_layer import StateLayer
from pagemill.worker.worker import Worker

SIZE, HEADS, VOCAB = 32, 2, 50
DIM = SIZE // HEADS


class AttentionPart(nn.Module):
    """Positions are known from the window, the chunk and the layers with states alone."""

    def __init__(self, name: str, generator: torch.Generator, kv_owner: str | None = None, **traits: Any) -> None:
        super().__init__()
        self.weights = [torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5 for _ in range(3)]
        spec = AttentionLayerSpec(HEADS, HEADS, DIM, DIM**-0.5, **traits)
        self.attn = Attention(spec, name=name, backend=ATTENTION.resolve("TORCH_CPU"), kv_owner=kv_owner)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (torch.matmul(x, weight).view(-1, HEADS, DIM) for weight in self.weights)
        reads = self.attn.kv_owner is not None
        result: Tensor = self.attn(query, None if reads else key, None if reads else value)
        return result.reshape(-1, SIZE)

    def naive(self, x: Tensor, kept: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        query, key, value = (torch.matmul(x, weight).view(-1, HEADS, DIM) for weight in self.weights)
        if self.attn.kv_owner is not None:
            key, value = kept[self.attn.kv_owner]
        kept[self.attn.name] = key, value
        scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
        for position in range(len(x)):
            scores[:, position, position + 1 :] = -torch.inf
            scores[:, position, : self.attn.spec.first_seen(position)] = -torch.inf
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(-1, SIZE)


class RecurrentPart(StateLayer):
    """A leaky sum of what the input and the one before it say, in float32; the one before is kept in `kind`."""

    def __init__(self, name: str, generator: torch.Generator, kind: str) -> None:
        super().__init__([(SIZE,), (2, SIZE // 2)], [kind, "float32"], name=name)
        self.kind = getattr(torch, kind)
        self.weights = [torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5 for _ in range(2)]

    def advance(self, x: Tensor, last: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """One token: the new states, the second of which is the output."""
        now, before = self.weights
        return x.to(self.kind), 0.8 * total + torch.tanh(x @ now + last.float() @ before)

    def forward(self, x: Tensor) -> Tensor:
        lasts, totals = self.states
        cut = self.metadata()
        # All reads come before all writes, as in a kernel that takes the requests of a step at once.
        begins = [(lasts[block].clone(), totals[block].flatten().clone()) for block in cut.source.tolist()]
        outputs: list[Tensor] = []
        written: dict[int, tuple[Tensor, Tensor]] = {}
        for segment, target in enumerate(cut.target.tolist()):
            last, total = written.get(int(cut.source[segment]), begins[segment])
            if cut.fresh[segment]:
                last, total = torch.zeros(SIZE, dtype=self.kind), torch.zeros(SIZE)
            for token in range(int(cut.start[segment]), int(cut.start[segment + 1])):
                last, total = self.advance(x[token], last, total)
                outputs.append(total)
            written = {target: (last, total)}
            lasts[target], totals[target] = last, total.view(2, -1)
        return torch.stack(outputs)

    def naive(self, x: Tensor, kept: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        last, total, outputs = torch.zeros(SIZE, dtype=self.kind), torch.zeros(SIZE), []
        for row in x:
            last, total = self.advance(row, last, total)
            outputs.append(total)
        return torch.stack(outputs)


class HybridModel(nn.Module):
    """What a worker needs of a model, and `greedy`: the tokens that it must produce."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.vocab_size = VOCAB
        self.embedding = torch.randn(VOCAB, SIZE, generator=g)
        self.head = torch.randn(SIZE, VOCAB, generator=g)
        self.parts = nn.ModuleList([
            AttentionPart("full", g),
            RecurrentPart("state.0", g, "bfloat16"),
            AttentionPart("sliding", g, window=6),
            AttentionPart("chunk", g, chunk_size=12),
            AttentionPart("reader", g, kv_owner="sliding", window=6),
            RecurrentPart("state.1", g, "float32"),
        ])  # fmt: skip

    def cache_layers(self) -> dict[str, Attention | StateLayer]:
        found: dict[str, Attention | StateLayer] = {}
        for part in self.parts:
            layer = part.attn if isinstance(part, AttentionPart) else part
            assert isinstance(layer, Attention | StateLayer)
            found[layer.name] = layer
        return found

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embedding[token_ids]
        for part in self.parts:
            hidden = hidden + part(nn.functional.normalize(hidden, dim=-1) * 4)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            hidden = self.embedding[torch.tensor(tokens)]
            kept: dict[str, tuple[Tensor, Tensor]] = {}
            for part in self.parts:
                assert isinstance(part, AttentionPart | RecurrentPart)
                hidden = hidden + part.naive(nn.functional.normalize(hidden, dim=-1) * 4, kept)
            tokens.append(int(self.compute_logits(hidden[-1]).argmax()))
        return tokens[len(prompt) :]


class HybridWorker(Worker):
    """The real worker with that model."""

    def load_model(self) -> None:
        self._loaded = HybridModel()  # type: ignore[assignment]
