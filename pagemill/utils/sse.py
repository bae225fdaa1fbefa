"""Server-sent events: bytes of a stream in, the data of each event out. Knows nothing about what the data mean."""


class SseParser:
    """Collects chunks of a text/event-stream, however they are cut, and hands out complete events."""

    def __init__(self) -> None:
        self._pending = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Append bytes; the `data` of the events that they complete, in order. Comments and other fields are skipped.

        Raises UnicodeDecodeError when a complete line is not UTF-8.
        """
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        return [event for line in lines if (event := self._line(line.rstrip(b"\r").decode())) is not None]

    def _line(self, line: str) -> str | None:
        if line:
            field, _, value = line.partition(":")
            if field == "data":
                self._data.append(value.removeprefix(" "))
            return None
        event, self._data = "\n".join(self._data) if self._data else None, []
        return event
