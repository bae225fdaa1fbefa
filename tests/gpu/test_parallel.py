"""Several GPUs compute what one does: tensor and pipeline parallel ranks over NCCL."""

import pytest

from tests.gpu.engines import greedy, make_llm, make_prompts, need_gpus, run, share_equal

ARCHITECTURE = "Qwen3ForCausalLM"
LAYOUTS = [
    ({"tensor_parallel_size": 2}, 2),
    ({"tensor_parallel_size": 4}, 4),
    ({"pipeline_parallel_size": 2}, 2),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
]
"""The model has two key-value heads: four tensor parallel ranks hold each of them twice."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("settings", "num_gpus"), LAYOUTS)
def test_ranks_equal_one_gpu(checkpoints, settings, num_gpus, dtype):
    """Sums over ranks round differently: in bfloat16 tokens are held against the reference only."""
    need_gpus(num_gpus)
    prompts = make_prompts(24)
    with make_llm(checkpoints.path(ARCHITECTURE), dtype=dtype) as llm:
        one = run(llm, prompts, greedy(24))
    with make_llm(checkpoints.path(ARCHITECTURE), dtype=dtype, **settings) as llm:
        several = run(llm, prompts, greedy(24))
    checkpoints.reference(ARCHITECTURE).check(prompts, several, dtype)
    if dtype == "float32":
        assert share_equal(one, several) >= 0.9
