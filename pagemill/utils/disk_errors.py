"""Whether an error, or what it came from, is that a file could not be written."""

import errno
import os
from typing import Final

_NUMBERS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR})


def disk_problem(error: BaseException) -> str | None:
    """What the system says of the disk, if that is where the error comes from: "No space left on device"."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno in _NUMBERS:
            return one.strerror or os.strerror(one.errno)
        # Compilers are programs of their own, of which there is only a text.
        if os.strerror(errno.ENOSPC) in str(one):
            return os.strerror(errno.ENOSPC)
        # torch keeps the error of a compiler in an attribute.
        waiting += [one.__cause__, one.__context__, getattr(one, "inner_exception", None)]
    return None
