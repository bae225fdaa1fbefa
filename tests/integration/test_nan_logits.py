"""A network that computes NaN for one request: that request ends with an error, and its neighbours are what they are
without it, also those that get its blocks of the KV cache afterwards."""

import concurrent.futures
import json

import httpx
import pytest
import safetensors.torch
import torch

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server
from tests.marks import slow

POISON = 310
"""A token whose embedding is NaN. No text has it."""
FORM = {"structured_outputs": {"regex": "[a-z]{30}"}}
ASKED = [{}, {"temperature": 0.9, "seed": 3, "logprobs": 2}, {"temperature": 0.9, "seed": 4} | FORM]


@pytest.fixture(scope="module", params=["steps ahead", slow("one step at a time")])
def server(request, tmp_path_factory):
    """With so few blocks that those of a failed request are soon somebody else's."""
    folder = make_checkpoint(tmp_path_factory.mktemp("nan"), "LlamaForCausalLM", tie_word_embeddings=False)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    ahead = "--async-scheduling" if request.param == "steps ahead" else "--no-async-scheduling"
    flags = (
        "--dtype",
        "float32",
        "--cpu-threads",
        "1",
        "--num-gpu-blocks-override",
        "48",
        "--max-num-seqs",
        "4",
        ahead,
    )
    with running_server(str(folder), *flags, "--max-model-len", "256", "--no-enable-prefix-caching") as process:
        yield process


def ask(url, prompt, **asked):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 60} | asked
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def neighbours(url):
    """What others are told: greedy, by chance with log-probabilities, and in a form."""
    prompts = [[20 + number, 70, 90, 30] * 12 for number in range(len(ASKED))]
    with concurrent.futures.ThreadPoolExecutor(len(ASKED)) as pool:
        answers = list(pool.map(lambda prompt, asked: ask(url, prompt, **asked), prompts, ASKED))
    assert [answer.status_code for answer in answers] == [200] * len(ASKED)
    return [answer.json()["choices"][0]["text"] for answer in answers]


def test_one_request_fails_and_no_other(server):
    url = server.url
    expected = neighbours(url)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for asked in ASKED:
            running = pool.submit(neighbours, url)
            failed = ask(url, [20, 70, POISON] * 16, **asked)
            assert (failed.status_code, failed.json()["error"]["code"]) == (500, "generation_failed"), failed.text
            assert "NaN" in failed.json()["error"]["message"]
            assert running.result() == expected
    assert neighbours(url) == expected
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def test_a_stream_ends_with_the_error(server):
    body = {"prompt": [20, POISON], "max_tokens": 8, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        answer.read()
    if answer.status_code == 200:
        errors = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        errors = [answer.json()]
    assert "NaN" in errors[-1]["error"]["message"]
