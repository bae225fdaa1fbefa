"""What becomes of the fields of the API that a schema does not declare: refused by name, or taken as a hint.

Declared fields have an effect. Fields of neither kind are unknown: accepted, and named in a header of the answer.
docs/compat.md is made of these tables. Does not know how bodies are parsed.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pagemill.errors import RequestError
from pagemill.utils.text import shown

IGNORED_FIELDS_HEADER = "X-Pagemill-Ignored-Fields"
_MAX_NAMES = 16
_MAX_NAME_CHARS = 40
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


class Refused(NamedTuple):
    """A field that would change the answer, and has no effect yet."""

    instead: str
    """What to do instead."""
    neutral: tuple[Any, ...] = ()
    """Values, besides null, that ask for nothing: they are accepted."""


_USE_TOOLS = "use tools and tool_choice"
_CHAT_ONLY = "use /v1/chat/completions; a text has neither tools nor reasoning"
_NO_MEDIA = "leave it out; this server takes text only"
_WRITE_IT_OUT = "write what it would add into the messages or the prompt"
_WRITE_IT_OUT_OF_PAIRS = "texts are compared as they are: write it into them"
_SHORTEN = "send a shorter input; nothing is cut silently"

_SAMPLING: dict[str, Refused] = {
    "best_of": Refused("use n, and choose", (1,)),
    "logits_processors": Refused("start the server with --logits-processors, and send vllm_xargs", ([],)),
    "thinking_token_budget": Refused(_CHAT_ONLY),
    "top_logprobs": Refused("use logprobs, which is a number here", (0,)),
}
_GRAMMAR: dict[str, Refused] = {
    "structural_tag": Refused("use structured_outputs.structural_tag, or response_format of type structural_tag"),
}
_PLUMBING: dict[str, Refused] = {
    "ec_transfer_params": Refused("leave it out; nothing is handed over between servers yet", ({},)),
    "kv_transfer_params": Refused("leave it out; nothing is handed over between servers yet", ({},)),
    "mm_processor_kwargs": Refused(_NO_MEDIA, ({},)),
    "media_io_kwargs": Refused(_NO_MEDIA, ({},)),
    "prompt_embeds": Refused("send text or token ids"),
    "suffix": Refused("send the beginning only; nothing is filled in between", ("",)),
    "stream_interval": Refused("leave it out; every token is sent when it is there", (1,)),
    "truncate_prompt_tokens": Refused(_SHORTEN),
}
_MESSAGES: dict[str, Refused] = {
    "audio": Refused(_NO_MEDIA),
    "chat_template": Refused("start the server with --chat-template"),
    "documents": Refused(_WRITE_IT_OUT, ([],)),
    "function_call": Refused(_USE_TOOLS, ("none",)),
    "functions": Refused(_USE_TOOLS, ([],)),
    "include_reasoning": Refused(_CHAT_ONLY, (True,)),
    "modalities": Refused(_NO_MEDIA, (["text"],)),
    "tool_choice": Refused(_CHAT_ONLY, ("none", "auto")),
    "tools": Refused(_CHAT_ONLY, ([],)),
    "verbosity": Refused("say in a message how long the answer shall be", ("medium",)),
    "web_search_options": Refused(_WRITE_IT_OUT),
}
_DECLARED_BY_CHATS = (
    "documents", "include_reasoning", "parallel_tool_calls", "thinking_token_budget", "tool_choice", "tools",
    "top_logprobs",
)  # fmt: skip
GENERATION_REFUSED = _SAMPLING | _GRAMMAR | _PLUMBING | _MESSAGES
CHAT_REFUSED = {name: rule for name, rule in GENERATION_REFUSED.items() if name not in _DECLARED_BY_CHATS}
EMBEDDINGS_REFUSED: dict[str, Refused] = {
    "chat_template": Refused("start the server with --chat-template"),
    "embed_dtype": Refused("leave it out; numbers are of 32 bits", ("float32",)),
    "endianness": Refused("leave it out; base64 is little-endian", ("native", "little")),
    "mm_processor_kwargs": Refused(_NO_MEDIA, ({},)),
}

COHERE_REFUSED: dict[str, Refused] = {
    "images": Refused(_NO_MEDIA, ([],)),
    "inputs": Refused("send texts", ([],)),
}

TOKENIZE_REFUSED: dict[str, Refused] = {
    "chat_template": Refused("start the server with --chat-template"),
    "mm_processor_kwargs": Refused(_NO_MEDIA, ({},)),
}

SCORES_REFUSED: dict[str, Refused] = {
    "chat_template_kwargs": Refused(_WRITE_IT_OUT_OF_PAIRS, ({},)),
    "instruction": Refused(_WRITE_IT_OUT_OF_PAIRS, ("",)),
    "mm_processor_kwargs": Refused(_NO_MEDIA, ({},)),
}

_OF_OTHERS = "for billing and abuse detection of a hosted service; nothing reads it"
HINTS: dict[str, str] = {
    "metadata": "labels of a hosted service; nothing is stored",
    "request_id": "the id of an answer is that of the header X-Request-Id",
    "safety_identifier": _OF_OTHERS,
    "store": "nothing is stored",
    "user": _OF_OTHERS,
}
GENERATION_HINTS: dict[str, str] = HINTS | {
    "guided_decoding_backend": "a server has one, that of --structured-outputs-config",
    "parallel_tool_calls": "a text calls no tools",
    "prediction": "may make an answer faster, and never changes it",
    "prompt_cache_key": "prefixes are found by what they are",
    "prompt_cache_retention": "prefixes stay as long as there is room",
    "service_tier": "there is one",
    "spaces_between_special_tokens": "special tokens that are shown have no spaces between them but those of the text",
}
CHAT_HINTS = {name: why for name, why in GENERATION_HINTS.items() if name not in _DECLARED_BY_CHATS}


ANTHROPIC_REFUSED: dict[str, Refused] = {
    "chat_template": Refused("start the server with --chat-template"),
    "container": Refused("leave it out; nothing is run on the server"),
    "mcp_servers": Refused("connect to them from the client, and send their tools", ([],)),
}
ANTHROPIC_HINTS: dict[str, str] = {
    "betas": "they are not told apart",
    "cache_control": "prefixes are found by what they are",
    "context_management": "nothing is taken out of a conversation",
    "diagnostics": "nothing is said about the cache beyond usage",
    "inference_geo": "there is one place",
    "metadata": _OF_OTHERS,
    "service_tier": "there is one",
    "speed": "there is one",
    "user_profile_id": _OF_OTHERS,
    "workspace_id": _OF_OTHERS,
}


RESPONSES_REFUSED: dict[str, Refused] = {
    "chat_template": Refused("start the server with --chat-template"),
    "context_management": Refused("send a shorter input; nothing is taken out of a conversation", ([],)),
    "moderation": Refused("leave it out; nothing is moderated"),
    "n": Refused("send the request several times", (1,)),
    "prompt": Refused("write the prompt into input; there are no templates of prompts"),
    "thinking_token_budget": _SAMPLING["thinking_token_budget"],
    "truncation": Refused("send a shorter input; nothing is taken out of a conversation", ("disabled",)),
}
RESPONSES_HINTS: dict[str, str] = {
    "max_tool_calls": "a limit on tools that a server runs; there are none",
    "prompt_cache_key": GENERATION_HINTS["prompt_cache_key"],
    "prompt_cache_options": GENERATION_HINTS["prompt_cache_key"],
    "prompt_cache_retention": GENERATION_HINTS["prompt_cache_retention"],
    "request_id": HINTS["request_id"],
    "safety_identifier": _OF_OTHERS,
    "service_tier": GENERATION_HINTS["service_tier"],
    "stream_options": "events have no padding, which is all that could be turned off",
}


OLLAMA_REFUSED: dict[str, Refused] = {
    "context": Refused("send the conversation to /api/chat", ([],)),
    "images": Refused(_NO_MEDIA, ([],)),
    "logprobs": Refused("use /v1/chat/completions", (False,)),
    "template": Refused("start the server with --chat-template", ("",)),
    "top_logprobs": Refused("use /v1/chat/completions", (0,)),
}
OLLAMA_HINTS: dict[str, str] = {"keep_alive": "the model stays as long as the server runs"}
OLLAMA_OPTIONS_REFUSED: dict[str, Refused] = {
    "mirostat": Refused("use temperature, top_p or min_p", (0,)),
    "tfs_z": Refused("use top_p or min_p", (1,)),
    "typical_p": Refused("use top_p or min_p", (1,)),
}
_OF_THE_START = "chosen when the server is started"
OLLAMA_OPTION_HINTS: dict[str, str] = {
    **dict.fromkeys(
        (
            "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu",
            "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only",
        ),
        _OF_THE_START,
    ),
    "mirostat_eta": "of mirostat",
    "mirostat_tau": "of mirostat",
    "num_keep": "nothing is taken out of a context",
    "penalize_newline": "a line break is a token like others",
    "repeat_last_n": "repeat_penalty looks at all tokens",
}  # fmt: skip


_OTHER_SAMPLING = "use temperature, top_k, top_p or min_p"
INFILL_REFUSED: dict[str, Refused] = {
    "dry_multiplier": Refused("use repeat_penalty", (0,)),
    "dynatemp_range": Refused(_OTHER_SAMPLING, (0,)),
    "lora": Refused("serve a checkpoint into which the adapter is merged", ([],)),
    "mirostat": Refused(_OTHER_SAMPLING, (0,)),
    "n_cmpl": Refused("send the request several times", (1,)),
    "n_probs": Refused("use /v1/completions with logprobs", (0,)),
    "typical_p": Refused(_OTHER_SAMPLING, (1,)),
    "xtc_probability": Refused(_OTHER_SAMPLING, (0,)),
}
INFILL_HINTS: dict[str, str] = {
    **dict.fromkeys(
        ("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"), "of dry_multiplier"
    ),
    "cache_prompt": "prefixes are found by what they are",
    "dynatemp_exponent": "of dynatemp_range",
    "id_slot": "slots are no places here",
    "min_keep": "at least one token is kept",
    "mirostat_eta": "of mirostat",
    "mirostat_tau": "of mirostat",
    "n_keep": "nothing is taken out of a context",
    "post_sampling_probs": "of n_probs",
    "repeat_last_n": OLLAMA_OPTION_HINTS["repeat_last_n"],
    "t_max_prompt_ms": "a prompt is not given up",
    "timings_per_token": "the last event has the timings",
    "xtc_threshold": "of xtc_probability",
}


def check_extras(extra: Mapping[str, Any], refused: Mapping[str, Refused], hints: Mapping[str, str]) -> list[str]:
    """The names that are unknown. Raises RequestError for a refused field, unless its value asks for nothing."""
    unknown = []
    for name, value in extra.items():
        rule = refused.get(name)
        if rule is None:
            if name not in hints:
                unknown.append(name)
        elif value is not None and not _is_neutral(rule, value) and not _is_unused_tools(name, extra):
            raise RequestError(f"{name}={shown(value)} is not supported by this server: {rule.instead}", name)
    return unknown


def header_of(unknown: Iterable[str]) -> str:
    """Names of fields as the value of a header: a bounded number of bounded names, in characters that are safe."""
    names = list(unknown)
    named = [_NOT_IN_NAMES.sub("?", name[:_MAX_NAME_CHARS]) for name in names[:_MAX_NAMES]]
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return ", ".join(named + more)


def _is_neutral(rule: Refused, value: Any) -> bool:
    """Equal to a neutral value; 0 is not false here (`logprobs: 0` asks for something)."""
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in rule.neutral)


def _is_unused_tools(name: str, extra: Mapping[str, Any]) -> bool:
    return name == "tools" and extra.get("tool_choice") == "none"
