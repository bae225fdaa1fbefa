"""Bodies of POST /score and POST /rerank: pairs of texts whose likeness is asked for."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, ValidationInfo, field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.serve.http.schemas.completions import MAX_PROMPTS
from pagemill.serve.http.schemas.cutting import CuttingSidesBody
from pagemill.serve.http.schemas.shapes import Document, Texts
from pagemill.serve.http.schemas.support import SCORES_REFUSED, Refused
from pagemill.utils.text import shown

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""What clients call the two sides: one of these pairs."""
_NAMES = tuple(dict.fromkeys(name for pair in _PAIRS for name in pair))


def _only(pair: tuple[str, str]) -> dict[str, Any]:
    """The part of a JSON schema that asks for one pair of names, and for no other."""
    return {"required": list(pair), "properties": {name: {"type": "null"} for name in _NAMES if name not in pair}}


class ScoreBody(CuttingSidesBody):
    """One text or several, each compared with one of as many others; or one with all of them. The sides have one of
    four pairs of names: text_1 and text_2, queries and documents, queries and items, data_1 and data_2."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_only(pair) for pair in _PAIRS]})

    refused: ClassVar[Mapping[str, Refused]] = SCORES_REFUSED

    text_1: Any = None
    """After validation a list of texts, as all of these."""
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    use_activation: bool | None = None
    """Of a model that scores pairs: whether a logit becomes a probability."""

    @field_validator(*_NAMES, mode="plain", json_schema_input_type=Texts | None)
    @classmethod
    def _side(cls, value: Any, info: ValidationInfo) -> list[str] | None:
        return None if value is None else _texts(value, str(info.field_name))

    @model_validator(mode="after")
    def _one_pair(self) -> "ScoreBody":
        given = {name for name in _NAMES if getattr(self, name) is not None}
        first, second = self.fields
        for name in (first, second):
            if name not in given:
                raise RequestError(f"{name} is missing: a text or a list of texts", name)
        others = sorted(given - {first, second})
        if others:
            raise RequestError(f"{others[0]} does not go with {first} and {second}: send one pair of names", others[0])
        num_first, num_second = len(getattr(self, first)), len(getattr(self, second))
        if num_first not in (1, num_second):
            raise RequestError(
                f"{first} has {num_first} texts and {second} {num_second}: as many, or one {first} for all", first
            )
        return self

    @property
    def fields(self) -> tuple[str, str]:
        """What the two sides are called here: the first pair of names of which this body has the most."""
        return max(_PAIRS, key=lambda pair: sum(getattr(self, name) is not None for name in pair))

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """Texts, and what they are compared with."""
        first, second = self.fields
        return getattr(self, first), getattr(self, second)

    @property
    def most(self) -> int | None:
        """How many results are told; None: all."""
        return None


class RerankBody(CuttingSidesBody):
    """A text, and others that are put in order of their likeness to it."""

    refused: ClassVar[Mapping[str, Refused]] = SCORES_REFUSED
    fields: ClassVar[tuple[str, str]] = ("query", "documents")

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
    def sides(self) -> tuple[list[str], list[str]]:
        """The query, and what it is compared with."""
        return [self.query], self.documents

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
