"""POST /v1/embeddings and /pooling: prompts in, a vector for each out."""

import base64
import contextlib
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from pagemill.serve.http.client_limits import Running
from pagemill.serve.http.connection import LargeJson, respond_unless_gone
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import GenerationFailedError, NotHereError
from pagemill.serve.http.preparer import EMBEDDINGS, POOLING, AnswerForm
from pagemill.serve.http.responses import now, told_cached_tokens
from pagemill.serve.http.schemas.answers import Embeddings, Pooling
from pagemill.serve.http.schemas.embeddings import EmbeddingBody, PoolingBody
from pagemill.serve.http.state import Services, services
from pagemill.serve.processing.input_processor import PreparedRequest
from pagemill.transport.shm_load import Load
from pagemill.utils.pacer import in_slices

router = APIRouter()
_encode = msgspec.json.encode


@router.post("/v1/embeddings", response_model=None, openapi_extra=describes(Embeddings, body=EmbeddingBody))
async def create_embedding(request: Request) -> Response:
    """Make vectors of texts. Every prompt is checked before any runs.

    Raises RequestError, NotHereError for a model that makes something else of texts, EngineOverloadedError,
    EngineDeadError.
    """
    here_for_vectors(request)
    return await _answer(request, EMBEDDINGS, "embd", Names("embedding", "embedding"))


@router.post("/pooling", response_model=None, openapi_extra=describes(Pooling, body=PoolingBody))
async def create_pooling(request: Request) -> Response:
    """What the model makes of texts: vectors or classes, of each text or of each of its tokens.

    Raises RequestError, NotHereError for a model that makes no vectors, EngineOverloadedError, EngineDeadError.
    """
    if not services(request).engine.preparation.inputs.pools:
        raise NotHereError("this model generates text and makes no vectors: start with --runner pooling")
    return await _answer(request, POOLING, "pool", Names("pooling", "data"))


def here_for_vectors(request: Request) -> Services:
    """Raises NotHereError for a model that makes something else of a text than one vector."""
    here = services(request)
    inputs = here.engine.preparation.inputs
    if inputs.pools and not inputs.pooling.one_vector:
        raise NotHereError("this model makes no vectors of texts: use /classify or /pooling")
    return here


class Names(NamedTuple):
    """What a vector is called in an answer."""

    kind: str
    """Of object."""
    field: str
    """Where its numbers are."""


async def _answer(request: Request, kind: str, prefix: str, names: Names) -> Response:
    form, prepared, _ = await services(request).intake.prepare(kind, request)
    name = f"{prefix}-{request.scope['request_id']}"
    return await respond_unless_gone(request, _collected(request, name, prepared, form, names))


async def vectors_of(
    request: Request, name: str, requests: list[PreparedRequest]
) -> tuple[list[npt.NDArray[np.float32]], int]:
    """A vector for each of the `requests` of one body, in order, and how many of their tokens were found in the prefix
    cache, as far as clients are told. They count for the client. Raises GenerationFailedError, RateLimitedError."""
    here = services(request)
    tokens = [len(item.request.prompt_token_ids) for item in requests]
    with here.limits.running(request.scope.get("api_key"), Load(len(tokens), sum(tokens))) as running:
        return await _vectors(here, running, name, requests)


async def _vectors(
    here: Services, running: Running, name: str, requests: list[PreparedRequest]
) -> tuple[list[npt.NDArray[np.float32]], int]:
    number_of = {f"{name}-{number}": number for number in range(len(requests))}
    vectors: dict[int, npt.NDArray[np.float32]] = {}
    num_cached = 0
    async with contextlib.aclosing(here.engine.pool(requests, list(number_of), limited=True)) as outputs:
        async for output in outputs:
            if output.outputs.finish_reason != "stop":
                raise GenerationFailedError(output.outputs.error)
            number = number_of[output.request_id]
            vectors[number] = _finite(output.outputs.data)
            request = requests[number].request
            running.begun(len(request.prompt_token_ids))
            num_cached += told_cached_tokens(request, output.num_cached_tokens, here.engine.block_size)
    return [vectors[number] for number in range(len(requests))], num_cached


def _finite(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector itself: JSON has no word for what is no number, and a client that gets none must be told. Raises
    GenerationFailedError."""
    if np.isfinite(vector).all():
        return vector
    raise GenerationFailedError("what the model computed is not a number")


async def _collected(
    request: Request, name: str, requests: list[PreparedRequest], form: AnswerForm, names: Names
) -> Response:
    vectors, num_cached = await vectors_of(request, name, requests)
    num_tokens = sum(len(item.request.prompt_token_ids) for item in requests)
    rows = await in_slices(
        _encode({"object": names.kind, "index": number, names.field: _as_json(vector, form.as_base64)})
        for number, vector in enumerate(vectors)
    )
    head = {"id": name, "object": "list", "created": now(), "model": services(request).model.name}
    tail = {
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }
    return LargeJson(head, "data", rows, tail, form.headers())


def _as_json(vector: npt.NDArray[np.float32], as_base64: bool) -> Any:
    """Numbers, or the base64 of little-endian 32-bit floats."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
