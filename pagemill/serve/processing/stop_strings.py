"""`StopMatcher`: finds stop strings in a growing text and holds back what may become one.
Does not know tokens: how the text is cut into pieces never changes the result.

All stop strings are followed at once by an automaton (Aho-Corasick) whose state is the longest end of the text that
begins some stop string. So each character is looked at once, and exactly the text that could still turn into a stop
string is held back.
"""

from pagemill.utils.sized_cache import SizedCache

ROOT = 0
MAX_CACHED_CHARS = 16_384
"""Of stop strings whose compiled form is kept: a character takes some 300 bytes."""


class StopAutomaton:
    """The compiled form of a set of stop strings; shared by requests, never changed."""

    __slots__ = ("_back", "_children", "_depth", "_held", "_matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._matched: list[str | None] = [None]
        """The longest stop string that ends in a state."""
        for stop in stops:
            self._insert(stop)
        self._back = [ROOT] * len(self._children)
        """The state of the next shorter end that begins a stop string."""
        self._held = [0] * len(self._children)
        """Characters that may still become a stop string."""
        self._link()

    def _insert(self, stop: str) -> None:
        state = ROOT
        for char in stop:
            following = self._children[state].get(char)
            if following is None:
                following = len(self._children)
                self._children[state][char] = following
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._matched.append(None)
            state = following
        self._matched[state] = stop

    def _link(self) -> None:
        """Breadth first, so that a state's shorter ends are complete before it."""
        order = [ROOT]
        for state in order:
            for char, child in self._children[state].items():
                if state != ROOT:
                    self._back[child] = self.advance(self._back[state], char)
                back = self._back[child]
                self._matched[child] = self._matched[child] or self._matched[back]
                self._held[child] = self._depth[child] if self._children[child] else self._held[back]
                order.append(child)

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self._children[state].get(char)
            if following is not None:
                return following
            if state == ROOT:
                return ROOT
            state = self._back[state]

    def matched(self, state: int) -> str | None:
        """The longest stop string that ends here, if any does."""
        return self._matched[state]

    def held(self, state: int) -> int:
        """How many characters at the end may still become a stop string."""
        return self._held[state]


_cache: SizedCache[tuple[str, ...], StopAutomaton] = SizedCache(MAX_CACHED_CHARS, lambda stops, _: sum(map(len, stops)))
"""The compiled forms that were used last. Used from one thread at a time."""


class StopMatcher:
    """The state of one text. The stop string that is complete first ends it; of those ending together, the longest."""

    __slots__ = ("_automaton", "_first_chars", "_held", "_include", "_state", "_stops")

    def __init__(self, stops: tuple[str, ...], include_in_output: bool) -> None:
        self._stops = stops
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._automaton: StopAutomaton | None = None
        """None until a stop string may have begun: most never do, and a request that waits takes no memory for it."""
        self._include = include_in_output
        self._state = ROOT
        self._held = ""

    def feed(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """Append a piece of text; the text that is now certain, and the stop string that ended it.

        While not `armed`, stop strings that end in the piece do not count.
        """
        if self._state == ROOT and self._first_chars.isdisjoint(piece):
            return piece, None
        automaton = self._automaton
        if automaton is None:
            automaton = _cache.get(self._stops) or _cache.put(self._stops, StopAutomaton(self._stops))
            self._automaton = automaton
        text = self._held + piece
        state = self._state
        for position, char in enumerate(piece, start=len(self._held) + 1):
            state = automaton.advance(state, char)
            stop = automaton.matched(state)
            if stop is not None and armed:
                self._state = ROOT
                self._held = ""
                return text[: position if self._include else position - len(stop)], stop
        certain = len(text) - automaton.held(state)
        self._state = state
        self._held = text[certain:]
        return text[:certain], None

    def release(self) -> str:
        """What was held back, once the text has ended without a stop string."""
        held, self._held, self._state = self._held, "", ROOT
        return held
