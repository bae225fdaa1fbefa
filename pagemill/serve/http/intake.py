"""`Intake`: what handlers ask for the requests of a body. Small bodies are prepared here, between other work of the
event loop; large ones in a helper process, because neither JSON nor a tokenizer lets go of the interpreter."""

from collections.abc import Iterable
from typing import NamedTuple

from starlette.requests import Request

from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.connection import read_body
from pagemill.serve.http.preparer import AnswerForm, Part, PreparedPrompt, Preparer
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.served_model import ServedModel
from pagemill.serve.preparation import in_slices
from pagemill.serve.processing.input_processor import PreparedRequest

LARGE_BODY_BYTES = 32 << 10
"""Bodies above this go to a helper process: parsing and tokenizing this much takes some 10 ms."""


class TakenIn(NamedTuple):
    """A body that passed every check."""

    form: AnswerForm
    requests: list[PreparedRequest]
    echoes: list[str]
    """Per request, what its texts begin with."""


class Intake:
    """Bodies of one server. Without helpers, all of them are prepared here."""

    def __init__(self, engine: AsyncLLM, model: ServedModel, helpers: PreparerPool | None = None) -> None:
        self._engine = engine
        self._preparer = Preparer(engine.preparation, model)
        self._helpers = helpers

    async def take(self, kind: str, request: Request) -> TakenIn:
        """The requests of a body of this kind (see preparer.py). Load is checked before any work is done for it.

        Raises RequestError, EngineOverloadedError, UnavailableError, EngineDeadError, GenerationFailedError.
        """
        raw = await read_body(request)
        self._engine.check_load()
        if self._helpers is not None and len(raw) > LARGE_BODY_BYTES:
            return _taken_in(await self._helpers.prepare(kind, raw))
        return _taken_in(await in_slices(self._preparer.parts(kind, raw)))


def _taken_in(parts: Iterable[Part]) -> TakenIn:
    taken = TakenIn(AnswerForm(), [], [])
    for part in parts:
        match part:
            case AnswerForm():
                taken = taken._replace(form=part)
            case PreparedPrompt():
                taken.requests.append(PreparedRequest(None, part.request))
                taken.echoes.append(part.echo)
    return taken
