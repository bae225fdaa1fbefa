"""A model of transformers is tried out once, when it has its weights: which modules attend, to what, and whether tokens
see each other in any other way. Two steps of a few tokens, in which attention gives each token something of itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pagemill.errors import ModelError
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.models.hosted.attention import unknown

NAME: Final = "pagemill_probe"
NUM_TOKENS: Final = 5
TRIES: Final = 3
SAME: Final = 0.02
"""Relative difference of a token's result up to which it is rounding: others of the batch were other tokens."""

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) -> whether the key is seen: a mask function of transformers."""

Pattern = tuple[int | None, int | None]
"""Window and chunk size of a mask; both None: it is causal, and nothing else."""


@dataclass(frozen=True)
class Attending:
    """An attention module of a hosted model, and what its first call told of the layer it needs."""

    module: nn.Module
    spec: AttentionLayerSpec
    sinks: Tensor | None


class Probe:
    """Records the calls of one forward pass."""

    def __init__(self, max_position: int) -> None:
        """`max_position`: the last that there may be: windows are told from masks of so many keys."""
        self._last = max(max_position - 1, 1)
        self._masks: list[tuple[Tensor, Predicate]] = []
        self._patterns: dict[int, Pattern] = {}
        """By mask, as they are asked for: a model may make some that no layer uses."""
        self.found: list[Attending] = []

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        **other: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: notes the layer, and gives each token its own value."""
        name = type(module).__name__
        heedless = unknown(other)
        if heedless:
            raise ModelError(f"{name} gives attention {', '.join(heedless)}, which the paged cache has no place for")
        if any(seen.module is module for seen in self.found):
            raise ModelError(f"{name} attends more than once in a step")
        if key.shape[2] != query.shape[2] or len(query) != 1:
            raise ModelError(f"{name} attends to {key.shape[2]} keys in a step of {query.shape[2]} tokens")
        window, chunk = self._pattern(name, attention_mask)
        sinks = other.get("s_aux")
        spec = AttentionLayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=max(query.shape[3], value.shape[3]),
            scale=float(query.shape[3] ** -0.5 if scaling is None else scaling),
            window=window,
            soft_cap=other.get("softcap"),
            chunk_size=chunk,
            has_sinks=sinks is not None,
        )
        self.found.append(Attending(module, spec, sinks))
        own = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return own.transpose(1, 2).contiguous(), None

    def mask(self, *, mask_function: Predicate, device: torch.device | None = None, **other: Any) -> Tensor:
        """transformers' mask function: something that `attend` knows the mask by."""
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._masks.append((mask, mask_function))
        return mask

    def _pattern(self, name: str, mask: Tensor | None) -> Pattern:
        sees = next((function for made, function in self._masks if made is mask), None)
        if sees is None:
            raise ModelError(f"{name} attends with a mask of its own making, or with none")
        if id(mask) not in self._patterns:
            self._patterns[id(mask)] = self._measure(sees)
        return self._patterns[id(mask)]

    def _measure(self, sees: Predicate) -> Pattern:
        """What a mask is. Raises ModelError for any other."""
        positions = sorted({0, 1, 2, 3, self._last // 3, self._last // 2, self._last - 1, self._last})
        first = {query: _first_seen(sees, query, self._last) for query in positions if 0 <= query <= self._last}
        if not any(first.values()):
            return None, None
        window = self._last - first[self._last] + 1
        if all(begin == max(0, query - window + 1) for query, begin in first.items()):
            return window, None
        # Of a chunk, the first token sees itself alone, and the one before it a whole chunk.
        begin = first[self._last]
        size = begin - _first_seen(sees, begin - 1, self._last)
        if size > 0 and all(seen == query // size * size for query, seen in first.items()):
            return None, size
        raise ModelError("a mask is neither causal, nor a window, nor chunks")


def _first_seen(sees: Predicate, query: int, last: int) -> int:
    """The first key that a query sees, when it sees all from there to itself. Raises ModelError."""
    keys = torch.arange(last + 1)
    zero = torch.zeros((), dtype=torch.int64)
    seen = torch.as_tensor(sees(zero, zero, torch.tensor(query), keys)).cpu().expand(last + 1)
    first = int(seen.int().argmax())
    if not seen[first : query + 1].all() or seen[query + 1 :].any():
        raise ModelError("a mask does not end at the query, or has gaps")
    return first


Run = Callable[[Tensor, Tensor], Tensor]
"""([T] token ids, [T] positions) -> [T, E]."""


def try_out(run: Run, vocab_size: int, max_position: int, device: torch.device) -> list[Attending]:
    """The attention modules of a model, in the order in which they attend. Raises ModelError with the reason where it
    cannot run on the paged cache."""
    count = min(NUM_TOKENS, max_position)
    positions = torch.arange(count, device=device)
    found: list[Attending] = []
    for attempt in range(TRIES):
        results = []
        for run_number in range(2):
            ids = (torch.arange(count, device=device) * 7 + 3 + attempt * 29 + run_number * 11) % vocab_size
            ids[-1] = (attempt * 5 + 3) % vocab_size
            probe = Probe(max_position)
            with _installed(probe):
                results.append(run(ids, positions)[-1].float())
            found = probe.found
        if not found:
            raise ModelError("its attention does not go through transformers' AttentionInterface")
        difference = float((results[0] - results[1]).abs().max())
        if difference <= SAME * float(results[0].abs().max()):
            return found
    raise ModelError(
        "its tokens see each other in other ways than through attention (states, convolutions): only an implementation "
        "made for the paged cache can run it"
    )


@contextmanager
def _installed(probe: Probe) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface  # optional: transformers

    AttentionInterface.register(NAME, probe.attend)
    AttentionMaskInterface.register(NAME, probe.mask)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(NAME)  # there is no public way to take a name out
        AttentionMaskInterface._global_mapping.pop(NAME)
