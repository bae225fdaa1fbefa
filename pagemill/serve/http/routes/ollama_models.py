"""/api/tags, /api/show, /api/ps and /api/version: what Ollama's clients ask before they generate."""

import asyncio
import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, Request

from pagemill.artifacts.parameter_count import parameter_count
from pagemill.config.facts import ModelFacts
from pagemill.serve.http.connection import read_small
from pagemill.serve.http.described import describes
from pagemill.serve.http.schemas.answers import OllamaModels, OllamaShown, Version
from pagemill.serve.http.schemas.ollama import ShowBody
from pagemill.serve.http.site_guard import ANY_CONTENT_TYPE
from pagemill.serve.http.state import Services, services

router = APIRouter()
API_VERSION = "0.33.0"
"""Of Ollama, whose API this is: clients ask for a version that is new enough."""
NEVER = "9999-12-31T23:59:59Z"
"""When the model leaves."""
_SUFFIXES = (".safetensors", ".gguf")
_NUMBERS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
}
"""Key of a Hugging Face config -> key of `model_info`, below the architecture."""


@router.get("/api/version", openapi_extra=describes(Version))
async def version() -> dict[str, str]:
    """The version of the API that these routes follow."""
    return {"version": API_VERSION}


@router.get("/api/tags", openapi_extra=describes(OllamaModels))
async def tags(request: Request) -> dict[str, Any]:
    """The names of the model."""
    here = services(request)
    card = await _card(here)
    return {"models": [{"name": name, "model": name, **card} for name in here.model.listed]}


@router.get("/api/ps", openapi_extra=describes(OllamaModels))
async def ps(request: Request) -> dict[str, Any]:
    """The model, which is always loaded."""
    here = services(request)
    card = await _card(here)
    loaded = {"expires_at": NEVER, "size_vram": card["size"], "context_length": here.engine.max_model_len}
    return {"models": [{"name": here.model.name, "model": here.model.name, **card, **loaded}]}


@router.post("/api/show", openapi_extra=ANY_CONTENT_TYPE | describes(OllamaShown, body=ShowBody))
async def show(request: Request) -> dict[str, Any]:
    """What the model is and can do. Raises RequestError, ModelNotFoundError."""
    here = services(request)
    body = await read_small(request, ShowBody)
    here.model.check(body.served_model)
    facts = here.engine.facts
    card = await _card(here)
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in facts.generation_defaults.items()),
        "template": here.engine.tokenizer.chat_template or "",
        "details": card["details"],
        "model_info": await _info(facts, here.engine.max_model_len),
        "capabilities": _capabilities(here),
        "modified_at": card["modified_at"],
    }


async def _info(facts: ModelFacts, max_model_len: int) -> dict[str, Any]:
    family = _family(facts)
    count = (await _files(facts)).num_parameters
    found = {name: facts.hf_config.get(key) for key, name in _NUMBERS.items()} | {"context_length": max_model_len}
    return (
        {"general.architecture": family, "general.basename": facts.public_name}
        | ({} if count is None else {"general.parameter_count": count})
        | {f"{family}.{name}": value for name, value in found.items() if isinstance(value, int)}
    )


def _capabilities(here: Services) -> list[str]:
    if here.engine.preparation.inputs.pools:
        return ["embedding"]
    parsers = here.parsers.settings
    tools = ["tools"] if parsers.tool_calls is not None else []
    return ["completion", *tools, *(["thinking"] if parsers.reasoning is not None else [])]


def _family(facts: ModelFacts) -> str:
    return str(facts.hf_config.get("model_type") or facts.architecture)


class _Files(NamedTuple):
    """Of the weights."""

    num_bytes: int
    modified_at: float
    """Unix time in seconds, of the newest."""
    num_parameters: int | None
    """None: they do not say."""


_found: dict[str, _Files] = {}
"""By the path of the model: what its files were when they were first asked for. They stay as they were loaded."""


async def _card(here: Services) -> dict[str, Any]:
    facts = here.engine.facts
    files = await _files(facts)
    family = _family(facts)
    digest = hashlib.sha256(f"{facts.public_name}/{files.num_bytes}/{files.modified_at}".encode()).hexdigest()
    return {
        "modified_at": datetime.fromtimestamp(files.modified_at, UTC).isoformat().replace("+00:00", "Z"),
        "size": files.num_bytes,
        "digest": digest,
        "details": {
            "parent_model": "",
            "format": facts.weights_format,
            "family": family,
            "families": [family],
            "parameter_size": short(files.num_parameters),
            "quantization_level": facts.quant_method or facts.dtype,
        },
    }


async def _files(facts: ModelFacts) -> _Files:
    if facts.path not in _found:
        _found[facts.path] = await asyncio.to_thread(_look, facts)
    return _found[facts.path]


def _look(facts: ModelFacts) -> _Files:
    stats = [file.stat() for file in _weights(Path(facts.path))]
    num_bytes, newest = sum(stat.st_size for stat in stats), max((stat.st_mtime for stat in stats), default=0.0)
    return _Files(num_bytes, newest, parameter_count(facts))


def short(count: int | None) -> str:
    """As Ollama writes a number of parameters: 134.52M, 8.0B; empty for one that is not known."""
    if count is None:
        return ""
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2)):
        if count >= size:
            return f"{count / size:.{0 if count % size == 0 else digits}f}{letter}"
    return f"{count / 1000:.0f}K" if count >= 1000 else str(count)


def _weights(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (file for file in sorted(path.iterdir()) if file.suffix in _SUFFIXES)
    elif path.is_file():
        yield path
