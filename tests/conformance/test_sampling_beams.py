"""Beam search finds the sequences that transformers finds, with its scores, and computes little more than the new
tokens. Tiny random checkpoint, float32."""

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from pagemill import LLM, BeamSearchParams, SamplingParams
from pagemill.errors import RequestError
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

PROMPTS = [[3 + (index * 37 + index**2) % 250 for index in range(size)] for size in (33, 5, 70)]
LENGTH = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, dtype="float32", cpu_threads=1, max_num_seqs=16) as found:
        yield found


def end_of(model, prompt):
    """A token that greedy text has early, so that beams end at different lengths."""
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    return int(ids[0, len(prompt) + 3])


def expected(model, prompt, ends, width, penalty):
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=LENGTH,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        output = row[len(prompt) :]
        last = next((index for index, token in enumerate(output) if token in (ends or ())), len(output) - 1)
        found.append((output[: last + 1], score))
    return found


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
@pytest.mark.parametrize("width", [1, 3, 6])
def test_sequences_and_scores_are_those_of_transformers(llm, model, width, penalty, monkeypatch):
    inputs = llm._engine._inputs
    for prompt in PROMPTS:
        for ends in ((), (end_of(model, prompt),), (end_of(model, prompt), 7)):
            monkeypatch.setattr(inputs, "_eos_token_ids", ends)
            params = BeamSearchParams(beam_width=width, max_tokens=LENGTH, length_penalty=penalty)
            (output,) = llm.beam_search([prompt], params)
            theirs = expected(model, prompt, list(ends) or None, width, penalty) if width > 1 else None
            if theirs is None:
                greedy = SamplingParams(temperature=0, max_tokens=LENGTH)
                tokens = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
                assert output.sequences[0].tokens == prompt + list(tokens)
                continue
            assert [sequence.tokens[len(prompt) :] for sequence in output.sequences] == [tokens for tokens, _ in theirs]
            assert [sequence.score for sequence in output.sequences] == pytest.approx(
                [score for _, score in theirs], abs=1e-4
            )
            reasons = {sequence.tokens[-1] in ends: sequence.finish_reason for sequence in output.sequences}
            assert reasons.items() <= {True: "stop", False: "length"}.items()


def test_prompts_side_by_side_and_their_prefixes(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=LENGTH, ignore_eos=True)
    alone = [llm.beam_search([prompt], params)[0] for prompt in PROMPTS]
    assert llm.reset_prefix_cache()
    together = llm.beam_search(PROMPTS, params)
    for one, other, prompt in zip(alone, together, PROMPTS, strict=True):
        assert [item.tokens for item in one.sequences] == [item.tokens for item in other.sequences]
        assert len(one.sequences) == 4
        assert one.sequences[0].text == llm.get_tokenizer().decode(one.sequences[0].tokens)
        assert one.sequences[0].cum_logprob == pytest.approx(one.sequences[0].score * LENGTH)
        # After the first step every beam of every step finds the full blocks of the prompt.
        blocks = (len(prompt) - 1) // 16 * 16
        assert other.num_cached_tokens >= blocks * 4 * (LENGTH - 1)


@pytest.mark.slow
def test_over_http(llm, checkpoint):
    (found,) = llm.beam_search("abcdefghijklmnopqrstuvwxyz", BeamSearchParams(beam_width=3, max_tokens=8))
    texts = [llm.get_tokenizer().decode(sequence.tokens[26:]) for sequence in found.sequences]
    body = {"use_beam_search": True, "n": 3, "max_tokens": 8}
    with running_server(checkpoint, "--dtype", "float32", "--cpu-threads", "1") as server:
        prompts = {"prompt": ["abcdefghijklmnopqrstuvwxyz"] * 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body | prompts, timeout=300).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert [choice["text"] for choice in answer["choices"]] == texts * 2
        assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
        assert answer["usage"]["completion_tokens"] == 2 * sum(len(item.tokens) - 26 for item in found.sequences)
        assert answer["usage"]["prompt_tokens"] == 52
        chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body | chat, timeout=300).json()
        assert [choice["message"]["role"] for choice in answer["choices"]] == ["assistant"] * 3
        answer = httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": "a", "n": 40}, timeout=300)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert "--max-logprobs 41" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 40}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": 10**5000}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 1e9}, "length_penalty"),
    ],
)
def test_bad_values(llm, fields, field):
    with pytest.raises(RequestError, match=field) as caught:
        llm.beam_search([PROMPTS[0]], BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields)))
    assert caught.value.field == field
