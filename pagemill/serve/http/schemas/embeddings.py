"""Bodies of POST /v1/embeddings, /pooling and /classify: texts, token ids, or a conversation."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from pagemill.errors import RequestError
from pagemill.messages.pooling_params import PoolingParams, PoolingTask
from pagemill.messages.prompts import Prompt
from pagemill.serve.http.connection import checked
from pagemill.serve.http.schemas.base import PromptBody
from pagemill.serve.http.schemas.chat import ChatBody
from pagemill.serve.http.schemas.completions import parse_prompts
from pagemill.serve.http.schemas.cutting import CuttingBody
from pagemill.serve.http.schemas.shapes import Prompts
from pagemill.serve.http.schemas.support import EMBEDDINGS_REFUSED, Refused

_OF_CHATS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class InputBody(CuttingBody, PromptBody):
    """Texts, or one conversation, of which the model makes vectors or classes."""

    refused: ClassVar[Mapping[str, Refused]] = EMBEDDINGS_REFUSED
    names: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    input: Any = None
    """After validation a list of prompts, each a text or token ids."""
    messages: Any = None
    """A conversation, in place of `input`; the next three are about how it is rendered."""
    add_generation_prompt: bool | None = None
    """Whether the beginning of an answer follows; by default it does not."""
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("input", mode="plain", json_schema_input_type=Prompts | None)
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt] | None:
        return None if value is None else parse_prompts(value, "input")

    @model_validator(mode="after")
    def _one_of_the_two(self) -> "InputBody":
        given = self._chat_fields
        if self.input is None and "messages" not in given:
            raise RequestError("input is missing: send input, texts, or messages, a conversation", "input")
        if self.input is not None and given:
            name = next(iter(given))
            raise RequestError(f"{name} does not go with input: send messages, a conversation, without input", name)
        return self

    @property
    def _chat_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_CHATS if getattr(self, name) is not None}

    @property
    def adds_special_tokens(self) -> bool:
        """`add_special_tokens`, or its default: texts get them, a conversation has what its template writes."""
        return self.input is not None if self.add_special_tokens is None else self.add_special_tokens

    def to_chat(self) -> ChatBody | None:
        """The conversation, as the body of a chat; None for texts. Raises RequestError."""
        if self.input is not None:
            return None
        return checked(ChatBody, {"add_generation_prompt": False} | self._chat_fields)

    def to_pooling_params(self) -> PoolingParams:
        """Raises RequestError."""
        return PoolingParams()


class EmbeddingBody(InputBody):
    """Texts to become vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """Of a model that classifies: whether logits become probabilities; otherwise another name of `normalize`."""

    def to_pooling_params(self) -> PoolingParams:
        """Raises RequestError."""
        return PoolingParams(dimensions=self.dimensions, normalize=self.normalize, use_activation=self.use_activation)


class PoolingBody(EmbeddingBody):
    """Texts to become what the model makes of them."""

    task: str | None = None
    """embed, token_embed, classify, token_classify or reward (default: what the model does)."""
    pooling_type: str | None = None
    """LAST, CLS, MEAN, ALL or STEP (default: as the server was started)."""
    step_tag_id: int | None = None
    """The token that ends a step, of STEP."""
    returned_token_ids: Any = None
    """Of classes, only these, by their numbers."""

    def to_pooling_params(self) -> PoolingParams:
        return (
            super()
            .to_pooling_params()
            .replace(
                task=self.task,
                pooling_type=self.pooling_type,
                step_tag_id=self.step_tag_id,
                returned_token_ids=self.returned_token_ids,
            )
        )


class ClassifyBody(InputBody):
    """Texts whose classes are asked for."""

    use_activation: bool | None = None
    """Whether logits become probabilities (default: as the server was started)."""

    def to_pooling_params(self) -> PoolingParams:
        """Raises RequestError."""
        return PoolingParams(task=PoolingTask.CLASSIFY, use_activation=self.use_activation)
