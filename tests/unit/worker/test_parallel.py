"""Tensor-parallel ranks and pipeline stages compute what one worker computes, each with its part of the model.

An engine with one worker runs some requests; the steps that it scheduled are replayed on the workers of several
processes. Cases of one number of processes share the processes, but for the first architecture, which has its own two:
it is what `make check` runs.
"""

import os

import numpy as np
import psutil
import pytest
import torch

from pagemill.config.arguments import EngineArgs
from pagemill.errors import ConfigError, DistributedError
from pagemill.launch import build_config
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.messages.worker_rank import WorkerRank
from pagemill.model.distributed.init import init_distributed
from pagemill.model.distributed.parallel_groups import ParallelSizes
from pagemill.worker import build_runner
from pagemill.worker.native.decode_path import NoNativeDecode
from pagemill.worker.worker import Worker
from tests.fakes.compressed_checkpoint import Layout, compress
from tests.fakes.engine_setup import core_request
from tests.fakes.masked_worker import forms, wide_table
from tests.fakes.ports import free_port
from tests.fakes.ranks import record, replay, run_ranks
from tests.fakes.scripted_grammar import SOME_PLACES, at_positions, grammar_of
from tests.fakes.tiny_checkpoint import LAYER_NORMS, SPECIFIC, make_checkpoint
from tests.fakes.tiny_gguf import convert
from tests.marks import slow

KV_HEADS = 2
ARCHITECTURES = list(SPECIFIC)
FIRST = "LlamaForCausalLM"
BFLOAT16 = {"llama-bfloat16": "LlamaForCausalLM", "gemma-bfloat16": "Gemma3ForCausalLM"}
"""The type in which native code runs whole models."""
COMPRESSED = {"llama-w4-ordered": "LlamaForCausalLM", "qwen3-w4": "Qwen3ForCausalLM", "moe-w4": "Qwen3MoeForCausalLM"}
"""Weights of 4 bits, of which a rank's columns are not whole groups; of the first, each input names its group."""
FORCED = {"llama-forced": "LlamaForCausalLM"}
"""Some tokens are the engine's, and what is in flight for them is void."""
HELD = {"llama-held": "LlamaForCausalLM"}
"""Some outputs have a form, whose masks come when a step is sampled."""
FORMS = {"r0": {"regex": "[a-m]{3,9}[0-9]{12}"}, "r1": {"choice": ["abcdefghij", "abxyz"]}, "r3": {"regex": "(ab|c)+"}}
CHANGES = {"Qwen3ForCausalLM": {"vocab_size": 321}, "Qwen2ForCausalLM": {"num_hidden_layers": 3}}
"""A vocabulary and a number of layers that do not divide."""


def requests(more_tokens=0):
    """More requests than slots, so that slots are reused while tokens are on their way; greedy and drawn."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, size).tolist() for size in (37, 5, 20, 1, 9)]
    return [
        core_request(
            f"r{i}", prompt, max_tokens=6 + i + more_tokens, temperature=0.0 if i % 2 else 0.8, top_p=0.95, seed=i
        )
        for i, prompt in enumerate(prompts)
    ]


class Recordings(dict):
    """Architecture, or gguf, -> an engine's run, made when it is asked for. Two steps in flight, as with two stages."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __missing__(self, name):
        architecture = FIRST if name == "gguf" else (BFLOAT16 | COMPRESSED | FORCED | HELD).get(name, name)
        path = make_checkpoint(self.folder / name, architecture, **CHANGES.get(name, {}))
        if name in COMPRESSED:
            path, _ = compress(path, self.folder / f"{name}-compressed", Layout(ordered=architecture == FIRST))
        settings = {"depth": 2, "max_num_seqs": 2, "max_num_batched_tokens": 16}
        if name in BFLOAT16:
            settings["dtype"] = "bfloat16"
        if name in FORCED:
            settings["grammar_of"] = grammar_of(at_positions(SOME_PLACES))
        if name in HELD:
            settings["grammar_of"] = forms(
                {r: StructuredOutputsParams(**form) for r, form in FORMS.items()}, wide_table()
            )
        with pytest.MonkeyPatch.context() as patch:
            # A step that is one native call computes logits where `logits_of` does not see them.
            patch.setattr(build_runner, "native_decode", lambda *_: NoNativeDecode("its logits are kept"))
            found = record(
                convert(path, self.folder / "m.gguf") if name == "gguf" else path,
                requests(12 if name in FORCED | HELD else 0),
                **settings,
            )
        assert sum(len(out.slots) for out in found.outputs) > 30
        self[name] = found
        return found

    def of(self, cases):
        """What ranks need for these cases."""
        return {name: self[name] for name, *_ in cases}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return Recordings(tmp_path_factory.mktemp("parallel"))


def replays(rank, recordings, cases, folder):
    """Every case (name, tp, pp) on one rank."""
    results = {}
    for number, (name, tp, pp) in enumerate(cases):
        address = f"file://{folder}/rendezvous{number}"
        me = WorkerRank(
            rank=rank,
            local_rank=rank,
            world_size=tp * pp,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            init_address=address,
        )
        results[name, tp, pp] = replay(recordings[name], me)
    return results


TWO = [(name, tp, 3 - tp) for name in (*ARCHITECTURES, *COMPRESSED, *FORCED, *HELD, "gguf") for tp in (1, 2)]
TWO_BFLOAT16 = [(name, tp, 3 - tp) for name in BFLOAT16 for tp in (1, 2)]
FIRST_TWO = [case for case in TWO if case[0] == FIRST]
FOUR = [("LlamaForCausalLM", 4, 1), ("Gemma3ForCausalLM", 2, 2), ("LlamaForCausalLM", 1, 4), ("llama-forced", 1, 4)]


def slow_but_the_first(cases):
    """Cases or architectures; the tests of the first architecture share two processes."""
    return [case if FIRST in (case, case[0]) else slow(case) for case in cases]


@pytest.fixture(scope="module")
def two_processes(recordings, tmp_path_factory):
    """What each of two ranks made of the first architecture, and what it saw of a group's operations."""
    folder = tmp_path_factory.mktemp("first")
    return run_ranks(2, folder, run_first, recordings.of(FIRST_TWO), folder, free_port())


def run_first(rank, save, recordings, folder, port):
    exchange(rank, save, port, replays(rank, recordings, FIRST_TWO, folder))


@pytest.fixture(scope="module")
def first_two_ranks(two_processes):
    return [results for results, _ in two_processes]


def run_cases(rank, save, recordings, cases, folder):
    save(replays(rank, recordings, cases, folder))


@pytest.fixture(scope="module")
def other_two_ranks(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    cases = [case for case in TWO + TWO_BFLOAT16 if case not in FIRST_TWO]
    return run_ranks(2, folder, run_cases, recordings.of(cases), cases, folder)


@pytest.fixture
def two_ranks(request):
    """What each of two ranks made of the architecture of this test."""
    params = request.node.callspec.params
    name = params["name"] if "name" in params else params["case"][0]
    return request.getfixturevalue("first_two_ranks" if name == FIRST else "other_two_ranks")


@pytest.fixture(scope="module")
def four_ranks(recordings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(4, folder, run_cases, recordings.of(FOUR), FOUR, folder)


def check_equal(recording, ranks, case):
    """Tokens equal and logits close on every rank of the last stage; the other stages report no tokens."""
    _, tp, pp = case
    for rank, results in enumerate(ranks):
        result = results[case]
        if rank < tp * (pp - 1):
            assert not any(len(output.slots) for output in result.outputs)
            continue
        for ours, expected in zip(result.outputs, recording.outputs, strict=True):
            assert ours.step_id == expected.step_id
            np.testing.assert_array_equal(ours.slots, expected.slots)
            np.testing.assert_array_equal(ours.token_ids, expected.token_ids)
        for ours, expected in zip(result.logits, recording.logits, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    last = [results[case].logits for results in ranks[tp * (pp - 1) :]]
    for logits in last[1:]:
        assert all(torch.equal(one, other) for one, other in zip(logits, last[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", slow_but_the_first(TWO), ids=lambda case: "{}-tp{}-pp{}".format(*case))
def test_two_ranks_equal_one(recordings, two_ranks, case):
    check_equal(recordings[case[0]], two_ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO_BFLOAT16, ids=lambda case: "{}-tp{}-pp{}".format(*case))
def test_two_ranks_in_bfloat16_come_close_to_one(recordings, two_ranks, case):
    """A sum of partial sums is rounded otherwise, so tokens may differ from some step on; the first logits do not."""
    name, _, pp = case
    expected = recordings[name].logits[0]
    for results in two_ranks[pp - 1 :]:
        error = (results[case].logits[0] - expected).abs().max()
        assert error < 0.03 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=lambda case: "{}-tp{}-pp{}".format(*case))
def test_four_ranks_equal_one(recordings, four_ranks, case):
    check_equal(recordings[case[0]], four_ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but_the_first([*(n for n in ARCHITECTURES if "Deepseek" not in n), "gguf"]))
def test_a_tensor_parallel_rank_holds_half_of_the_weights_and_heads(recordings, two_ranks, name):
    whole = recordings[name].weight_bytes
    positions = 514 * 64 * 4 if name == "OPTForCausalLM" else 0  # every rank has the table
    heads = 4 if name in LAYER_NORMS else KV_HEADS
    for results in two_ranks:
        result = results[name, 2, 1]
        assert result.weight_bytes - positions < 0.53 * (whole - positions)
        assert result.num_kv_heads == heads // 2
    assert sum(results[name, 2, 1].weight_bytes for results in two_ranks) >= whole


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but_the_first(ARCHITECTURES))
def test_a_stage_holds_its_layers(recordings, two_ranks, name):
    first, last = (results[name, 1, 2] for results in two_ranks)
    everything = [layer for group in recordings[name].plan.groups for layer in group.layers]
    assert sorted(first.layers + last.layers) == sorted(everything)
    assert len(first.layers) - len(last.layers) == len(everything) % 2
    tied = name in ("LlamaForCausalLM", "Gemma3ForCausalLM", "OPTForCausalLM")
    embedding = CHANGES.get(name, {}).get("vocab_size", 320) * 64 * 4
    whole = recordings[name].weight_bytes + tied * embedding
    assert first.weight_bytes + last.weight_bytes == whole
    assert max(first.weight_bytes, last.weight_bytes) < 0.65 * whole


@pytest.mark.slow
def test_key_and_value_heads_are_replicated_when_ranks_are_more(four_ranks):
    for results in four_ranks:
        result = results["LlamaForCausalLM", 4, 1]
        assert result.num_kv_heads == 1
        assert result.kv_bytes == 4 * 2 * 16 * 16 * 4, "four layers, keys and values of one head"


def exchange(rank, save, port, results):
    """All operations of a group, then the death of rank 1."""
    sizes = ParallelSizes(tp=2)
    groups = init_distributed(rank, 2, rank, f"tcp://127.0.0.1:{port}", "gloo", sizes, timeout_s=30)
    group = groups.tp
    seen = {"listening": sorted({c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"})}
    seen["shape"] = (group.rank, group.size, groups.pp.size, groups.dp.size, groups.ep is group)
    mine = torch.arange(4.0).reshape(2, 2) + 10 * rank
    seen["bfloat16"] = group.all_reduce(mine.to(torch.bfloat16)).tolist()
    seen["sum"] = group.all_reduce(mine.clone()).tolist()
    seen["gathered"] = group.all_gather(mine).tolist()
    seen["stacked"] = group.all_gather(mine, dim=0).tolist()
    seen["broadcast"] = group.broadcast(mine.clone(), 1).tolist()
    if rank:
        transfers = [group.isend(torch.full((2,), float(i)), 0) for i in range(3)]
        for transfer in transfers:
            transfer.wait()
    else:
        received = [torch.empty(2) for _ in range(3)]
        transfers = [group.irecv(tensor, 1) for tensor in received]
        transfers[2].wait()
        seen["received"] = [tensor.tolist() for tensor in received]
    group.barrier()
    if rank:
        save((results, seen))
        os._exit(0)
    with pytest.raises(DistributedError, match="another rank is gone"):
        group.all_reduce(torch.ones(2))
    save((results, seen))


@pytest.mark.slow
def test_group_operations_and_the_death_of_a_peer(two_processes):
    first, second = (dict(seen) for _, seen in two_processes)
    assert first.pop("received") == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert first.pop("shape") == (0, 2, 1, 1, True)
    assert second.pop("shape") == (1, 2, 1, 1, True)
    assert first == second
    assert first["listening"] == ["127.0.0.1"]
    assert first["sum"] == first["bfloat16"] == [[10, 12], [14, 16]]
    assert first["gathered"] == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert first["stacked"] == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert first["broadcast"] == [[10, 11], [12, 13]]


@pytest.mark.parametrize("kind", ["tcp", slow("file")])
def test_a_rank_that_does_not_come_is_named(tmp_path, kind):
    address = f"file://{tmp_path}/rendezvous" if kind == "file" else f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(DistributedError, match=r"rank 0 of 3 waited .* missing: rank 1, rank 2"):
        init_distributed(0, 3, 0, address, "gloo", ParallelSizes(tp=3), timeout_s=0.3)


@pytest.mark.slow
def test_rank_0_that_does_not_come_is_named():
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(DistributedError, match="rank 1 of 2 cannot reach rank 0 at tcp"):
        init_distributed(1, 2, 1, address, "gloo", ParallelSizes(pp=2), timeout_s=0.3)


@pytest.mark.parametrize(
    ("world_size", "address", "backend", "message"),
    [
        (2, "redis://x", "gloo", "neither tcp://HOST:PORT nor file://PATH"),
        (2, "tcp://x", "gloo", "neither tcp://HOST:PORT nor file://PATH"),
        (2, "file:///x", "mpi", "backend='mpi' is not one of gloo, nccl"),
        (3, "file:///x", "gloo", "world_size=3 is not the 2 ranks"),
    ],
)
def test_bad_arguments_are_named(world_size, address, backend, message):
    with pytest.raises(ConfigError, match=message):
        init_distributed(0, world_size, 0, address, backend, ParallelSizes(tp=2))


def test_a_worker_alone_does_not_play_two(recordings):
    config = build_config(EngineArgs(recordings["LlamaForCausalLM"].path, tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* does not fit the 1 x 1 workers"):
        Worker(config)
