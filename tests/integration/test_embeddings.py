"""Embeddings as users meet them: the openai client, two engines behind two API servers, and a server of text."""

import base64

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

FLAGS = ("--dtype", "float32", "--served-model-name", "tiny", "--cpu-threads", "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def mean(token_ids):
        with torch.inference_mode():
            found = model(torch.tensor([token_ids])).last_hidden_state[0].mean(0)
        return (found / found.norm()).numpy()

    return mean


@pytest.fixture(scope="module")
def server(checkpoint):
    several = ("--data-parallel-size", "2", "--api-server-count", "2")
    pooling = ("--runner", "pooling", "--pooler-config.pooling_type", "MEAN")
    with running_server(str(checkpoint), *FLAGS, *several, *pooling) as process:
        yield process


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


PROMPTS = [list(range(3, 3 + size)) for size in (40, 1, 300, 7)]


def test_the_openai_client_gets_what_the_reference_says(client, reference):
    for encoding in ({}, {"encoding_format": "float"}):  # without one, the client asks for base64 and decodes it
        answer = client.embeddings.create(model="tiny", input=PROMPTS, **encoding)
        assert [item.index for item in answer.data] == list(range(len(PROMPTS)))
        for item, prompt in zip(answer.data, PROMPTS, strict=True):
            np.testing.assert_allclose(item.embedding, reference(prompt), atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, PROMPTS))


def test_both_encodings_and_dimensions(client):
    ask = {"model": "tiny", "input": "Hello", "dimensions": 10}
    plain = client.embeddings.create(**ask, encoding_format="float").data[0].embedding
    packed = client.embeddings.create(**ask, encoding_format="base64").data[0].embedding
    numbers = np.frombuffer(base64.b64decode(packed), "<f4") if isinstance(packed, str) else packed
    assert len(plain) == 10
    assert np.linalg.norm(plain) == pytest.approx(1)
    np.testing.assert_array_equal(np.float32(numbers), np.float32(plain))
    whole = client.embeddings.create(model="tiny", input="Hello").data[0].embedding
    np.testing.assert_allclose(np.array(whole[:10]) / np.linalg.norm(whole[:10]), plain, atol=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions=65 is not allowed: 1 to 64"):
        client.embeddings.create(model="tiny", input="Hello", dimensions=65)


def test_many_at_once(client, reference):
    prompts = [[3 + (first * 7 + place) % 300 for place in range(1 + first * 5 % 90)] for first in range(100)]
    answer = client.embeddings.create(model="tiny", input=prompts)
    for item, prompt in zip(answer.data, prompts, strict=True):
        np.testing.assert_allclose(item.embedding, reference(prompt), atol=1e-5)


def test_text_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="makes embeddings and generates no text"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError, match="makes embeddings and generates no text"):
        client.completions.create(model="tiny", prompt="Hello")


def test_a_server_of_text_refuses_embeddings(checkpoint):
    with running_server(str(checkpoint), *FLAGS) as process:
        answer = httpx.post(f"{process.url}/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 400
        assert "start with --runner pooling" in answer.json()["error"]["message"]
