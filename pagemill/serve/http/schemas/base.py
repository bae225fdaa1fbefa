"""What bodies have in common: what becomes of fields that no schema declares, and the fields of all with prompts."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator

from pagemill.errors import RequestError
from pagemill.serve.http.schemas.support import HINTS, Refused, check_extras, header_of


class RequestBody(BaseModel):
    """A body that may name a model. Types are strict; null means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    refused: ClassVar[Mapping[str, Refused]] = {}
    hints: ClassVar[Mapping[str, str]] = HINTS
    names: ClassVar[Mapping[str, str]] = {}
    """What a field of the request is called in this body, where it is called otherwise; for errors."""
    _ignored: list[str] = PrivateAttr(default_factory=list)

    model: str | None = None

    @model_validator(mode="after")
    def _extras_are_refused_or_named(self) -> Self:
        self._ignored += check_extras(self.model_extra or {}, self.refused, self.hints)
        return self

    @property
    def unknown_fields(self) -> list[str]:
        """Names of fields without effect."""
        return self._ignored

    @property
    def ignored_fields(self) -> str:
        """The same as the value of a header; empty when there are none."""
        return header_of(self._ignored) if self._ignored else ""

    def leave_out(self, names: Iterable[str]) -> None:
        """Name further fields among those without effect."""
        self._ignored += names

    @contextlib.contextmanager
    def naming(self, names: Mapping[str, str] | None = None) -> Iterator[None]:
        """In errors: the fields of this body, by `names` (default: those of its class)."""
        try:
            yield
        except RequestError as error:
            name = (names or self.names).get(error.field or "")
            if name is None:
                raise
            message = str(error)
            if message.startswith(str(error.field)):
                message = name + message.removeprefix(str(error.field))
            raise type(error)(message, name) from None


class PromptBody(RequestBody):
    """A body with prompts for the model."""

    add_special_tokens: bool | None = None
    """Whether the text gets the tokenizer's own begin-of-sequence token."""
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
