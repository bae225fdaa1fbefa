"""The GPU's memory: the budget is kept and filled, misfits name what fits, and an engine gives everything back."""

import gc

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.worker.memory import GRAPH_BYTES
from tests.gpu.engines import greedy, make_llm, make_prompts, run, sampled

LLAMA = "LlamaForCausalLM"
NOT_CAPTURED = 150 * GRAPH_BYTES
"""Graphs that the budget has room for, and that an engine captures while it has nothing to do."""


def used_bytes() -> int:
    """What is taken of the GPU's memory, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def settle() -> int:
    """`used_bytes` after everything that nobody holds was given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return used_bytes()


def test_the_budget_is_filled_and_kept_under_load(checkpoints):
    before, total = settle(), torch.cuda.mem_get_info()[1]
    share = 0.3 + before / total
    settings = {"gpu_memory_utilization": share, "kv_cache_memory_bytes": None, "max_num_seqs": 256}
    with make_llm(checkpoints.path(LLAMA), **settings) as llm:
        assert used_bytes() <= share * total * 1.01
        prompts = make_prompts(300, longest=900, seed=5)
        params = [sampled(30, index) if index % 2 else greedy(30) for index in range(300)]
        run(llm, prompts, params)
        assert 0.95 * share * total - NOT_CAPTURED <= used_bytes() <= 1.01 * share * total


def test_an_engine_gives_its_memory_back(checkpoints):
    with make_llm(checkpoints.path(LLAMA)) as llm:
        run(llm, make_prompts(4), greedy(4))
    before = settle()
    for _ in range(2):
        with make_llm(checkpoints.path(LLAMA), kv_cache_memory_bytes=2 << 30) as llm:
            run(llm, make_prompts(4), greedy(4))
            assert used_bytes() - before > 2 << 30
        del llm
    assert settle() - before < 256 << 20


def test_a_misfit_names_the_length_that_fits(checkpoints):
    with pytest.raises(ConfigError, match=r"max_model_len=1024 .*--max-model-len \d+"):
        make_llm(checkpoints.path(LLAMA), kv_cache_memory_bytes=1 << 20)


def test_more_than_there_is_is_refused(checkpoints):
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        make_llm(checkpoints.path(LLAMA), gpu_memory_utilization=1e-4, kv_cache_memory_bytes=None)
