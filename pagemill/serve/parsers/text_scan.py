"""Looking for marks in a text that arrives in pieces. Time is linear in the text, however it is cut."""


class MarkerFinder:
    """Finds one marker. Holds back no more than what may become it."""

    __slots__ = ("_held", "_marker")

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def feed(self, piece: str) -> tuple[str, str | None]:
        """The text before the marker, as far as it is certain; and what follows the marker, None while it is not
        there."""
        text = self._held + piece
        at = text.find(self._marker)
        if at >= 0:
            self._held = ""
            return text[:at], text[at + len(self._marker) :]
        certain = len(text) - self._may_begin(text)
        self._held = text[certain:]
        return text[:certain], None

    def release(self) -> str:
        """What was held back, once the text has ended."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> int:
        """How many characters at the end are the first ones of the marker."""
        first = self._marker[0]
        at = text.find(first, max(0, len(text) - len(self._marker) + 1))
        while at >= 0:
            if self._marker.startswith(text[at:]):
                return len(text) - at
            at = text.find(first, at + 1)
        return 0


class SpaceHolder:
    """Holds back white space at the end of a text until something follows it."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[str] = []

    def feed(self, piece: str) -> str:
        """The text up to its last character that is no white space."""
        end = len(piece.rstrip())
        if end == 0:
            if piece:
                self._held.append(piece)
            return ""
        text = "".join(self._held) + piece[:end]
        self._held = [piece[end:]] if end < len(piece) else []
        return text

    def release(self) -> str:
        """The white space that was held back; it is forgotten."""
        held = "".join(self._held)
        self._held = []
        return held
