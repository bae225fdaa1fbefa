"""Heads and draft models on a real GPU change no text, whatever they guess: chains, all tokens in one pass, blocks,
heads of one hidden state; in graphs and without, of many requests, chunks and a crowded cache."""

import pytest

from pagemill.config.graph_mode import GraphMode
from pagemill.worker.forward.drafted_steps import DraftedSteps
from pagemill.worker.forward.guess_graphs import GuessGraphs
from pagemill.worker.spec_decode.block_heads import BlockHeadProposer
from pagemill.worker.spec_decode.draft_model import DraftModelProposer
from pagemill.worker.spec_decode.heads import HeadProposer
from pagemill.worker.spec_decode.parallel_heads import ParallelHeadProposer
from pagemill.worker.spec_decode.row_heads import RowHeadsProposer
from tests.fakes.noted_guesses import note_guesses, note_modes
from tests.fakes.tiny_block_heads import make_block_head
from tests.fakes.tiny_heads import make_head
from tests.fakes.tiny_parallel_heads import make_parallel_head
from tests.fakes.tiny_row_heads import make_medusa
from tests.gpu.conftest import LARGER
from tests.gpu.engines import KV_BYTES, graph_settings, greedy, make_llm, make_prompts, run, sampled, share_equal

LLAMA = "LlamaForCausalLM"
NUM_DRAFTS = 4
MODES = ("eager", "FULL_AND_PIECEWISE")
TIES = {"float32": 0.9, "bfloat16": 0.6}
"""Share of requests that must be identical: rows that are verified together are summed by other kernels."""
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
KINDS = {
    "eagle3": lambda folder: make_head(folder, "eagle3", draft_vocab_size=100, **LARGER),
    "eagle": lambda folder: make_head(folder, "eagle", **LARGER),
    "peagle": lambda folder: make_parallel_head(folder, draft_vocab_size=100, **LARGER),
    "dflash": lambda folder: make_block_head(folder, **LARGER),
    "dflash with a window": lambda folder: make_block_head(folder, **LARGER, **WINDOWS),
    "medusa": lambda folder: make_medusa(folder, size=LARGER["hidden_size"], num_heads=NUM_DRAFTS),
}
DRAFT_MODEL = "draft model"
PROPOSERS = {
    "eagle3": HeadProposer,
    "peagle": ParallelHeadProposer,
    "dflash": BlockHeadProposer,
    "dflash with a window": BlockHeadProposer,
    "medusa": RowHeadsProposer,
    DRAFT_MODEL: DraftModelProposer,
}


def mixed_params(count, num_tokens=24):
    return [sampled(num_tokens, 1000 + index) if index % 2 else greedy(num_tokens) for index in range(count)]


@pytest.fixture(scope="module")
def plain_texts(checkpoints):
    """48 requests without drafts, by type."""
    found = {}

    def texts(dtype):
        if dtype not in found:
            with make_llm(checkpoints.path(LLAMA), dtype=dtype) as llm:
                found[dtype] = run(llm, make_prompts(48), mixed_params(48))
        return found[dtype]

    return texts


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    made = {}

    def head(kind):
        if kind not in made:
            made[kind] = str(KINDS[kind](tmp_path_factory.mktemp("head")))
        return made[kind]

    return head


def asked(model, **fields):
    """Settings by which it proposes."""
    return {"speculative_config": {"model": model, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False} | fields}


def counts(llm):
    return llm._engine._client.stats()[0].drafts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_without_a_head(checkpoints, plain_texts, heads, kind, mode, dtype):
    prompts = make_prompts(48)
    settings = {"dtype": dtype, **graph_settings(mode), **asked(heads(kind))}
    with make_llm(checkpoints.path(LLAMA), **settings) as llm:
        tokens = run(llm, prompts, mixed_params(48))
        again = run(llm, prompts[:8], mixed_params(48)[:8])
        assert counts(llm).num_draft_tokens > 1000
    checkpoints.reference(LLAMA).check(prompts[::2], tokens[::2], dtype)
    assert share_equal(tokens, plain_texts(dtype)) >= TIES[dtype]
    assert share_equal(again, tokens[:8]) >= TIES[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_a_crowded_cache(checkpoints, heads, kind):
    prompts = make_prompts(24, longest=400, seed=3)
    settings = {
        "dtype": "float32",
        "max_num_batched_tokens": 128,
        "max_model_len": 448,
        "kv_cache_memory_bytes": KV_BYTES // 16,
    }
    with make_llm(checkpoints.path(LLAMA), **settings, **asked(heads(kind))) as llm:
        tokens = run(llm, prompts, greedy(32))
    checkpoints.reference(LLAMA).check(prompts, tokens, "float32")


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_guesses_for_itself_is_right(checkpoints, plain_texts, mode):
    path = checkpoints.path(LLAMA)
    settings = {"dtype": "float32", **graph_settings(mode), **asked(path, method="draft_model")}
    with make_llm(path, **settings) as llm:
        tokens = run(llm, make_prompts(48)[::2], greedy(24))
        found = counts(llm)
    assert share_equal(tokens, plain_texts("float32")[::2]) >= TIES["float32"]
    assert found.num_accepted_tokens > 0.9 * found.num_draft_tokens > 300


@pytest.mark.parametrize("kind", PROPOSERS)
def test_guesses_in_graphs_are_those_without(monkeypatch, checkpoints, heads, kind):
    path = checkpoints.path(LLAMA)
    given = asked(path, method="draft_model") if kind == DRAFT_MODEL else asked(heads(kind))
    noted = []
    note_guesses(monkeypatch, PROPOSERS[kind], lambda text, drafts: noted.append((tuple(text), drafts)))
    modes = note_modes(monkeypatch)
    with make_llm(path, dtype="float32", **graph_settings("FULL_AND_PIECEWISE"), **given) as llm:
        modes.clear()
        run(llm, make_prompts(6), greedy(16))
        ran = set(modes)
        captured = {text: drafts for text, drafts in noted if drafts}
        noted.clear()
        monkeypatch.setattr(GuessGraphs, "_mode", lambda graphs, count: GraphMode.NONE)
        monkeypatch.setattr(DraftedSteps, "guess", lambda steps, batch: None)
        run(llm, make_prompts(6), greedy(16))
    launched = {text: drafts for text, drafts in noted if drafts}
    both = captured.keys() & launched.keys()
    assert len(both) > 20
    assert sum(captured[text] == launched[text] for text in both) >= TIES["float32"] * len(both)
    assert ran >= {(step, GraphMode.FULL) for step in (("both",) if kind == "medusa" else ("both", "follow", "guess"))}


@pytest.mark.parametrize("mode", MODES)
def test_rejection_sampling_keeps_greedy_text(checkpoints, plain_texts, heads, mode):
    given = asked(heads("eagle3"), rejection_sample_method="standard")
    with make_llm(checkpoints.path(LLAMA), dtype="float32", **graph_settings(mode), **given) as llm:
        tokens = run(llm, make_prompts(48), mixed_params(48))
        assert counts(llm).num_draft_tokens > 1000
    assert share_equal(tokens[::2], plain_texts("float32")[::2]) >= TIES["float32"]
    assert all(len(text) == 24 for text in tokens)
