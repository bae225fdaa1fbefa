"""Drives a scheduler and its KV cache through anything, and checks all that must hold after every step.

What must hold is said in terms of messages and of a naive model (prefix_store.py), not of the scheduler's own state.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pagemill.config.choices import HashAlgorithm
from pagemill.engine.kv_cache.events import wire_hash
from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.kv_cache.planning import blocks_for_request
from pagemill.engine.kv_cache.prefix_hash import GROUP_BYTES
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreRequest, Finish
from pagemill.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from pagemill.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from tests.fakes.narrow import max_tokens_of, sampling_of
from tests.fakes.prefix_store import Owner, Prefixes, PrefixStore, first_read
from tests.fakes.scripted_grammar import Rule, grammar_of
from tests.fakes.step_payloads import copies_of

VOCAB_SIZE = 11


@dataclass(frozen=True)
class Setup:
    """A scheduler, a pool, and a pipeline. `spare_blocks`: blocks beyond those that one request may need."""

    specs: tuple[KVCacheSpec, ...]
    limits: SchedulerLimits
    spare_blocks: int = 0
    depth: int = 1
    algorithm: str | None = "sha256"
    partial_reuse: bool = False
    max_drafts: int = 0
    """That a slot proposes for its next step; there is room for them in every step, and none with states."""
    rule: Rule | None = None
    """Of the grammar that every request has; see scripted_grammar.py."""

    @property
    def uncertain(self) -> bool:
        """Whether what a slot runs depends on tokens in flight."""
        return self.depth > 1 and (self.max_drafts > 0 or self.rule is not None)

    def plan(self) -> KVCacheConfig:
        groups = tuple(KVCacheGroup((f"layer{index}",), spec) for index, spec in enumerate(self.specs))
        needed = blocks_for_request(groups, self.limits.max_model_len, self.limits.max_step_tokens)
        return KVCacheConfig(1 + needed + self.spare_blocks, groups)


@dataclass
class Life:
    """What must become of a request, and what has so far."""

    core_request: EngineCoreRequest
    rank: tuple[float, ...]
    """Among those who wait or run, who goes first."""
    length_limit: int
    expected: list[int]
    """The tokens that it gets alone."""
    stops: bool
    """Whether the last of them is a stop id, and not the limit."""
    tokens: list[int]
    forced: list[int]
    """What the grammar forces before anything is sampled."""
    told: bool = False
    """Whether there was an output."""
    cached: int | None = None
    """Prompt tokens found when it first ran."""
    num_admissions: int = 0
    finish: Finish | None = None


class SchedulerDriver:
    """`arrive`, `abort`, `reset`, `schedule` and `deliver` in any order; `step` is what an engine does. All raise
    AssertionError, or the product's own error, when something does not hold. `seen` counts what happened."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.limits = setup, setup.limits
        self._threshold = self.limits.long_prefill_token_threshold if self.limits.enable_chunked_prefill else 0
        config = setup.plan()
        algorithm = None if setup.algorithm is None else HashAlgorithm(setup.algorithm)
        self.kv = KVCacheManager(config, algorithm, partial_reuse=setup.partial_reuse, record_events=True)
        given = {} if setup.rule is None else {"grammar_of": grammar_of(setup.rule)}
        self.scheduler = Scheduler(self.limits, self.kv, depth=setup.depth, **given)
        self.prefixes = Prefixes()
        self.owners: dict[str, Owner] = {}
        self.store = PrefixStore(config, self.limits, self.prefixes, self.owners, VOCAB_SIZE, setup.max_drafts)
        self.lives: dict[str, Life] = {}
        self.waiting: set[str] = set()
        self.running: dict[str, int] = {}
        """Request id -> slot."""
        self.in_flight: deque[ModelRunnerOutput] = deque()
        self.seen: Counter[str] = Counter()
        self.num_steps = 0
        self.num_added = 0
        self.num_queries = self.num_hits = 0
        self.findable: set[tuple[int | None, int]] = set()
        """(group, hash) of the blocks that whoever reads the cache's events takes for cached."""

    # --- what may happen ------------------------------------------------------------------------------------------

    def arrive(self, request: EngineCoreRequest) -> None:
        """Add a request, and foresee its whole output."""
        name = request.request_id
        self.owners[name] = Owner.of(request)
        self.num_added += 1
        if self.limits.policy == "priority":
            rank: tuple[float, ...] = (request.priority, request.rank, request.arrival_time, self.num_added)
        else:
            rank = (request.rank, self.num_added)
        life = self._alone(request, rank)
        self.lives[name] = life
        self.scheduler.add(request)
        if len(request.prompt_token_ids) + len(request.emitted_token_ids) < life.length_limit:
            self.waiting.add(name)
        for output in self.scheduler.take_unreported():
            self._receive_output(output)

    def abort(self, name: str) -> None:
        """Abort a request in whatever state it is; its blocks are free at once."""
        self.seen["abort of a request that is " + self.state(name)] += 1
        before = self.kv.pool.num_free
        held = [self.kv.managers[group].table(name).block_ids for group in range(len(self.setup.specs))]
        alone = {block for ids in held for block in ids if block and self.kv.pool.ref_count(block) == 1}
        self.scheduler.abort([name, "unknown"])
        assert self.kv.pool.num_free == before + len(alone), "an abort frees all that nobody else holds, at once"
        self.waiting.discard(name)
        self.running.pop(name, None)
        del self.lives[name]
        self.check()

    def state(self, name: str) -> str:
        """Where a request is, in words."""
        life = self.lives[name]
        if life.finish is not None:
            return "finished"
        if name in self.waiting:
            return "preempted" if life.num_admissions else "waiting"
        slot = self.running[name]
        if any(slot in output.slots for output in self.in_flight):
            return "sampled in flight"
        known, computed = self.store.states.num_tokens[slot], self.store.num_computed[slot]
        return "running" if known - computed == 1 else "half prefilled"

    def reset(self) -> None:
        """Empty the prefix cache, which works when nobody holds blocks."""
        done = self.kv.reset()
        assert done == (not self.running)
        self.seen["reset" if done else "reset refused"] += 1
        self.check()

    def step(self) -> None:
        """Keep `depth` steps in flight, as the engine does."""
        scheduled = len(self.in_flight) < self.setup.depth and self.schedule()
        assert scheduled or self.in_flight or not self.scheduler.has_work(), "there is work, and nothing runs"
        if self.in_flight and (not scheduled or len(self.in_flight) == self.setup.depth):
            self.deliver()

    def schedule(self) -> bool:
        """Schedule a step and execute it; its tokens stay in flight. Returns whether there was one."""
        before = dict(self.running)
        wanted = {name: self._wanted(name) for name in before if not self._is_uncertain(name)}
        reusable = self._reusable() if self.setup.depth == 1 and self.setup.algorithm else None
        num_preemptions = self.scheduler.stats().num_preemptions
        cached = self.kv.pool.cached_blocks()
        step = self.scheduler.schedule()
        cached_after = self.kv.pool.cached_blocks()
        self.seen["evicted"] += sum(cached_after.get(block) != key for block, key in cached.items())
        self._follow_preemptions(self.scheduler.stats().num_preemptions - num_preemptions, step)
        if step is not None:
            self.num_steps += 1
            self.seen["copied"] += len(copies_of(step))
            self._follow_admissions(step, reusable)
            self.seen["forced"] += sum(len(known.token_ids) for known in step.known)
            self.seen["forced with a token in flight"] += sum(
                known.slot in output.slots for known in step.known for output in self.in_flight
            )
            self.store.begin(step)
            self._check_blocks()
            self.in_flight.append(self.store.finish(step))
        self._check_limits(step)
        if before.keys() <= self.running.keys():  # what a preempted one was to run is lost to the step
            self._check_shares(step, wanted)
        self.check()
        return step is not None

    def deliver(self) -> None:
        """Hand the oldest step's tokens to the scheduler, and look at what it reports."""
        outputs = self.scheduler.update(self.in_flight.popleft())
        named = [*outputs.request_ids, *(output.request_id for output in outputs.outputs)]
        assert len(set(named)) == len(named), "a request appears twice in one step"
        for name, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
            self._receive(name, [token])
        for output in outputs.outputs:
            self._receive_output(output)
        self.check()

    def drain(self) -> None:
        """Step until nothing is left, within a bound that follows from the work; then check the books."""
        work = self.work_left()
        deadline = self.num_steps + work
        while self.scheduler.has_work():
            self.step()
            assert self.num_steps <= deadline, f"still busy after {work} steps: {self.scheduler.stats()}"
        for name, life in self.lives.items():
            assert life.finish is not None, f"{name} never ended"
            assert life.tokens == life.expected
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
        assert self.kv.pool.num_free == self.kv.pool.num_blocks - 1
        assert self.kv.reset()
        self.check()

    def work_left(self, names: Iterable[str] | None = None) -> int:
        """Steps in which these requests end even if each step does no more than one token of the first of them that
        is unfinished: their tokens, and once per request the way through the pipeline."""
        lives = [self.lives[name] for name in names or self.lives]
        return sum(
            len(life.core_request.prompt_token_ids)
            + len(life.core_request.emitted_token_ids)
            + len(life.expected)
            + self.setup.depth
            for life in lives
            if life.finish is None
        )

    # --- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After whatever happened: the product's own check, and its blocks, queues and counters against the model."""
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (len(self.running), len(self.waiting))
        assert len(self.running) <= self.limits.max_num_seqs
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (self.num_queries, self.num_hits)
        self._check_blocks()
        self._follow_events()
        if self.kv.pool.num_free == 0:
            self.seen["pool full"] += 1

    def _check_blocks(self) -> None:
        """Who reads which blocks, according to the workers' tables and to the pool. Holds while a step runs too."""
        pool, step_tokens = self.kv.pool, self.limits.max_step_tokens
        counts: Counter[int] = Counter()
        for group, manager in enumerate(self.kv.managers):
            tables = manager.tables()
            assert tables.keys() == self.running.keys()
            for name, slot in self.running.items():
                held, table = self.store.held(group, slot), tables[name].block_ids
                assert len(table) == self.store.tables.groups[group].num_blocks[slot], "the workers' table is another"
                assert all(table[index] == block != 0 for index, block in held.items()), "a block that is read is gone"
                counts.update(held.values())
                length = int(self.store.states.num_tokens[slot])
                most = length + self.setup.max_drafts * self.setup.depth
                assert tables[name].num_held <= manager.peak_blocks(most, step_tokens), "more than planned for"
        assert all(pool.ref_count(block) >= count for block, count in counts.items()), "a free block is read"

    def _follow_events(self) -> None:
        """Whoever applies the events in order knows exactly what can be found."""
        for event in self.kv.take_events():
            match event:
                case BlockStored():
                    blocks = {(event.group_idx, number) for number in event.block_hashes}
                    assert len(blocks) == len(event.block_hashes) and not blocks & self.findable, "stored twice"
                    assert len(event.token_ids) == len(blocks) * event.block_size
                    self.findable |= blocks
                case BlockRemoved():
                    blocks = {(event.group_idx, number) for number in event.block_hashes}
                    assert len(blocks) == len(event.block_hashes) and blocks <= self.findable, "removed twice"
                    self.findable -= blocks
                case AllBlocksCleared():
                    self.findable.clear()
        keys = {
            (int.from_bytes(key[-GROUP_BYTES:], "big"), wire_hash(key[:-GROUP_BYTES]))
            for key in self.kv.pool.cached_blocks().values()
        }
        assert self.findable == keys, "events and cache differ"

    def _check_limits(self, step: SchedulerOutput | None) -> None:
        """The limits of a step."""
        given = step.num_tokens if step else np.zeros(1, np.int64)
        assert given.sum() <= self.limits.max_num_batched_tokens
        assert not self._threshold or given.max() <= max(self._threshold, 1 + self.setup.max_drafts)
        started = [int(step.num_tokens[step.slots == new.slot][0]) for new in step.new] if step else []
        assert len(started) <= 1 or sum(started) <= (self.limits.max_prefill_tokens or math.inf)

    def _check_shares(self, step: SchedulerOutput | None, wanted: dict[str, int]) -> None:
        """Nobody idles who could run, and one token comes before many."""
        given = dict(zip(step.slots.tolist(), step.num_tokens.tolist(), strict=True)) if step else {}
        total, budget = sum(given.values()), self.limits.max_num_batched_tokens
        singles = sum(1 for slot in self.running.values() if given.get(slot) == 1)
        for name, tokens in wanted.items():
            got = given.get(self.running[name], 0)
            assert got <= tokens + self.setup.max_drafts
            assert got >= tokens or total == budget, f"{name} got {got} of {tokens} tokens, of {budget} {total} ran"
            assert got or tokens != 1 or singles == budget, f"{name} waits for one token while chunks run"

    def _is_uncertain(self, name: str) -> bool:
        """Whether a step in flight may yield fewer tokens for a running request than the scheduler must think."""
        slot = self.running[name]
        return self.setup.uncertain and any(slot in output.slots for output in self.in_flight)

    def _wanted(self, name: str) -> int:
        """Tokens that a running request would run if it ran alone."""
        slot = self.running[name]
        request, life = self.lives[name].core_request, self.lives[name]
        told = len(request.prompt_token_ids) + len(request.emitted_token_ids) + len(life.tokens)
        # The workers have yet to hear of tokens that were forced.
        known, computed = max(told, int(self.store.states.num_tokens[slot])), int(self.store.num_computed[slot])
        wanted = min(known, self.lives[name].length_limit - 1) - computed
        return min(wanted, self._threshold) if self._threshold else wanted

    def _follow_preemptions(self, count: int, step: SchedulerOutput | None) -> None:
        holders = self.kv.managers[0].tables().keys()
        gone = [name for name in self.running if name not in holders]
        assert len(gone) == count
        sampling = {slot for output in self.in_flight for slot in output.slots.tolist()}
        for name in gone:
            slot = self.running.pop(name)
            self.waiting.add(name)
            self.seen["preempted with a token in flight" if slot in sampling else "preempted"] += 1
        if gone:
            firsts = step is None or all(not self._core_rank(new.request_id) for new in step.new)
            yielded = firsts and count == 1 and self._core_rank(gone[0])
            assert step is None or not step.new or yielded, "a step that preempts admits nobody but a first one"
            self.seen["yielded"] += bool(yielded and step is not None and step.new)
            ranks = [self.lives[name].rank for name in self.running]
            assert max(ranks, default=()) < min(self.lives[name].rank for name in gone), "the wrong one gave way"

    def _core_rank(self, name: str) -> int:
        return self.lives[name].core_request.rank

    def _follow_admissions(self, step: SchedulerOutput, reusable: set[tuple[int, int]] | None) -> None:
        for new in step.new:
            name = new.request_id
            life = self.lives[name]
            assert life.rank == min(self.lives[other].rank for other in self.waiting), "somebody was passed over"
            self.waiting.remove(name)
            self.running[name] = new.slot
            life.num_admissions += 1
            prompt = life.core_request.prompt_token_ids
            known = life.tokens if life.told else life.forced
            assert new.token_ids.tolist() == [*prompt, *life.core_request.emitted_token_ids, *known]
            assert new.num_prompt_tokens == len(prompt)
            assert new.num_computed_tokens < len(new.token_ids), "the last token is always computed"
            self.seen["cached" if new.num_computed_tokens else "not cached"] += 1
            if life.num_admissions == 1:
                life.cached = min(new.num_computed_tokens, len(prompt))
                self.num_queries += len(prompt)
                self.num_hits += life.cached
            elif new.num_computed_tokens:
                self.seen["cached after preemption"] += 1
            if reusable is not None:
                assert new.num_computed_tokens >= self._longest(new, reusable), "a prefix in use was not found"
            if not self.limits.enable_chunked_prefill:
                count = step.num_tokens[step.slots.tolist().index(new.slot)]
                assert new.num_computed_tokens + count == len(new.token_ids), "a prompt was cut"

    # --- the naive model ------------------------------------------------------------------------------------------

    def _alone(self, request: EngineCoreRequest, rank: tuple[float, ...]) -> Life:
        """The output of a request, computed without an engine."""
        params, vocab = sampling_of(request), VOCAB_SIZE
        tokens = [*request.prompt_token_ids, *request.emitted_token_ids]
        limit = min(len(request.prompt_token_ids) + max_tokens_of(request), self.limits.max_model_len)
        number = self.prefixes.numbers(self.owners[request.request_id], tokens)[-1]
        expected: list[int] = []
        stops, at_start, leading = False, True, 0
        while len(tokens) + len(expected) < limit and not stops:
            forced = self.setup.rule([*request.emitted_token_ids, *expected]) if self.setup.rule else ()
            at_start = at_start and bool(forced)
            leading += at_start
            token = forced[0] if forced else self.prefixes.next_token(number, params.seed or 0, vocab)
            num_generated = len(request.emitted_token_ids) + len(expected)
            stops = token in (params.stop_token_ids or ()) and num_generated >= params.min_tokens
            expected.append(token)
            number = self.prefixes.after(number, token)
        return Life(request, rank, limit, expected, stops, [], expected[:leading])

    def _receive_output(self, output: EngineCoreOutput) -> None:
        self._receive(output.request_id, output.new_token_ids)
        life = self.lives[output.request_id]
        if output.num_cached_tokens is not None:
            assert not life.told, "cached tokens are told once, with the first output"
            assert output.num_cached_tokens == life.cached
        life.told = True
        if output.finish is None:
            return
        life.finish = output.finish
        assert life.tokens == life.expected
        stop = life.tokens[-1] if life.stops else None
        assert (output.finish.reason.value, output.finish.stop_token_id) == ("stop" if life.stops else "length", stop)
        self.running.pop(output.request_id, None)
        self.waiting.discard(output.request_id)
        self.seen["finished by " + output.finish.reason.value] += 1

    def _receive(self, name: str, token_ids: Sequence[int]) -> None:
        life = self.lives[name]
        assert life.finish is None, f"{name} goes on after its end"
        life.tokens.extend(token_ids)
        assert life.tokens == life.expected[: len(life.tokens)], f"{name} got other tokens than alone"

    def _reusable(self) -> set[tuple[int, int]]:
        """{(group, number of the tokens up to a block's end)} of full blocks that running requests hold and need."""
        found: set[tuple[int, int]] = set()
        for group, spec in enumerate(self.setup.specs):
            for slot in self.running.values():
                num_full = int(self.store.num_computed[slot]) // spec.block_size
                found.update(
                    (group, int(self.store.numbers[slot, (index + 1) * spec.block_size - 1]))
                    for index in self.store.held(group, slot)
                    if index < num_full
                )
        return found

    def _longest(self, new: NewRequest, reusable: set[tuple[int, int]]) -> int:
        """The longest prefix that a new request can take from them, by trying all."""
        numbers = self.prefixes.numbers(self.owners[new.request_id], new.token_ids.tolist())
        step = math.lcm(*(spec.block_size for spec in self.setup.specs))
        for length in range((len(numbers) - 1) // step * step, 0, -step):
            if all(
                (group, numbers[end - 1]) in reusable
                for group, spec in enumerate(self.setup.specs)
                for end in range(
                    length, first_read(spec, length) // spec.block_size * spec.block_size, -spec.block_size
                )
            ):
                return length
        return 0
