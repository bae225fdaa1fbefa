"""Quantized checkpoints on a GPU: dequantized at load, so that they choose the tokens of their dequantized weights."""

from pathlib import Path

import pytest

from tests.fakes.compressed_checkpoint import Layout, compress
from tests.gpu.engines import greedy, make_llm, make_prompts, run


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        ("LlamaForCausalLM", Layout()),
        ("Qwen3ForCausalLM", Layout(bits=8, group_size=None)),
        ("Qwen3MoeForCausalLM", Layout(ordered=True)),
    ],
)
def test_tokens_are_those_of_the_dequantized_weights(checkpoints, tmp_path, architecture, layout):
    packed, plain = compress(Path(checkpoints.path(architecture)), tmp_path, layout)
    prompts, outputs = make_prompts(8), []
    for folder in (packed, plain):
        with make_llm(str(folder)) as llm:
            outputs.append(run(llm, prompts, greedy(16)))
    assert outputs[0] == outputs[1]
