"""`AttentionCGSupport`: for which batches an attention backend can be part of a captured graph."""

from enum import IntEnum


class AttentionCGSupport(IntEnum):
    """Ordered by capability; of several backends in one model the least counts. Cascade attention is never captured,
    whatever the level."""

    NEVER = 0
    """Attention cannot be captured."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches in which every request has one token."""
    UNIFORM_BATCH = 2
    """Batches in which every request has as many tokens, such as 1 + drafts."""
    ALWAYS = 3
    """Any batch, prefill and decode mixed."""
