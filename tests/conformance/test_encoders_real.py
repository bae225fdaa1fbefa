"""all-MiniLM-L6-v2 against transformers: the mean of the last hidden states, scaled to length 1, as it is published."""

import numpy as np
import pytest
import torch

from pagemill import LLM
from tests.conformance.fetch_minilm import minilm_path

pytestmark = [pytest.mark.model, pytest.mark.conformance]

TEXTS = [
    "The sea is calm.",
    "The ocean lies still.",
    "word " * 120,
    "A.",
    "Gödel, Escher, Bach: an eternal golden braid",
]


@pytest.fixture(scope="module")
def reference():
    from tokenizers import Tokenizer
    from transformers import BertModel

    tokenizer = Tokenizer.from_file(str(minilm_path() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    model = BertModel.from_pretrained(minilm_path(), dtype=torch.float32).eval()
    vectors = []
    with torch.inference_mode():
        for text in TEXTS:
            rows = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
            vectors.append((rows.mean(0) / rows.mean(0).norm()).numpy())
    return vectors


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-2)])
def test_minilm_makes_the_published_vectors(reference, dtype, tolerance):
    with LLM(str(minilm_path()), dtype=dtype) as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
    error = max(float(np.abs(np.asarray(ours) - theirs).max()) for ours, theirs in zip(found, reference, strict=True))
    print(f"{dtype}: largest difference of a component {error:.1e}")
    assert error < tolerance
    calm = np.asarray(found[0])
    still = np.asarray(found[1])
    assert float(calm @ still) > float(calm @ np.asarray(found[4])) + 0.3, "what means the same is closer"
