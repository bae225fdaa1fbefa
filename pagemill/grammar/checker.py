"""The process that tries grammars before anybody relies on them: some take minutes or gigabytes, and nothing but the
end of the process stops the library then. Knows of a model only what its tokens are."""

import contextlib
import resource
import signal
import socket

import msgspec
import numpy as np

from pagemill.catalog.grammars import GRAMMARS
from pagemill.grammar.interface import GrammarBackend, num_words
from pagemill.grammar.vocabulary import TokenTable
from pagemill.transport.stream_frames import receive_frame, send_frame
from pagemill.utils.processes import Report

MAX_MEMORY_BYTES = 4 << 30
"""Of addresses; a grammar within the limits takes a few MiB."""
NUM_TRIED = 8
"""Tokens of an output that are tried."""


class CheckerSpec(msgspec.Struct, frozen=True):
    """What the process is given."""

    socket_fd: int
    backend: str
    """Its line in the catalogue."""
    table: TokenTable
    check_s: float
    """Processor time that one grammar may take; the process ends with SIGPROF then."""


def run(payload: bytes, report: Report) -> None:
    """Entry of the process (utils/processes.py): grammars in, what is wrong with each of them out."""
    spec = msgspec.msgpack.decode(payload, type=CheckerSpec)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    backend: GrammarBackend = GRAMMARS.resolve(spec.backend)(spec.table)
    # EOFError: the other end is gone.
    with socket.socket(fileno=spec.socket_fd) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            source = receive_frame(connection)
            signal.setitimer(signal.ITIMER_PROF, spec.check_s)
            found = problem(backend, spec.table, source.decode())
            signal.setitimer(signal.ITIMER_PROF, 0)
            send_frame(connection, found.encode())


def problem(backend: GrammarBackend, table: TokenTable, source: str) -> str:
    """What is wrong with a grammar, or with the beginning of an output that follows it; empty when nothing is."""
    try:
        matcher = backend.matcher(source)
        mask = np.zeros(num_words(len(table.tokens)), np.int32)
        for place in range(NUM_TRIED):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):
                return "it allows no output at all" if not place else "it leads to where nothing is allowed"
            if set(table.ends) >= set(allowed.tolist()):
                break
            others = np.setdiff1d(allowed, table.ends)
            matcher.accept(others[len(others) * place // NUM_TRIED :][:1].tolist())
    except ValueError as error:
        return str(error)
    return ""
