"""`SamplingCall`: what step extensions say with the call that samples a step, later than with the step itself.

Knows nothing about what they say.
"""

from pagemill.engine.extensions.host import EngineExtensions
from pagemill.engine.scheduler.limits import IntArray
from pagemill.engine.scheduler.slots import SlotStates
from pagemill.messages.extensions import SamplingPayloads


class SamplingCall:
    """For each step in turn: `begin` when it is scheduled; then, while `awaits_tokens`, the tokens of the steps before
    it are applied, the oldest first; then `take`."""

    def __init__(self, extensions: EngineExtensions, states: SlotStates, *, early: bool = False) -> None:
        """`early`: no step is in flight when one is scheduled, and it is computed before `take`: what is said of it is
        made when it is scheduled. What that needs is in the caches then, from following the last tokens. Otherwise it
        is made in `take`, while the step is computed."""
        self._extensions = extensions
        self._states = states
        self._early = early
        self._asked: dict[str, IntArray] | None = None
        """Name of an extension -> slots of which it says more, in the step that was scheduled last."""
        self._awaited: dict[str, IntArray] | None = None
        """The same, until it is taken."""
        self._epochs: dict[str, IntArray] = {}
        self._made: SamplingPayloads | None = None

    def begin(self, sampled: IntArray) -> None:
        """A step was scheduled anew that samples [L] slots, which expect its tokens already."""
        self._asked = self._extensions.awaited(sampled)
        if self._asked is not None:
            self._epochs = {name: self._states.epoch[slots] for name, slots in self._asked.items()}
        self.repeat()

    def repeat(self) -> None:
        """The step that was scheduled last goes on."""
        self._awaited = self._asked
        self._made = None if self._asked is None or not self._early else self._make(self._asked)

    def awaits_tokens(self) -> bool:
        """Whether what is to be said depends on tokens of steps in flight."""
        if self._awaited is None or self._made is not None:
            return False
        states = self._states
        return any(
            bool((states.num_expected[slots] - 1 > states.num_known[slots]).any())
            for slots in (self._live(name, slots) for name, slots in self._awaited.items())
        )

    def take(self) -> SamplingPayloads | None:
        """What goes with the call that samples the step; None: nothing."""
        if self._awaited is None:
            return None
        made = self._make(self._awaited) if self._made is None else self._made
        self._awaited = self._made = None
        return made

    def _make(self, awaited: dict[str, IntArray]) -> SamplingPayloads:
        say = self._extensions.sampling_payload
        return SamplingPayloads({name: say(name, self._live(name, slots)) for name, slots in awaited.items()})

    def _live(self, name: str, slots: IntArray) -> IntArray:
        """Those whose request is there, and samples in this step what counts."""
        live: IntArray = slots[self._states.epoch[slots] == self._epochs[name]]
        return live
