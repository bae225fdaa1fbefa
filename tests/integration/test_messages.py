"""Reasoning and tool calls on a served engine: the flags, the openai client, large bodies, and what start-up refuses.

A tiny random checkpoint writes noise, which is reasoning for the parser of DeepSeek-R1 until a mark ends it.
"""

import subprocess
import sys

import openai
import pytest

from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "temperature": 0}
LARGE = "x" * (20 << 10)
"""More than an API server prepares itself."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


@pytest.fixture(scope="module")
def client(checkpoint):
    flags = ["--reasoning-parser", "deepseek_r1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with (
        running_server(checkpoint, "--dtype", "float32", "--served-model-name", "tiny", *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_reasoning_is_apart_streamed_and_whole(client):
    whole = client.chat.completions.create(**ASK, tools=TOOLS).choices[0]
    assert whole.message.reasoning
    assert whole.message.content is None
    chunks = list(client.chat.completions.create(**ASK, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == whole.message.reasoning
    assert not any(delta.content for delta in deltas)
    hidden = client.chat.completions.create(**ASK, extra_body={"include_reasoning": False}).choices[0].message
    assert not hidden.content
    assert "reasoning" not in hidden.model_extra


def test_a_large_body_is_parsed_like_a_small_one(client):
    tools = [{"type": "function", "function": {"name": "get", "description": LARGE}}]
    large = client.chat.completions.create(**ASK, tools=tools)
    assert large.choices[0].message.reasoning


def test_what_cannot_work_is_said_before_anything_is_loaded(checkpoint):
    for flags, message in (
        (["--enable-auto-tool-choice"], "needs --tool-call-parser"),
        (["--reasoning-parser", "gpt6"], "unknown reasoning parser 'gpt6'; known: cohere_command3, deepseek_r1"),
    ):
        command = [sys.executable, "-m", "pagemill", "serve", checkpoint, "--port", "0", *flags]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode != 0
        assert message in ended.stderr
