"""Log-probabilities of `LLM` next to transformers: of samples and of prompts, however they are computed, of
tiny checkpoints and of the embedded model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagemill import LLM, SamplingParams
from pagemill.errors import RequestError
from pagemill.messages.outputs import Logprob, RequestOutput
from pagemill.tokenizers.load import load_tokenizer
from tests.conformance.prompts import PROMPTS
from tests.conformance.reference import load_gguf_reference
from tests.fakes.tiny_checkpoint import VOCAB_SIZE, make_checkpoint

SHARED = list(range(20, 61))
IDS = [SHARED, [5], SHARED[:37], list(range(100, 113)), [*SHARED, 7, 8]]
ASKED = SamplingParams(max_tokens=6, temperature=0.8, seed=1, logprobs=3, prompt_logprobs=2)
CLOSE = 1e-3
"""Of float32 sums in another order."""
ROUNDED = 0.5
"""Of bfloat16, whose logits of 16 and more are multiples of 1/8: enough to tell a wrong row or token."""
Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "Qwen3ForCausalLM")


class Reference:
    """transformers' model. What it says of a sequence is computed once, by one thread: several wait for each other on a
    machine that does much else."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: dict[tuple[int, ...], Rows] = {}

    def logits(self, token_ids: list[int]) -> Rows:
        """[T, V] of the token after each."""
        name = tuple(token_ids)
        if name not in self._rows:
            num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
            with torch.inference_mode():
                self._rows[name] = self._model(torch.tensor([token_ids])).logits[0].float().numpy()
            torch.set_num_threads(num_threads)
        return self._rows[name]

    def log_softmax(self, token_ids: list[int]) -> Rows:
        """The same as log-probabilities."""
        rows: Rows = torch.from_numpy(self.logits(token_ids)).log_softmax(-1).numpy()
        return rows


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    from transformers import AutoModelForCausalLM

    return Reference(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def embedded_reference(smollm2_path: Path) -> Reference:
    return Reference(load_gguf_reference(smollm2_path))


def open_llm(checkpoint: Path, **settings: Any) -> LLM:
    given = {"dtype": "float32", "max_model_len": 96, "num_gpu_blocks_override": 60, "skip_tokenizer_init": True}
    return LLM(str(checkpoint), **(given | settings))


def run(llm: LLM, prompts: Sequence[list[int]], params: SamplingParams = ASKED) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def check_row(found: dict[int, Logprob], token: int, row: Rows, num_likeliest: int, close: float = CLOSE) -> None:
    assert next(iter(found)) == token
    assert len(found) in (num_likeliest, num_likeliest + 1)
    for name, item in found.items():
        assert abs(item.logprob - row[name]) < close
        assert item.rank is not None
        lower, upper = (row > row[name] + close).sum(), (row > row[name] - close).sum()
        assert lower <= item.rank - 1 <= upper
    likeliest = sorted((item.logprob for item in found.values()), reverse=True)[:num_likeliest]
    np.testing.assert_allclose(likeliest, np.sort(row)[::-1][:num_likeliest], atol=close)


def check(reference: Reference, output: RequestOutput, close: float = CLOSE) -> None:
    """An output that was asked for with ASKED."""
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for completion in output.outputs:
        rows = reference.log_softmax(prompt + completion.token_ids)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        for place, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            check_row(found, token, rows[len(prompt) - 1 + place], 3, close)
        total = sum(
            found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
        for place, (token, row) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True)):
            assert row is not None
            check_row(row, token, rows[place], 2, close)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("budget", [16, 96])
@pytest.mark.parametrize("caching", [True, False])
def test_cached_or_not_in_chunks_or_whole_alone_or_together(
    checkpoint: Path, reference: Reference, caching: bool, budget: int, together: bool
) -> None:
    with open_llm(checkpoint, enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=5) as llm:
        outputs = run(llm, IDS) if together else [run(llm, [ids])[0] for ids in IDS]
        again = run(llm, IDS)
    for output in [*outputs, *again]:
        check(reference, output)
        assert output.num_cached_tokens == 0


def test_several_completions_of_a_prompt(checkpoint: Path, reference: Reference) -> None:
    with open_llm(checkpoint) as llm:
        (output,) = run(llm, [SHARED], ASKED.replace(n=3))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    check(reference, output)


def test_preempted_requests(checkpoint: Path, reference: Reference) -> None:
    with open_llm(checkpoint, num_gpu_blocks_override=8, max_model_len=80, disable_log_stats=False) as llm:
        outputs = run(llm, [ids[:30] for ids in IDS], ASKED.replace(max_tokens=30, ignore_eos=True))
        preemptions = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"]
    assert preemptions[0] > 0
    for output in outputs:
        check(reference, output)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_four_modes(checkpoint: Path, reference: Reference, mode: str) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.5, top_k=5, seed=3, logit_bias={7: 3.0}, logprobs=5)
    with open_llm(checkpoint, logprobs_mode=mode) as llm:
        (only,) = run(llm, [SHARED], params)[0].outputs
    logits = reference.logits(SHARED + only.token_ids)
    assert only.logprobs is not None
    for place, found in enumerate(only.logprobs):
        row = logits[len(SHARED) - 1 + place].copy()
        if mode.startswith("processed"):
            row[7] += 3.0
            row = row / 0.5
            row[row < np.sort(row)[-5]] = -np.inf
        if mode.endswith("logprobs"):
            row = row - row.max() - np.log(np.exp(row - row.max()).sum())
        for token, item in found.items():
            assert item.logprob == pytest.approx(row[token], abs=2 * CLOSE)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs", "processed_logits"])
def test_modes_are_the_same_cached_or_not_in_chunks_or_whole_alone_or_together(checkpoint: Path, mode: str) -> None:
    params = ASKED.replace(top_k=9, logit_bias={7: 3.0}, repetition_penalty=1.2)
    expected: list[list[Any]] | None = None
    for caching, budget in ((False, 96), (True, 16)):
        settings = {"enable_prefix_caching": caching, "max_num_batched_tokens": budget, "max_num_seqs": 5}
        with open_llm(checkpoint, logprobs_mode=mode, **settings) as llm:
            for outputs in ([run(llm, [ids], params)[0] for ids in IDS], run(llm, IDS, params)):
                found = [values_of(output) for output in outputs]
                expected = expected or found
                for one, other in zip(found, expected, strict=True):
                    assert [token for token, _ in one] == [token for token, _ in other]
                    assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=CLOSE)


def values_of(output: RequestOutput) -> list[tuple[int, float]]:
    """The tokens of an answer with their own values: those of the prompt, then those that were drawn."""
    (completion,) = output.outputs
    rows = [*zip(output.prompt_token_ids[1:], (output.prompt_logprobs or ())[1:], strict=True)]
    rows += zip(completion.token_ids, completion.logprobs or (), strict=True)
    return [(token, row[token].logprob) for token, row in rows if row is not None]


def test_named_tokens_all_tokens_and_no_tokens(checkpoint: Path, reference: Reference) -> None:
    with open_llm(checkpoint, max_logprobs=-1) as llm:
        named = run(llm, [SHARED], SamplingParams(max_tokens=2, temperature=0, logprob_token_ids=[9, 3]))[0]
        every = run(llm, [SHARED], SamplingParams(max_tokens=1, temperature=0, logprobs=-1))[0]
        nothing = run(llm, [SHARED], ASKED.replace(max_tokens=0))[0]
    rows = reference.log_softmax(SHARED + named.outputs[0].token_ids)
    for place, (token, found) in enumerate(
        zip(named.outputs[0].token_ids, named.outputs[0].logprobs or (), strict=True)
    ):
        assert list(found) == list(dict.fromkeys([token, 9, 3]))
        for name, item in found.items():
            assert item.logprob == pytest.approx(rows[len(SHARED) - 1 + place, name], abs=CLOSE)
    assert every.outputs[0].logprobs is not None
    assert set(every.outputs[0].logprobs[0]) == set(range(VOCAB_SIZE))
    assert nothing.outputs[0].token_ids == []
    assert nothing.outputs[0].finish_reason == "length"
    check(reference, nothing)


def test_more_than_the_server_allows(checkpoint: Path) -> None:
    with open_llm(checkpoint, max_logprobs=4) as llm:
        for field, value in (("logprobs", 5), ("logprobs", -1), ("prompt_logprobs", 5), ("logprob_token_ids", [1] * 5)):
            with pytest.raises(RequestError, match=field) as caught:
                run(llm, [SHARED], SamplingParams(**{field: value}))
            assert caught.value.field == field


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedded_model(smollm2_path: Path, embedded_reference: Reference, dtype: str) -> None:
    """In bfloat16 decode steps are native calls; values are those of float32 within what bfloat16 rounds."""
    tokenizer = load_tokenizer(smollm2_path)
    params = ASKED.replace(max_tokens=8, temperature=0)
    with LLM(str(smollm2_path), dtype=dtype, max_model_len=256, max_num_seqs=4) as llm:
        prompts = [tokenizer.encode(prompt)[:24] for prompt in PROMPTS[:3]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        if dtype == "float32":
            check(embedded_reference, output, 5e-3)
            continue
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        rows = embedded_reference.log_softmax(prompt + completion.token_ids)
        assert completion.logprobs is not None
        own = [found[token] for token, found in zip(completion.token_ids, completion.logprobs, strict=True)]
        assert {item.rank for item in own} == {1}, "greedy"
        theirs = [rows[len(prompt) - 1 + place, token] for place, token in enumerate(completion.token_ids)]
        np.testing.assert_allclose([item.logprob for item in own], theirs, atol=ROUNDED)
