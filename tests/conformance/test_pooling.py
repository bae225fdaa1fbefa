"""Vectors of every architecture against transformers' last hidden states, on a tiny random checkpoint."""

import json

import pytest
import torch

from pagemill import LLM, PoolingParams
from tests.fakes.tiny_checkpoint import PLANNABLE, SPECIFIC, make_checkpoint

PROMPTS = [[3 + (index * 37 + index**2) % 250 for index in range(size)] for size in (90, 1, 200, 33, 200)]
POOLED = {"LAST": lambda rows: rows[-1], "CLS": lambda rows: rows[0], "MEAN": lambda rows: rows.mean(0)}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def hidden_states(folder):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def check(folder, tolerance, **settings):
    theirs = hidden_states(folder)
    given = {"runner": "pooling", "max_num_batched_tokens": 64, "max_num_seqs": 3} | settings
    with LLM(str(folder), **given) as llm:
        for kind, pooled in POOLED.items():
            outputs = llm.encode(PROMPTS, PoolingParams(pooling_type=kind, normalize=False), use_tqdm=False)
            for output, rows in zip(outputs, theirs, strict=True):
                wanted = pooled(rows)
                assert (torch.from_numpy(output.outputs.data) - wanted).abs().max() < tolerance * wanted.abs().max()
        assert outputs[-1].num_cached_tokens == 0
        (output,) = llm.embed(PROMPTS[2], use_tqdm=False, pooling_params=PoolingParams(dimensions=16))
        short = theirs[2][-1][:16]
        assert output.num_cached_tokens > 0
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), short / short.norm(), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("architecture", SPECIFIC)
def test_vectors_equal_the_reference(tmp_path, architecture):
    check(make_checkpoint(tmp_path, architecture), 1e-3, dtype="float32")


@pytest.mark.parametrize("architecture", PLANNABLE[:1])
def test_vectors_of_a_native_plan(tmp_path, architecture):
    check(make_checkpoint(tmp_path, architecture), 0.1, dtype="bfloat16")


@pytest.mark.parametrize("parts", [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_vectors_of_a_model_in_parts(tmp_path, parts):
    check(make_checkpoint(tmp_path, "LlamaForCausalLM"), 1e-3, dtype="float32", **parts)


def test_a_folder_of_sentence_transformers_without_a_head(tmp_path):
    """It says by itself what it is for."""
    from transformers import AutoModel

    make_checkpoint(tmp_path / "whole", "Qwen3ForCausalLM")
    folder = make_checkpoint(tmp_path / "headless", "Qwen3ForCausalLM")
    AutoModel.from_pretrained(tmp_path / "whole", dtype=torch.float32).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    (folder / "modules.json").write_text(json.dumps([{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "p"}]))
    (folder / "p").mkdir()
    (folder / "p" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    theirs = hidden_states(folder)
    with LLM(str(folder), dtype="float32") as llm:
        for output, rows in zip(llm.embed(PROMPTS, use_tqdm=False), theirs, strict=True):
            torch.testing.assert_close(torch.from_numpy(output.outputs.data), rows.mean(0), atol=1e-4, rtol=1e-3)
        with pytest.raises(ValueError, match="makes embeddings and generates no text"):
            llm.generate("x", use_tqdm=False)
