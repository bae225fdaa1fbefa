"""POST /v1/embeddings: prompts in, a vector for each out."""

import base64
import contextlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import respond_unless_gone
from pagemill.serve.http.errors import GenerationFailedError
from pagemill.serve.http.handlers.generation import now, told_cached_tokens
from pagemill.serve.http.intake import Intake
from pagemill.serve.http.preparer import EMBEDDINGS, AnswerForm
from pagemill.serve.http.served_model import ServedModel
from pagemill.serve.processing.input_processor import PreparedRequest

_encode = msgspec.json.encode


class EmbeddingHandler:
    """Makes vectors of texts with one engine."""

    def __init__(self, engine: AsyncLLM, model: ServedModel, intake: Intake) -> None:
        self._engine = engine
        self._model = model
        self._intake = intake

    async def respond(self, request: Request) -> Response:
        """Check every prompt before any runs, then make the vectors.

        Raises RequestError, EngineOverloadedError, EngineDeadError.
        """
        form, prepared, _ = await self._intake.take(EMBEDDINGS, request)
        name = f"embd-{request.scope['request_id']}"
        return await respond_unless_gone(request, self._collect(name, prepared, form))

    async def _collect(self, name: str, requests: list[PreparedRequest], form: AnswerForm) -> Response:
        number_of = {f"{name}-{number}": number for number in range(len(requests))}
        vectors: dict[int, npt.NDArray[np.float32]] = {}
        num_cached = 0
        async with contextlib.aclosing(self._engine.pool(requests, list(number_of), limited=True)) as outputs:
            async for output in outputs:
                if output.outputs.finish_reason != "stop":
                    raise GenerationFailedError(output.outputs.error)
                number = number_of[output.request_id]
                vectors[number] = output.outputs.data
                request = requests[number].request
                num_cached += told_cached_tokens(request, output.num_cached_tokens, self._engine.block_size)
        num_tokens = sum(len(item.request.prompt_token_ids) for item in requests)
        body = {
            "id": name,
            "object": "list",
            "created": now(),
            "model": self._model.name,
            "data": [
                {"object": "embedding", "index": number, "embedding": _as_json(vectors[number], form.as_base64)}
                for number in range(len(requests))
            ],
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": num_cached},
            },
        }
        return Response(_encode(body), headers=form.headers(), media_type="application/json")


def _as_json(vector: npt.NDArray[np.float32], as_base64: bool) -> Any:
    """Numbers, or the base64 of little-endian 32-bit floats."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist()
