"""`SpaceHolder`: white space at the end of a text, held back until something follows it."""


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
