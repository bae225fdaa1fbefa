"""The engine's half of the example's step extension."""

from typing import Any

from pagemill.engine.extensions.interface import BoolArray, EngineContext, EngineExtension, IntArray
from pagemill.log import get_logger
from pagemill.messages.step import SchedulerOutput
from pagemill_example.extension import Changed, Remainders

logger = get_logger("pagemill.example")


class Decider(EngineExtension):
    """By the length of the prompt. Logs what the workers answer."""

    def __init__(self, context: EngineContext) -> None:
        self._occupant = context.occupant

    def payload(self, step: SchedulerOutput, sampled: IntArray) -> Remainders | None:
        if not step.new:
            return None
        slots = [new.slot for new in step.new]
        return Remainders(slots, [self._occupant(slot).num_prompt_tokens % 2 * 2 for slot in slots])

    def receive(self, answer: Any, slots: IntArray, live: BoolArray) -> None:
        if isinstance(answer, Changed):
            logger.info("%d of %d rows were changed", answer.num_rows, live.sum())
