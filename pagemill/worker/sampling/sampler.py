"""Logits to tokens: processors in order, temperature, min-p, top-k and top-p, then one draw per row.

Knows no requests, only slots. The draw is by inverse distribution: one uniform number per (seed, position).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.catalog.logits import load_processors
from pagemill.config.choices import LogprobsMode
from pagemill.log import get_logger
from pagemill.messages.step import KnownTokens, NewRequest, SampledLogprobs
from pagemill.model.kernels import ops
from pagemill.model.kernels.reference import token_or_none
from pagemill.worker.batch.input_batch import SampledRows
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.batch.row_masks import LEFT, RowMasks
from pagemill.worker.extensions.interface import WorkerExtension
from pagemill.worker.sampling.context import SamplerContext
from pagemill.worker.sampling.draft_draws import NO_DRAFT, DraftDraws, draft_or_best, draw_with_drafts
from pagemill.worker.sampling.filters import min_p_, top_k_top_p_
from pagemill.worker.sampling.history import HostHistory, TokenHistory
from pagemill.worker.sampling.logprobs import LogprobRecorder, SampledValues, joined_samples
from pagemill.worker.sampling.philox import uniform
from pagemill.worker.sampling.processors.interface import LogitsProcessor, MaskingProcessor
from pagemill.worker.sampling.uploads import LatestUpload

logger = get_logger(__name__)

MAX_PROCESSED_ROWS = 64
"""Rows that a processor gets at a time: what it computes with, of the size of their logits, has a bound."""


class _Processing:
    """A processor, and the slots that take part in it."""

    def __init__(self, processor: LogitsProcessor, num_slots: int, device: torch.device) -> None:
        self.processor = processor
        self.slots = np.zeros(num_slots, bool)
        """[S] whether a slot takes part."""
        self._rows = LatestUpload(device)

    def apply(self, logits: Tensor, rows: SampledRows) -> Sequence[int]:
        """Change the rows of [L, V] logits whose slots take part; the slots that ask for nothing more."""
        if not self.slots.any():  # as for most processors at most steps
            return ()
        which = np.flatnonzero(self.slots[rows.slots])
        if not len(which):
            return ()
        if len(which) == len(rows) <= MAX_PROCESSED_ROWS:
            self._apply(logits, rows)
        else:
            places = self._rows.of(which)
            for start in range(0, len(which), MAX_PROCESSED_ROWS):
                part = slice(start, start + MAX_PROCESSED_ROWS)
                taken = logits.index_select(0, places[part])
                self._apply(taken, rows[which[part]])
                logits.index_copy_(0, places[part], taken)
        try:
            done = [slot for slot in self.processor.take_done() if self.slots[slot]]
        except Exception:
            self._report_failure(len(which))
            logits[torch.from_numpy(which).to(logits.device)] = torch.nan
            return ()
        self.slots[done] = False
        return done

    def remove(self, slot: int) -> None:
        """A slot takes no part any more."""
        self.slots[slot] = False
        try:
            self.processor.remove(slot)
        except Exception:
            self._report_failure(0)

    def _apply(self, logits: Tensor, rows: SampledRows) -> None:
        try:
            self.processor.apply(logits, rows)
        except Exception:  # may be somebody else's code: the requests end that asked for it, not the engine
            self._report_failure(len(rows))
            logits.fill_(torch.nan)

    def _report_failure(self, num_rows: int) -> None:
        """Log the exception that is being handled, and for how many rows no token is sampled."""
        logger.exception("logits processor %s failed for %d rows", type(self.processor).__name__, num_rows)


class _Failed(LogitsProcessor):
    """Of requests that some processor could not take in: no token is sampled for them, which ends them."""

    def add(self, new: NewRequest) -> bool:
        return False

    def apply(self, logits: Tensor, rows: SampledRows) -> None:
        logits.fill_(torch.nan)


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """What settings say of sampling."""

    processors: Sequence[type[LogitsProcessor]] | None = None
    """Of logits; None: those of the catalogue."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    """What is told of tokens where requests ask for it."""


class Sampler:
    """Samples one token for each row of logits. `history` None: that of the slots' state, on the host. `processors`
    None: those of the catalogue. `draft_draws` None: a token is drawn alike whether a draft is in its place or not."""

    def __init__(
        self,
        states: RequestStates,
        vocab_size: int,
        device: torch.device | None = None,
        history: TokenHistory | None = None,
        processors: Sequence[type[LogitsProcessor]] | None = None,
        extensions: Mapping[str, WorkerExtension] | None = None,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        draft_draws: DraftDraws | None = None,
    ) -> None:
        device = torch.device("cpu") if device is None else device
        history = HostHistory(states, vocab_size) if history is None else history
        self.logprobs = LogprobRecorder(states, device, logprobs_mode)
        self._states = states
        self._history = history
        context = SamplerContext(states, vocab_size, device, history, extensions or {})
        self._context = context
        num_slots = len(states.num_tokens)
        made = [*(load_processors(()) if processors is None else processors), _Failed]
        self._processings = [_Processing(processor(context), num_slots, device) for processor in made]
        masking = (one.processor for one in self._processings if isinstance(one.processor, MaskingProcessor))
        self._masking: MaskingProcessor | None = next(masking, None)
        self._masked = np.zeros(num_slots, bool)
        """[S] whether a slot takes part in this one and wants nothing else."""
        self._num_asked = np.zeros(num_slots, np.int32)
        """[S] processors that a slot takes part in, and one for log-probabilities."""
        self._watched = np.zeros(num_slots, bool)
        """[S] whether one of them reads the slot's tokens."""
        self._num_processed = 0
        self.draft_draws = draft_draws
        """By what tokens are drawn that have a draft in their place; None: as all others."""
        self._rows = LatestUpload(device)

    def add(self, new: NewRequest) -> None:
        """A request takes a slot."""
        slot = new.slot
        self._drop(slot)
        failed = [processing for processing in self._processings if not self._offer(processing, new)]
        self._processings[-1].slots[slot] = bool(failed)
        asked = [processing.processor for processing in self._processings if processing.slots[slot]]
        self._num_asked[slot] = len(asked) + self.logprobs.add(new)
        if not self._num_asked[slot]:
            return
        self._states.processed[slot] = True
        self._num_processed += 1
        self._masked[slot] = self._num_asked[slot] == 1 and asked[:1] == [self._masking]
        if any(processor.reads_tokens for processor in asked):
            self._watched[slot] = True
            self._history.watch(new)

    def remove(self, slot: int) -> None:
        """A slot is released."""
        self.logprobs.remove(slot)
        if not self._states.processed[slot]:
            return
        for processing in self._processings:
            if processing.slots[slot]:
                processing.remove(slot)
        self._drop(slot)

    def replace(self, known: KnownTokens) -> None:
        """Tokens of a slot are others than those that were sampled."""
        self.logprobs.replace(known)
        if self._watched[known.slot]:
            self._history.replace(known)

    def precompile(self) -> None:
        """Launch the kernels of processors, which steps of no request do not."""
        vocab_size = self._context.vocab_size
        device = self._context.device
        words = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        ops.mask_(torch.zeros(1, vocab_size, device=device), words)

    @property
    def active(self) -> bool:
        """Whether any slot has a processor with something to do, or wants log-probabilities: the slots that are
        `processed`."""
        return self._num_processed > 0

    def masks(self, rows: SampledRows) -> RowMasks | None:
        """What those of [R] rows may sample whose requests ask for nothing else; the other rows are LEFT. None: they
        all are."""
        masked = self._masked[rows.slots]
        if self._masking is None or not masked.any():
            return None
        found = self._masking.masks(rows)
        return found if masked.all() else RowMasks(found.words, np.where(masked, found.rows, np.int32(LEFT)))

    def process(self, logits: Tensor, rows: SampledRows) -> None:
        """Change [L, V] float32 logits in place, as the slots' requests ask for. Rows of other slots stay as they
        are."""
        for processing in self._processings:
            for slot in processing.apply(logits, rows):
                self._num_asked[slot] -= 1

    def expect(self, rows: SampledRows, drafts: Tensor) -> None:
        """Before all rows of a step are sampled where slots verify drafts: [L] those that follow the rows, negative
        where there is none, where the logits are."""
        watched = np.flatnonzero(self._watched[rows.slots])
        if len(watched):
            self._history.expect(rows[watched], drafts.index_select(0, self._rows.of(watched)))

    def processed(self, rows: SampledRows, tokens: Tensor) -> None:
        """[L] the tokens that were sampled after `process`, where the logits are."""
        watched = np.flatnonzero(self._watched[rows.slots])
        if len(watched):
            self._history.append(rows[watched], tokens.index_select(0, self._rows.of(watched)))
        for slot in rows.slots[self._states.processed[rows.slots] & (self._num_asked[rows.slots] == 0)].tolist():
            self._drop(slot)

    def sample(self, logits: Tensor, rows: SampledRows) -> npt.NDArray[np.int32]:
        """[L, V] float32 logits (changed in place) to [L] token ids; NO_TOKEN for rows that are no distribution."""
        return self.sample_scored(logits, rows)[0]

    def sample_scored(self, logits: Tensor, rows: SampledRows) -> tuple[npt.NDArray[np.int32], SampledLogprobs | None]:
        """`sample`, and log-probabilities of the tokens, where slots ask for them."""
        if not self._num_processed:
            return self._choose(logits, rows), None
        masks = None if self._drafts_of(rows) is not None else self._masks_of_all(logits, rows)
        if masks is not None:
            return self._choose_by(masks, logits, rows), None
        tokens = np.empty(len(rows), np.int32)
        found: list[SampledLogprobs] = []
        for part in self.logprobs.parts(rows):
            choose = partial(self._chosen, logits[part], rows[part])
            chosen, values = self.choose(logits[part], rows[part], choose, part.start)
            tokens[part] = chosen.numpy()
            found += [] if values is None else [values.message()]
        return tokens, joined_samples(found)

    def choose(
        self, logits: Tensor, rows: SampledRows, choose: Callable[[], Tensor], first: int
    ) -> tuple[Tensor, SampledValues | None]:
        """[L] the tokens that `choose` takes from [L, V] float32 logits after processors have changed these, where the
        logits are; and their log-probabilities, where slots ask for them. `first`: how many rows were sampled before
        in this step."""
        kept = self.logprobs.keep_raw(logits, rows)
        self.process(logits, rows)
        kept = kept or self.logprobs.keep_processed(logits, rows)
        tokens = choose()
        self.processed(rows, tokens)
        return tokens, None if kept is None else self.logprobs.values(kept, tokens, first)

    def _offer(self, processing: _Processing, new: NewRequest) -> bool:
        """Let a processor say whether a request concerns it. False when it fails."""
        try:
            processing.slots[new.slot] = processing.processor.add(new)
        except Exception:
            processing.slots[new.slot] = False
            logger.exception("logits processor %s failed", type(processing.processor).__name__)
            return False
        return True

    def _drop(self, slot: int) -> None:
        """A slot takes part in nothing any more."""
        if not self._states.processed[slot]:
            return
        self._states.processed[slot] = False
        self._masked[slot] = False
        self._num_processed -= 1
        self._num_asked[slot] = 0
        if self._watched[slot]:
            self._watched[slot] = False
            self._history.forget(slot)

    def _chosen(self, logits: Tensor, rows: SampledRows) -> Tensor:
        return torch.from_numpy(self._choose(logits, rows))

    def _choose(self, logits: Tensor, rows: SampledRows) -> npt.NDArray[np.int32]:
        drafts = self._drafts_of(rows)
        return self._choose_plainly(logits, rows) if drafts is None else self._choose_by_drafts(logits, rows, drafts)

    def _choose_plainly(self, logits: Tensor, rows: SampledRows) -> npt.NDArray[np.int32]:
        greedy = self._states.greedy[rows.slots]
        if greedy.all():
            return ops.argmax(logits).numpy().astype(np.int32)
        tokens = np.empty(len(greedy), np.int32)
        if greedy.any():
            tokens[greedy] = ops.argmax(logits[torch.from_numpy(greedy)]).numpy()
        drawn = ~greedy
        some = logits[torch.from_numpy(drawn)] if greedy.any() else logits
        tokens[drawn] = self._draw(some, rows.slots[drawn], rows.positions[drawn])
        return tokens

    def _drafts_of(self, rows: SampledRows) -> npt.NDArray[np.int64] | None:
        """[L] those that change how tokens are drawn; None where none does."""
        return None if self.draft_draws is None else self.draft_draws.drafts_of(rows)

    def _choose_by_drafts(
        self, logits: Tensor, rows: SampledRows, drafts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        draws, states = self.draft_draws, self._states
        chance = None if draws is None else draws.accepted(rows)
        greedy = states.greedy[rows.slots]
        plain = drafts == NO_DRAFT
        if chance is None:
            plain |= greedy  # of one token that is certain, a draft is accepted if it is that
        tokens = np.empty(len(rows), np.int32)
        if plain.any():
            tokens[plain] = self._choose_plainly(logits[torch.from_numpy(plain)], rows[plain])
        which = np.flatnonzero(~plain)
        if not len(which):
            return tokens
        some, of_some = logits[torch.from_numpy(which)], torch.from_numpy(drafts[which])
        accepted = None
        if chance is not None:
            allowed = some.gather(1, of_some.unsqueeze(1)).squeeze(1) > -torch.inf
            accepted = torch.from_numpy(chance[which]) & allowed
        slots = rows.slots[which]
        uniforms = torch.from_numpy(uniform(states.seed[slots], rows.positions[which]))
        sure = torch.from_numpy(np.flatnonzero(greedy[which]))  # these only come here where chance accepts
        pairs = draft_or_best(some[sure], of_some[sure])
        self._filter(some, slots)
        some[sure] = pairs
        tokens[which] = draw_with_drafts(some, uniforms, of_some, accepted).numpy()
        return tokens

    def _masks_of_all(self, logits: Tensor, rows: SampledRows) -> RowMasks | None:
        """Masks, where nobody wants anything else of these rows, and tokens are chosen by them in one pass."""
        slots = rows.slots
        if (self._states.processed[slots] & ~self._masked[slots]).any() or not ops.samples_natively(logits):
            return None
        return self.masks(rows)

    def _choose_by(self, masks: RowMasks, logits: Tensor, rows: SampledRows) -> npt.NDArray[np.int32]:
        states, slots = self._states, rows.slots
        settings = [
            torch.from_numpy(values[slots]) for values in (states.temperature, states.min_p, states.top_k, states.top_p)
        ]
        uniforms = torch.from_numpy(uniform(states.seed[slots], rows.positions))
        greedy, words, which = (torch.from_numpy(values) for values in (states.greedy[slots], masks.words, masks.rows))
        tokens: npt.NDArray[np.int32] = ops.choose(logits, greedy, settings, uniforms, words, which).numpy()
        return tokens

    def _draw(
        self, logits: Tensor, slots: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        states = self._states
        uniforms = torch.from_numpy(uniform(states.seed[slots], positions))
        if ops.samples_natively(logits):
            return self._draw_natively(logits, slots, uniforms)
        self._filter(logits, slots)
        return _invert(logits, uniforms)

    def _filter(self, logits: Tensor, slots: npt.NDArray[np.int32]) -> None:
        """Temperature, min-p, top-k and top-p, in place."""
        states = self._states
        logits.div_(torch.from_numpy(states.temperature[slots]).unsqueeze(1))
        min_p = states.min_p[slots]
        top_k = states.top_k[slots]
        top_p = states.top_p[slots]
        if min_p.any():
            min_p_(logits, torch.from_numpy(min_p))
        if top_k.any() or (top_p < 1).any():
            top_k_top_p_(logits, torch.from_numpy(top_k.astype(np.int64)), torch.from_numpy(top_p))

    def _draw_natively(self, logits: Tensor, slots: npt.NDArray[np.int32], uniforms: Tensor) -> npt.NDArray[np.int32]:
        states = self._states
        temperature, min_p, top_k, top_p = (
            torch.from_numpy(values[slots]) for values in (states.temperature, states.min_p, states.top_k, states.top_p)
        )
        tokens: npt.NDArray[np.int32] = ops.sample(logits, temperature, min_p, top_k, top_p, uniforms).numpy()
        return tokens


def _invert(logits: Tensor, uniforms: Tensor) -> npt.NDArray[np.int32]:
    """[L, V], [L] float64 -> [L]: the token at which the cumulative probability passes each uniform number; NO_TOKEN
    for rows that are no distribution."""
    cumulative = logits.softmax(-1).to(torch.float64).cumsum(-1)
    targets = (uniforms * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, targets, right=True).squeeze(1)
    tokens = token_or_none(logits, tokens.clamp_(max=logits.shape[1] - 1))
    return tokens.to(torch.int32).numpy()
