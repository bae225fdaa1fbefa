"""`SamplingCall`: what step extensions say with the call that samples a step, later than with the step itself.

Knows nothing about what they say.
"""

from typing import Any

from pagemill.engine.extensions.host import EngineExtensions
from pagemill.engine.scheduler.limits import IntArray
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.messages.extensions import SamplingPayloads
from pagemill.messages.pending import Pending


class SamplingCall:
    """For each step in turn: `begin` when it is scheduled; then, while `awaits_tokens`, the tokens of the steps before
    it are applied, the oldest first; then `take`."""

    def __init__(self, extensions: EngineExtensions, states: SlotStates) -> None:
        self._extensions = extensions
        self._states = states
        self._awaited: dict[str, IntArray] | None = None
        """Name of an extension -> slots of which it says more."""
        self._epochs: dict[str, IntArray] = {}
        self._pending: dict[str, Pending[Any]] | None = None

    def begin(self, sampled: IntArray) -> None:
        """A step was scheduled anew that samples [L] slots, which expect its tokens already. What can be said of them
        is made from now on, while the step is computed."""
        self._pending = None
        self._awaited = self._extensions.awaited(sampled)
        if self._awaited is not None:
            self._epochs = {name: self._states.epoch[slots] for name, slots in self._awaited.items()}
            if not self.awaits_tokens():
                self._start(self._awaited, True)

    def awaits_tokens(self) -> bool:
        """Whether what is to be said depends on tokens of steps in flight."""
        if self._awaited is None:
            return False
        states = self._states
        return any(
            bool((states.num_expected[slots] - 1 > states.num_known[slots]).any())
            for slots in (self._live(name, slots) for name, slots in self._awaited.items())
        )

    def take(self) -> SamplingPayloads | None:
        """What goes with the call that samples the step; None: nothing. Waits for what is still being made."""
        if self._awaited is None:
            return None
        if self._pending is None:
            self._start(self._awaited, False)
        pending, self._pending = self._pending or {}, None
        self._awaited = None
        return SamplingPayloads({name: payload.result() for name, payload in pending.items()})

    def _start(self, awaited: dict[str, IntArray], meanwhile: bool) -> None:
        self._pending = {
            name: self._extensions.sampling_payload(name, self._live(name, slots), meanwhile)
            for name, slots in awaited.items()
        }

    def _live(self, name: str, slots: IntArray) -> IntArray:
        """Those whose request is there, and samples in this step what counts."""
        live: IntArray = slots[self._states.epoch[slots] == self._epochs[name]]
        return live
