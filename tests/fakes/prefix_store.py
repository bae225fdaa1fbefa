"""What a paged cache holds, and what is sampled from it: a worker without a network, for proofs about the engine.

Every sequence of tokens has a number, found in a tree and not by hashing: equal numbers mean equal sequences. A token
that is computed writes the number of the sequence that ends in it where the block tables say; before anything is
sampled, everything that attention reads is compared with the numbers that must be there. A block that is lost, shared
wrongly, evicted too early or filled too late is a number that differs.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.kv_spec import ChunkedLocalSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from pagemill.messages.step import Drafts, ModelRunnerOutput, SchedulerOutput
from pagemill.worker.batch.block_tables import BlockTable, BlockTables
from pagemill.worker.batch.input_batch import InputBatch, build_batch
from pagemill.worker.batch.request_states import RequestStates
from tests.fakes.step_payloads import copies_of

MASK = (1 << 64) - 1


def pairs(step: SchedulerOutput) -> list[tuple[int, int]]:
    """(slot, number of tokens) of a step."""
    return list(zip(step.slots.tolist(), step.num_tokens.tolist(), strict=True))


def flat(lists: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All elements one list after the other, and the lengths of the lists."""
    return (
        np.array([element for elements in lists for element in elements], np.int32),
        np.array([len(elements) for elements in lists], np.int32),
    )


def first_read(spec: KVCacheSpec, position: int) -> int:
    """The first position that the token at `position` reads. A new kind of group is a case here."""
    match spec:
        case SlidingWindowSpec(window=window):
            return max(0, position - window + 1)
        case ChunkedLocalSpec(chunk_size=size):
            return position // size * size
        case MambaSpec():  # the state after the token before
            return max(0, position - 1)
    return 0


@dataclass(frozen=True)
class Owner:
    """What makes contents unique besides their tokens: who asks (salt, adapter), and what placeholders stand for."""

    root: tuple[object, ...] = ()
    items: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Position -> the item there, and which of its placeholders."""

    @classmethod
    def of(cls, request: EngineCoreRequest) -> "Owner":
        items = {
            item.offset + index: (item.content_hash, index)
            for item in request.mm_items
            for index in range(item.num_tokens)
        }
        return cls((request.cache_salt, request.lora and request.lora.lora_id), items)


class Prefixes:
    """A tree of token sequences. Those that differ in more than their tokens have different numbers, but go on with
    the same tokens."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int | None, object], int] = {}
        self._digests = [0]

    def after(self, number: int, token: int | None, more: object = None) -> int:
        """The number of a sequence and one token more; number 0 is no sequence."""
        child = self._children.get((number, token, more))
        if child is None:
            child = self._children[number, token, more] = len(self._digests)
            digest = 0
            if number and token is not None:
                digest = (self._digests[number] ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9
            self._digests.append((digest ^ digest >> 29) & MASK)
        return child

    def numbers(self, owner: Owner, token_ids: Sequence[int]) -> list[int]:
        """[len(token_ids)] the number of each leading part."""
        number = self.after(0, None, owner.root)
        found: list[int] = []
        for position, token in enumerate(token_ids):
            number = self.after(number, token, owner.items.get(position))
            found.append(number)
        return found

    def next_token(self, number: int, seed: int, vocab_size: int) -> int:
        """The token that follows a sequence: depends on its tokens and the seed alone."""
        digest = (self._digests[number] + seed * 0x94D049BB133111EB) * 0xD6E8FEB86659FD93 & MASK
        return (digest >> 32) % vocab_size


class PrefixStore:
    """Executes steps on slots, block tables and batches as the workers have them, with numbers for keys and values.

    `owners`: request id -> `Owner`. With `max_drafts`, slots propose up to so many tokens, most of them right, for
    their next step to verify; what a step writes for wrong ones stays where it is.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        limits: SchedulerLimits,
        prefixes: Prefixes,
        owners: Mapping[str, Owner],
        vocab_size: int,
        max_drafts: int = 0,
    ) -> None:
        self.specs = [group.spec for group in config.groups]
        self.live: dict[int, str] = {}
        """Slot -> request id."""
        self._prefixes, self._owners, self._vocab_size = prefixes, owners, vocab_size
        slots, length = limits.max_num_seqs, limits.max_model_len
        self.states = RequestStates(slots, length)
        self._max_drafts = max_drafts
        self._rng = random.Random(0)
        self._drafts: dict[int, list[int]] = {}
        """Slot -> what its next step may verify."""
        self.num_accepted = self.num_rejected = 0
        self.num_computed = self.states.num_computed
        self.tables = BlockTables(tuple(BlockTable(slots, length, spec.block_size) for spec in self.specs))
        self.numbers = np.zeros((slots, length + 1), np.int64)
        """[slots, length + 1] the number of each leading part of a slot's tokens."""
        # Groups share the memory, and equal tokens in different groups are different contents.
        self._cells = np.zeros((config.num_blocks, max(spec.block_size for spec in self.specs)), np.int64)

    def begin(self, step: SchedulerOutput) -> None:
        """Take a step's slots and blocks: the first half of executing it."""
        for slot in step.released:
            del self.live[slot]
        for new in step.new:
            assert new.slot not in self.live, f"slot {new.slot} is given twice"
            self.live[new.slot] = new.request_id
            self.states.add(new)
            self.tables.reset(new.slot, new.block_ids)
            numbers = self._prefixes.numbers(self._owners[new.request_id], new.token_ids.tolist())
            self.numbers[new.slot, : len(numbers)] = numbers
            self._drafts[new.slot] = []
        for grown in step.grown:
            self.tables.append(grown.slot, grown.block_ids)
        for known in step.known:
            slot, position = known.slot, known.position
            assert slot in self.live and position <= self.states.num_tokens[slot]
            self.states.replace(known)
            self._drafts[slot] = []
            for place, token in enumerate(known.token_ids.tolist(), position):
                self.numbers[slot, place] = self._prefixes.after(int(self.numbers[slot, place - 1]), token)
        assert set(step.slots.tolist()) <= self.live.keys(), "a slot runs that has no request"

    def finish(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step; what it samples. Raises AssertionError when it would read or write what it must not."""
        verified = {slot: self._drafts_for(slot, count) for slot, count in pairs(step)}
        step = self._as_run(step, verified)
        known = self.states.num_tokens.copy()
        for slot, drafts in verified.items():
            self._extend(slot, drafts)
        batch = build_batch(step, self.states)
        assert len(set(batch.slots.tolist())) == len(batch.slots), "a slot is in the batch twice"
        assert (step.num_tokens > 0).all()
        assert (batch.seq_lens <= self.states.num_tokens[batch.slots]).all(), "a token is computed before it is known"
        groups = range(len(self.specs))
        # Copies and states are read as the steps before left them; keys and values are written before they are read.
        sources = [copy.source for copy in copies_of(step)]
        destinations = [copy.destination for copy in copies_of(step)]
        assert all(sources) and all(destinations), "the null block is copied"
        assert len(set(destinations)) == len(destinations), "two blocks are copied to one place"
        self._cells[destinations] = self._cells[sources]
        for group in groups:
            if isinstance(self.specs[group], MambaSpec):
                for slot in batch.slots.tolist():
                    self._check_reads(group, slot, int(self.num_computed[slot]))
                self._write_states(group, batch)
            else:
                self._write(group, batch)
        ends = self.num_computed.copy()
        ends[batch.slots] = batch.seq_lens
        for slot in self.live:
            for group in groups:
                self._check_reads(group, slot, int(ends[slot]))
        self.states.advance(step.slots, step.num_tokens)
        self.states.num_tokens[batch.slots] = known[batch.slots]
        sampled = [self._verify(slot, verified[slot]) for slot in batch.sampled_slots.tolist()]
        proposed = [self._propose(slot) for slot in batch.sampled_slots.tolist()]
        token_ids, counts = flat(sampled)
        return ModelRunnerOutput(
            step.step_id,
            batch.sampled_slots,
            token_ids,
            counts=counts if (counts != 1).any() else None,
            drafts=Drafts(*reversed(flat(proposed))) if any(proposed) else None,
        )

    def _drafts_for(self, slot: int, count: int) -> list[int]:
        """The drafts that a step of so many tokens has room for."""
        return self._drafts[slot][: max(0, count - int(self.states.num_tokens[slot] - self.num_computed[slot]))]

    def _as_run(self, step: SchedulerOutput, verified: dict[int, list[int]]) -> SchedulerOutput:
        """The step, without room for drafts that do not exist."""
        counts = [
            min(count, int(self.states.num_tokens[slot] - self.num_computed[slot]) + len(verified[slot]))
            for slot, count in pairs(step)
        ]
        assert counts == step.num_tokens.tolist() or self._max_drafts, "a token is computed before it is known"
        return dataclasses.replace(step, num_tokens=np.array(counts, np.int32))

    def _extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens at the end of a slot's."""
        states = self.states
        for token in token_ids:
            place = int(states.num_tokens[slot])
            self.numbers[slot, place] = self._prefixes.after(int(self.numbers[slot, place - 1]), token)
            states.token_ids[slot, place] = token
            states.num_tokens[slot] += 1

    def _next(self, slot: int) -> int:
        """The token that follows a slot's last one."""
        last = int(self.numbers[slot, self.states.num_tokens[slot] - 1])
        return self._prefixes.next_token(last, int(self.states.seed[slot]), self._vocab_size)

    def _verify(self, slot: int, drafts: list[int]) -> list[int]:
        """A token after the last one, and after each draft up to the first that is another token."""
        found = []
        for draft in [*drafts, None]:
            found.append(self._next(slot))
            self._extend(slot, found[-1:])
            if found[-1] != draft:
                break
        self.states.num_sampled[slot] += len(found)
        self.num_computed[slot] = self.states.num_tokens[slot] - 1
        self.num_accepted += len(found) - 1
        self.num_rejected += len(drafts) - (len(found) - 1)
        return found

    def _propose(self, slot: int) -> list[int]:
        """What may follow; every fourth is another token. No more than there is room for."""
        length, limit = int(self.states.num_tokens[slot]), self.numbers.shape[1]
        drafts = []
        for _ in range(min(self._rng.randint(0, self._max_drafts), limit - length - 1)):
            right = self._next(slot)
            drafts.append(right if self._rng.random() < 0.75 else (right + 1) % self._vocab_size)
            self._extend(slot, drafts[-1:])
        self.states.num_tokens[slot] = length
        self._drafts[slot] = drafts
        return drafts

    def held(self, group: int, slot: int) -> dict[int, int]:
        """{index: block} of the blocks that a slot's next token and those after it read or write."""
        spec, table = self.specs[group], self.tables.groups[group]
        first = first_read(spec, int(self.num_computed[slot])) // spec.block_size
        return dict(enumerate(table.blocks[slot, first : table.num_blocks[slot]].tolist(), first))

    def _write(self, group: int, batch: InputBatch) -> None:
        table = self.tables.groups[group]
        places = table.slot_mapping(batch.token_slots, batch.positions)
        assert len(set(places.tolist())) == len(places), "two tokens are written to one place"
        blocks, offsets = np.divmod(places, table.block_size)
        assert blocks.all(), "a token is written to the null block"
        self._cells[blocks, offsets] = self._contents(group, batch.token_slots, batch.positions)

    def _write_states(self, group: int, batch: InputBatch) -> None:
        """In each block that a slot's tokens touch, the state after its last token there."""
        spec, table = self.specs[group], self.tables.groups[group]
        written = []
        for slot, start, end in zip(batch.slots, self.num_computed[batch.slots], batch.seq_lens, strict=True):
            indices = np.arange(start // spec.block_size, (end - 1) // spec.block_size + 1)
            blocks = table.blocks[slot, indices]
            assert blocks.all(), "a state is written to the null block"
            last = np.minimum((indices + 1) * spec.block_size, end) - 1
            self._cells[blocks, 0] = self._contents(group, slot, last)
            written += blocks.tolist()
        assert len(set(written)) == len(written), "two states are written to one place"

    def _check_reads(self, group: int, slot: int, end: int) -> None:
        """What a slot's tokens before `end` that are not computed yet read; if there are none, what the next will."""
        spec, table, start = self.specs[group], self.tables.groups[group], int(self.num_computed[slot])
        first = end - 1 if isinstance(spec, MambaSpec) else first_read(spec, start)
        positions = np.arange(max(0, first), end)
        offsets = 0 if isinstance(spec, MambaSpec) else positions % spec.block_size
        found = self._cells[table.blocks[slot, positions // spec.block_size], offsets]
        wrong = positions[found != self._contents(group, slot, positions)]
        assert not wrong.size, (
            f"{self.live[slot]} computes {start} to {end - 1} and reads what is not its history in group {group} at "
            f"positions {wrong.tolist()}"
        )

    def _contents(self, group: int, slots: Any, positions: Any) -> np.ndarray:
        contents: np.ndarray = self.numbers[slots, positions] * len(self.specs) + group
        return contents
