"""POST /v2/embed: texts in, vectors out, for Cohere's clients."""

import base64

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from pagemill.serve.http.connection import LargeBody, list_of, respond_unless_gone
from pagemill.serve.http.described import describes
from pagemill.serve.http.errors import NotHereError
from pagemill.serve.http.preparer import COHERE_EMBED, AnswerForm
from pagemill.serve.http.routes.embeddings import vectors_of
from pagemill.serve.http.schemas.answers import CohereVectors
from pagemill.serve.http.schemas.cohere import CohereEmbedBody
from pagemill.serve.http.state import services
from pagemill.serve.processing.input_processor import PreparedRequest
from pagemill.utils.pacer import in_slices

router = APIRouter()
_encode = msgspec.json.encode


@router.post("/v2/embed", response_model=None, openapi_extra=describes(CohereVectors, body=CohereEmbedBody))
async def embed(request: Request) -> Response:
    """Make vectors of texts, as Cohere's clients ask. Every text is checked before any runs.

    Raises RequestError, NotHereError for a model that makes no vectors, EngineOverloadedError, EngineDeadError.
    """
    inputs = services(request).engine.preparation.inputs
    if not inputs.pools or not inputs.pooling.one_vector:
        raise NotHereError("this model makes no vectors of texts")
    form, prepared, texts = await services(request).intake.prepare(COHERE_EMBED, request)
    name = f"embd-{request.scope['request_id']}"
    return await respond_unless_gone(request, _embedded(request, name, prepared, texts, form))


async def _embedded(
    request: Request, name: str, requests: list[PreparedRequest], texts: list[str], form: AnswerForm
) -> Response:
    vectors, _ = await vectors_of(request, name, requests)
    pieces = [_encode({"id": name})[:-1], b',"response_type":"embeddings_by_type","embeddings":{']
    for number, kind in enumerate(form.vector_types):
        pieces += [b"," if number else b"", _encode(kind), b":"]
        pieces += list_of(await in_slices(_encode(_as(kind, vector)) for vector in vectors))
    num_tokens = sum(len(item.request.prompt_token_ids) for item in requests)
    meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_tokens}}
    pieces += [b"},", _encode({"texts": texts, "meta": meta})[1:]]
    return LargeBody(pieces, form.headers())


def _as(kind: str, vector: npt.NDArray[np.float32]) -> list[float] | list[int] | str:
    """A vector as a client asks for it. Bits are the signs, the first number's the highest bit of its byte; a last byte
    that is not full ends with zeros."""
    match kind:
        case "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        case "ubinary":
            return [int(byte) for byte in np.packbits(vector > 0)]
        case "binary":
            return [int(byte) - 128 for byte in np.packbits(vector > 0)]
        case _:
            return [float(number) for number in vector]
