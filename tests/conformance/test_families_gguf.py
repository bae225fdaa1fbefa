"""Families from GGUF files: names by llama.cpp's own table, values as its converter changes them, logits as of the
checkpoint that the file was made of."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.artifacts import gguf_families
from pagemill.artifacts.gguf_file import read_gguf
from pagemill.errors import ModelError
from tests.conformance.test_families import replays
from tests.fakes.engine_setup import core_request
from tests.fakes.gguf_convert import convert
from tests.fakes.paged import PagedModel
from tests.fakes.ranks import record, run_ranks
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.fakes.tiny_families import FAMILIES, YARN
from tests.fakes.tiny_states import STATES

TOKENS = list(range(3, 60))
ALL = FAMILIES | STATES
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {}),
    "chatglm": ("glm", {}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4, "layer_types": None}),
    "command-r": ("cohere", {}),
    "deepseek2": ("DeepseekV3ForCausalLM", {
        "num_hidden_layers": 2, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek2-v2": ("DeepseekV2ForCausalLM", {"num_hidden_layers": 2, "norm_topk_prob": False}),
    "exaone4": ("exaone4", {}),
    "exaone4-full": ("exaone4-full", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "falcon": ("falcon-7b", {}),
    "falcon-11b": ("falcon-11b", {}),
    "falcon-40b": ("falcon-40b", {"ffn_hidden_size": 256}),
    "falcon-h1": ("falcon-h1", {}),
    "falcon-h1-gate-first": ("falcon-h1-gate-first", {"mamba_proj_bias": False}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3n": ("gemma3n", {"vocab_size_per_layer_input": 320}),
    "gemma4": ("gemma4", {}),
    "gemma4-experts": ("gemma4-experts", {}),
    "glm4": ("glm4", {}),
    "glm4moe": ("glm4-moe", {}),
    "gpt-oss": ("gpt-oss", {"swiglu_limit": 7.0}),
    "gpt2": ("gpt2", {"n_inner": 96}),
    "gptneox": ("GPTNeoXForCausalLM", {"num_hidden_layers": 2}),
    "granite": ("granite", {}),
    "granitehybrid": ("granite-hybrid", {}),
    "granitehybrid-bamba": ("bamba", {}),
    "granitehybrid-experts": ("granite-hybrid-experts", {}),
    "granitemoe": ("granite-moe", {}),
    "granitemoe-shared": ("granite-moe-shared", {}),
    "jamba": ("jamba", {}),
    "llama": ("MixtralForCausalLM", {"num_hidden_layers": 2}),
    "llama4": ("llama4", {
        "num_hidden_layers": 4, "num_local_experts": 16, "attention_chunk_size": 8192, "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 8192, "moe_layers": [1, 3]}),
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "olmo2": ("olmo2", {}),
    "olmo2-window": ("olmo3-yarn", {}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "phi2": ("phi", {}),
    "phi3": ("phi3-window", {}),
    "qwen2moe": ("qwen2-moe", {"norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 2, "mlp_only_layers": []}),
    "qwen3next": ("qwen3-next", {"mlp_only_layers": []}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
    "stablelm": ("stablelm", {}),
    "stablelm-12b": ("stablelm-12b", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
}  # fmt: skip
"""GGUF's name of a family, or that and a variant -> a tiny model, and what differs, for files do not say it."""


VARIANTS = ("2", "11b", "12b", "40b", "bamba", "experts", "full", "gate-first", "shared", "v2", "window")


def gguf_name(case: str) -> str:
    """A family's name without its variant."""
    return next((case.removesuffix(f"-{variant}") for variant in VARIANTS if case.endswith(f"-{variant}")), case)


def make(tmp_path: Path, case: str) -> Path:
    """The tiny checkpoint of a case."""
    model, changes = CASES[case]
    architecture, fields = ALL.get(model, (model, {}))
    return make_checkpoint(tmp_path / "model", architecture, **{**fields, **changes})


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_file_is_the_checkpoint_that_it_was_made_of(tmp_path: Path, case: str) -> None:
    folder = make(tmp_path, case)
    path = convert(folder, tmp_path / "m.gguf", gguf_name(case))
    wanted = PagedModel.load(folder).logits(TOKENS)
    torch.testing.assert_close(PagedModel.load(path).logits(TOKENS), wanted, rtol=1e-4, atol=1e-4)


QUANTIZED = ("falcon-40b", "llama", "deepseek2", "gemma3n", "gemma4", "granitehybrid-experts", "qwen3next")


@pytest.mark.parametrize("case", QUANTIZED)
def test_blocks_are_what_they_are_dequantized(tmp_path: Path, case: str) -> None:
    """In bfloat16 most matrices stay blocks of integers, whose rows have changed places."""
    path = convert(make(tmp_path, case), tmp_path / "m.gguf", gguf_name(case), "Q8_0")
    wanted = PagedModel.load(path).logits(TOKENS)
    found = PagedModel.load(path, "bfloat16").logits(TOKENS).float()
    similar = torch.nn.functional.cosine_similarity(found, wanted, dim=-1)
    assert similar.median() > 0.99, similar  # of experts that are nearly as good, bfloat16 may choose the other


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_that_are_not_stacked_are_those_that_are(tmp_path: Path, kind: str) -> None:
    """Files of Mixtral from before experts were stacked."""
    folder = make(tmp_path, "llama")
    stacked, numbered = (
        PagedModel.load(convert(folder, tmp_path / f"{stacks}.gguf", "llama", kind, stacks=stacks)).logits(TOKENS)
        for stacks in (True, False)
    )
    assert torch.equal(stacked, numbered)


def test_two_tensor_parallel_ranks_equal_one(tmp_path: Path) -> None:
    """Tensors of which a rank reads a part, and those that are made whole first, of floats and of blocks."""
    recordings = {}
    for case in ("falcon-40b", "llama", "gpt-oss", "stablelm-12b", "gptneox", "chatglm"):
        (tmp_path / case).mkdir()
        path = convert(make(tmp_path / case, case), tmp_path / case / "m.gguf", gguf_name(case), "Q8_0")
        recordings[case] = record(path, [core_request("r", TOKENS[:20], max_tokens=4, temperature=0.0)])
    for result in run_ranks(2, tmp_path, replays, recordings, tmp_path):
        for case, recording in recordings.items():
            for ours, expected in zip(result[case].logits, recording.logits, strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path, "deepseek2")
    path = convert(folder, tmp_path / "m.gguf", "deepseek2")
    tensors = dict(read_gguf(path).tensors)
    del tensors["blk.0.attn_v_b.weight"]
    with pytest.raises(ModelError, match=r"blk.0.attn_k_b.weight lacks its other part 'attn_v_b.weight'"):
        list(gguf_families.FAMILIES["deepseek2"].pieces(tensors, 1))
