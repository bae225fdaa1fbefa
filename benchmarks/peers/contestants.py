"""Who takes part in benchmarks/cpu_peers.py, and how each is started. Every contestant does works: `run(work, ...)`.

No tuning on our side: the model is all that ours are given. Peers get what their documentation asks for.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import workload
from peers import http_load
from peers.processes import (
    PATIENCE_S,
    PEERS_HOME,
    REPOSITORY,
    Command,
    Engine,
    end,
    free_port,
    last_words,
    log_of,
    num_cores,
    watched_pss,
)
from workload import Sizes

MODELS = PEERS_HOME / "models"
FOLDER = MODELS / "smollm2-135m-bf16"
OURS = {"bf16": FOLDER, "8-bit": MODELS / "smol-Q8_0.gguf", "4-bit": MODELS / "smol-Q4_1.gguf"}
THEIRS = {"bf16": MODELS / "smol-BF16.gguf", "8-bit": MODELS / "smol-Q8_0.gguf", "4-bit": MODELS / "smol-Q4_1.gguf"}
LLAMA = PEERS_HOME / "llama"
ENGINES = REPOSITORY / "benchmarks/engines"
CORES = num_cores()


class Contestant(Protocol):
    """Whoever does works."""

    name: str
    pid: int | None
    """Of the process that stays between works, if one does."""

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """Figure -> value."""

    def close(self) -> None:
        """End what stays."""


def ours(*argv: str) -> Command:
    """A Python of ours."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Command([sys.executable, *argv], {"PYTHONPATH": os.pathsep.join(paths)})


def vllm(*argv: str) -> Command:
    """A Python with vLLM, and what its documentation asks for: allocator, OpenMP runtime, room for the KV cache."""
    preloads = [PEERS_HOME / "lib/libtcmalloc_minimal.so.4", PEERS_HOME / "venvs/vllm/lib/libiomp5.so"]
    environment = {
        "LD_PRELOAD": ":".join(str(path) for path in preloads if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Command([str(PEERS_HOME / "venvs/vllm/bin/python"), *argv], environment)


def llama(program: str, model: Path, *argv: str) -> Command:
    """A program of llama.cpp."""
    return Command([str(LLAMA / program), "-m", str(model), *argv], {"LD_LIBRARY_PATH": str(LLAMA)})


def output_of(name: str, command: Command) -> str:
    """What a program prints. Raises RuntimeError, with the end of its log, when it fails."""
    with log_of(name).open("w") as log:
        process = command.start(log, stdout=subprocess.PIPE)
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            end(process)
    if process.returncode:
        raise RuntimeError(f"{name} ended with {process.returncode}:\n{last_words(name)}")
    return str(output)


class LlamaBench:
    """llama.cpp's own measurement: neither sampling nor HTTP."""

    pid = None

    def __init__(self, name: str, model: Path) -> None:
        self.name = name
        self._model = model

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """single_decode or prefill."""
        decode = ["-p", "0", "-n", str(sizes.decoded - 1), "-d", "33"]
        what = decode if work == "single_decode" else ["-p", str(sizes.prefill), "-n", "0"]
        command = llama("llama-bench", self._model, "-t", str(CORES), "-r", "1", "-o", "json", *what)
        return {work: json.loads(output_of(self.name, command))[0]["avg_ts"]}

    def close(self) -> None:
        """Nothing stays."""


class Server:
    """An OpenAI-compatible server, measured over HTTP."""

    def __init__(self, name: str, command: Command, address: http_load.Address) -> None:
        self.name = name
        self._address = address
        start = time.perf_counter()
        with log_of(name).open("w") as log:
            self._process = command.start(log)
        self.pid = self._process.pid
        try:
            self._wait_healthy(start)
            self._complete([workload.tokens(1, 16)], 1, 1)
        except BaseException:
            self.close()
            raise
        self.started_s = time.perf_counter() - start

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """throughput: all at once; served: at a concurrency; wear_in: prompts alone."""
        if work == "wear_in":
            return self._complete(workload.wearing_in(sizes), 1, sizes.concurrency)
        if work == "throughput":
            prompts = workload.throughput(repetition, sizes)
            return self._complete(prompts, sizes.output, len(prompts))
        return self._complete(workload.served(repetition, sizes), sizes.output, sizes.concurrency)

    def close(self) -> None:
        """End the server."""
        end(self._process)

    def _complete(self, prompts: list[list[int]], num_tokens: int, concurrency: int) -> dict[str, float]:
        answers = http_load.complete(self._address, prompts, num_tokens, concurrency)
        return http_load.figures(answers) if num_tokens > 1 else {}

    def _wait_healthy(self, start: float) -> None:
        url = f"http://127.0.0.1:{self._address.port}/health"
        while time.perf_counter() - start < PATIENCE_S:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} does not come up:\n{last_words(self.name)}")


class WornIn:
    """An engine or server of ours whose KV cache has been written once, as after a minute of use: the system gives its
    pages when they are first written, which takes a tenth of a prompt's time. vLLM writes all of its own at its start.
    """

    def __init__(self, inner: Server | Engine) -> None:
        self.name, self.pid = inner.name, inner.pid
        self._inner = inner
        self._is_worn_in = False

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """As the one inside; a single stream does not need it."""
        if not self._is_worn_in and work != "single_decode":
            self._inner.run("wear_in", 0, sizes)
            self._is_worn_in = True
        return self._inner.run(work, repetition, sizes)

    def close(self) -> None:
        """End it."""
        self._inner.close()


class Fresh:
    """Starts an engine or a server for every work and ends it: its start, and the memory of its tree."""

    pid = None

    def __init__(self, name: str, start: Callable[[], Server | Engine]) -> None:
        self.name = name
        self._start = start

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """start: seconds from the process to the first token. memory: peak PSS in GB, from the start of the process
        to the end of `throughput`."""
        with watched_pss() if work == "memory" else contextlib.nullcontext([0]) as peak:
            one = self._start()
            try:
                if work == "start":
                    return {"start_s": one.started_s}
                one.run("throughput", repetition, sizes)
            finally:
                one.close()
        return {"pss_gb": peak[0] / 1e9}

    def close(self) -> None:
        """Nothing stays."""


class Cli:
    """A program that completes a prompt on the command line: its start."""

    pid = None

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        self._command = command

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """Seconds from the start of the process to the first byte of text, which is that of one token."""
        with log_of(self.name).open("w") as log:
            start = time.perf_counter()
            process = self._command.start(log, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            first = os.read(process.stdout.fileno(), 1)
            seconds = time.perf_counter() - start
        process.communicate(timeout=PATIENCE_S)
        if process.returncode or not first:
            raise RuntimeError(f"{self.name} ended with {process.returncode}:\n{last_words(self.name)}")
        return {"start_s": seconds}

    def close(self) -> None:
        """Nothing stays."""


class HostTime:
    """benchmarks/host_time.py, in a process of its own."""

    pid = None
    name = "null model"

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """batch_1_ms, batch_1024_ms: medians over the steps of one run."""
        script = str(REPOSITORY / "benchmarks/host_time.py")
        command = ours(script, "--json", *(["--steps", "20"] if sizes == workload.TINY else []))
        return json.loads(output_of(self.name, command))

    def close(self) -> None:
        """Nothing stays."""


def start(name: str) -> Contestant:
    """Bring a contestant up. Raises RuntimeError, with the end of its log, when it does not come up."""
    who, _, kind = name.partition(" ")
    return _MAKERS[who](name, kind)


def _make_ours(name: str, kind: str) -> Contestant:
    """ours PRECISION, ours server PRECISION, ours fresh server, ours fresh engine, ours complete."""
    if kind == "complete":
        argv = ["-m", "pagemill", "complete", "--model", "smollm2", "The", "--max-tokens", "1", "--temperature", "0"]
        return Cli(name, ours(*argv))
    if kind == "fresh server":
        return Fresh(name, lambda: _our_server(name, OURS["4-bit"]))
    if kind == "fresh engine":
        return Fresh(name, lambda: Engine(name, _our_engine(OURS["4-bit"])))
    if kind.startswith("server "):
        return WornIn(_our_server(name, OURS[kind.removeprefix("server ")]))
    return WornIn(Engine(name, _our_engine(OURS[kind])))


def _our_engine(model: Path) -> Command:
    return ours(str(ENGINES / "pagemill_engine.py"), str(model))


def _our_server(name: str, model: Path) -> Server:
    port = free_port()
    argv = ["-m", "pagemill", "serve", "--model", str(model), "--port", str(port), "--served-model-name", "model"]
    return Server(name, ours(*argv), http_load.Address(port, "model"))


def _make_llama(name: str, kind: str) -> Contestant:
    """llama.cpp PRECISION, llama.cpp server SLOTS, llama.cpp fresh server SLOTS, llama.cpp complete."""
    if kind == "complete":
        argv = ["-p", "The", "-n", "1", "-no-cnv", "--temp", "0", "--no-display-prompt", "-t", str(CORES)]
        return Cli(name, llama("llama-completion", THEIRS["4-bit"], *argv))
    if kind.startswith("fresh server "):
        return Fresh(name, lambda: _llama_server(name, THEIRS["4-bit"], int(kind.split()[-1])))
    if kind.startswith("server "):
        return _llama_server(name, THEIRS["bf16"], int(kind.split()[-1]))
    return LlamaBench(name, THEIRS[kind])


def _llama_server(name: str, model: Path, num_slots: int) -> Server:
    port = free_port()
    room = ["-np", str(num_slots), "-c", str(num_slots * 512)]
    command = llama("llama-server", model, *room, "-t", str(CORES), "--port", str(port), "--no-webui")
    return Server(name, command, http_load.Address(port, "model"))


def _make_vllm(name: str, kind: str) -> Contestant:
    """vLLM engine, vLLM server."""
    if kind == "engine":
        command = vllm(str(ENGINES / "vllm_engine.py"), str(FOLDER))
        command.environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{CORES - 1}"
        return Engine(name, command)
    port = free_port()
    argv = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(FOLDER), "--served-model-name", "model"]
    argv += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64"]
    return Server(name, vllm(*argv), http_load.Address(port, "model"))


def _make_transformers(name: str, kind: str) -> Contestant:
    """transformers fresh engine."""
    python = str(PEERS_HOME / "venvs/base/bin/python")
    return Fresh(name, lambda: Engine(name, Command([python, str(ENGINES / "transformers_engine.py"), str(FOLDER)])))


def _make_machine(name: str, kind: str) -> Contestant:
    """machine: what the hardware allows."""
    return Engine(name, ours(str(ENGINES / "machine_engine.py"), str(FOLDER), str(CORES)))


_MAKERS: dict[str, Callable[[str, str], Contestant]] = {
    "ours": _make_ours,
    "llama.cpp": _make_llama,
    "vLLM": _make_vllm,
    "transformers": _make_transformers,
    "machine": _make_machine,
    "null": lambda name, kind: HostTime(),
}
