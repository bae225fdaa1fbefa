"""POST /tokenize and /detokenize: texts and conversations to token ids, and back."""

import msgspec
from fastapi import APIRouter, Request, Response

from pagemill.serve.http.described import describes
from pagemill.serve.http.preparer import DETOKENIZE, TOKENIZE
from pagemill.serve.http.schemas.answers import Detokenized, Tokenized
from pagemill.serve.http.schemas.tokenize import DetokenizeBody, TokenizeBody
from pagemill.serve.http.state import services

router = APIRouter()
_encode = msgspec.json.encode


@router.post("/tokenize", response_model=None, openapi_extra=describes(Tokenized, body=TokenizeBody))
async def tokenize(request: Request) -> Response:
    """The tokens of a text, or those that a conversation is run with. They need not fit the context.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    here = services(request)
    form, (tokens,) = await here.intake.tokens(TOKENIZE, request)
    body = b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
        tokens.count,
        here.engine.max_model_len,
        tokens.ids,
        tokens.texts,
    )
    return Response(body, headers=form.headers(), media_type="application/json")


@router.post("/detokenize", response_model=None, openapi_extra=describes(Detokenized, body=DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of tokens, special ones included.

    Raises RequestError, EngineOverloadedError, EngineDeadError.
    """
    form, (tokens,) = await services(request).intake.tokens(DETOKENIZE, request)
    return Response(_encode({"prompt": tokens.prompt}), headers=form.headers(), media_type="application/json")
