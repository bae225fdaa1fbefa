"""Body of POST /v2/embed: Cohere's, for its clients."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pagemill.serve.http.connection import checked
from pagemill.serve.http.schemas.embeddings import EmbeddingBody
from pagemill.serve.http.schemas.support import COHERE_REFUSED, Refused
from pagemill.serve.http.schemas.translation import Translation

VectorType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedBody(Translation):
    """Texts to become vectors."""

    refused: ClassVar[Mapping[str, Refused]] = COHERE_REFUSED
    names: ClassVar[Mapping[str, str]] = {"input": "texts", "prompt": "texts", "dimensions": "output_dimension"}

    texts: list[str]
    embedding_types: list[VectorType] | None = Field(None, min_length=1, max_length=16)
    """Forms of the vectors: numbers, base64 of little-endian 32-bit floats, or the signs of the numbers as bits, eight
    in an integer with a sign or without one (default: float)."""
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """Which end of a text is cut off that does not fit; by default the END, NONE: such a text is an error."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of a text, special ones included; at most as many as the context has."""
    priority: int | None = None

    def translated(self) -> EmbeddingBody:
        """See `Translation`."""
        fields = {
            "model": self.served_model,
            "input": self.texts,
            "dimensions": self.output_dimension,
            "priority": self.priority,
        }
        body = checked(EmbeddingBody, fields)
        body.leave_out(self.unknown_fields)
        return body

    @property
    def vector_types(self) -> list[str]:
        """Each once, in their order."""
        return list(dict.fromkeys(self.embedding_types or ("float",)))

    @property
    def cut(self) -> Mapping[str, Any] | None:
        """See `Translation`."""
        return None if self.truncate == "NONE" else {"most": self.max_tokens, "keep_end": self.truncate == "START"}
