"""The example of docs/sampling.md: a logits processor of one's own, by class and by path, in `LLM` and in a server with
two workers; and one that fails."""

import re
import sys
from pathlib import Path

import httpx
import pytest

from pagemill import LLM, LogitsProcessor, SamplingParams
from pagemill.errors import ConfigError, RequestError
from tests.fakes.tiny_checkpoint import make_checkpoint
from tests.integration.server_process import running_server

DOC = Path(__file__).parents[2] / "docs" / "sampling.md"
PROMPT = list(range(10, 40))
PLAIN = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("tiny"), "LlamaForCausalLM"))


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The module of the documentation, where every process finds it."""
    (code,) = re.findall(r"```python\n(# my_processors\.py\n.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "my_processors.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "my_processors:OneOf"
    sys.modules.pop("my_processors", None)


def tokens_of(llm, *params):
    outputs = llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_of_a_class_and_only_for_requests_that_ask_for_it(checkpoint, example):
    sys.modules.pop("my_processors", None)
    from my_processors import OneOf

    with LLM(checkpoint, dtype="float32", cpu_threads=1) as llm:
        (expected,) = tokens_of(llm, SamplingParams(**PLAIN))
    with LLM(checkpoint, dtype="float32", cpu_threads=1, logits_processors=[OneOf]) as llm:
        asks = SamplingParams(**PLAIN, extra_args={"one_of": [7, 9]})
        plain, chosen = tokens_of(llm, SamplingParams(**PLAIN), asks)
        assert plain == expected
        assert set(chosen) <= {7, 9}
        for wrong, message in (
            ({"two_of": [1]}, "extra_args .* has 'two_of'; known: one_of"),
            ({"one_of": "7"}, "one_of='7' is not allowed: a list of token ids"),
            ({"one_of": [float("nan")]}, "must map texts to finite numbers"),
            ({"one_of": [1] * 20_000}, "holds more than 16384"),
        ):
            with pytest.raises(RequestError, match=message):
                tokens_of(llm, SamplingParams(**PLAIN, extra_args=wrong))


class Broken(LogitsProcessor):
    """Raises where it is told to."""

    arguments = ("fail_in",)

    def add(self, new):
        self.where = (new.params.extra_args or {}).get("fail_in")
        if self.where == "add":
            raise OverflowError("not with me")
        return self.where is not None

    def remove(self, slot):
        pass

    def apply(self, logits, rows):
        raise OverflowError("nor now")


@pytest.mark.parametrize("where", ["add", "apply"])
def test_one_that_raises_ends_the_request_and_nothing_else(checkpoint, where, caplog):
    with LLM(checkpoint, dtype="float32", cpu_threads=1, logits_processors=[Broken]) as llm:
        fails = SamplingParams(**PLAIN, extra_args={"fail_in": where})
        outputs = llm.generate([PROMPT] * 3, [SamplingParams(**PLAIN), fails, SamplingParams(**PLAIN)], use_tqdm=False)
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["length", "error", "length"]
        assert outputs[1].outputs[0].token_ids == []
        assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
        assert "logits processor Broken failed" in caplog.text
        assert len(tokens_of(llm, SamplingParams(**PLAIN))[0]) == 6


@pytest.mark.slow
def test_of_a_path_in_a_server_with_two_workers(checkpoint, example):
    flags = ["--dtype", "float32", "--cpu-threads", "1", "-tp", "2", "--logits-processors", example]
    with running_server(checkpoint, *flags) as server:
        body = {"prompt": PROMPT, "vllm_xargs": {"one_of": [67, 68]}, **PLAIN}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
        assert set(answer["choices"][0]["text"]) <= set("ab")
        wrong = httpx.post(f"{server.url}/v1/completions", json=body | {"vllm_xargs": {"one_of": [-1]}}, timeout=300)
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "vllm_xargs"
        assert "token ids" in wrong.json()["error"]["message"]


def test_what_is_no_processor(checkpoint):
    for path, message in (
        ("no.such:Thing", "logits processor 'no.such:Thing' cannot be found"),
        ("builtins:int", "does not derive from pagemill.LogitsProcessor"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(checkpoint, dtype="float32", cpu_threads=1, logits_processors=[path])

    class Inside(LogitsProcessor):
        pass

    with pytest.raises(ConfigError, match="workers cannot import"):
        LLM(checkpoint, logits_processors=[Inside])
