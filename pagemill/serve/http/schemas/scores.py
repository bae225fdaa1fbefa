"""Bodies of POST /score and POST /rerank: pairs of texts whose likeness is asked for."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.serve.http.schemas.base import RequestBody
from pagemill.serve.http.schemas.completions import MAX_PROMPTS
from pagemill.serve.http.schemas.shapes import Document, Texts
from pagemill.serve.http.schemas.support import SCORES_REFUSED, Refused
from pagemill.utils.text import shown


class ScoreBody(RequestBody):
    """One text or several, each compared with one of as many others; or one with all of them."""

    refused: ClassVar[Mapping[str, Refused]] = SCORES_REFUSED
    query_names: ClassVar[Mapping[str, str]] = {"prompt": "text_1"}
    document_names: ClassVar[Mapping[str, str]] = {"prompt": "text_2"}

    text_1: Any
    """After validation a list of texts."""
    text_2: Any
    """After validation a list of texts."""
    use_activation: bool | None = None
    """Of a model that scores pairs: whether a logit becomes a probability."""

    @field_validator("text_1", mode="plain", json_schema_input_type=Texts)
    @classmethod
    def _first(cls, value: Any) -> list[str]:
        return _texts(value, "text_1")

    @field_validator("text_2", mode="plain", json_schema_input_type=Texts)
    @classmethod
    def _second(cls, value: Any) -> list[str]:
        return _texts(value, "text_2")

    @model_validator(mode="after")
    def _pairs(self) -> "ScoreBody":
        if len(self.text_1) not in (1, len(self.text_2)):
            raise RequestError(
                f"text_1 has {len(self.text_1)} texts and text_2 {len(self.text_2)}: as many, or one text_1 for all",
                "text_1",
            )
        return self

    @property
    def queries(self) -> list[str]:
        """What is compared with the documents."""
        return self.text_1  # type: ignore[no-any-return]

    @property
    def documents(self) -> list[str]:
        """What the queries are compared with."""
        return self.text_2  # type: ignore[no-any-return]

    @property
    def most(self) -> int | None:
        """How many results are told; None: all."""
        return None


class RerankBody(RequestBody):
    """A text, and others that are put in order of their likeness to it."""

    refused: ClassVar[Mapping[str, Refused]] = SCORES_REFUSED
    query_names: ClassVar[Mapping[str, str]] = {"prompt": "query"}
    document_names: ClassVar[Mapping[str, str]] = {"prompt": "documents"}

    query: str
    documents: Any
    """After validation a list of texts."""
    top_n: int | None = None
    """How many of the likest are told; by default, and for 0, all."""
    use_activation: bool | None = None
    """Of a model that scores pairs: whether a logit becomes a probability."""

    @field_validator("documents", mode="plain", json_schema_input_type=list[str | Document])
    @classmethod
    def _documents(cls, value: Any) -> list[str]:
        if isinstance(value, list):
            value = [item.get("text") if isinstance(item, Mapping) else item for item in value]
        return _texts(value, "documents")

    @field_validator("top_n")
    @classmethod
    def _not_negative(cls, value: int | None) -> int | None:
        if value is not None and value < 0:
            raise RequestError(f"top_n={value} is not allowed: 0 for all, or more", "top_n")
        return value

    @property
    def queries(self) -> list[str]:
        """What is compared with the documents."""
        return [self.query]

    @property
    def most(self) -> int | None:
        """How many results are told; None: all."""
        return self.top_n or None


def _texts(value: Any, field: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or set(map(type, texts)) != {str}:
        raise RequestError(f"{field}={shown(value)} is not allowed: a text or a list of texts, not empty", field)
    if len(texts) > MAX_PROMPTS:
        raise RequestError(f"{field} holds {len(texts)} texts; at most {MAX_PROMPTS} per request", field)
    return texts
