"""Copies of KV blocks, told to the workers with a step: the step extension "block_copies"."""

from dataclasses import dataclass

import msgspec

from pagemill.messages.extensions import StepExtension


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The whole block `destination` becomes what `source` is: its page in every one of the shared tensors."""

    source: int
    destination: int


class BlockCopies(msgspec.Struct, frozen=True, array_like=True):
    """All at once, before the step writes anything: every source is read as the steps before left it, even where it is
    the destination of another copy. No block is a destination twice."""

    copies: list[BlockCopy]


BLOCK_COPIES = StepExtension(
    engine="pagemill.engine.extensions.block_copies:CopiesOfStep",
    worker="pagemill.worker.kv_tensors.copy_blocks:BlockCopier",
    payload=BlockCopies,
)
