"""What the device does around a step by itself: gather a decode batch from the slots, place tokens, keep what was
sampled. Triton on GPUs that have it, else plain torch (`batching_reference`, which says what each computes)."""

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from pagemill.model.kernels import batching_reference
from pagemill.model.kernels.batching_reference import SlotTokens, TableRows
from pagemill.model.kernels.dispatch import triton_kernels


def begin_decode(
    slots: Tensor,
    next_positions: Tensor,
    last_tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    groups: Sequence[TableRows],
) -> None:
    """The inputs of a decode batch."""
    _for(slots).begin_decode(slots, next_positions, last_tokens, token_ids, positions, seq_lens, groups)


def place_tokens(
    tokens: SlotTokens,
    last_tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    groups: Sequence[tuple[Tensor, int, Tensor]],
) -> None:
    """The inputs of any batch."""
    _for(last_tokens).place_tokens(tokens, last_tokens, token_ids, positions, groups)


def end_step(slots: Tensor, sampled: Tensor, last_tokens: Tensor, results: Tensor, turn: Tensor) -> None:
    """Keep what was sampled."""
    _for(slots).end_step(slots, sampled, last_tokens, results, turn)


def end_verification(
    slots: Tensor,
    first_rows: Tensor,
    drafts: Tensor,
    sampled: Tensor,
    last_tokens: Tensor,
    results: Tensor,
    turn: Tensor,
) -> None:
    """Keep what was sampled where slots verify drafts, and how many of them were right."""
    _for(slots).end_verification(slots, first_rows, drafts, sampled, last_tokens, results, turn)


def keep_guesses(logits: Tensor, tokens_of: Tensor | None, slots: Tensor, last_tokens: Tensor, drafts: Tensor) -> None:
    """Keep what is guessed from logits: for the next step, and as drafts."""
    _for(logits).keep_guesses(logits, tokens_of, slots, last_tokens, drafts)


def write_places(table: Tensor, places: Tensor, values: Tensor) -> None:
    """Changes of a block table."""
    _for(table).write_places(table, places, values)


def _for(x: Tensor) -> ModuleType:
    return (triton_kernels("batching") if x.is_cuda else None) or batching_reference
