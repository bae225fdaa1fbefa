"""What a front end remembers of the requests that engines work on, so that another engine can go on with them.

Knows nothing about how engines are reached or chosen.
"""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Finish, FinishReason

CRASHES_OF_A_SUSPECT = 2
MAX_CRASHES = 4
"""So often a request may be in doubt when its engine dies, however many others are."""
CLEARING_TOKENS = 8
"""Tokens after which a request is taken for innocent, and of several suspects the next one is tried."""
MAX_LOST_LINKS = 16
"""So often in a row the connection may be lost before a request makes any progress: something about it breaks them."""


class InFlight:
    """One request: what was asked, what was answered so far, and where it is."""

    __slots__ = (
        *("cleared", "emitted", "engine", "lost_by", "num_crashes", "num_lost_links"),
        *("num_placed", "num_resumed", "request", "suspicion"),
    )

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.emitted: list[int] = []
        """Tokens that the engines produced so far."""
        self.engine: int | None = None
        """Index of the engine that has it; None while it waits for one."""
        self.lost_by: int | None = None
        """Index of an engine to which the connection was lost while it had it, and is not made again."""
        self.num_placed = 0
        """How often it was given to an engine."""
        self.num_lost_links = 0
        """How often in a row the connection was lost, and no token had come over it."""
        self.num_crashes = 0
        """Engines that died while they had it and it was in doubt."""
        self.suspicion = 0
        """Those of them that died since it was last found innocent."""
        self.cleared = False
        """Whether it was found innocent after that, by the tokens that an engine made of it."""
        self.num_resumed = 0
        """Length of `emitted` when the present engine got it."""

    def resumed(self) -> EngineCoreRequest:
        """The request for an engine that shall go on where the last one ended."""
        self.num_resumed = len(self.emitted)
        if not self.emitted:
            return self.request
        emitted = [*self.request.emitted_token_ids, *self.emitted]
        return msgspec.structs.replace(self.request, emitted_token_ids=emitted)


class Ledger:
    """All requests in flight, in order of arrival.

    When an engine dies, those of its requests are in doubt of which no engine has made a few tokens yet; all of them,
    where there are none. A request that was in doubt twice is a suspect. A suspect that alone is in doubt is finished
    with an error, and so are suspects that came of the same prompt with it (n > 1). Of several suspects, one at a time
    is sent again, until it has produced a few tokens or the engine died once more.
    """

    def __init__(self) -> None:
        self._entries: dict[str, InFlight] = {}
        self._num_on: Counter[int] = Counter()
        self._held: deque[str] = deque()
        """Suspects that wait for their turn."""
        self._on_trial: str | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, request: EngineCoreRequest) -> InFlight:
        """A new request."""
        entry = self._entries[request.request_id] = InFlight(request)
        return entry

    def get(self, request_id: str) -> InFlight | None:
        """The entry of a request that is in flight."""
        return self._entries.get(request_id)

    def remove(self, request_ids: Iterable[str]) -> list[InFlight]:
        """Forget requests; those that were in flight."""
        removed = []
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                removed.append(entry)
                if entry.engine is not None:
                    self._num_on[entry.engine] -= 1
            if request_id == self._on_trial:
                self._on_trial = None
        return removed

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Remember the tokens that came, and forget what is finished."""
        entries = self._entries
        for request_id, token_id in zip(outputs.request_ids, outputs.token_ids, strict=True):
            entry = entries.get(request_id)
            if entry is not None:
                entry.emitted.append(token_id)
        finished = []
        for output in outputs.outputs:
            entry = entries.get(output.request_id)
            if entry is not None:
                entry.emitted += output.new_token_ids
            if output.finish is not None:
                finished.append(output.request_id)
        self.remove(finished)

    def place(self, entry: InFlight, engine: int) -> EngineCoreRequest:
        """Give a request to an engine; what to send to it."""
        entry.engine = engine
        entry.num_placed += 1
        self._num_on[engine] += 1
        return entry.resumed()

    def take_back(self, entry: InFlight) -> None:
        """An engine did not get it after all."""
        if entry.engine is not None:
            self._num_on[entry.engine] -= 1
            entry.engine = None

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return len(self._entries) - self._num_on.total()

    def num_on(self, engine: int) -> int:
        """How many requests an engine has."""
        return self._num_on[engine]

    def disconnect(self, engine: int, reason: str) -> list[EngineCoreOutput]:
        """The connection to an engine is lost. Its requests wait for another, or for the next connection, but for those
        that lose every one: their outputs."""
        victims = self._take_from(engine)
        for entry in victims:
            entry.lost_by = engine
            has_moved = len(entry.emitted) > entry.num_resumed
            entry.num_lost_links = 1 if has_moved else entry.num_lost_links + 1
        guilty = [entry for entry in victims if entry.num_lost_links >= MAX_LOST_LINKS]
        return self._fail(guilty, f"the connection to the engine was lost {MAX_LOST_LINKS} times in a row ({reason})")

    def reconnect(self, engine: int) -> None:
        """An engine is connected, for the first time or again: what it had, it has no more."""
        for entry in self._entries.values():
            if entry.lost_by == engine:
                entry.lost_by = None

    def bury(self, engine: int, reason: str, follows: bool = False) -> list[EngineCoreOutput]:
        """An engine died. Its requests wait for another, except those that are taken for the cause: their outputs.
        Where it only `follows` another that died, none of them is."""
        victims = self._take_from(engine)
        # An engine that hangs is silent before it is killed: what it had then is in doubt as well.
        victims += [entry for entry in self._entries.values() if entry.lost_by == engine and entry.engine is None]
        self.reconnect(engine)
        if follows:
            return []
        doubtful = [entry for entry in victims if not entry.cleared] or victims
        for entry in doubtful:
            entry.num_crashes += 1
            entry.suspicion += 1
            entry.cleared = False
        suspects = [entry for entry in doubtful if entry.suspicion >= CRASHES_OF_A_SUSPECT]
        if suspects and len(doubtful) > 1:
            suspects = doubtful  # any of them may be the cause, also one that was not there before
        guilty = [entry for entry in doubtful if entry.num_crashes >= MAX_CRASHES]
        if len(suspects) == 1:
            held = [self._entries[name] for name in self._held if name in self._entries]
            guilty = suspects + [entry for entry in held if _are_siblings(entry.request, suspects[0].request)]
        self._hold(suspects)
        message = f"the engine died {CRASHES_OF_A_SUSPECT} times or more with this request in flight ({reason})"
        return self._fail(guilty, message)

    def _take_from(self, engine: int) -> list[InFlight]:
        """What an engine had."""
        victims = [entry for entry in self._entries.values() if entry.engine == engine]
        self._num_on[engine] = 0
        for entry in victims:
            entry.cleared = entry.cleared or _is_cleared(entry)
            entry.engine = None
        return victims

    def _hold(self, suspects: list[InFlight]) -> None:
        """Let suspects wait for their turns, after those that wait already."""
        names = [entry.request.request_id for entry in suspects]
        if self._on_trial in names:
            self._on_trial = None
        self._held = deque(name for name in dict.fromkeys([*self._held, *names]) if name in self._entries)

    def _fail(self, guilty: list[InFlight], message: str) -> list[EngineCoreOutput]:
        """Forget requests; their last outputs."""
        names = [entry.request.request_id for entry in guilty]
        self.remove(names)
        finish = Finish(FinishReason.ERROR, message=message)
        return [EngineCoreOutput(request_id=name, finish=finish) for name in names]

    def to_send(self) -> list[InFlight]:
        """Requests that no engine has and that may go to one now, oldest first; `place` them."""
        self._end_trial()
        while self._held and self._on_trial is None:
            candidate = self._held.popleft()
            if candidate in self._entries:
                self._on_trial = candidate
        held = set(self._held)
        return [entry for request_id, entry in self._entries.items() if entry.engine is None and request_id not in held]

    def trial_is_over(self) -> bool:
        """Whether suspects wait, and the one on trial has shown enough; then `to_send` has news."""
        if not self._held or self._on_trial is None:
            return bool(self._held)
        return _is_cleared(self._entries[self._on_trial])

    def _end_trial(self) -> None:
        entry = self._entries.get(self._on_trial) if self._on_trial is not None else None
        if entry is not None and _is_cleared(entry):
            entry.suspicion = 0
            entry.cleared = True
            self._on_trial = None


def _is_cleared(entry: InFlight) -> bool:
    return entry.engine is not None and len(entry.emitted) - entry.num_resumed >= CLEARING_TOKENS


def _are_siblings(one: EngineCoreRequest, other: EngineCoreRequest) -> bool:
    """Whether they are completions of one prompt that were asked for together."""
    return one.arrival_time == other.arrival_time and one.prompt_token_ids == other.prompt_token_ids
