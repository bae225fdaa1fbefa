"""Every documented field of the APIs that stand for one of OpenAI's, also of objects inside their bodies: it has an
effect, is refused by name, is named in the header of the answer, or is a hint that docs/compat.md explains."""

import json
from functools import cache
from typing import Any

import pytest
from msgspec import structs

from pagemill.config.pooler_config import PoolerConfig
from pagemill.errors import RequestError
from pagemill.serve.http.preparer import (
    INFILL,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_GENERATE,
    RERANK,
    RESPONSES,
    SCORE,
    AnswerForm,
    Part,
    Preparer,
)
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.http.schemas.support import (
    ANTHROPIC_HINTS,
    INFILL_HINTS,
    OLLAMA_HINTS,
    OLLAMA_OPTION_HINTS,
    RESPONSES_HINTS,
)
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.tokenizers.fill_in import FillInTokens
from tests.fakes.engine import make_engine
from tests.fakes.fake_tokenizer import ByteTokenizer

HI = [{"role": "user", "content": "hi"}]
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USED = [
    *HI,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "no"}]},
]
BASE: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": USED, "max_tokens": 9, "tools": [CLAUDE_TOOL], "temperature": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 9, "tools": [FLAT], "temperature": 1},
    OLLAMA_CHAT: {"model": "fake", "messages": HI, "tools": [FUNCTION], "options": {"num_predict": 9}},
    OLLAMA_GENERATE: {"model": "fake", "prompt": "hi", "options": {"num_predict": 9}},
    OLLAMA_EMBED: {"model": "fake", "input": "a" * 400},
    SCORE: {"text_1": "a", "text_2": "b"},
    RERANK: {"query": "aa", "documents": ["bb", "c"]},
    INFILL: {"input_prefix": "a", "input_suffix": "b", "n_predict": 9},
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
ANTHROPIC: dict[str, Any] = {
    "model": "another", "max_tokens": 5, "system": "be brief", "stop_sequences": ["x"], "stream": True,
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "tool_choice": {"type": "none"}, "metadata": {"user_id": "u"},
    "service_tier": "auto", "container": "c", "mcp_servers": [{"name": "m"}], "context_management": {"edits": []},
    "betas": ["b"], "cache_control": {"type": "ephemeral"}, "inference_geo": "eu", "speed": "fast",
    "thinking.type": "enabled", "thinking.budget_tokens": 1024, "thinking.display": "omitted",
    "output_config.effort": "low", "output_config.format": {"type": "json_schema", "schema": SCHEMA},
    "output_config.task_budget": {"type": "tokens", "total": 20000}, "output_format": {"type": "json_schema"},
    "tool_choice.disable_parallel_tool_use": True,
    "tools.0.description": "what", "tools.0.strict": True, "tools.0.cache_control": {"type": "ephemeral"},
    "tools.0.type": "bash_20250124", "tools.0.defer_loading": True, "tools.0.allowed_callers": ["direct"],
    "tools.0.input_examples": [{}], "tools.0.eager_input_streaming": True,
    "messages.2.content.0.is_error": True, "messages.2.content.0.cache_control": {"type": "ephemeral"},
}  # fmt: skip
OPENAI_RESPONSES: dict[str, Any] = {
    "model": "another", "background": True, "conversation": "c", "include": ["message.output_text.logprobs"],
    "input": "ho", "instructions": "be brief", "max_output_tokens": 5, "max_tool_calls": 2, "metadata": {"a": "b"},
    "parallel_tool_calls": False, "previous_response_id": "r", "prompt": {"id": "p"}, "prompt_cache_key": "k",
    "prompt_cache_retention": "24h", "reasoning.effort": "low", "reasoning.summary": "auto",
    "reasoning.generate_summary": "auto", "safety_identifier": "s", "service_tier": "auto", "store": True,
    "stream": True, "stream_options": {"include_obfuscation": False}, "temperature": 0.5,
    "text.format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "text.verbosity": "low",
    "tool_choice": "none", "tools.0.strict": True, "tools.0.description": "what", "tools.0.type": "web_search",
    "tools.0.defer_loading": True, "top_logprobs": 2, "top_p": 0.5, "truncation": "auto", "user": "u",
    "context_management": [{"type": "compaction"}], "text.other": 1, "reasoning.other": 1,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "num_keep": 2, "seed": 42, "num_predict": 5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.7,
    "repeat_last_n": 33, "temperature": 0.5, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
    "penalize_newline": True, "stop": ["x"], "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1,
    "main_gpu": 0, "use_mmap": True, "num_thread": 8, "mirostat": 1, "mirostat_eta": 0.1, "mirostat_tau": 5.0,
    "tfs_z": 0.5, "low_vram": True, "vocab_only": True, "use_mlock": True, "f16_kv": True, "draft_num_predict": 4,
}  # fmt: skip
OLLAMA: dict[str, Any] = {
    "model": "another", "format": "json", "stream": False, "keep_alive": "5m", "think": True, "logprobs": True,
    "top_logprobs": 3, "truncate": False, "shift": False, **{f"options.{name}": OPTIONS[name] for name in OPTIONS},
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    MESSAGES: ANTHROPIC,
    RESPONSES: OPENAI_RESPONSES,
    OLLAMA_CHAT: OLLAMA | {
        "tools": [], "messages.0.images": ["aGk="],
    },
    OLLAMA_GENERATE: OLLAMA | {
        "suffix": "x", "images": ["aGk="], "system": "be brief", "template": "t", "raw": True, "context": [1, 2],
        "width": 512, "height": 512, "steps": 4,
    },
    OLLAMA_EMBED: {
        "model": "another", "truncate": False, "dimensions": 2, "keep_alive": "5m",
        **{f"options.{name}": value for name, value in OPTIONS.items()},
    },
    SCORE: {
        "model": "another", "text_1": "x", "text_2": "y", "queries": "q", "documents": "d", "items": "i", "data_1": "x",
        "data_2": "y", "truncate_prompt_tokens": 1, "mm_processor_kwargs": {"a": 1},
        "priority": 1, "user": "u", "cache_salt": "s", "activation": False, "softmax": True,
    },
    RERANK: {
        "model": "another", "query": "x", "documents": ["y"], "top_n": 1, "truncate_prompt_tokens": 2,
        "return_documents": False, "max_tokens_per_query": 1, "max_tokens_per_doc": 1, "instruction": "find",
        "chat_template_kwargs": {"a": 1}, "priority": 1,
    },
    INFILL: {
        "input_prefix": "x", "input_suffix": "y", "input_extra": [{"text": "t"}], "prompt": "p", "stream": True,
        "n_predict": 5, "temperature": 0.5, "dynatemp_range": 0.5, "dynatemp_exponent": 2, "top_k": 3, "top_p": 0.5,
        "min_p": 0.1, "n_indent": 4, "n_keep": 3, "stop": ["x"], "typical_p": 0.5, "repeat_penalty": 1.2,
        "repeat_last_n": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "dry_multiplier": 0.8, "dry_base": 2,
        "dry_allowed_length": 3, "dry_penalty_last_n": 4, "dry_sequence_breakers": ["x"], "xtc_probability": 0.5,
        "xtc_threshold": 0.2, "mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2, "grammar": "root ::= \"a\"",
        "json_schema": SCHEMA, "seed": 5, "ignore_eos": True, "logit_bias": [[5, 1.5]], "n_probs": 2, "min_keep": 2,
        "t_max_predict_ms": 100, "t_max_prompt_ms": 100, "id_slot": 1, "cache_prompt": False, "return_tokens": True,
        "samplers": ["top_k"], "timings_per_token": True, "return_progress": True, "post_sampling_probs": True,
        "response_fields": ["content"], "lora": [{"id": 0, "scale": 1}], "n_cmpl": 2, "model": "another",
    },
}  # fmt: skip
_OPTION_HINTS = {f"options.{name}" for name in OLLAMA_OPTION_HINTS}
HINTS: dict[str, set[str]] = {
    MESSAGES: set(ANTHROPIC_HINTS) | {"tools.0.cache_control", "messages.2.content.0.cache_control"},
    RESPONSES: set(RESPONSES_HINTS) | {"user"},
    OLLAMA_CHAT: set(OLLAMA_HINTS) | _OPTION_HINTS,
    OLLAMA_GENERATE: set(OLLAMA_HINTS) | _OPTION_HINTS,
    OLLAMA_EMBED: set(OLLAMA_HINTS) | _OPTION_HINTS,
    SCORE: {"user"},
    RERANK: set(),
    INFILL: set(INFILL_HINTS),
}


@pytest.fixture(autouse=True)
def _fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "fill_in", FillInTokens(290, 291, 292, None, None, ()))


def with_field(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a body in which the field has this value."""
    found = json.loads(json.dumps(body))
    at: Any = found
    *steps, last = path.split(".")
    for step in steps:
        at = (
            at[int(step)]
            if isinstance(at, list)
            else at.setdefault(step, {"type": "auto"} if step == "tool_choice" else {})
        )
    at[last] = value
    if path.startswith("thinking.") and path != "thinking.type":
        found["thinking"]["type"] = "enabled"
    return found  # type: ignore[no-any-return]


@cache
def preparer_of(pools: bool, reasoning: str | None) -> Preparer:
    """Of a server of text, or of vectors."""
    engine = make_engine(pooler=PoolerConfig(pooling_type="LAST", normalize=False) if pools else None)
    return Preparer(engine.preparation, ServedModel("fake", 0), ParserSettings(reasoning, "hermes"))


def parts(kind: str, body: dict[str, Any], reasoning: str | None) -> list[Part]:
    """What is run, and what is answered; ids and times, which differ anyway, left out."""
    preparer = preparer_of(kind in (OLLAMA_EMBED, SCORE, RERANK), reasoning)
    found = list(preparer.parts(kind, json.dumps(body).encode()))
    return [
        structs.replace(part, request=structs.replace(part.request, request_id="", arrival_time=0.0))
        if hasattr(part, "request")
        else part
        for part in found
    ]


@cache
def parts_without(kind: str, added: str, reasoning: str | None) -> list[Part]:
    """What the body that a field is added to leads to; `added`, as JSON, are fields that it needs."""
    return parts(kind, BASE[kind] | json.loads(added), reasoning)


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in FIELDS.items() for path in paths])
@pytest.mark.parametrize("reasoning", ["qwen3", None])
def test_no_documented_field_is_ignored_in_silence(kind: str, path: str, reasoning: str | None) -> None:
    added: dict[str, Any] = {}
    if path.startswith("thinking.") and path != "thinking.type":
        added = {"thinking": {"type": "enabled"}}
    if path == "tool_choice.disable_parallel_tool_use":
        added = {"tool_choice": {"type": "auto"}}
    before = parts_without(kind, json.dumps(added), reasoning)
    try:
        after = parts(kind, with_field(BASE[kind] | added, path, FIELDS[kind][path]), reasoning)
    except RequestError as error:
        assert error.field is not None
        if (kind, path) == (OLLAMA_EMBED, "truncate"):
            assert "at most 256 fit" in str(error), "what is not to be cut does not fit"
            return
        assert path.split(".")[-1] in str(error) or path.startswith(error.field) or error.field.startswith(path)
        return
    form = after[0]
    assert isinstance(form, AnswerForm)
    named = any(path.startswith(name) or name.endswith(path) for name in form.ignored_fields.split(", ") if name)
    if path in HINTS[kind]:
        assert after[1:] == before[1:], "an answer may repeat it, and what is run is the same"
    elif not named:
        assert after != before, f"{path} has no effect, which nobody is told"
