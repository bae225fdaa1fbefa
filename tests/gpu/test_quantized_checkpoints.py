"""Quantized checkpoints on a GPU choose the tokens of their dequantized weights, up to rounding."""

from pathlib import Path

import pytest
import torch

from tests.fakes.compressed_checkpoint import Layout, compress
from tests.fakes.stored_formats import FORMATS, store, store_gpt_oss
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES
from tests.gpu.conftest import LARGER, MATRIX_SCALE, calm_weights
from tests.gpu.engines import Reference, check_regrets, greedy, make_llm, make_prompts, run


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("LlamaForCausalLM", Layout()),
        ("Qwen3ForCausalLM", Layout(bits=8, group_size=None)),
        ("Qwen3MoeForCausalLM", Layout(ordered=True)),
        ("Qwen3MoeForCausalLM", Layout()),
        ("Qwen3MoeForCausalLM", Layout(bits=8, group_size=None)),
    ],
)
def test_tokens_are_those_of_the_dequantized_weights(checkpoints, tmp_path, architecture, layout):
    packed, plain = compress(Path(checkpoints.path(architecture)), tmp_path, layout)
    prompts = make_prompts(8)
    with make_llm(str(packed)) as llm:
        outputs = run(llm, prompts, greedy(16))
    if architecture == "Qwen3MoeForCausalLM":  # another expert, where two nearly tie, changes more than rounding
        check_regrets(Reference(str(plain)), prompts, outputs, most=1.0, mean=0.02)
    else:
        Reference(str(plain)).check(prompts, outputs, "bfloat16")


NAMES = ["auto-round-gptq", "auto-round-awq", "quark-fp8", "quark-int8", "quark-mxfp4"]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_auto_round_and_quark(checkpoints, tmp_path, name):
    packed, plain = store(Path(checkpoints.path("Qwen3ForCausalLM")), tmp_path, *FORMATS[name])
    prompts = make_prompts(8)
    with make_llm(str(packed)) as llm:
        outputs = run(llm, prompts, greedy(16))
    reference = Reference(str(plain))
    if name in ("quark-fp8", "quark-int8"):  # inputs in 8 bits, too
        check_regrets(reference, prompts, outputs, most=1.5, mean=0.1)
    else:
        reference.check(prompts, outputs, "bfloat16")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("only", ["", "self_attn"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_auto_round_and_quark_with_experts(tmp_path, name, only):
    """Stored in the format, and as floats, which the configuration does not name."""
    pytest.importorskip("transformers")
    folder = make_checkpoint(tmp_path / "model", "Qwen3MoeForCausalLM", **LARGER, moe_intermediate_size=128)
    calm_weights(folder, MATRIX_SCALE)
    packed, plain = store(folder, tmp_path, *FORMATS[name], only=only)
    prompts = make_prompts(8)
    with make_llm(str(packed)) as llm:
        outputs = run(llm, prompts, greedy(16))
    in_8_bits = name in ("quark-fp8", "quark-int8")
    check_regrets(
        Reference(str(plain)), prompts, outputs, most=2.5 if in_8_bits else 1.0, mean=0.1 if in_8_bits else 0.02
    )


@pytest.fixture
def unwritten():
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("layout", [Layout(ordered=True), Layout(), Layout(bits=8, group_size=None)])
def test_memory_that_nobody_has_written_is_not_read(checkpoints, tmp_path, layout):
    """Of the first, one layer of each expert is dequantized when it is loaded, and the other in the first step."""
    packed, plain = compress(Path(checkpoints.path("Qwen3MoeForCausalLM")), tmp_path, layout)
    prompts = make_prompts(8)
    with make_llm(str(packed)) as llm:
        outputs = run(llm, prompts, greedy(16))
    check_regrets(Reference(str(plain)), prompts, outputs, most=1.0, mean=0.02)


def test_the_output_head_in_8_bits(checkpoints, tmp_path):
    """A rounded head chooses tokens that are nearly as likely."""
    packed, plain = compress(Path(checkpoints.path("LlamaForCausalLM")), tmp_path, Layout())
    prompts = make_prompts(8)
    with make_llm(str(packed), quantization="int8") as llm:
        outputs = run(llm, prompts, greedy(16))
    check_regrets(Reference(str(plain)), prompts, outputs, most=0.2, mean=0.01)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("name", ["int8", "int4", "int4_g64"])
def test_floats_that_become_integers_at_load(checkpoints, architecture, name):
    """Rounded weights choose tokens that are nearly as likely."""
    path = checkpoints.path(architecture)
    prompts = make_prompts(8)
    with make_llm(path, quantization=name) as llm:
        outputs = run(llm, prompts, greedy(16))
    most, mean = (0.5, 0.02) if name == "int8" else (3.0, 0.4)
    check_regrets(Reference(path), prompts, outputs, most=most, mean=mean)


@pytest.mark.parametrize("quantized", [False, True])
def test_experts_of_gpt_oss(tmp_path, quantized):
    """In one tensor, with biases and gates that are clamped where transformers clamps them, whatever its version."""
    architecture, changes = FAMILIES["gpt-oss"]
    sizes = {"intermediate_size": 64, "hidden_size": 128, "head_dim": 64, "swiglu_limit": 7.0}
    folder = make_checkpoint(tmp_path / "model", architecture, **(changes | sizes))
    calm_weights(folder, 1.0)
    packed, plain = store_gpt_oss(folder, tmp_path)
    prompts = make_prompts(8)
    reference = Reference(str(plain))
    for eager in (False, True):
        with make_llm(str(packed if quantized else plain), enforce_eager=eager) as llm:
            reference.check(prompts, run(llm, prompts, greedy(16)), "bfloat16")
