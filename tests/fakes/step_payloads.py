"""What step extensions of a step say, for fakes that do without the workers' halves."""

from collections.abc import Sequence

from pagemill.messages.block_copies import BlockCopies, BlockCopy
from pagemill.messages.step import SchedulerOutput


def copies_of(step: SchedulerOutput) -> Sequence[BlockCopy]:
    """The copies of blocks that a step begins with."""
    payload = step.extensions.get("block_copies") if step.extensions else None
    return payload.copies if isinstance(payload, BlockCopies) else []
