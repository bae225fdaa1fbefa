"""`FormChecks`: whether the engine can follow the grammars of requests, asked before it gets them."""

import asyncio
from collections.abc import Iterable, Sequence

from pagemill.catalog.grammars import GUIDANCE
from pagemill.errors import RequestError
from pagemill.grammar.checker import BadWords
from pagemill.grammar.checking import GrammarChecker
from pagemill.grammar.vocabulary import TokenTable, token_table
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.sampling_params import SamplingParams
from pagemill.tokenizers.interface import Tokenizer


class FormChecks:
    """The checks of one front end. The process that tries grammars starts with the first one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int], backend: str = GUIDANCE) -> None:
        """`backend`: what follows grammars in the engine."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = ends
        self._backend = backend
        self._checker: GrammarChecker | None = None

    async def check(self, requests: Iterable[EngineCoreRequest]) -> None:
        """Raises RequestError for a grammar that cannot be followed, or of which a request's bad words leave nothing,
        EngineOverloadedError when too many are being looked at. Grammars that were looked at before cost nothing."""
        wanted = {(spec.source, _bad_words(request)): spec for request in requests if (spec := request.grammar)}
        for (source, bad_words), spec in wanted.items():
            if not source:
                continue
            problem, field = await self._problem(source), spec.field
            for name, part in spec.parts if problem else ():
                if found := await self._problem(part):
                    problem, field = found, name
                    break
            if problem:
                raise RequestError(f"{field} is not supported: {problem}", field)
            if bad_words and (problem := await self._problem(source, bad_words)):
                raise RequestError(f"bad_words is not allowed beside this {field}: {problem}", "bad_words")

    async def _problem(self, source: str, bad_words: BadWords = ()) -> str:
        """What is wrong with a grammar, or with bad words beside it; empty: nothing."""
        if self._checker is None:
            self._checker = GrammarChecker(self._table, backend=self._backend)
        known = self._checker.known(source, bad_words)
        return await asyncio.wrap_future(self._checker.submit(source, bad_words)) if known is None else known

    def close(self) -> None:
        """End the process that checks grammars, if there is one."""
        if self._checker is not None:
            self._checker.close()
            self._checker = None

    def _table(self) -> TokenTable:
        return token_table(self._tokenizer, self._vocab_size, self._ends)


def _bad_words(request: EngineCoreRequest) -> BadWords:
    """What a request excludes from the first token on that its grammar says something of."""
    params = request.params
    spec = request.grammar
    if spec is None or spec.free is not None or spec.waits or not isinstance(params, SamplingParams):
        return ()
    return tuple(tuple(word) for word in params.bad_words_token_ids or ())
