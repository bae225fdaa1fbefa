"""What others wrote, as a part of a line of the log: no end of line, no control character, and no more than so much."""

import traceback

_MAX_FRAMES = 24


def one_line(text: str, most_chars: int) -> str:
    """The beginning of a text; what cannot be printed, or would change how the line is shown, is escaped as in a
    literal of Python. What is left out is counted."""
    left_out = len(text) - most_chars
    shown = repr(text[:most_chars])[1:-1]
    return f"{shown}... ({left_out} more characters)" if left_out > 0 else shown


def stack_of(error: BaseException, most_chars: int = 500) -> str:
    """Where an error was raised, and what it says, in one line; a message may quote what a client has sent."""
    frames = traceback.extract_tb(error.__traceback__)[-_MAX_FRAMES:]
    places = " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {one_line(str(error), most_chars)} ({places or 'raised nowhere'})"
