"""What the graphs of each kind of network compute that guesses: one token after another, all in one pass, or from one
hidden state; `guess_graphs` says which kind a network is.

Letters in shapes: T tokens, R requests, padding included, E hidden size, K drafts.
"""

from abc import abstractmethod
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pagemill.config.graph_mode import GraphMode
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.layer import Attention
from pagemill.model.forward_context import current_forward
from pagemill.model.kernels import batching
from pagemill.model.kernels.rows import rows_at
from pagemill.model.models.causal_lm import CausalLM
from pagemill.model.models.dflash import DFlashHead
from pagemill.model.models.draft_head import DraftHead
from pagemill.model.models.parallel_eagle import ParallelEagle3Head
from pagemill.model.models.row_heads import RowHeads
from pagemill.worker.forward.guess_graphs import Asked, FollowingGraphs, GuessGraphs, GuessParts
from pagemill.worker.forward.mixed_batch import BatchBounds, MixedTensors
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from pagemill.worker.spec_decode.hidden_states import HiddenStates


def guess_graphs(parts: GuessParts) -> GuessGraphs | None:
    """Of a network of any kind; None where it cannot be part of a graph."""
    model, given = parts.network.model, parts.given
    if isinstance(model, RowHeads):
        return None if given is None else RowGraphs(parts, model, given)
    if not _is_capturable(model, parts.network.groups):
        return None
    if not isinstance(model, DraftHead):
        return ModelGraphs(parts, model)
    if given is None:
        return None
    if isinstance(model, DFlashHead):
        return BlockGraphs(parts, model, given)
    if isinstance(model, ParallelEagle3Head):
        return ParallelGraphs(parts, model, given)
    return HeadGraphs(parts, model, given)


def _is_capturable(model: CausalLM, groups: AttentionGroups) -> bool:
    """Whether all layers may be part of a graph, of any lengths, and nothing is planned on the host."""
    layers = model.cache_layers().values()
    return (
        bool(layers)
        and all(
            isinstance(layer, Attention) and layer.backend.metadata_builder.graph_support is AttentionCGSupport.ALWAYS
            for layer in layers
        )
        and not groups.plans_on_host
    )


class ChainGraphs(FollowingGraphs):
    """A guess goes on with the tokens that it has guessed, one after another."""

    _tokens_of: Tensor | None = None
    """[V] int64: the model's tokens of the logits; None: those of their indices."""

    def _guess_step(self, asked: Asked) -> None:
        batch = self._batch
        count = len(asked)
        positions = batch.positions[:count]
        token_ids = batch.token_ids[:count]
        next_positions = batch.next_positions[:count]
        next_positions.copy_(asked.starts)
        hidden = rows_at(self.hidden, asked.rows)
        replayed = current_forward().graph_mode is GraphMode.FULL
        for place in range(self._max_drafts):
            if place:
                batching.begin_decode(
                    asked.slots,
                    next_positions,
                    self._last_tokens,
                    token_ids,
                    positions,
                    batch.seq_lens[:count],
                    [batch.table_rows(group, count) for group in self._groups.indices],
                )
                self._planned.update(self._groups.plan_with(partial(batch.decode_common, replayed, count)))
                hidden = self._next(token_ids, hidden, positions)
            drafts = self.drafts[:count, place]
            batching.keep_guesses(self._logits(hidden), self._tokens_of, asked.slots, self._last_tokens, drafts)

    @abstractmethod
    def _next(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """[R] int64 tokens, [R, E] from which they were guessed, and their positions -> [R, E]."""

    @abstractmethod
    def _logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> [R, V]."""


class ModelGraphs(ChainGraphs):
    """Of a model that reads tokens alone."""

    shift = 1

    def __init__(self, parts: GuessParts, model: CausalLM) -> None:
        super().__init__(parts)
        self._model = model

    def _compute(self, tokens: Tensor, positions: Tensor, source: Tensor, rows: Tensor) -> Tensor | None:
        found: Tensor = self._model(tokens, positions, rows)
        return found

    def _next(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        found: Tensor = self._model(tokens, positions)
        return found

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)


class HeadGraphs(ChainGraphs):
    """Of a head that is given hidden states of the model, and then its own."""

    def __init__(self, parts: GuessParts, head: DraftHead, given: HiddenStates) -> None:
        super().__init__(parts)
        self._head = head
        self._given = given
        self._tokens_of = None if head.offsets is None else head.offsets.tokens

    def _compute(self, tokens: Tensor, positions: Tensor, source: Tensor, rows: Tensor) -> Tensor | None:
        return self._head.step(tokens, self._head.fused(_read(self._given, source)), positions, rows)

    def _next(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return self._head.step(tokens, hidden, positions)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head.compute_logits(hidden)


class ParallelGraphs(HeadGraphs):
    """The first guess is made of what was computed, all others in one more pass."""

    def __init__(self, parts: GuessParts, head: ParallelEagle3Head, given: HiddenStates) -> None:
        super().__init__(parts, head, given)
        self._parallel = head
        with torch.inference_mode():
            self._masked = head.masked()
            """[1, E]."""

    def _guess_step(self, asked: Asked) -> None:
        count = len(asked)
        tokens, logits = self._head.best(rows_at(self.hidden, asked.rows))
        self._keep_drafts(tokens.unsqueeze(1), logits.unsqueeze(1))
        further = self._max_drafts - 1
        if not further:
            return
        head = self._parallel
        tensors, bounds = self._alike(asked, torch.full_like(self.drafts[:count, 1:], head.mask_token))
        masks, positions = self._plan(tensors, bounds)
        tokens, logits = head.best(head.step(masks, self._masked.expand(len(masks), -1), positions))
        self._keep_drafts(tokens.view(count, further), logits.view(count, further), 1)


class BlockGraphs(FollowingGraphs):
    """Of a head that guesses blocks."""

    def __init__(self, parts: GuessParts, head: DFlashHead, given: HiddenStates) -> None:
        super().__init__(parts)
        self._head = head
        self._given = given
        self._ahead = [name for name, is_causal in head.causal_layers().items() if not is_causal]
        """Layers in which tokens of a block see those behind them."""
        self._reach = 1 + parts.max_drafts  # a block begins with the last token

    def _compute(self, tokens: Tensor, positions: Tensor, source: Tensor, rows: Tensor) -> Tensor | None:
        self._head.keep(_read(self._given, source), positions)
        return None

    def _guess_step(self, asked: Asked) -> None:
        head = self._head
        count = len(asked)
        masks = torch.full_like(self.drafts[:count], head.mask_token)
        tensors, bounds = self._alike(asked, torch.cat((asked.tokens.unsqueeze(1), masks), dim=1))
        tokens, positions = self._plan(tensors, bounds)
        if self._ahead:
            planned = self._groups.plan_with(partial(self._batch.mixed_common, *_each_alone(tensors)))
            self._planned.update({name: planned[name] for name in self._ahead})
        rows = torch.arange(len(tokens), device=tokens.device).view(count, -1)[:, 1:].reshape(-1)
        guesses, logits = head.best(head.guess(tokens, positions, rows))
        self._keep_drafts(guesses.view(masks.shape), logits.view(masks.shape))


class RowGraphs(GuessGraphs):
    """Of heads that read one hidden state."""

    def __init__(self, parts: GuessParts, heads: RowHeads, given: HiddenStates) -> None:
        super().__init__(replace(parts, max_drafts=min(parts.max_drafts, heads.num_heads)))
        self._heads = heads
        self._given = given

    def _guess_step(self, asked: Asked) -> None:
        hidden = rows_at(self._given.sampled, asked.rows)
        self._keep_drafts(*self._heads.guess(hidden, asked.tokens.long(), self._max_drafts))


def _read(given: HiddenStates, source: Tensor) -> Tensor:
    """[T] rows of the step that ran last -> what a head reads of them."""
    return rows_at(given.layers if given.wanted.layers else given.final, source)


def _each_alone(tensors: MixedTensors) -> tuple[MixedTensors, BatchBounds]:
    """A batch of equally many tokens of each request, as requests of one token as long as the whole:
    so each sees all others."""
    slots = tensors.tokens.slots
    count = len(slots)
    query_start = torch.arange(count + 1, dtype=torch.int32, device=slots.device)
    ends = tensors.seq_lens.repeat_interleave(count // len(tensors.slots))
    return replace(tensors, slots=slots, query_start=query_start, seq_lens=ends), BatchBounds(count, 1, 1, None)
