"""`EngineExtensions`: those of the catalogue, in its order. Knows nothing about what they say."""

from collections.abc import Mapping
from typing import Any, Self

from pagemill.catalog.registry import load_path
from pagemill.catalog.step_extensions import STEP_EXTENSIONS
from pagemill.engine.extensions.interface import BoolArray, EngineContext, EngineExtension, IntArray
from pagemill.messages.extensions import StepAnswers, StepPayloads
from pagemill.messages.step import SchedulerOutput


class EngineExtensions:
    """All step extensions of one engine, by name."""

    def __init__(self, by_name: Mapping[str, EngineExtension]) -> None:
        self._by_name = dict(by_name)

    @classmethod
    def load(cls, context: EngineContext) -> Self:
        """Those of the catalogue. Raises ConfigError for a line that cannot be imported."""
        made = {}
        for name in STEP_EXTENSIONS:
            half = load_path(f"engine's half of step extension {name!r}", STEP_EXTENSIONS.resolve(name).engine)
            made[name] = half(context)
        return cls(made)

    def payloads(self, step: SchedulerOutput, sampled: IntArray) -> StepPayloads | None:
        """What all of them say to a step that samples [L] slots; None when nobody says anything."""
        found = None
        for name, extension in self._by_name.items():
            payload = extension.payload(step, sampled)
            if payload is not None:
                found = StepPayloads() if found is None else found
                found[name] = payload
        return found

    def awaited(self, sampled: IntArray) -> dict[str, IntArray] | None:
        """Slots of which more is said when the step is sampled, of [L] that it samples, by who says it; None where
        nobody does."""
        found = None
        for name, extension in self._by_name.items():
            slots = extension.awaited(sampled)
            if slots is not None:
                found = {} if found is None else found
                found[name] = slots
        return found

    def sampling_payload(self, name: str, slots: IntArray) -> Any:
        """What one of them says when a step is sampled; see `EngineExtension.sampling_payload`."""
        return self._by_name[name].sampling_payload(slots)

    def join_every_step(self, slots: IntArray) -> bool:
        """Whether one of them must be asked even before steps that only go on with these [R] slots."""
        return any(extension.joins_every_step(slots) for extension in self._by_name.values())

    def receive(self, answers: StepAnswers, slots: IntArray, live: BoolArray) -> None:
        """The answers to a step that sampled [L] slots; `live`: whether a slot still has the request of then."""
        for name, answer in answers.items():
            self._by_name[name].receive(answer, slots, live)
