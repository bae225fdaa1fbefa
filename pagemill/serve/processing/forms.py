"""`FormChecks`: whether the engine can follow the grammars of requests, asked before it gets them."""

import asyncio
from collections.abc import Iterable, Sequence

from pagemill.catalog.grammars import GUIDANCE
from pagemill.errors import RequestError
from pagemill.grammar.checking import GrammarChecker
from pagemill.grammar.vocabulary import TokenTable, token_table
from pagemill.messages.structured_outputs import GrammarSpec
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

    async def check(self, specs: Iterable[GrammarSpec | None]) -> None:
        """Raises RequestError for a grammar that cannot be followed, EngineOverloadedError when too many are being
        looked at. Grammars that were looked at before cost nothing."""
        wanted = {spec.source: spec for spec in specs if spec is not None and spec.source}
        for source, spec in wanted.items():
            problem, field = await self._problem(source), spec.field
            for name, part in spec.parts if problem else ():
                if found := await self._problem(part):
                    problem, field = found, name
                    break
            if problem:
                raise RequestError(f"{field} is not supported: {problem}", field)

    async def _problem(self, source: str) -> str:
        """What is wrong with a grammar; empty: nothing."""
        if self._checker is None:
            self._checker = GrammarChecker(self._table, backend=self._backend)
        known = self._checker.known(source)
        return await asyncio.wrap_future(self._checker.submit(source)) if known is None else known

    def close(self) -> None:
        """End the process that checks grammars, if there is one."""
        if self._checker is not None:
            self._checker.close()
            self._checker = None

    def _table(self) -> TokenTable:
        return token_table(self._tokenizer, self._vocab_size, self._ends)
