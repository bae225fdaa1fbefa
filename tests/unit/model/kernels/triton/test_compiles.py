"""The compiler takes the kernels, not only the interpreter; needs no GPU."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[5]
KERNELS = {
    "_attention_inputs", "_combine", "_down", "_down_one_sum", "_early", "_end_verification", "_few", "_floats",
    "_gate_up", "_gate_up_one_sum", "_gated", "_gated_many", "_gather_pair", "_gemv", "_group_stats", "_keep_guesses",
    "_many", "_mask", "_merge", "_packed_experts", "_packed_gemv", "_packed_layer", "_packed_rows", "_quantize",
    "_rms_norm", "_rotate", "_route", "_sample", "_scan", "_skinny", "_sort", "attend_decoding", "attend_expanded",
    "attend_few_decoding", "attend_prompts", "attend_to_expanded", "attend_to_prompts", "finish_wide", "gather_latents",
    "merge_splits", "paged_attention", "place_bracket", "plan_items", "plan_last_tiles", "plan_prompts", "plan_tiles",
    "scan_parts", "sort_prompts", "write_cache",
}  # fmt: skip


PARTS = (
    ["linears", "layers", "invariant_attention", "prompts", "latent_prompts"],
    [
        "one_sum",
        "integers",
        "rows",
        "eight_bits",
        "attention_inputs",
        "experts",
        "packed_experts",
        "sampling",
        "around_steps",
        "attention",
    ],
)
"""Compiled by a process each, at the same time: about the same work."""


@pytest.mark.nightly
def test_the_kernels_compile_for_hopper(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}

    def compiled(parts: list[str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.unit.model.kernels.triton.compile_all", *parts]
        return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)

    with ThreadPoolExecutor(len(PARTS)) as pool:
        results = list(pool.map(compiled, PARTS))
    assert [result.returncode for result in results] == [0] * len(PARTS), [result.stderr[-3000:] for result in results]
    assert {name for result in results for name in result.stdout.split()} == KERNELS
