"""What a front end remembers of the requests that engines work on, so that another engine can go on with them.

Knows nothing about how engines are reached or chosen.
"""

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from pagemill.messages.engine_io import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, Finish, FinishReason

CRASHES_OF_A_SUSPECT = 2
MAX_CRASHES = 4
"""So often a request may be in flight while its engine dies, however many others were."""
CLEARING_TOKENS = 8
"""Tokens after which a suspect is taken for innocent, and the next one is tried."""


class InFlight:
    """One request: what was asked, what was answered so far, and where it is."""

    __slots__ = ("emitted", "engine", "num_crashes", "num_resumed", "request", "suspicion")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        self.emitted: list[int] = []
        """Tokens that the engines produced so far."""
        self.engine: int | None = None
        """Index of the engine that has it; None while it waits for one."""
        self.num_crashes = 0
        """Engines that died while they had it."""
        self.suspicion = 0
        """Those of them that died since it was last found innocent."""
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

    A request that was in flight in two crashes is a suspect. The only suspect of a crash is finished with an error;
    of several, one at a time is sent again, until it has produced a few tokens or the engine died once more.
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

    def bury(self, engine: int, reason: str, follows: bool = False) -> list[EngineCoreOutput]:
        """An engine died. Its requests wait for another, except those that are taken for the cause: their outputs.
        Where it only `follows` another that died, none of them is."""
        victims = [entry for entry in self._entries.values() if entry.engine == engine]
        self._num_on[engine] = 0
        for entry in victims:
            entry.engine = None
        if follows:
            return []
        for entry in victims:
            entry.num_crashes += 1
            entry.suspicion += 1
            if entry.request.request_id == self._on_trial:
                self._on_trial = None
        suspects = [entry for entry in victims if entry.suspicion >= CRASHES_OF_A_SUSPECT]
        guilty = suspects if len(suspects) == 1 else [e for e in victims if e.num_crashes >= MAX_CRASHES]
        failed = [entry.request.request_id for entry in guilty]
        self.remove(failed)
        self._held = deque(
            request_id
            for request_id in dict.fromkeys([*self._held, *(entry.request.request_id for entry in suspects)])
            if request_id in self._entries
        )
        message = f"the engine died {CRASHES_OF_A_SUSPECT} times or more with this request in flight ({reason})"
        finish = Finish(FinishReason.ERROR, message=message)
        return [EngineCoreOutput(request_id=request_id, finish=finish) for request_id in failed]

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
            self._on_trial = None


def _is_cleared(entry: InFlight) -> bool:
    return entry.engine is not None and len(entry.emitted) - entry.num_resumed >= CLEARING_TOKENS
