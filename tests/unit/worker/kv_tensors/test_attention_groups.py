"""Plans of a step: one per group and kind of layer, readers with their owners."""

import numpy as np

from pagemill.engine.kv_cache.planning import plan_kv_cache
from pagemill.messages.sampling_params import SamplingParams
from pagemill.messages.step import NewRequest, SchedulerOutput
from pagemill.worker.batch.block_tables import BlockTable, BlockTables
from pagemill.worker.batch.input_batch import build_batch
from pagemill.worker.batch.request_states import RequestStates
from pagemill.worker.kv_tensors.allocate import bind_kv_cache
from pagemill.worker.kv_tensors.attention_groups import AttentionGroups
from tests.fakes.hybrid_model import HybridModel


def test_each_layer_finds_the_plan_of_its_group_and_a_reader_that_of_its_owner():
    layers = HybridModel().cache_layers()
    specs = {name: layer.kv_spec(4, "float32") for name, layer in layers.items()}
    plan = plan_kv_cache(specs, 1 << 20, max_model_len=64, max_step_tokens=64, num_blocks_override=100)
    bind_kv_cache(plan, layers, "cpu")
    tables = BlockTables(tuple(BlockTable(1, 64, group.spec.block_size) for group in plan.groups))
    states = RequestStates(1, 64)
    block_ids = tuple([10 * index + 1, 10 * index + 2] for index in range(len(plan.groups)))
    states.add(NewRequest("r", 0, [5] * 6, 6, 0, block_ids, SamplingParams()))
    tables.reset(0, block_ids)
    batch = build_batch(SchedulerOutput(0, np.zeros(1, np.int32), np.full(1, 6, np.int32)), states)
    planned = AttentionGroups(plan, layers, tables, "cpu").plan(batch)
    assert set(planned) == set(layers)
    assert planned["reader"] is planned["sliding"]
    group_of = {name: index for index, group in enumerate(plan.groups) for name in group.layers}
    for name in ("full", "sliding", "chunk"):
        size = plan.groups[group_of[name]].spec.block_size
        assert set((planned[name].slot_mapping // size).tolist()) <= set(block_ids[group_of[name]])
    assert planned["state.0"].target.tolist() == block_ids[group_of["state.0"]][: len(planned["state.0"].target)]
