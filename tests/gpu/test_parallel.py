"""Several GPUs compute what one does: tensor and pipeline parallel ranks over NCCL, with models and heads that propose
drafts on the last stage."""

import pytest

from tests.gpu.engines import greedy, make_llm, make_prompts, need_gpus, run, share_equal
from tests.gpu.test_heads import KINDS, LLAMA, asked, counts

ARCHITECTURE = "Qwen3ForCausalLM"
LAYOUTS = [
    ({"tensor_parallel_size": 2}, 2),
    ({"tensor_parallel_size": 4}, 4),
    ({"pipeline_parallel_size": 2}, 2),
    ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 4),
]
"""The model has two key-value heads: four tensor parallel ranks hold each of them twice."""
PROPOSE = {
    **{kind: (kind, 2, 1) for kind in ("eagle", "eagle3", "peagle", "dflash", "medusa", "draft_model")},
    "eagle3 on four": ("eagle3", 2, 2),
    "draft_model on four": ("draft_model", 2, 2),
}
"""What proposes, pipeline stages and tensor parallel ranks."""


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


@pytest.mark.parametrize("case", PROPOSE)
def test_what_proposes_on_the_last_stage_changes_no_text(checkpoints, tmp_path, case):
    kind, stages, ranks = PROPOSE[case]
    need_gpus(stages * ranks)
    path = checkpoints.path(LLAMA)
    given = asked(path, method="draft_model") if kind == "draft_model" else asked(str(KINDS[kind](tmp_path / "head")))
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": ranks}
    prompts = make_prompts(24)
    with make_llm(path, dtype="float32") as llm:
        one = run(llm, prompts, greedy(24))
    with make_llm(path, dtype="float32", max_num_batched_tokens=128, **sizes, **given) as llm:
        several = run(llm, prompts, greedy(24))
        found = counts(llm)
    checkpoints.reference(LLAMA).check(prompts, several, "float32")
    assert share_equal(one, several) >= 0.9
    assert found.num_draft_tokens > 300
    if kind == "draft_model":
        assert found.num_accepted_tokens > 0.9 * found.num_draft_tokens
