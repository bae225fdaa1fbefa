"""Worked examples of the documents, from requests to the messages that workers get, and to their batches.

The documents on prefix caching number blocks from 0; here block 0 is the null block, so theirs are ours minus one.
"""

import numpy as np

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.scheduler.limits import SchedulerLimits
from pagemill.engine.scheduler.scheduler import Scheduler
from pagemill.messages.kv_spec import KVCacheConfig, KVCacheGroup
from pagemill.messages.step import ModelRunnerOutput
from pagemill.worker.batch.block_tables import BlockTable
from pagemill.worker.batch.input_batch import build_batch
from pagemill.worker.batch.request_states import RequestStates
from tests.fakes.engine_setup import core_request, full


class Engine:
    """A scheduler with ten blocks of four tokens; sampled tokens are given by whoever steps."""

    def __init__(self):
        config = KVCacheConfig(11, (KVCacheGroup(("layer",), full(4)),))
        self.kv = KVCacheManager(config, "sha256")
        self.scheduler = Scheduler(SchedulerLimits(64, 4, 40), self.kv)
        self.tables = {}
        """Slot -> blocks in the documents' numbers, from the messages."""

    def step(self, **tokens):
        """One step in which each request samples the token given by its name; the message to the workers."""
        step = self.scheduler.schedule()
        for new in step.new:
            self.tables[new.slot] = documented(new.block_ids[0])
        for grown in step.grown:
            self.tables[grown.slot] += documented(grown.block_ids[0])
        self.scheduler.update(ModelRunnerOutput(step.step_id, step.slots, np.array(list(tokens.values()), np.int32)))
        self.scheduler.check_integrity()
        return step

    def free_queue(self):
        return documented(self.kv.pool.free_blocks())

    def cached(self):
        return sorted(documented(self.kv.pool.cached_blocks()))


def documented(block_ids):
    return [block - 1 for block in block_ids]


def test_times_1_to_6_of_prefix_caching():
    engine = Engine()
    tokens = list(range(100, 150))

    engine.scheduler.add(core_request("0", tokens[:15], max_tokens=4))
    engine.step(r0=1)  # time 1: three full blocks, and one of three tokens
    assert engine.tables[0] == [0, 1, 2, 3]
    assert engine.cached() == [0, 1, 2]

    engine.step(r0=2)
    engine.step(r0=3)  # time 2: block 3 is full, and another is there for the token after it
    assert engine.tables[0] == [0, 1, 2, 3, 4]
    assert engine.cached() == [0, 1, 2, 3]

    engine.scheduler.add(core_request("1", [*tokens[:10], 1, 2, 3, 4], max_tokens=2))
    step = engine.step(r0=4, r1=5)  # time 3: two blocks hit, the third matches in two tokens only
    assert step.new[0].num_computed_tokens == 8
    assert engine.tables[1] == [0, 1, 5, 6]
    assert engine.cached() == [0, 1, 2, 3, 5]

    assert engine.free_queue() == [7, 8, 9, 4, 3, 2]  # time 4: request 0 has its four tokens
    assert engine.cached() == [0, 1, 2, 3, 5]

    engine.step(r1=6)  # time 5: request 1 has its two
    assert engine.free_queue() == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    engine.scheduler.add(core_request("2", [*tokens[:12], *range(17)]))
    step = engine.step(r2=7)  # time 6: hits leave the queue (7-8-9-4-3-6-5) before five blocks are taken from it
    assert step.new[0].num_computed_tokens == 12
    assert engine.tables[step.new[0].slot] == [0, 1, 2, 7, 8, 9, 4, 3]
    assert engine.free_queue() == [6, 5]
    assert engine.cached() == [0, 1, 2, 4, 5, 7, 8, 9]


def test_duplicate_blocks_stay_until_their_request_ends():
    a, b, c, d, e, f, g, h, i, j = range(10, 20)
    engine = Engine()
    engine.scheduler.add(core_request("1", [a, b, c, d, e, f], max_tokens=9))
    engine.step(r1=g)
    assert (engine.tables[0], engine.cached()) == ([0, 1], [0])
    engine.step(r1=h)
    engine.step(r1=i)
    assert (engine.tables[0], engine.cached()) == ([0, 1], [0, 1])
    engine.step(r1=j)
    assert engine.tables[0] == [0, 1, 2]

    engine.scheduler.add(core_request("2", [a, b, c, d, e, f], max_tokens=9))
    step = engine.step(r1=1, r2=g)
    assert step.new[0].num_computed_tokens == 4
    assert (engine.tables[1], engine.cached()) == ([0, 3], [0, 1])
    engine.step(r1=2, r2=h)
    engine.step(r1=3, r2=i)
    assert engine.tables[1] == [0, 3], "tables are append-only"
    assert {0, 1, 3} <= set(engine.cached())
    engine.scheduler.abort(["2"])
    assert 3 not in engine.cached()
    assert {0, 1} <= set(engine.cached())


def test_the_batch_of_three_prompts_and_the_step_after_it():
    engine = Engine()
    prompts = {"hi": [1, 2, 3, 4, 5], "today": [1, 6, 5, 7, 8, 9, 10], "hello": [1, 12, 13]}
    for name, prompt in prompts.items():
        engine.scheduler.add(core_request(name, prompt))
    states, table = RequestStates(4, 40), BlockTable(4, 40, block_size=4)

    step = engine.step(hi=14, today=15, hello=16)
    assert [new.block_ids for new in step.new] == [([1, 2],), ([3, 4],), ([5],)]
    for new in step.new:
        states.add(new)
        table.reset(new.slot, new.block_ids[0])
    batch = build_batch(step, states)
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 6, 5, 7, 8, 9, 10, 1, 12, 13]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    assert batch.query_start.tolist() == [0, 5, 12, 15]
    assert batch.seq_lens.tolist() == [5, 7, 3]
    assert batch.num_tokens == 15
    places = table.slot_mapping(batch.token_slots, batch.positions)
    assert places.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22]

    states.advance(batch.slots, step.num_tokens)
    states.append(batch.sampled_slots, np.array([14, 15, 16], np.int32))
    step = engine.step(hi=1, today=2, hello=3)
    assert not step.new and not step.grown
    batch = build_batch(step, states)
    assert batch.token_ids.tolist() == [14, 15, 16]
    assert batch.positions.tolist() == [5, 7, 3]
    assert batch.query_start.tolist() == [0, 1, 2, 3]
    assert batch.seq_lens.tolist() == [6, 8, 4]
    assert table.slot_mapping(batch.token_slots, batch.positions).tolist() == [9, 19, 23]
