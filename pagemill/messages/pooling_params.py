"""`PoolingParams`: how one prompt becomes a vector. Knows nothing about models.

The hidden states are those of the last layer, after the final norm.
"""

from enum import StrEnum
from typing import Any

import msgspec

from pagemill.messages.bounds import MAX_INT32, check_integer, check_switch, refusal


class PoolingType(StrEnum):
    """Which hidden states of a prompt become its vector."""

    LAST = "LAST"
    """The last token's."""
    CLS = "CLS"
    """The first token's."""
    MEAN = "MEAN"
    """The mean of all tokens'."""


POOLING_TYPES = tuple(kind.value for kind in PoolingType)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pooling"):
    """Parameters of one pooling request. What is None is filled in on admission, with what the server was started with.

    Raises RequestError (a ValueError) that names the field.
    """

    pooling_type: str | None = None
    """LAST: the last token's hidden state; CLS: the first one's; MEAN: the mean of all."""
    dimensions: int | None = None
    """Only the first so many numbers; None: all. Of use for models that were trained for it (Matryoshka)."""
    normalize: bool | None = None
    """Scale the vector, once shortened, to length 1."""

    def __post_init__(self) -> None:
        if self.pooling_type is not None and self.pooling_type not in POOLING_TYPES:
            raise refusal("pooling_type", self.pooling_type, ", ".join(POOLING_TYPES))
        if self.dimensions is not None:
            check_integer("dimensions", self.dimensions, 1, MAX_INT32)
        if self.normalize is not None:
            check_switch("normalize", self.normalize)

    @property
    def reads_all_tokens(self) -> bool:
        """Whether the hidden states of earlier tokens are read, so that all of them must be computed."""
        return self.pooling_type in (PoolingType.CLS, PoolingType.MEAN)

    def replace(self, **changes: Any) -> "PoolingParams":
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)
