"""`LogprobRecorder`: log-probabilities of tokens, for the slots that ask for them, wherever the logits are.

What it computes with has a bound: logits of at most MAX_ROWS rows are copied, or made of a prompt, at a time. Nothing
here waits for a device. Knows slots; nothing about how tokens are chosen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.config.choices import LogprobsMode
from pagemill.messages.logprobs import TokenLogprobs, joined
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import Int32Array, KnownLogprobs, KnownTokens, NewRequest, SampledLogprobs
from pagemill.worker.batch.device_states import DeviceStates, SamplingColumns
from pagemill.worker.batch.input_batch import InputBatch, Int64Array, SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.sampling.device_sampler import filter_rows_

T = TypeVar("T", bound=np.generic)

MAX_ROWS = 64
"""Rows of logits that are copied, or computed of a prompt, at a time."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the values of some rows will be made of, once their tokens are chosen."""

    which: Int64Array
    """[K] the rows, of those that are sampled together."""
    rows: SampledRows
    """[K] the same."""
    logits: Tensor
    """[K, V] float32, a copy."""


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """Values where the logits are; `unpack` makes of them what a message has."""

    packed: Tensor
    """[N, 2 W + 1] int32: W = 1 + C ids, the bits of W values, and the rank (see `TokenLogprobs`)."""

    def unpack(self, on_host: Tensor | None = None) -> TokenLogprobs:
        """`on_host`: what `packed` holds, if that is elsewhere."""
        array: Int32Array = (self.packed if on_host is None else on_host).numpy()
        width = array.shape[1] // 2
        values = np.ascontiguousarray(array[:, width : 2 * width]).view(np.float32)
        return TokenLogprobs(array[:, :width].copy(), values, array[:, -1].copy())


@dataclass(frozen=True, slots=True)
class SampledValues:
    """Of some of the tokens that a step samples."""

    indices: Int32Array
    """[N] which of them."""
    values: PackedLogprobs

    def message(self, on_host: Tensor | None = None) -> SampledLogprobs:
        """`on_host`: as in `PackedLogprobs.unpack`."""
        return SampledLogprobs(self.indices, self.values.unpack(on_host))


@dataclass(frozen=True, slots=True)
class KnownValues:
    """Of tokens that were known before."""

    request_id: str
    start: int
    """As in `KnownLogprobs`."""
    values: PackedLogprobs

    def message(self, on_host: Tensor | None = None) -> KnownLogprobs:
        """`on_host`: as in `PackedLogprobs.unpack`."""
        return KnownLogprobs(self.request_id, self.start, self.values.unpack(on_host))


class _Stretch(NamedTuple):
    """Known tokens of a slot that are to be scored."""

    request_id: str
    first: int
    """Position of the first, > 0."""
    end: int
    """Position behind the last."""
    num_likeliest: int
    """Candidates: the most likely tokens."""
    named: Tensor | None
    """Candidates in place of these."""


class LogprobRecorder:
    """Told of every request, with `add` and `remove`.

    Around the choice of tokens for the rows of each of `parts`: `keep_raw` before logits are changed, `keep_processed`
    after processors have changed them, `values` when the tokens are there.
    """

    def __init__(
        self, states: RequestStates, device: torch.device, mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    ) -> None:
        """`device`: where the logits are that are sampled from."""
        num_slots = len(states.num_tokens)
        self._states = states
        self._device = device
        self._mode = mode
        self._asks = np.zeros(num_slots, bool)
        self._num_asking = 0
        self._num_likeliest = np.zeros(num_slots, np.int64)
        """[S] most likely tokens that a slot asks for."""
        self._named: dict[int, Tensor] = {}
        """Slot -> the tokens that it names."""
        self._stretches: dict[int, _Stretch] = {}
        """Slot -> the known tokens that it wants scored, as far as they are not computed."""
        self._request_ids: dict[int, str] = {}
        """Of the slots that ask."""

    def add(self, new: NewRequest) -> bool:
        """A request takes a slot. Whether it asks for log-probabilities of what it samples."""
        slot = new.slot
        params = new.params
        self.remove(slot)
        if not isinstance(params, SamplingParams):
            return False
        if new.scores_prompt and params.prompt_logprobs is not None:
            end = new.num_prompt_tokens
            self._stretches[slot] = _Stretch(new.request_id, 1, end, params.prompt_logprobs, None)
        if params.num_candidates is None:
            return False
        self._request_ids[slot] = new.request_id
        self._asks[slot] = True
        self._num_asking += 1
        self._num_likeliest[slot] = params.logprobs or 0
        if params.logprob_token_ids is not None:
            self._named[slot] = torch.tensor(params.logprob_token_ids).to(self._device, non_blocking=True)
        if new.scores_from is not None:
            self._score_output(slot, new.scores_from, len(new.token_ids))
        return True

    def replace(self, known: KnownTokens) -> None:
        """Tokens of a slot that nobody samples."""
        if self._asks[known.slot]:
            self._score_output(known.slot, known.position, known.position + len(known.token_ids))

    def remove(self, slot: int) -> None:
        """A slot is released. May be told twice."""
        self._num_asking -= bool(self._asks[slot])
        self._asks[slot] = False
        self._named.pop(slot, None)
        self._stretches.pop(slot, None)
        self._request_ids.pop(slot, None)

    # --- of sampled tokens ----------------------------------------------------------------------------------------

    def parts(self, rows: SampledRows) -> list[slice]:
        """The rows that are to be sampled together: all, unless more of them ask than may be copied at a time."""
        if not self._num_asking or int(self._asks[rows.slots].sum()) <= MAX_ROWS:
            return [slice(0, len(rows))]
        return [slice(start, start + MAX_ROWS) for start in range(0, len(rows), MAX_ROWS)]

    def keep_raw(self, logits: Tensor, rows: SampledRows) -> Kept | None:
        """What values are made of, of [L, V] float32 logits as the model gives them."""
        return None if self._mode.processed else self._keep(logits, rows)

    def keep_processed(self, logits: Tensor, rows: SampledRows) -> Kept | None:
        """What values are made of, of [L, V] float32 logits after processors."""
        kept = self._keep(logits, rows) if self._mode.processed else None
        if kept is not None:
            columns = SamplingColumns(_plain_where_greedy(self._states, kept.rows.slots).to(kept.logits.device))
            filter_rows_(kept.logits, columns)
        return kept

    def values(self, kept: Kept, tokens: Tensor, first: int = 0) -> SampledValues:
        """Of [L] tokens, where the logits are, that were chosen for the rows of a part; `first`: its first row."""
        slots = kept.rows.slots
        own = tokens.index_select(0, torch.from_numpy(kept.which).to(tokens.device)).long().clamp(min=0)
        named = {place: ids for place, slot in enumerate(slots.tolist()) if (ids := self._named.get(slot)) is not None}
        packed = _pack(kept.logits, own, int(self._num_likeliest[slots].max()), self._mode.normalized, named)
        return SampledValues((first + kept.which).astype(np.int32), PackedLogprobs(packed))

    def _keep(self, logits: Tensor, rows: SampledRows) -> Kept | None:
        if not self._num_asking:
            return None
        which = np.flatnonzero(self._asks[rows.slots])
        if not len(which):
            return None
        return Kept(which, rows[which], logits.index_select(0, torch.from_numpy(which).to(logits.device)))

    # --- of known tokens ------------------------------------------------------------------------------------------

    def scores(self, slots: Int32Array) -> bool:
        """Whether one of the slots wants known tokens scored: hidden states of all its tokens are needed then."""
        return bool(self._stretches) and not self._stretches.keys().isdisjoint(slots.tolist())

    def score_known(
        self, batch: InputBatch, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> list[KnownValues]:
        """Those of known tokens before which a batch has computed the last; [T, E] hidden states of all its tokens."""
        found = []
        starts = batch.query_start.tolist()
        token_ids = self._states.token_ids
        for place, slot in enumerate(batch.slots.tolist()):
            stretch = self._stretches.get(slot)
            if stretch is None:
                continue
            computed = int(batch.positions[starts[place]])
            first = max(computed + 1, stretch.first)
            end = min(int(batch.seq_lens[place]) + 1, stretch.end)
            if first < end:
                targets = torch.from_numpy(token_ids[slot, first:end].astype(np.int64)).to(hidden.device)
                row = starts[place] + first - 1 - computed
                packed = self._score(hidden[row : row + end - first], targets, stretch, compute_logits)
                found.append(KnownValues(stretch.request_id, first, PackedLogprobs(packed)))
            if end == stretch.end:
                del self._stretches[slot]
        return found

    def _score_output(self, slot: int, first: int, end: int) -> None:
        if first < end:
            count = int(self._num_likeliest[slot])
            self._stretches[slot] = _Stretch(self._request_ids[slot], first, end, count, self._named.get(slot))

    def _score(
        self, hidden: Tensor, targets: Tensor, stretch: _Stretch, compute_logits: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """[N, E] hidden states, [N] the tokens that follow -> [N, 2 W + 1]."""
        parts = []
        for start in range(0, len(targets), MAX_ROWS):
            part = slice(start, start + MAX_ROWS)
            tokens = targets[part]
            named = None if stretch.named is None else dict.fromkeys(range(len(tokens)), stretch.named)
            logits = compute_logits(hidden[part])
            parts.append(_pack(logits, tokens, stretch.num_likeliest, self._mode.normalized, named))
        return torch.cat(parts)


def joined_samples(parts: Sequence[SampledLogprobs]) -> SampledLogprobs | None:
    """Those of all parts of a step, in their order; None where there are none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    width = max(part.logprobs.token_ids.shape[1] for part in parts)
    padded = [
        TokenLogprobs(
            _widened(part.logprobs.token_ids, width), _widened(part.logprobs.values, width), part.logprobs.ranks
        )
        for part in parts
    ]
    return SampledLogprobs(np.concatenate([part.indices for part in parts]), joined(padded))


def _widened(array: npt.NDArray[T], width: int) -> npt.NDArray[T]:
    """[N, W] -> [N, width], zeros behind."""
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))


def _pack(
    logits: Tensor, tokens: Tensor, num_likeliest: int, normalized: bool, named: dict[int, Tensor] | None = None
) -> Tensor:
    """[K, V] float32 logits and [K] tokens -> [K, 2 W + 1], as in `PackedLogprobs`; `named`: row -> its candidates."""
    values = logits.log_softmax(-1) if normalized else logits
    own = values.gather(1, tokens.unsqueeze(1))
    ranks = (values > own).sum(-1, keepdim=True) + 1
    named = named or {}
    width = max([num_likeliest, *map(len, named.values())])
    ids = tokens.unsqueeze(1)
    found = own
    if width:
        # Candidates of rows that name theirs are written over these.
        likeliest = values.topk(width)
        candidates = likeliest.indices
        chosen = likeliest.values
        for row, some in named.items():
            candidates[row, : len(some)] = some
            chosen[row, : len(some)] = values[row].index_select(0, some)
        ids, found = torch.cat([ids, candidates], 1), torch.cat([own, chosen], 1)
    return torch.cat([ids.int(), found.contiguous().view(torch.int32), ranks.int()], 1)


def _plain_where_greedy(states: RequestStates, slots: Int32Array) -> Tensor:
    """[K, columns] how slots sample (`DeviceStates.sampling`), without temperature and filters where they are
    greedy."""
    rows = torch.from_numpy(DeviceStates.sampling_rows(states, slots))
    columns = SamplingColumns(rows)
    greedy = torch.from_numpy(states.greedy[slots])
    columns.temperature[greedy] = 1
    columns.top_p[greedy] = 1
    columns.min_p[greedy] = 0
    columns.top_k[greedy] = 0
    return rows
