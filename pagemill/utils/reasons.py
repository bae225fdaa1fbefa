"""Why something failed, for one line of a message."""

from typing import Final

MAX_REASON_CHARS: Final = 300


def reason(error: BaseException) -> str:
    """The kind of an error and what it says, in one line of bounded length: it may repeat what a file says."""
    words = " ".join(str(error).split())[:MAX_REASON_CHARS]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
