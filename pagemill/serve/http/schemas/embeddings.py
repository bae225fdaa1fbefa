"""Body of POST /v1/embeddings: one text or several, or token ids."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr, field_validator, model_validator

from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt
from pagemill.serve.http.schemas.completions import parse_prompts
from pagemill.serve.http.schemas.support import EMBEDDINGS_REFUSED, HINTS, Refused, check_extras, header_of


class EmbeddingBody(BaseModel):
    """Texts to become vectors. Types are strict; null means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    refused: ClassVar[Mapping[str, Refused]] = EMBEDDINGS_REFUSED
    hints: ClassVar[Mapping[str, str]] = HINTS
    _ignored: list[str] = PrivateAttr(default_factory=list)

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
    def _extras_are_refused_or_named(self) -> "EmbeddingBody":
        self._ignored = check_extras(self.model_extra or {}, self.refused, self.hints)
        return self

    @property
    def ignored_fields(self) -> str:
        """Names of fields that nobody knows, as the value of a header; empty when there are none."""
        return header_of(self._ignored)

    def to_pooling_params(self) -> PoolingParams:
        """Raises RequestError."""
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize)
