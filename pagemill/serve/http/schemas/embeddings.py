"""Body of POST /v1/embeddings: one text or several, or token ids."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from pagemill.messages.pooling_params import PoolingParams
from pagemill.messages.prompts import Prompt
from pagemill.serve.http.schemas.base import PromptBody
from pagemill.serve.http.schemas.completions import parse_prompts
from pagemill.serve.http.schemas.shapes import Prompts
from pagemill.serve.http.schemas.support import EMBEDDINGS_REFUSED, Refused


class EmbeddingBody(PromptBody):
    """Texts to become vectors."""

    refused: ClassVar[Mapping[str, Refused]] = EMBEDDINGS_REFUSED

    input: Any
    """After validation a list of prompts, each a text or token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    @field_validator("input", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt]:
        return parse_prompts(value, "input")

    def to_pooling_params(self) -> PoolingParams:
        """Raises RequestError."""
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize)
