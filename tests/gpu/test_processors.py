"""Logits processors on a real GPU: nothing waits for the device, other requests are not touched, and greedy text is
what transformers would choose from logits that its own processors changed."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from pagemill import SamplingParams
from pagemill.worker.sampling.sampler import Sampler
from tests.gpu.engines import MAX_REGRET, graph_settings, make_llm, make_prompts

LLAMA = "LlamaForCausalLM"
LENGTH = 48
PLAIN = {"max_tokens": LENGTH, "ignore_eos": True}
EVERYTHING = {
    "temperature": 0.8,
    "seed": 3,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "logit_bias": {7: 2.0},
    "bad_words_token_ids": [[5], [8, 9]],
    "allowed_token_ids": list(range(200)),
    "min_tokens": 20,
    "stop_token_ids": [11],
}


@pytest.fixture
def strict(monkeypatch):
    """Whatever waits for the device in the sampler raises."""
    for name in ("process", "processed"):
        method = getattr(Sampler, name)

        def watched(self, *args, method=method):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Sampler, name, watched)


def generated(folder, params, **settings):
    with make_llm(folder, **settings) as llm:
        outputs = llm.generate(make_prompts(len(params), 60), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE"])
def test_one_request_changes_no_other_and_nothing_waits(checkpoints, strict, mode):
    others = [SamplingParams(temperature=0 if index % 2 else 0.9, seed=index, **PLAIN) for index in range(7)]
    folder, settings = checkpoints.path(LLAMA), graph_settings(mode)
    special = SamplingParams(**(EVERYTHING | PLAIN))
    plain = SamplingParams(temperature=0.8, seed=3, **PLAIN)
    found = generated(folder, [*others, special], **settings)
    assert found[:-1] == generated(folder, [*others, plain], **settings)[:-1]
    assert set(found[-1]) <= set(range(200)) - {5}
    assert (8, 9) not in zip(found[-1], found[-1][1:], strict=False)


@pytest.mark.parametrize("mode", ["eager", "FULL_AND_PIECEWISE"])
def test_penalised_greedy_text_is_the_references(checkpoints, strict, mode):
    folder = checkpoints.path(LLAMA)
    params = [SamplingParams(temperature=0, repetition_penalty=1.5, **PLAIN)] * 5
    outputs = generated(folder, params, dtype="float32", **graph_settings(mode))
    model, changed = checkpoints.reference(LLAMA)._model, RepetitionPenaltyLogitsProcessor(1.5)
    for prompt, tokens in zip(make_prompts(5, 60), outputs, strict=True):
        ids = torch.tensor([[*prompt, *tokens]], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits.float()
        for index, token in enumerate(tokens):
            end = len(prompt) + index
            row = changed(ids[:, :end], logits[:, end - 1].clone())[0]
            assert float((row.max() - row[token]) / row.std()) <= MAX_REGRET["float32"]
