"""Requests that run in a fresh engine, with drafts or without, and in engines that are killed."""

import os
import signal

from pagemill.config.arguments import EngineArgs
from pagemill.engine.core import EngineCore
from pagemill.engine.executor.factory import make_executor
from pagemill.engine.executor.uniproc import UniprocExecutor
from pagemill.launch import WORKER, build_config
from pagemill.serve.client.in_flight import InFlightRequests
from pagemill.worker.worker import Worker
from tests.fakes.engine_setup import Client
from tests.fakes.noted_guesses import note_guesses

SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "cpu_threads": 1}
"""With one thread: of so little work, several wait for each other longer than they compute."""


def executor_of(config, speculation=None):
    """With a worker here, which may have proposers that no settings name; with processes where several are asked
    for."""
    if config.parallel.workers_per_replica == 1:
        return UniprocExecutor(Worker(config, speculation=speculation))
    assert speculation is None
    return make_executor(config, WORKER)


def run_requests(checkpoint, *batches, speculation=None, depth=1, grammar_of=None, **settings):
    """What a fresh engine says to requests, batch after batch, and its counts."""
    config = build_config(EngineArgs(checkpoint, **({"num_gpu_blocks_override": 200} | SETTINGS | settings)))
    given = {} if grammar_of is None else {"grammar_of": grammar_of}
    core = EngineCore(config, executor_of(config, speculation), depth=depth, **given)
    client = Client(core)
    for batch in batches:
        client.add(*batch)
        client.run()
    core.check_integrity()
    stats = core.stats()
    core.shutdown()
    return client, stats


def run_killed(checkpoint, asked, speculation=None, depth=1, **settings):
    """What engines say to requests that end after a few steps each, one after the other, worker processes by a signal:
    all that the next one is told is what the front end remembers. Returns tokens by request, and how many drafts were
    verified."""
    config = build_config(EngineArgs(checkpoint, **({"num_gpu_blocks_override": 200} | SETTINGS | settings)))
    requests = InFlightRequests()
    entries = [requests.add(request) for request in asked]
    num_drafts = 0
    for num_steps in (2, 5, 1, 100):
        executor = executor_of(config, speculation)
        core = EngineCore(config, executor, depth=depth)
        for entry in entries:
            if entry.request.request_id in requests:
                core.add(entry.resumed())
        while core.has_work() and num_steps:
            num_steps -= 1
            for outputs in core.step():
                requests.note(outputs)
        counts = core.stats().drafts
        num_drafts += counts.num_draft_tokens if counts is not None else 0
        for process in getattr(executor, "pids", ()):
            os.kill(process, signal.SIGKILL)
        core.shutdown()
    return {entry.request.request_id: entry.emitted for entry in entries}, num_drafts


def noted_guesses(monkeypatch, proposer):
    """A list that gets (text, drafts) of every guess that this class of proposers makes."""
    seen = []
    note_guesses(monkeypatch, proposer, lambda text, drafts: seen.append((text, drafts)))
    return seen
