"""`ScriptedWorker`: a worker without a network, whose every sampled token depends on all that was cached.

A block holds, per token, a number that depends on that token and all before it, as keys and values do. A sampled
token is a function of the numbers read through the block tables. A wrong or stale block, a token that was never
computed, or a count that is off therefore changes the tokens; `alone` says what they must be.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict

import numpy as np

from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.kv_spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from pagemill.messages.pending import Pending, Ready
from pagemill.messages.step import Drafts, KnownTokens, ModelRunnerOutput, SchedulerOutput
from pagemill.utils.math import ceil_div
from tests.fakes.narrow import max_tokens_of, sampling_of
from tests.fakes.scripted_grammar import Rule
from tests.fakes.step_payloads import copies_of

MASK = (1 << 64) - 1
Cell = int | None
"""What a block holds for a token; None: nothing was written yet."""


class _Slot(TypedDict):
    """What the worker knows of a slot."""

    tokens: list[int]
    computed: int
    tables: list[list[int]]
    seed: int
    drafts: list[int]


def mixed(state: int, token: int) -> int:
    """The number cached for `token` after a prefix with number `state`."""
    state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ (state >> 29)


def history(token_ids: Sequence[int]) -> list[int]:
    """The numbers cached for a sequence of tokens."""
    numbers, state = [], 1
    for token in token_ids:
        state = mixed(state, token)
        numbers.append(state)
    return numbers


def first_read(spec: KVCacheSpec, position: int) -> int:
    """The first position that the token at `position` reads. What a state holds of a sequence is its last number."""
    match spec:
        case SlidingWindowSpec(window=window):
            return max(0, position - window + 1)
        case ChunkedLocalSpec(chunk_size=size):
            return position // size * size
        case MambaSpec():
            return position
    return 0


def sampled(reads: Iterable[Iterable[Cell]], seed: int, vocab_size: int) -> int:
    """The token sampled from the numbers that each group read."""
    state = seed & MASK
    for numbers in reads:
        for number in numbers:
            assert number is not None, "what is read was never written"
            state = mixed(state, number)
    return state % vocab_size


def following(tokens: Sequence[int], specs: Sequence[KVCacheSpec], seed: int, vocab_size: int) -> int:
    """The token that is sampled after a sequence."""
    numbers, last = history(tokens), len(tokens) - 1
    return sampled([numbers[first_read(spec, last) :] for spec in specs], seed, vocab_size)


def alone(
    request: EngineCoreRequest,
    specs: Sequence[KVCacheSpec],
    vocab_size: int,
    max_model_len: int,
    rule: Rule | None = None,
) -> list[int]:
    """The tokens that a request must get, computed without batches, blocks or steps. `rule`: of a scripted grammar."""
    params, tokens = sampling_of(request), [*request.prompt_token_ids, *request.emitted_token_ids]
    limit = min(len(request.prompt_token_ids) + max_tokens_of(request), max_model_len)
    generated: list[int] = []
    while len(tokens) < limit:
        forced = rule([*request.emitted_token_ids, *generated]) if rule else ()
        token = forced[0] if forced else following(tokens, specs, params.seed or 0, vocab_size)
        may_stop = len(tokens) >= len(request.prompt_token_ids) + params.min_tokens
        tokens.append(token)
        generated.append(token)
        if may_stop and token in (params.stop_token_ids or ()):
            break
    return generated


class ScriptedWorker:
    """A WorkerApi. Blocks keep what former requests left in them, so that reading it by mistake shows.

    With `max_drafts`, slots propose up to so many tokens for their next step, most of them right, and verify them.
    Their number is drawn for each slot and step; what is computed for wrong ones stays in the blocks.
    """

    runs_ahead = False

    def __init__(
        self,
        specs: dict[str, KVCacheSpec] | None = None,
        *,
        kv_bytes: int = 1 << 30,
        vocab_size: int = 13,
        max_drafts: int = 0,
    ) -> None:
        self.max_drafts = max_drafts
        self.rng = random.Random(0)
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_forced = 0
        self.specs = specs or {"layer": FullAttentionSpec(4, 1, 1, "float32")}
        self.kv_bytes = kv_bytes
        self.vocab_size = vocab_size
        self.calls: list[str] = []
        self.slots: dict[int, _Slot] = {}
        self.steps: list[SchedulerOutput] = []
        self.results: list[ModelRunnerOutput] = []
        self.num_dummy_steps = 0

    def load_model(self) -> None:
        self.calls.append("load_model")

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        self.calls.append("kv_cache_specs")
        return self.specs

    def available_kv_bytes(self) -> int:
        self.calls.append("available_kv_bytes")
        return self.kv_bytes

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.calls.append("initialize_kv_cache")
        self.config = config
        self.group_specs = [group.spec for group in config.groups]
        # One cell per token; groups share the blocks, as they share the memory.
        size = max(spec.block_size for spec in self.group_specs)
        self.cells: list[list[Cell]] = [[None] * size for _ in range(config.num_blocks)]
        # The group whose tokens a block holds: groups cache equal numbers for equal tokens, and are different layers.
        self.writers: list[int | None] = [None] * config.num_blocks

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def prepare_more(self) -> bool:
        return False

    def execute_dummy_step(self) -> None:
        self.num_dummy_steps += 1

    def describe(self) -> dict[str, str | int]:
        return {"rank": 0, "device": "scripted", "free_bytes": 0}

    def save_sharded_state(self, path: str = "", pattern: str | None = None, max_size: int | None = None) -> list[str]:
        self.calls.append(f"save_sharded_state {path}")
        return ["model-rank-0-part-0.safetensors"]

    def start_profile(self, prefix: str) -> None:
        self.calls.append(f"start_profile {prefix}")

    def stop_profile(self) -> str:
        self.calls.append("stop_profile")
        return "trace"

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def execute_model(self, step: SchedulerOutput) -> None:
        self.steps.append(step)
        found = [(list(self.cells[copy.source]), self.writers[copy.source]) for copy in copies_of(step)]
        for copy, (cells, writer) in zip(copies_of(step), found, strict=True):
            assert copy.source and copy.destination, "the null block is copied"
            self.cells[copy.destination], self.writers[copy.destination] = cells, writer
        for slot in step.released:
            del self.slots[slot]
        for new in step.new:
            assert new.slot not in self.slots, f"slot {new.slot} is given twice"
            self.slots[new.slot] = _Slot(
                tokens=new.token_ids.tolist(),
                computed=new.num_computed_tokens,
                tables=[list(ids) for ids in new.block_ids],
                seed=getattr(new.params, "seed", None) or 0,
                drafts=[],
            )
        for grown in step.grown:
            for table, ids in zip(self.slots[grown.slot]["tables"], grown.block_ids, strict=True):
                table.extend(ids)
        for known in step.known:
            self._replace(self.slots[known.slot], known)
        counts = dict(zip(step.slots.tolist(), step.num_tokens.tolist(), strict=True))
        assert len(counts) == len(step.slots), "a slot is in the batch twice"
        assert min(counts.values()) > 0
        states = {slot: self._read_states(self.slots[slot]) for slot in counts}
        verified = {slot: self._drafts_for(self.slots[slot], count) for slot, count in counts.items()}
        for slot, count in counts.items():
            state, drafts = self.slots[slot], verified[slot]
            run = min(count, len(state["tokens"]) - state["computed"] + len(drafts))
            assert run == count or self.max_drafts, "a token is computed before it is known"
            self._write_states(state, run, states[slot])
            self._write(state, run, drafts)
            state["computed"] += run - len(drafts)
        samples = [slot for slot in counts if self.slots[slot]["computed"] == len(self.slots[slot]["tokens"])]
        tokens = [self._sample(self.slots[slot], verified[slot]) for slot in samples]
        proposed = [self._propose(self.slots[slot]) for slot in samples]
        flat = np.array([token for sampled in tokens for token in sampled], np.int32)
        sizes = np.array([len(sampled) for sampled in tokens], np.int32)
        tried = np.array([len(verified[slot]) for slot in samples], np.int32)
        offered = Drafts(
            np.array([len(ids) for ids in proposed], np.int32), np.array([d for ids in proposed for d in ids], np.int32)
        )
        self.results.append(
            ModelRunnerOutput(
                step.step_id,
                np.array(samples, np.int32),
                flat,
                counts=None if len(flat) == len(samples) else sizes,
                verified=tried if tried.any() else None,
                drafts=offered if len(offered.token_ids) else None,
            )
        )

    def sample_tokens(self, payloads: SamplingPayloads | None = None) -> Pending[ModelRunnerOutput]:
        return Ready(self.results.pop(0))

    def _replace(self, state: _Slot, known: KnownTokens) -> None:
        """Tokens that were not sampled, in place of those that were from there on."""
        assert known.position <= len(state["tokens"]), "tokens are missing before those that are known"
        state["tokens"][known.position :] = known.token_ids.tolist()
        state["computed"] = min(state["computed"], known.num_computed)
        state["drafts"] = []
        self.num_forced += len(known.token_ids)

    def _drafts_for(self, state: _Slot, count: int) -> list[int]:
        """The drafts that a step of so many tokens has room for."""
        return state["drafts"][: max(0, count - (len(state["tokens"]) - state["computed"]))]

    def _propose(self, state: _Slot) -> list[int]:
        """What may follow; every fourth is another token."""
        state["drafts"] = []
        for _ in range(self.rng.randint(0, self.max_drafts)):
            tokens = state["tokens"] + state["drafts"]
            token = following(tokens, self.group_specs, state["seed"], self.vocab_size)
            state["drafts"].append(token if self.rng.random() < 0.75 else (token + 1) % self.vocab_size)
        return state["drafts"]

    def _write(self, state: _Slot, count: int, drafts: list[int]) -> None:
        """Cache the step's tokens; each of them finds those it reads where the tables say, or the step fails."""
        start = state["computed"]
        tokens = state["tokens"] + drafts
        assert start + count <= len(tokens), "a token is computed before it is known"
        numbers = history(tokens[: start + count])
        for position in range(start, start + count):
            for group, (spec, table) in enumerate(zip(self.group_specs, state["tables"], strict=True)):
                if isinstance(spec, MambaSpec):
                    continue
                first = first_read(spec, position)
                found = [self._cell(spec, table, earlier) for earlier in range(first, position)]
                assert found == numbers[first:position], f"token {position} reads what is not its history"
                read = table[first // spec.block_size : ceil_div(position, spec.block_size)]
                assert {self.writers[block] for block in read} <= {group}, "a group reads what another one cached"
                block = table[position // spec.block_size]
                assert block != 0, "a token is written to the null block"
                self.cells[block][position % spec.block_size] = numbers[position]
                self.writers[block] = group

    def _read_states(self, state: _Slot) -> list[Cell]:
        """The states with which the step begins, of each group that keeps states: read before any is written."""
        start = state["computed"]
        return [
            self._cell(spec, table, start - 1) if start else 1
            for spec, table in zip(self.group_specs, state["tables"], strict=True)
            if isinstance(spec, MambaSpec)
        ]

    def _write_states(self, state: _Slot, count: int, begins: list[Cell]) -> None:
        """Leave in each block that the step touches the state after its last token there."""
        start, end = state["computed"], state["computed"] + count
        numbers = history(state["tokens"][:end])
        groups = [
            pair for pair in zip(self.group_specs, state["tables"], strict=True) if isinstance(pair[0], MambaSpec)
        ]
        for (spec, table), begin in zip(groups, begins, strict=True):
            assert begin == (numbers[start - 1] if start else 1), f"token {start} continues what is not its history"
            for index in range(start // spec.block_size, (end - 1) // spec.block_size + 1):
                assert table[index] != 0, "a state is written to the null block"
                self.cells[table[index]][0] = numbers[min(end, (index + 1) * spec.block_size) - 1]

    def _cell(self, spec: KVCacheSpec, table: list[int], position: int) -> Cell:
        if isinstance(spec, MambaSpec):
            return self.cells[table[position // spec.block_size]][0]
        return self.cells[table[position // spec.block_size]][position % spec.block_size]

    def _sample(self, state: _Slot, drafts: list[int]) -> list[int]:
        """A token after the last one, and after each draft up to the first that is another token."""
        found = []
        for draft in [*drafts, None]:
            token = sampled(self._reads(state), state["seed"], self.vocab_size)
            state["tokens"].append(token)
            found.append(token)
            if token != draft:
                break
            state["computed"] += 1
        self.num_accepted += len(found) - 1
        self.num_rejected += len(drafts) - (len(found) - 1)
        return found

    def _reads(self, state: _Slot) -> Iterator[list[Cell]]:
        """What each group's attention reads for the last computed token, through the block table."""
        last = state["computed"] - 1
        for spec, table in zip(self.group_specs, state["tables"], strict=True):
            yield [self._cell(spec, table, position) for position in range(first_read(spec, last), last + 1)]
