"""/v1/models."""

from fastapi import APIRouter, Request

from pagemill.serve.http.described import describes
from pagemill.serve.http.schemas.models import ModelCard, ModelList
from pagemill.serve.http.state import services

router = APIRouter()


def _card(request: Request, name: str) -> ModelCard:
    here = services(request)
    return ModelCard(id=name, created=here.model.created, max_model_len=here.engine.max_model_len)


@router.get("/v1/models", openapi_extra=describes(ModelList))
async def list_models(request: Request) -> ModelList:
    """The names of the model that is served here."""
    return ModelList(data=[_card(request, name) for name in services(request).model.listed])


@router.get("/v1/models/{name:path}", openapi_extra=describes(ModelCard, statuses=(404,)))
async def get_model(request: Request, name: str) -> ModelCard:
    """One of them, or one that an alias stands for."""
    services(request).model.check(name)
    return _card(request, name)
