"""`GrammarQueue`: requests whose grammar is being made, on threads of their own: the scheduler gets them then.

Does not know what is scheduled. Making a grammar lets go of the interpreter.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from pagemill.catalog.grammars import GRAMMARS, GUIDANCE
from pagemill.engine.grammar import Grammar
from pagemill.engine.structured_output.following import FollowedGrammar
from pagemill.engine.structured_output.watching import OutputWatch
from pagemill.grammar.interface import GrammarBackend, TokenMatcher, num_words
from pagemill.grammar.vocabulary import TokenTable, token_table
from pagemill.messages.engine_io import EngineCoreRequest
from pagemill.messages.structured_outputs import CONTROL, GrammarSpec
from pagemill.tokenizers.interface import Tokenizer
from pagemill.utils.sized_cache import SizedCache

NUM_THREADS: Final = 2
MAX_CACHE_BYTES: Final = 256 << 20
WAIT_S: Final = 0.005


class GrammarQueue:
    """Used from the thread that steps the engine."""

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], vocab_size: int, ends: Sequence[int], backend: str = GUIDANCE
    ) -> None:
        """`tokenizer` is called once, with the first request that has a grammar; `ends`: end-of-sequence tokens
        other than those that it names; `backend`: what follows grammars."""
        self._backend_class: type[GrammarBackend] = GRAMMARS.resolve(backend)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = ends
        self._lock = threading.Lock()
        self._backend: tuple[GrammarBackend, TokenTable] | None = None
        self._cache: SizedCache[str, TokenMatcher] = SizedCache(MAX_CACHE_BYTES, _num_bytes)
        self._making: dict[str, Future[TokenMatcher]] = {}
        """Sources that a thread is at work on; a request with the same one waits for it."""
        self._threads: ThreadPoolExecutor | None = None
        self._waiting: dict[str, tuple[EngineCoreRequest, Future[FollowedGrammar]]] = {}
        self._ready: dict[str, Future[FollowedGrammar]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id waits."""
        return request_id in self._waiting

    def add(self, request: EngineCoreRequest) -> None:
        """Begin to make the grammar of a request that has one. One that is known is there at once."""
        future = self._known(request)
        if future is None:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(NUM_THREADS, "pagemill-grammars")
            future = self._threads.submit(self._make, request)
        self._waiting[request.request_id] = (request, future)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests that wait."""
        for request_id in request_ids:
            waiting = self._waiting.pop(request_id, None)
            if waiting is not None:
                waiting[1].cancel()

    def take_ready(self, idle: bool) -> list[EngineCoreRequest]:
        """Requests whose grammar is there, in the order in which they came. `idle`: wait a little for one."""
        if idle:
            wait([future for _, future in self._waiting.values()], WAIT_S, "FIRST_COMPLETED")
        found = [(request, future) for request, future in self._waiting.values() if future.done()]
        for request, future in found:
            del self._waiting[request.request_id]
            self._ready[request.request_id] = future
        return [request for request, _ in found]

    def grammar_of(self, request: EngineCoreRequest) -> Grammar | None:
        """What was made for a request, once. Raises ValueError when nothing could be."""
        ready = self._ready.pop(request.request_id, None)
        return None if ready is None else ready.result()

    def shutdown(self) -> None:
        """No more grammars are made."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _known(self, request: EngineCoreRequest) -> Future[FollowedGrammar] | None:
        """What takes some microseconds: less than waking a thread, and much less than waiting for a core in company.
        Not so where tokens are to be followed again."""
        # Whoever makes the vocabulary has the lock for seconds.
        if self._backend is None or request.grammar is None or request.emitted_token_ids:
            return None
        with self._lock:
            matcher = self._cache.get(request.grammar.source)
        if matcher is None or matcher.worn:
            return None
        future: Future[FollowedGrammar] = Future()
        future.set_result(self._followed(matcher, request.grammar, self._backend[1]))
        return future

    def _make(self, request: EngineCoreRequest) -> FollowedGrammar:
        """Raises ValueError, whatever a library raises: it is about this request alone."""
        try:
            return self._resumed(request)
        except ValueError:
            raise
        except BaseException as error:
            raise ValueError(f"its grammar cannot be made: {type(error).__name__}: {str(error)[:200]}") from None

    def _resumed(self, request: EngineCoreRequest) -> FollowedGrammar:
        spec = request.grammar
        if spec is None:
            raise ValueError(f"request {request.request_id} has no grammar")
        backend, table = self._backend_of_model()
        matcher = self._matcher_of(backend, spec.source) if spec.source else None
        followed = self._followed(matcher, spec, table)
        followed.accept(request.emitted_token_ids)
        return followed

    def _followed(self, matcher: TokenMatcher | None, spec: GrammarSpec, table: TokenTable) -> FollowedGrammar:
        """An output that is about to begin. `matcher`: None: nothing but its reasoning is limited."""
        watch = None
        if spec.waits or spec.thinking is not None:
            watch = OutputWatch(spec, functools.partial(_named_bytes, table.tokens, frozenset(table.special)))
        begun = matcher.copy() if matcher is not None else None
        return FollowedGrammar(begun, num_words(self._vocab_size), table.ends, spec.free, watch, waits=spec.waits)

    def _matcher_of(self, backend: GrammarBackend, source: str) -> TokenMatcher:
        """At the beginning of an output. Made once, however many requests ask for it at the same time."""
        with self._lock:
            found = self._cache.get(source)
            if found is not None and not found.worn:
                return found
            others = self._making.get(source)
            making = self._making.setdefault(source, Future())
        if others is not None:
            return others.result()
        try:
            matcher = backend.matcher(source)
        except BaseException as error:
            making.set_exception(error)
            raise
        else:
            with self._lock:
                self._cache.put(source, matcher)
            making.set_result(matcher)
            return matcher
        finally:
            with self._lock:
                del self._making[source]

    def _backend_of_model(self) -> tuple[GrammarBackend, TokenTable]:
        with self._lock:
            if self._backend is None:
                tokenizer = self._tokenizer()
                table = token_table(tokenizer, self._vocab_size, (*self._ends, *tokenizer.eos_token_ids))
                self._backend = self._backend_class(table, tokenizer), table
            return self._backend


def _named_bytes(tokens: Sequence[bytes], control: frozenset[int], token: int) -> bytes:
    """The bytes of a token, by which an `OutputWatch` knows it."""
    return CONTROL + tokens[token] if token in control else tokens[token]


def _num_bytes(source: str, matcher: TokenMatcher) -> int:
    return matcher.num_bytes
