"""/v1/models."""

from fastapi import APIRouter, Request

from pagemill.serve.http.schemas.models import ModelCard, ModelList
from pagemill.serve.http.state import services

router = APIRouter()


def _card(request: Request) -> ModelCard:
    here = services(request)
    return ModelCard(id=here.model.name, created=here.model.created, max_model_len=here.engine.max_model_len)


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """The models served here."""
    return ModelList(data=[_card(request)])


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> ModelCard:
    """One of them, by name."""
    services(request).model.check(name)
    return _card(request)
