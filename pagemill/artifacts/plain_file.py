"""What is looked at before a file of a stranger's folder is read as a whole: that it is one, and how large it is.
Knows nothing about what is in it."""

import stat
from pathlib import Path


def check_plain(path: Path, most: int) -> None:
    """Raise OSError for a pipe or device, which may have no end, for a file of more than `most` bytes, and where there
    is none. A folder is left to whoever opens it."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError("it is a pipe, a socket or a device")
    if found.st_size > most:
        raise OSError(f"it has {found.st_size} bytes, and at most {most} are read")
