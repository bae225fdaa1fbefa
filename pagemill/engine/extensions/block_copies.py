"""`CopiesOfStep`: blocks that a step's new requests need as copies of others. Knows nothing about why (the KV cache's
partial_reuse.py does)."""

from pagemill.engine.extensions.interface import EngineContext, EngineExtension, IntArray
from pagemill.messages.block_copies import BlockCopies
from pagemill.messages.step import SchedulerOutput


class CopiesOfStep(EngineExtension):
    """Tells the workers what the KV cache wants copied."""

    def __init__(self, context: EngineContext) -> None:
        self._kv = context.kv

    def payload(self, step: SchedulerOutput, sampled: IntArray) -> BlockCopies | None:
        copies = self._kv.take_copies()
        return BlockCopies(copies) if copies else None
