"""Bodies of /v1/models."""

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """One model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pagemill"
    max_model_len: int
    """Tokens of prompt and output together."""


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
