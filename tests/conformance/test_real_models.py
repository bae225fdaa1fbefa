"""Real models against transformers on the same dequantized float32 weights.

Five prompts of SmolLM2 run in `make test`; all fifty, and Gemma-3-270M past its sliding window, in `make conformance`.
"""

import random
from pathlib import Path

import pytest
import torch

from pagemill import LLM, SamplingParams
from pagemill.tokenizers.load import load_tokenizer
from tests.conformance.fetch_gemma import gemma_path as gemma3_path
from tests.conformance.prompts import PROMPTS
from tests.conformance.reference import TIE_GAP, compare_greedy, load_gguf_reference
from tests.fakes.paged import PagedModel

pytestmark = pytest.mark.model

NUM_TOKENS = 64
ALICE = Path(__file__).parents[2] / "benchmarks" / "texts" / "alice.txt"


def greedy(path: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(str(path), dtype="float32", max_num_seqs=16) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def check_continuations(path: Path, prompts: list[list[int]], allowed: int, num_tokens: int = NUM_TOKENS) -> None:
    """At most `allowed` continuations differ, and each difference is a logit tie; prints every difference."""
    model = load_gguf_reference(path)
    differences = []
    for prompt, ours in zip(prompts, greedy(path, prompts, num_tokens), strict=True):
        difference = compare_greedy(model, prompt, ours)
        if difference is not None:
            differences.append(difference)
            print(f"prompt of {len(prompt)} tokens differs: {difference}")
    print(f"{len(prompts) - len(differences)} of {len(prompts)} continuations of {num_tokens} tokens are identical")
    assert len(differences) <= allowed
    assert all(difference.gap < TIE_GAP for difference in differences)


def check_logits(path: Path, prompt: list[int]) -> None:
    """Logits at every position within 1e-3 of the reference, relative to the largest."""
    ours = PagedModel.load(path, dtype="float32").logits(prompt)
    with torch.inference_mode():
        theirs = load_gguf_reference(path)(torch.tensor([prompt])).logits[0]
    error = (ours - theirs).abs().max() / theirs.abs().max()
    print(f"largest relative logit error over {len(prompt)} tokens: {error:.1e}")
    assert error < 1e-3


def encode_all(path: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(path)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


def test_smollm2_five_prompts(smollm2_path):
    check_continuations(smollm2_path, encode_all(smollm2_path)[:5], allowed=0)


def test_smollm2_logits(smollm2_path):
    check_logits(smollm2_path, encode_all(smollm2_path)[3])


def test_smollm2_reads_as_well_from_a_cache_of_integers(smollm2_path):
    """Perplexity of a page of prose within 1% of a cache of bfloat16."""
    token_ids = load_tokenizer(smollm2_path).encode(ALICE.read_text())[:1024]
    losses = []
    for kv_cache_dtype in ("auto", "int8"):
        model = PagedModel.load(smollm2_path, "bfloat16", kv_cache_dtype=kv_cache_dtype)
        scores = model.logits(token_ids)[:-1].float()
        losses.append(torch.nn.functional.cross_entropy(scores, torch.tensor(token_ids[1:])))
    assert losses[0] != losses[1]
    assert abs((losses[1] - losses[0]).expm1()) < 0.01


@pytest.mark.conformance
def test_smollm2_fifty_prompts(smollm2_path):
    check_continuations(smollm2_path, encode_all(smollm2_path), allowed=2)


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    path = gemma3_path()
    if not path.exists():
        pytest.skip("Gemma-3-270M is not cached; `make conformance` fetches it")
    return path


def long_prompts(path: Path, count: int, num_tokens: int) -> list[list[int]]:
    """Prompts of text, longer than the sliding window: the short prompts in random orders, repeated."""
    rng = random.Random(0)
    pieces = encode_all(path)
    prompts = []
    for _ in range(count):
        prompt: list[int] = []
        while len(prompt) < num_tokens:
            prompt += rng.choice(pieces)
        prompts.append(prompt[:num_tokens])
    return prompts


@pytest.mark.conformance
def test_gemma3_past_its_window(gemma_path):
    check_continuations(gemma_path, long_prompts(gemma_path, 4, 1600), allowed=0, num_tokens=32)


@pytest.mark.conformance
def test_gemma3_fifty_prompts(gemma_path):
    check_continuations(gemma_path, encode_all(gemma_path), allowed=2)


@pytest.mark.conformance
def test_gemma3_logits_past_its_window(gemma_path):
    check_logits(gemma_path, long_prompts(gemma_path, 1, 1500)[0])
