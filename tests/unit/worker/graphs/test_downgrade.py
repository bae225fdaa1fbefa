"""The closest mode that backends can run: golden."""

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.worker.graphs.downgrade import downgrade

# (wanted, cut at attention) -> for ALWAYS, UNIFORM_BATCH, UNIFORM_SINGLE_TOKEN_DECODE, NEVER
LEVELS = tuple(reversed(AttentionCGSupport))
GOLDEN = {
    ("NONE", True): ("NONE", "NONE", "NONE", "NONE"),
    ("NONE", False): ("NONE", "NONE", "NONE", "NONE"),
    ("PIECEWISE", True): ("PIECEWISE", "PIECEWISE", "PIECEWISE", "PIECEWISE"),
    ("PIECEWISE", False): ("NONE", "NONE", "NONE", "NONE"),
    ("FULL", True): ("FULL", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "PIECEWISE"),
    ("FULL", False): ("FULL", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "NONE"),
    ("FULL_DECODE_ONLY", True): ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "PIECEWISE"),
    ("FULL_DECODE_ONLY", False): ("FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "NONE"),
    ("FULL_AND_PIECEWISE", True): ("FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE", "PIECEWISE"),
    ("FULL_AND_PIECEWISE", False): ("FULL", "FULL_DECODE_ONLY", "FULL_DECODE_ONLY", "NONE"),
}

# As documented for the backends of the field.
BACKENDS = {
    "FLASH_ATTN 2": AttentionCGSupport.UNIFORM_BATCH,
    "FLASH_ATTN 3": AttentionCGSupport.ALWAYS,
    "TRITON_ATTN": AttentionCGSupport.ALWAYS,
    "ROCM_AITER_FA": AttentionCGSupport.UNIFORM_BATCH,
    "FLASHINFER": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "FLASHMLA": AttentionCGSupport.UNIFORM_BATCH,
    "FLASHINFER_MLA": AttentionCGSupport.UNIFORM_BATCH,
    "ROCM_AITER_MLA": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "CUTLASS_MLA": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "MAMBA": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    "FLEX_ATTENTION": AttentionCGSupport.NEVER,
}


@pytest.mark.parametrize("wanted, pieces", GOLDEN)
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_every_mode_on_every_level(wanted, pieces, level):
    runs, why = downgrade(GraphMode[wanted], {"B": level}, pieces=pieces)
    assert runs.value == GOLDEN[wanted, pieces][LEVELS.index(level)]
    assert bool(why) == (runs.value != wanted)


@pytest.mark.parametrize("name", BACKENDS)
def test_full_on_every_backend(name):
    level = BACKENDS[name]
    runs, why = downgrade(GraphMode.FULL, {name: level})
    expected = {3: "FULL", 2: "FULL_AND_PIECEWISE", 1: "FULL_AND_PIECEWISE", 0: "PIECEWISE"}[level]
    assert runs.value == expected
    assert (name in why) == (expected != "FULL")


@pytest.mark.parametrize("wanted", ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"))
@pytest.mark.parametrize("pieces", (True, False))
def test_drafts_need_uniform_batches(wanted, pieces):
    single, batch = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.UNIFORM_BATCH
    runs, why = downgrade(GraphMode[wanted], {"B": single}, pieces=pieces, uniform_query_len=4)
    assert runs is (GraphMode.PIECEWISE if pieces else GraphMode.NONE)
    assert "4 tokens per request" in why
    assert downgrade(GraphMode[wanted], {"B": batch}, pieces=pieces, uniform_query_len=4)[0].uses_full


def test_the_least_of_all_backends_counts_and_is_named():
    mixed = {"FLASH_ATTN": AttentionCGSupport.ALWAYS, "MAMBA": AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE}
    runs, why = downgrade(GraphMode.FULL, mixed)
    assert runs is GraphMode.FULL_AND_PIECEWISE
    assert why == "MAMBA supports full graphs for batches of one token per request only"


def test_both_reasons_are_told():
    _, why = downgrade(GraphMode.FULL_AND_PIECEWISE, {"B": AttentionCGSupport.NEVER}, pieces=False)
    assert why == "the model is not cut at attention; B supports full graphs never"


def test_a_model_without_attention_can_do_everything():
    assert downgrade(GraphMode.FULL, {}) == (GraphMode.FULL, "")
