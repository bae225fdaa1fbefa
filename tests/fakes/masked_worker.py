"""`MaskedWorker`: a scripted worker that samples what the masks of grammars leave, when it is asked to sample."""

from collections.abc import Mapping, Sequence

import numpy as np

from pagemill.config.engine_config import EngineConfig
from pagemill.engine.scheduler.scheduler import GrammarOf
from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.grammar.backends.guidance import GuidanceBackend
from pagemill.grammar.interface import num_words
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import TokenTable
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.grammar_masks import GrammarMasks
from pagemill.messages.pending import Pending
from pagemill.messages.step import ModelRunnerOutput, SchedulerOutput
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.messages.worker_rank import WorkerRank
from tests.fakes.byte_vocabulary import TABLE
from tests.fakes.scripted_worker import ScriptedWorker, _Slot
from tests.fakes.tiny_checkpoint import VOCAB_SIZE


class MaskedWorker(ScriptedWorker):
    """Its tokens are those of `byte_vocabulary`. `num_masked`: how many were sampled by a mask."""

    def __init__(self) -> None:
        super().__init__(vocab_size=len(TABLE.tokens))
        self.num_masked = 0
        self._step: SchedulerOutput | None = None
        self._allowed: dict[int, Sequence[int]] = {}

    def execute_model(self, step: SchedulerOutput) -> None:
        assert self._step is None, "a step is not sampled yet"
        self._step = step

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        assert self._step is not None
        self._allowed = {}
        masks = None if payloads is None else payloads["grammar_masks"]
        if isinstance(masks, GrammarMasks):
            for slot, mask in zip(masks.slots, masks.masks, strict=True):
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                self._allowed[slot] = np.flatnonzero(bits).tolist()
        step, self._step = self._step, None
        super().execute_model(step)
        return super().sample_tokens()

    def _sample(self, state: _Slot, drafts: list[int]) -> list[int]:
        [token] = super()._sample(state, drafts)
        slot = next(slot for slot, other in self.slots.items() if other is state)
        allowed = self._allowed.get(slot)
        if allowed is not None:
            self.num_masked += 1
            token = allowed[token % len(allowed)]
            state["tokens"][-1] = token
        return [token]


def in_process(config: EngineConfig, rank: WorkerRank) -> MaskedWorker:
    """A worker for a process of its own; every rank computes everything."""
    return MaskedWorker()


def wide_table(vocab_size: int = VOCAB_SIZE) -> TokenTable:
    """The byte vocabulary for logits that are wider."""
    return TokenTable(TABLE.tokens + [b""] * (vocab_size - len(TABLE.tokens)), TABLE.special, TABLE.ends)


def forms(by_request: Mapping[str, StructuredOutputsParams], table: TokenTable = TABLE) -> GrammarOf:
    """What a scheduler is given, so that requests have these forms, by their ids; others have none."""
    vocabulary = GuidanceBackend(table)

    def grammar_of(request: EngineCoreRequest) -> FollowedGrammar | None:
        form = by_request.get(request.request_id)
        if form is None:
            return None
        matcher = vocabulary.matcher(translated(form))
        grammar = FollowedGrammar(matcher, num_words(len(table.tokens)), table.ends)
        grammar.accept(request.emitted_token_ids)
        return grammar

    return grammar_of
