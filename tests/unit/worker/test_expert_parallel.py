"""Experts dealt out over the ranks of one engine, and of several that step together, compute what one worker does."""

import numpy as np
import pytest
import torch

from pagemill.messages.worker_rank import WorkerRank
from tests.fakes.engine_setup import core_request
from tests.fakes.ranks import record, replay, run_ranks
from tests.fakes.tiny_checkpoint import make_checkpoint

pytestmark = pytest.mark.slow
MODELS = ["Qwen3MoeForCausalLM", "MixtralForCausalLM"]
"""Of 8 experts and of 5, which do not divide."""
NUM_DUMMY_STEPS = 2
LAYOUTS = [(2, 1, 1), (1, 1, 2)]
"""(tensor parallel, pipeline parallel, replicas)."""
WIDE_LAYOUTS = [(2, 1, 2), (1, 2, 2), (4, 1, 1)]


def requests(replica):
    """Other requests, and other steps, for each replica."""
    rng = np.random.default_rng(replica)
    prompts = [rng.integers(3, 300, size).tolist() for size in (27, 5, 1 + 20 * replica)]
    return [
        core_request(f"r{i}", prompt, max_tokens=6 + i + 3 * replica, temperature=0.0 if i % 2 else 0.8, seed=i)
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """(architecture, replica) -> an engine's run."""
    folder = tmp_path_factory.mktemp("experts")
    settings = {"depth": 2, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    paths = {name: make_checkpoint(folder / name, name) for name in MODELS}
    return {(name, part): record(paths[name], requests(part), **settings) for name in MODELS for part in range(2)}


def replays(rank, save, recordings, layouts, folder):
    results = {}
    for number, (name, layout) in enumerate((name, layout) for name in MODELS for layout in layouts):
        tp, pp, replicas = layout
        replica, within = divmod(rank, tp * pp)
        me = WorkerRank(
            rank=within,
            local_rank=rank,
            world_size=tp * pp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            init_address=f"file://{folder}/rendezvous{number}",
            replica=replica,
            num_replicas=replicas,
        )
        most = max(len(recordings[name, part].steps) for part in range(replicas))
        mine = recordings[name, replica]
        extra = most - len(mine.steps) + NUM_DUMMY_STEPS
        results[name, layout] = replay(mine, me, expert_parallel=True, num_dummy_steps=extra)
    save(results)


@pytest.fixture(scope="module")
def two_ranks(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(2, folder, replays, recordings, LAYOUTS, folder)


@pytest.fixture(scope="module")
def four_ranks(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(4, folder, replays, recordings, WIDE_LAYOUTS, folder)


def check_equal(recordings, ranks, name, layout):
    tp, pp, _ = layout
    for rank, results in enumerate(ranks):
        replica, within = divmod(rank, tp * pp)
        result, recording = results[name, layout], recordings[name, replica]
        if within < tp * (pp - 1):
            continue
        for ours, expected in zip(result.outputs, recording.outputs, strict=True):
            np.testing.assert_array_equal(ours.slots, expected.slots)
            np.testing.assert_array_equal(ours.token_ids, expected.token_ids)
        for ours, expected in zip(result.logits, recording.logits, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_two_ranks_equal_one(recordings, two_ranks, name, layout):
    check_equal(recordings, two_ranks, name, layout)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", WIDE_LAYOUTS, ids="tp{0[0]}-pp{0[1]}-dp{0[2]}".format)
def test_four_ranks_equal_one(recordings, four_ranks, name, layout):
    check_equal(recordings, four_ranks, name, layout)


def test_replicas_hold_half_of_the_experts_each(recordings, two_ranks):
    experts = 3 * 3 * 8 * 32 * 64 * 4
    whole = recordings["Qwen3MoeForCausalLM", 0].weight_bytes
    for results in two_ranks:
        assert results["Qwen3MoeForCausalLM", (1, 1, 2)].weight_bytes == whole - experts // 2
