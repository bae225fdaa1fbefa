"""Body of POST /v1/embeddings: one text or several, or token ids."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.log import get_logger
from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt
from pagemill.serve.http.schemas.completions import parse_prompts
from pagemill.serve.processing.checks import shown

logger = get_logger(__name__)

UNSUPPORTED = ("messages", "truncate_prompt_tokens", "embed_dtype", "endianness")
"""Fields whose effect does not exist: who asks for it would get something else."""


class EmbeddingBody(BaseModel):
    """Texts to become vectors. Types are strict; null means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    input: Any
    """After validation a list of prompts, each a text or token ids."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None

    @field_validator("input", mode="plain")
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt]:
        return parse_prompts(value, "input")

    @model_validator(mode="after")
    def _extras_are_harmless(self) -> "EmbeddingBody":
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None:
                raise RequestError(f"{name}={shown(value)} is not supported by this server", name)
            logger.debug("request field %s is unknown and ignored", shown(name))
        return self

    def to_pooling_params(self) -> PoolingParams:
        """Raises RequestError."""
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize)
