"""`Intake`: what routes ask for the requests of a body. Small bodies are prepared here, between other work of the
event loop; large ones in a helper process, because neither JSON nor a tokenizer lets go of the interpreter."""

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from pagemill.config.server_logs import ServerLogs
from pagemill.grammar.translate import TakesTimeError
from pagemill.serve.async_llm import AsyncLLM
from pagemill.serve.http.client_limits import ClientLimits
from pagemill.serve.http.connection import read_body, until_disconnect
from pagemill.serve.http.preparer import NO_PARSERS, AnswerForm, Part, PreparedPrompt, Preparer, Tokens
from pagemill.serve.http.preparer_pool import PreparerPool
from pagemill.serve.http.request_log import RequestLog
from pagemill.serve.http.responses import ServedModel
from pagemill.serve.http.salts import KeySalts
from pagemill.serve.http.schemas.forms import check_form_bytes
from pagemill.serve.parsers.choose import ParserSettings
from pagemill.serve.processing.input_processor import PreparedRequest
from pagemill.utils.pacer import in_slices

LARGE_BODY_BYTES = 16 << 10
"""Bodies above this go to a helper process: parsing and tokenizing more would keep the event loop. All do where the
tokenizer may take longer, because a helper has a time limit."""


class PreparedBody(NamedTuple):
    """A body that passed every check."""

    form: AnswerForm
    requests: list[PreparedRequest]
    echoes: list[str]
    """Per request, what its texts begin with."""


class Intake:
    """Bodies of one server. Without helpers, all of them are prepared here."""

    def __init__(
        self,
        engine: AsyncLLM,
        model: ServedModel,
        helpers: PreparerPool | None = None,
        salts: KeySalts | None = None,
        parsers: ParserSettings = NO_PARSERS,
        limits: ClientLimits | None = None,
        log: RequestLog | None = None,
    ) -> None:
        """`salts`: of the clients' keys; None: all share cached prefixes. `parsers`: those of the answers' messages.
        `limits`: what each key may ask for. `log`: of requests; None: there is none."""
        self._limits = limits or ClientLimits()
        self._log = log or RequestLog(ServerLogs(), engine.tokenizer)
        self._engine = engine
        self._salts = salts
        self._preparer = Preparer(engine.preparation, model, parsers, hurried=helpers is not None)
        self._helpers = helpers
        self._small_bytes = 0 if engine.preparation.tokenizer.may_stall else LARGE_BODY_BYTES

    async def prepare(self, kind: str, request: Request) -> PreparedBody:
        """The requests of a body of this kind (see preparer.py). Raises what `parts` does."""
        return await self.prepare_read(kind, await read_body(request), request)

    async def parts(self, kind: str, request: Request) -> list[Part]:
        """What becomes of a body of this kind. Load is checked before any work is done for it.

        Raises RateLimitedError, RequestError, EngineOverloadedError, UnavailableError, EngineDeadError,
        GenerationFailedError, ClientDisconnect.
        """
        return await self.parts_of(kind, await read_body(request), request)

    async def prepare_read(self, kind: str, raw: bytes, request: Request) -> PreparedBody:
        """`prepare`, of a body that was read."""
        return self._counted(self._gathered(await self.parts_of(kind, raw, request), request), request)

    async def prepare_several(self, kind: str, request: Request) -> tuple[list[AnswerForm], PreparedBody]:
        """`prepare`, of a body whose prompts have a form each."""
        parts = await self.parts(kind, request)
        forms = [part for part in parts if isinstance(part, AnswerForm)]
        return forms, self._counted(self._gathered(parts, request), request)

    async def parts_of(self, kind: str, raw: bytes, request: Request) -> list[Part]:
        """`parts`, of a body that was read."""
        self._limits.check(request.scope.get("api_key"))
        self._engine.check_load()
        check_form_bytes(raw)
        if self._helpers is None:
            return await in_slices(self._preparer.parts(kind, raw))
        if len(raw) <= self._small_bytes:
            with contextlib.suppress(TakesTimeError):
                return await in_slices(self._preparer.parts(kind, raw))
        return await self._helped(self._helpers, kind, raw, request)

    async def tokens(self, kind: str, request: Request) -> tuple[AnswerForm, list[Tokens]]:
        """The tokens of a body that asks for nothing else. Raises what `parts` does."""
        parts = await self.parts(kind, request)
        forms = [part for part in parts if isinstance(part, AnswerForm)]
        return forms[0], [part for part in parts if isinstance(part, Tokens)]

    async def _helped(self, helpers: PreparerPool, kind: str, raw: bytes, request: Request) -> list[Part]:
        """By another process. Its turn may be far away: who leaves meanwhile gives it up."""
        parts = await until_disconnect(request.receive, helpers.prepare(kind, raw))
        if parts is None:
            raise ClientDisconnect
        return parts

    def _counted(self, body: PreparedBody, request: Request) -> PreparedBody:
        """The body, whose tokens its client has used now."""
        num_tokens = sum(len(item.request.prompt_token_ids) for item in body.requests)
        self._limits.use_tokens(request.scope.get("api_key"), num_tokens)
        self._log.received(request.scope["request_id"], request.scope["path"], body.requests)
        return body

    def _gathered(self, parts: Iterable[Part], request: Request) -> PreparedBody:
        found = PreparedBody(AnswerForm(), [], [])
        for part in parts:
            match part:
                case AnswerForm():
                    found = found._replace(form=part)
                case PreparedPrompt(prepared, echo):
                    salted = prepared if self._salts is None else self._salts.salted(prepared, request.scope)
                    found.requests.append(PreparedRequest(None, salted))
                    found.echoes.append(echo)
        return found
