"""`EngineExtension`: adds a payload to steps, and gets what the workers answer. Knows no other extension."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagemill.engine.kv_cache.manager import KVCacheManager
from pagemill.engine.request import Request
from pagemill.messages.step import SchedulerOutput

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What an extension is built with."""

    kv: KVCacheManager
    occupant: Callable[[int], Request]
    """The request of a slot in use. Raises RuntimeError for any other."""
    num_slots: int
    """Slots are 0 to num_slots - 1."""
    computes_elsewhere: bool = False
    """Whether steps are computed while the engine goes on, by other processes, on other threads or on a device."""


class EngineExtension(ABC):
    """One per engine, called on the thread that schedules. What it raises ends the engine, as an error of the
    scheduler does; a request that it cannot serve is refused before it gets here."""

    def __init__(self, context: EngineContext) -> None:  # noqa: B027 - for those that need nothing of it
        """`context` lives as long as the engine."""

    @abstractmethod
    def payload(self, step: SchedulerOutput, sampled: IntArray) -> Any | None:
        """What the workers' half is told before this step; None: nothing, which costs nothing more.

        `sampled`: the [L] slots that sample in the step, in its order. `step` names those that begin (`new`) and end
        (`released`); it has no payloads yet. Called for every step that is scheduled anew: not for one that repeats
        the step before, unless `joins_every_step` asks for it.
        """

    def awaited(self, sampled: IntArray) -> IntArray | None:
        """Those of the [L] slots that sample in the step that `payload` was just asked about of which more is said
        later: with the call that samples the step, which may know tokens that were in flight when it was scheduled.
        None: nothing is said later, which costs nothing more. A step that repeats the one before awaits the same."""
        return None

    def sampling_payload(self, slots: IntArray) -> Any:
        """What the workers' half is told when the step is sampled, of an extension whose line names a type of it.
        `slots`: those that were `awaited` and still have their request, all of whose tokens before the step's own are
        known now."""
        raise TypeError(f"{type(self).__name__} says nothing when a step is sampled")

    def joins_every_step(self, slots: IntArray) -> bool:
        """Whether `payload` must be called also for steps that only go on with these [R] slots, one token each. They
        are then scheduled anew each time, which is slower. Otherwise such steps are repeated without asking, until a
        request comes, ends or needs a block."""
        return False

    def receive(self, answer: Any, slots: IntArray, live: BoolArray) -> None:
        """What the workers' half answered to a step that sampled [L] slots, and whether each of these still belongs to
        the request that it sampled for. Called before the tokens of the step are applied, in the order of the steps;
        only for an extension whose line names a type of answer."""
        raise TypeError(f"{type(self).__name__} expects no answer")
