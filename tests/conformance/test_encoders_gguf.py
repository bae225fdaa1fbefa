"""Encoders from GGUF files, against transformers on the checkpoints that they were made of, in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagemill import LLM, PoolingParams
from tests.conformance.test_encoders import PROMPTS, close, hidden_states
from tests.fakes.gguf_convert import convert
from tests.fakes.tiny_encoders import make_encoder

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "roberta": ("RobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
}


def encoded(path: Path, params: PoolingParams, dtype: str = "float32") -> list[Any]:
    with LLM(str(path), dtype=dtype, max_num_seqs=4, skip_tokenizer_init=True) as llm:
        return [output.outputs.data for output in llm.encode(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_the_reference(tmp_path: Path, case: str) -> None:
    architecture, changes = CASES[case]
    theirs = hidden_states(make_encoder(tmp_path / "model", architecture, **changes))
    path = convert(tmp_path / "model", tmp_path / "m.gguf", "bert")
    for ours, rows in zip(encoded(path, PoolingParams(pooling_type="ALL", normalize=False)), theirs, strict=True):
        close(ours, rows)
    for ours, rows in zip(encoded(path, PoolingParams(normalize=False)), theirs, strict=True):
        close(ours, rows.mean(0))  # as the file says


def test_vectors_of_blocks_are_nearly_those_of_floats(tmp_path: Path) -> None:
    theirs = hidden_states(make_encoder(tmp_path / "model", "BertModel"))
    path = convert(tmp_path / "model", tmp_path / "m.gguf", "bert", "Q8_0")
    for ours, rows in zip(encoded(path, PoolingParams(), "bfloat16"), theirs, strict=True):
        vector = rows.mean(0).numpy()
        assert np.dot(np.asarray(ours), vector / np.linalg.norm(vector)) > 0.999
