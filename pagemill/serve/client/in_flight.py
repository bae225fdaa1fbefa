"""`InFlightRequests`: what an API server keeps of the requests that engines work on, so that another can continue them.

Knows nothing about how engines are reached or chosen.
"""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

CRASHES_BEFORE_QUARANTINE = 2
"""Engines that may die with a request before it is sent again only while no other quarantined one runs."""
MAX_CRASHES = 4
"""Engines that may die while a request is a possible cause, before it is rejected however many others are."""
PROBATION_TOKENS = 8
"""Tokens after which a request is no longer a possible cause, and the next one of the quarantine is sent."""
MAX_LOST_LINKS = 16
"""Connections in a row that may be lost before a request makes any progress: it may be what breaks them."""


class InFlight:
    """One request: what was asked, what was answered so far, and where it is."""

    __slots__ = (
        *("cleared", "emitted", "engine", "lost_by", "num_crashes", "num_lost_links"),
        *("num_placed", "num_resumed", "request", "recent_crashes"),
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
        """Engines that died while they had it and it was a possible cause."""
        self.recent_crashes = 0
        """Those of them that died since it last passed its probation."""
        self.cleared = False
        """Whether an engine has produced `PROBATION_TOKENS` of it since the last crash: it is not the cause then."""
        self.num_resumed = 0
        """Length of `emitted` when the present engine got it."""

    def resumed(self) -> EngineCoreRequest:
        """The request as it is sent to an engine that continues where the last one ended."""
        self.num_resumed = len(self.emitted)
        if not self.emitted:
            return self.request
        emitted = [*self.request.emitted_token_ids, *self.emitted]
        return msgspec.structs.replace(self.request, emitted_token_ids=emitted)


class InFlightRequests:
    """All requests in flight, in order of arrival.

    When an engine dies, those of its requests may be the cause that have not produced `PROBATION_TOKENS` yet; all of
    them, where there are none. A request that was a possible cause of two crashes goes into quarantine. One that was
    the only possible cause is rejected: finished with an error, together with the others of its prompt (n > 1) that are
    in quarantine. Of several, one at a time is on probation: it is sent again, until it has produced a few tokens or
    the engine died once more.
    """

    def __init__(self) -> None:
        self._entries: dict[str, InFlight] = {}
        self._num_on: Counter[int] = Counter()
        self._quarantined: deque[str] = deque()
        """Requests in quarantine that wait for their probation."""
        self._on_probation: str | None = None

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
        """Forget requests. Returns those that were in flight."""
        removed = []
        for request_id in request_ids:
            entry = self._entries.pop(request_id, None)
            if entry is not None:
                removed.append(entry)
                if entry.engine is not None:
                    self._num_on[entry.engine] -= 1
            if request_id == self._on_probation:
                self._on_probation = None
        return removed

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Keep the tokens of a step's outputs, and forget the requests that are finished."""
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
        """Assign a request to an engine. Returns what to send to it."""
        entry.engine = engine
        entry.num_placed += 1
        self._num_on[engine] += 1
        return entry.resumed()

    def unplace(self, entry: InFlight) -> None:
        """Undo `place`: the request did not reach the engine."""
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
        """The connection to an engine is lost. Its requests wait for another, or for the next connection. Returns the
        last outputs of those that have lost too many in a row."""
        affected = self._unassign_all(engine)
        for entry in affected:
            entry.lost_by = engine
            has_moved = len(entry.emitted) > entry.num_resumed
            entry.num_lost_links = 1 if has_moved else entry.num_lost_links + 1
        rejected = [entry for entry in affected if entry.num_lost_links >= MAX_LOST_LINKS]
        return self._fail(rejected, f"the connection to the engine was lost {MAX_LOST_LINKS} times in a row ({reason})")

    def reconnect(self, engine: int) -> None:
        """An engine is connected, for the first time or again: it has none of its former requests."""
        for entry in self._entries.values():
            if entry.lost_by == engine:
                entry.lost_by = None

    def engine_died(self, engine: int, reason: str, follows: bool = False) -> list[EngineCoreOutput]:
        """An engine died. Its requests wait for another. Returns the last outputs of those that are rejected as the
        cause; where its end only `follows` another's, there are none."""
        affected = self._unassign_all(engine)
        # An engine that hangs is silent before it is killed: what it had then may be the cause as well.
        affected += [entry for entry in self._entries.values() if entry.lost_by == engine and entry.engine is None]
        self.reconnect(engine)
        if follows:
            return []
        possible = [entry for entry in affected if not entry.cleared] or affected
        for entry in possible:
            entry.num_crashes += 1
            entry.recent_crashes += 1
            entry.cleared = False
        quarantined = [entry for entry in possible if entry.recent_crashes >= CRASHES_BEFORE_QUARANTINE]
        if quarantined and len(possible) > 1:
            quarantined = possible  # any of them may be the cause, also one that was not there before
        rejected = [entry for entry in possible if entry.num_crashes >= MAX_CRASHES]
        if len(quarantined) == 1:
            waiting = [self._entries[name] for name in self._quarantined if name in self._entries]
            rejected = quarantined + [
                entry for entry in waiting if _are_siblings(entry.request, quarantined[0].request)
            ]
        self._quarantine(quarantined)
        message = f"the engine died {CRASHES_BEFORE_QUARANTINE} times or more with this request in flight ({reason})"
        return self._fail(rejected, message)

    def _unassign_all(self, engine: int) -> list[InFlight]:
        """Unassign the requests of an engine. Returns them."""
        affected = [entry for entry in self._entries.values() if entry.engine == engine]
        self._num_on[engine] = 0
        for entry in affected:
            entry.cleared = entry.cleared or _is_cleared(entry)
            entry.engine = None
        return affected

    def _quarantine(self, quarantined: list[InFlight]) -> None:
        """Put requests into quarantine, behind those that wait already."""
        names = [entry.request.request_id for entry in quarantined]
        if self._on_probation in names:
            self._on_probation = None
        self._quarantined = deque(name for name in dict.fromkeys([*self._quarantined, *names]) if name in self._entries)

    def _fail(self, rejected: list[InFlight], message: str) -> list[EngineCoreOutput]:
        """Forget requests. Returns their last outputs."""
        names = [entry.request.request_id for entry in rejected]
        self.remove(names)
        return [EngineCoreOutput.failed(name, message) for name in names]

    def to_send(self) -> list[InFlight]:
        """Requests that no engine has and that may go to one now, oldest first; `place` them."""
        self._end_probation()
        while self._quarantined and self._on_probation is None:
            candidate = self._quarantined.popleft()
            if candidate in self._entries:
                self._on_probation = candidate
        held_back = set(self._quarantined)
        return [entry for name, entry in self._entries.items() if entry.engine is None and name not in held_back]

    def probation_is_over(self) -> bool:
        """Whether requests wait in quarantine and none is on probation any more: `to_send` then returns the next."""
        if not self._quarantined or self._on_probation is None:
            return bool(self._quarantined)
        return _is_cleared(self._entries[self._on_probation])

    def _end_probation(self) -> None:
        entry = self._entries.get(self._on_probation) if self._on_probation is not None else None
        if entry is not None and _is_cleared(entry):
            entry.recent_crashes = 0
            entry.cleared = True
            self._on_probation = None


def _is_cleared(entry: InFlight) -> bool:
    return entry.engine is not None and len(entry.emitted) - entry.num_resumed >= PROBATION_TOKENS


def _are_siblings(one: EngineCoreRequest, other: EngineCoreRequest) -> bool:
    """Whether they are completions of one prompt that were asked for together."""
    return one.arrival_time == other.arrival_time and one.prompt_token_ids == other.prompt_token_ids
