"""A step extension of one's own, what its halves exchange: which even tokens a request may have."""

import msgspec

from pagemill.messages.extensions import StepExtension


class Remainders(msgspec.Struct, frozen=True):
    """Of the requests that begin with a step."""

    slots: list[int]
    remainders: list[int]
    """[L] 0 or 2: what every token of the request leaves when it is divided by 4."""


class Changed(msgspec.Struct, frozen=True):
    """How many rows of logits were changed in a step."""

    num_rows: int


EXTENSION = StepExtension(
    engine="pagemill_example.extension_engine:Decider",
    worker="pagemill_example.extension_worker:Rule",
    payload=Remainders,
    answer=Changed,
)
