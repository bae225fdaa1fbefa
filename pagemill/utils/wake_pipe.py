"""`WakePipe`: lets any thread end the wait of one that polls."""

import contextlib
import os


class WakePipe:
    """`fd` is readable after `wake`, until `drain`. Raises OSError when there are no descriptors left."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        for end in (self.fd, self._write):
            os.set_blocking(end, False)

    def wake(self) -> None:
        """Make `fd` readable. From any thread."""
        with contextlib.suppress(BlockingIOError):  # enough wake-ups are waiting
            os.write(self._write, b"w")

    def drain(self) -> None:
        """Undo `wake`. Called by the thread that polls."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 1 << 16)

    def close(self) -> None:
        """Close both ends. Called once."""
        os.close(self.fd)
        os.close(self._write)
