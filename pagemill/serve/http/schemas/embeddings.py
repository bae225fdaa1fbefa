"""Body of POST /v1/embeddings: one text or several, or token ids."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from pagemill.messages.pooling_params import PoolingParams, PoolingTask
from pagemill.messages.prompts import Prompt
from pagemill.serve.http.schemas.base import PromptBody
from pagemill.serve.http.schemas.completions import parse_prompts
from pagemill.serve.http.schemas.shapes import Prompts
from pagemill.serve.http.schemas.support import EMBEDDINGS_REFUSED, Refused


class EmbeddingBody(PromptBody):
    """Texts to become vectors."""

    refused: ClassVar[Mapping[str, Refused]] = EMBEDDINGS_REFUSED
    names: ClassVar[Mapping[str, str]] = {"prompt": "input"}

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
    use_activation: bool | None = None
    """Of a model that classifies: whether logits become probabilities; otherwise another name of `normalize`."""

    def to_pooling_params(self) -> PoolingParams:
        return (
            super()
            .to_pooling_params()
            .replace(
                task=self.task,
                pooling_type=self.pooling_type,
                step_tag_id=self.step_tag_id,
                returned_token_ids=self.returned_token_ids,
                use_activation=self.use_activation,
            )
        )


class ClassifyBody(PromptBody):
    """Texts whose classes are asked for."""

    refused: ClassVar[Mapping[str, Refused]] = EMBEDDINGS_REFUSED
    names: ClassVar[Mapping[str, str]] = {"prompt": "input"}

    input: Any
    """After validation a list of prompts, each a text or token ids."""
    use_activation: bool | None = None
    """Whether logits become probabilities (default: as the server was started)."""

    @field_validator("input", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _prompts(cls, value: Any) -> list[Prompt]:
        return parse_prompts(value, "input")

    def to_pooling_params(self) -> PoolingParams:
        """Raises RequestError."""
        return PoolingParams(task=PoolingTask.CLASSIFY, use_activation=self.use_activation)
