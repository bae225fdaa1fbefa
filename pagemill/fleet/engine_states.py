"""`EngineStates`: the latest event of each engine, for whoever must be told the present state first.

Does not know where events come from, nor who is told.
"""

from pagemill.messages.fleet import DrainOrder, EngineDown, EngineStalled, EngineUp, FrontEndMessage, HaltOrder


class EngineStates:
    """Which engines are up, down, or stalled, as the events noted so far say."""

    def __init__(self) -> None:
        self._states: dict[int, EngineUp | EngineDown] = {}
        self._stalls: dict[int, EngineStalled] = {}
        self._orders: dict[type, HaltOrder | DrainOrder] = {}

    def note(self, event: FrontEndMessage) -> None:
        """Take an event into account. One that says nothing about whether an engine is up, down or stalled has no
        effect."""
        if isinstance(event, (EngineUp, EngineDown)):
            self._states[event.index] = event
            self._stalls.pop(event.index, None)
        elif isinstance(event, EngineStalled):
            self._stalls[event.index] = event
        elif isinstance(event, (HaltOrder, DrainOrder)):
            self._orders[type(event)] = event

    def orders(self) -> tuple[HaltOrder | DrainOrder, ...]:
        """What front ends have told the engines and each other last, if anything."""
        return tuple(self._orders.values())

    def events(self) -> tuple[EngineUp | EngineDown | EngineStalled, ...]:
        """The events that tell the present state to somebody who knows nothing yet."""
        return (*self._states.values(), *self._stalls.values())
