"""`WorkerExtensions`: those of the catalogue. Knows nothing about what they do."""

from collections.abc import Mapping
from typing import Any, Self

from pagemill.catalog.registry import load_path
from pagemill.catalog.step_extensions import STEP_EXTENSIONS
from pagemill.messages.extensions import SamplingPayloads, StepAnswers, StepPayloads
from pagemill.messages.pending import Pending
from pagemill.messages.step import Int32Array
from pagemill.worker.extensions.interface import WorkerContext, WorkerExtension


class StepAnswersPending:
    """The answers to one step, which may not be there yet."""

    def __init__(self, by_name: Mapping[str, Pending[Any]]) -> None:
        self._by_name = by_name

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        return all(answer.ready() for answer in self._by_name.values())

    def result(self) -> StepAnswers:
        """The answer of each extension, by name; waits for those that are not there yet."""
        return StepAnswers({name: answer.result() for name, answer in self._by_name.items()})


class WorkerExtensions:
    """All step extensions of one worker, by name; `answering`: those that answer."""

    def __init__(self, by_name: Mapping[str, WorkerExtension] | None = None, answering: tuple[str, ...] = ()) -> None:
        self.by_name = dict(by_name or {})
        self._answering = {name: self.by_name[name] for name in answering}

    @classmethod
    def load(cls, context: WorkerContext) -> Self:
        """Those of the catalogue. Raises ConfigError for a line that cannot be imported."""
        made = {}
        answering = []
        for name in STEP_EXTENSIONS:
            line = STEP_EXTENSIONS.resolve(name)
            made[name] = load_path(f"worker's half of step extension {name!r}", line.worker)(context)
            if line.answer is not None:
                answering.append(name)
        return cls(made, tuple(answering))

    def begin(self, payloads: StepPayloads) -> None:
        """What the engine's halves say to the next step."""
        for name, payload in payloads.items():
            self.by_name[name].begin(payload)

    def begin_sampling(self, payloads: SamplingPayloads) -> None:
        """What the engine's halves say when the last step is sampled."""
        for name, payload in payloads.items():
            self.by_name[name].begin_sampling(payload)

    def answers(self, slots: Int32Array) -> StepAnswersPending | None:
        """What goes to the engine's halves with the tokens of a step that sampled [L] slots; None: nothing."""
        if not self._answering:
            return None
        found = {name: extension.answer(slots) for name, extension in self._answering.items()}
        given = {name: answer for name, answer in found.items() if answer is not None}
        return StepAnswersPending(given) if given else None
