"""Prompts over latent vectors on a GPU: both kernels against the definition, and engines against transformers."""

import dataclasses

import pytest
import torch

from benchmarks.latent_case import LatentCase, LatentShape
from pagemill.model.attention.backends import latent_prompts
from pagemill.model.kernels import gpu_facts
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.triton_interpreter import DEVICE
from tests.gpu.conftest import LARGER, calm_weights
from tests.gpu.engines import Reference, check_regrets, greedy, make_llm, make_prompts, run

from pagemill.model.attention.backends.triton_mla import MlaBuilder, TritonMlaBackend  # isort: skip
from pagemill.model.kernels.triton import launch, mla_prompts_hopper  # isort: skip

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")]
LITE = LatentShape(heads=16, turned=64, plain=128, value=128, latent=512)
V3 = LatentShape(heads=128, turned=64, plain=128, value=128, latent=512)
ODD = LatentShape(heads=6, turned=32, plain=48, value=40, latent=96)
BATCHES = {
    "prompts": [(300, 300), (1024, 1024), (513, 513), (192, 192)],
    "mixed": [(300, 300), (1, 700), (513, 1290), (133, 1000), (3, 40), (257, 4096)],
}
SIZES = {"kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
"""Of heads that the kernel for Hopper GPUs takes."""
LONG = {"max_position_embeddings": 4096, "num_key_value_heads": 4}


@pytest.fixture(params=[False, True], ids=["plain", "dependent"])
def dependent(request):
    before = launch.dependent()
    launch.set_dependent(request.param)
    yield
    launch.set_dependent(before)


def relative_error(result, expected):
    return float((result.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kernel", ["for Hopper", "for all"])
@pytest.mark.parametrize("room", [12 << 20, 32 << 20, 256 << 20])
@pytest.mark.parametrize(("shape", "dtype"), [(LITE, torch.bfloat16), (V3, torch.float16), (ODD, torch.bfloat16)])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_equals_the_definition(dependent, kernel, room, shape, dtype, batch, monkeypatch):
    if kernel == "for all":
        monkeypatch.setattr(mla_prompts_hopper, "takes", lambda *_: False)
    case = LatentCase(shape, BATCHES[batch], dtype, "cuda", padding=5)
    expected = case.expected(torch.float32)
    builder = MlaBuilder(shape.spec, torch.device("cuda"), room)
    assert builder.build(case.common).prompts is not None
    result = case.run(TritonMlaBackend, builder)
    assert relative_error(result[: len(expected)], expected) < 1e-2
    assert not result[len(expected) :].any(), "padding"
    case.common = dataclasses.replace(case.common, batch_lens=None)
    absorbed = case.run(TritonMlaBackend, builder)
    assert relative_error(absorbed[: len(expected)], expected) < 1e-2


@pytest.mark.parametrize("heads", [16, 6, 7])
def test_heads_one_after_the_other(heads, dependent, monkeypatch):
    """Keys that the L2 cache does not hold: a part of the heads at the same time; again and again with one plan."""
    shape = dataclasses.replace(LITE, heads=heads)
    case = LatentCase(shape, [(700, 3000), (300, 300), (1, 700), (1500, 1500)], torch.bfloat16, "cuda")
    builder = MlaBuilder(shape.spec, torch.device("cuda"), 256 << 20)
    expected = case.run(TritonMlaBackend, builder)
    assert relative_error(expected, case.expected(torch.float32)) < 1e-2
    impl, metadata = TritonMlaBackend.impl(shape.spec), builder.build(case.common)
    for megabytes in (1, 6, 12, 1000):
        monkeypatch.setattr(gpu_facts, "L2_SHARE", megabytes << 20)
        for _ in range(3):
            result = impl.attend_latents(case.query, case.kept, case.cache, metadata, case.weights)
            assert torch.equal(result, expected)


@pytest.mark.parametrize("room", [12 << 20, 256 << 20])
@pytest.mark.parametrize("batch", BATCHES)
def test_rows_that_are_asked_for(dependent, room, batch):
    """The last ones of requests: they have the bits that they have among all rows."""
    case = LatentCase(LITE, BATCHES[batch], torch.bfloat16, "cuda")
    case.common = dataclasses.replace(case.common, asks_for_ends=True)
    builder, impl = MlaBuilder(LITE.spec, torch.device("cuda"), room), TritonMlaBackend.impl(LITE.spec)
    metadata = builder.build(case.common)
    rows = case.common.query_start[1:].long() - 1
    given = case.query, case.kept, case.cache
    for _ in range(2):
        everything = impl.attend_latents(*given, metadata, case.weights)
        asked = impl.attend_latents(*given, impl.for_asked_rows(metadata), case.weights)
        assert torch.equal(asked[rows], everything[rows])


def test_float32():
    case = LatentCase(ODD, BATCHES["mixed"], torch.float32, "cuda", padding=5)
    expected = case.expected()
    assert relative_error(case.run(TritonMlaBackend)[: len(expected)], expected) < 1e-4


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("budget", [4096, 640])
def test_engines_choose_the_tokens_of_the_reference(architecture, budget, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    attended = []
    attend = latent_prompts.attend

    def noted(output, *others):
        attended.append(len(output))
        return attend(output, *others)

    monkeypatch.setattr(latent_prompts, "attend", noted)
    folder = make_checkpoint(tmp_path, architecture, **(LARGER | SIZES | LONG))
    calm_weights(folder, 0.5)
    prompts = [*make_prompts(6, longest=900), *make_prompts(2, longest=3000, seed=4)]
    with make_llm(str(folder), max_num_batched_tokens=budget) as llm:
        outputs = run(llm, prompts, greedy(12))
    assert attended
    check_regrets(Reference(str(folder)), prompts, outputs, 1.0, 0.02)
