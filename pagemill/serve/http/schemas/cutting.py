"""Fields of bodies that say how a prompt is cut that is too long: without them it is an error."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from pagemill.errors import RequestError
from pagemill.serve.http.schemas.base import RequestBody
from pagemill.serve.processing.cutting import Cut
from pagemill.tokenizers.pair_cut import PairCut


class CuttingBody(RequestBody):
    """A body whose prompts may be cut."""

    truncate_prompt_tokens: int | None = None
    """Most tokens of a prompt, special ones included, and at most those of the context; -1: those of the context."""
    truncation_side: Literal["left", "right"] | None = None
    """Where tokens are taken off a prompt that has more (default: right)."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _a_number(cls, value: int | None) -> int | None:
        Cut.of(value)
        return value

    @property
    def cut(self) -> Mapping[str, Any] | None:
        """How prompts are cut that do not fit, as arguments of `InputProcessor.tokenize_cut`; None: such a prompt is an
        error."""
        return None if self.joint_cut is None else self.joint_cut._asdict()

    @property
    def joint_cut(self) -> Cut | None:
        """The same, of all that is read together."""
        return Cut.of(self.truncate_prompt_tokens, self.truncation_side)


class CuttingSidesBody(CuttingBody):
    """A body with queries and documents, which may be cut by themselves."""

    max_tokens_per_query: int | None = None
    """The first so many tokens of a query, without special ones; 0: all."""
    max_tokens_per_doc: int | None = None
    """The first so many tokens of a document, without special ones; 0: all."""

    @field_validator("max_tokens_per_query", "max_tokens_per_doc")
    @classmethod
    def _tokens_or_all(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < 0:
            raise RequestError(
                f"{info.field_name}={value} is not allowed: a number of tokens, or 0 for all", str(info.field_name)
            )
        return value

    def pair_cut(self, both: PairCut) -> PairCut:
        """How a query and a document are cut that are read together, of which `both` are cut so."""
        return replace(both, first=self.max_tokens_per_query or None, second=self.max_tokens_per_doc or None)

    def cut_of(self, most_plain: int | None) -> Mapping[str, Any] | None:
        """`cut`, of a text of which alone so many tokens are kept; 0 and None: all."""
        return self.cut if not most_plain else {**(self.cut or {}), "most_plain": most_plain}
