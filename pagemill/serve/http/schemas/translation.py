"""Bodies of other APIs, which stand for one of OpenAI's. Do not know how it is run."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from pydantic import PrivateAttr

from pagemill.serve.http.schemas.base import RequestBody
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import CompletionBody
from pagemill.serve.http.schemas.embeddings import EmbeddingBody
from pagemill.serve.processing.fill_in import Gap


class Translation(RequestBody):
    """A body that is run as another one."""

    _gap_token_ids: list[int] = PrivateAttr(default_factory=list)

    @property
    def served_model(self) -> str | None:
        """The model, as a name that may be served."""
        return self.model

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to be run: it asks for the model alone."""
        return False

    @property
    def cut(self) -> Mapping[str, Any] | None:
        """How texts are cut that do not fit the context, as arguments of `InputProcessor.tokenize_cut`; None: such a
        text is an error."""
        return None

    @property
    def gap(self) -> Gap | None:
        """The text with a gap that is the prompt; None: it is none. Raises RequestError."""
        return None

    @property
    def gap_tokens(self) -> int | None:
        """Most tokens that fill the gap; None: as many as there is room for."""
        return None

    @property
    def gap_token_ids(self) -> list[int]:
        """What `take_gap` was given."""
        return self._gap_token_ids

    def take_gap(self, token_ids: list[int]) -> None:
        """The gap as tokens; before `translated`."""
        self._gap_token_ids = token_ids

    @abstractmethod
    def translated(self) -> ChatBody | CompletionBody | EmbeddingBody:
        """The body that it stands for. Raises RequestError."""
