"""What HTTP leaves of the engine's speed: the same requests in one process, and streamed over HTTP.

    python benchmarks/gpu_http.py [--model llama-3.2-1b] [--servers auto,1,4] [--requests 512] [--concurrency 256]

Requests of --input random token ids, --output tokens each, greedy, --concurrency at a time, to random weights of a real
shape. In process: `LLM.generate` with as many sequences at most. Over HTTP: `pagemill serve` with the number of API
servers named, and POST /v1/completions with "stream": true from --clients processes; an event may carry several tokens.
The tokenizer is made here: byte-level BPE with a text for each id, as the model's own is not at hand.

Every measurement is made --rounds times in one server, with other ids, and printed as one JSON line. `client_busy` is
the share of a processor that the busiest client process used: well under 1, or the clients are the limit.
`server_cpu_s` is what each process of the server used. The last line has the share of in process, first round and best.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))

from ready_server import wait_ready

CONFIGS = Path(__file__).parent / "configs"
TAIL_BYTES = 1000
"""Of an answer: what is kept of its end has the usage."""


# --- the model --------------------------------------------------------------------------------------------------------


def make_model(name: str, folder: Path) -> int:
    """Write the config of that shape, and a tokenizer for its vocabulary, whose size is returned."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    shutil.copy(CONFIGS / name / "config.json", folder)
    size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: index for index, letter in enumerate(letters)}
    for first in "Ġ" + "abcdefghijklmnopqrstuvwxyz":
        for number in range(size):
            if len(words) == size:
                break
            words.setdefault(first + _spelled(number), len(words))
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return size


def _spelled(number: int) -> str:
    """A number in letters, two at least."""
    text = ""
    while number or len(text) < 2:
        number, rest = divmod(number, 26)
        text += chr(ord("a") + rest)
    return text


def prompts_of(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids; no two seeds share a prompt."""
    rng = random.Random(seed)
    return [[rng.randrange(300, vocab_size - 1000) for _ in range(length)] for _ in range(count)]


# --- in process -------------------------------------------------------------------------------------------------------


def in_process(folder: str, args: argparse.Namespace, vocab_size: int) -> None:
    """Print a line for each round."""
    from pagemill import LLM, SamplingParams

    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=args.max_model_len,
        max_num_seqs=args.concurrency,
    )
    params = SamplingParams(temperature=0, max_tokens=args.output, ignore_eos=True, detokenize=False)
    for turn in range(args.rounds):
        prompts = prompts_of(args.requests, args.input, vocab_size, turn)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        shown({"where": "in process", "round": turn, "tokens_per_s": args.requests * args.output / seconds})


# --- over HTTP --------------------------------------------------------------------------------------------------------


class Exchange(asyncio.Protocol):
    """One connection with one request after another. Nothing of an answer is parsed but its end."""

    def __init__(self) -> None:
        self.num_events = 0
        self.first_s = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self, request: bytes) -> "asyncio.Future[bytes]":
        """Send it; the result is the end of the answer."""
        self.done = asyncio.get_running_loop().create_future()
        self._tail = b""
        self.first_s = 0.0
        self._transport.write(request)  # type: ignore[attr-defined]
        return self.done

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b"data: {" in data:
            self.first_s = time.perf_counter()
        self.num_events += data.count(b"data: {")
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._tail.endswith(b"0\r\n\r\n") and not self.done.done():
            self.done.set_result(self._tail)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the server closed the connection: {self._tail!r}"))


def request_of(port: int, ids: list[int], num_tokens: int) -> bytes:
    """A streamed completion."""
    body = {
        "model": "m", "prompt": ids, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


async def _ask_all(port: int, requests: list[bytes], at_once: int, num_tokens: int, begin_s: float) -> dict[str, Any]:
    waiting = iter(requests)
    firsts: list[float] = []
    num_events = 0

    async def client() -> None:
        nonlocal num_events
        _, link = await asyncio.get_running_loop().create_connection(Exchange, "127.0.0.1", port)
        await asyncio.sleep(max(0.0, begin_s - time.time()))
        for request in waiting:
            asked = time.perf_counter()
            tail = await link.ask(request)
            if f'"completion_tokens":{num_tokens}'.encode() not in tail.replace(b" ", b""):
                raise RuntimeError(f"the answer ended with {tail!r}")
            firsts.append(link.first_s - asked)
        num_events += link.num_events

    await asyncio.gather(*(client() for _ in range(at_once)))
    return {"events": num_events, "firsts": firsts}


def client_process(
    port: int, requests: list[bytes], at_once: int, num_tokens: int, begin_s: float, answers: Any
) -> None:
    """Ask them all, beginning at a `time.time()`."""
    found = asyncio.run(_ask_all(port, requests, at_once, num_tokens, begin_s))
    used = sum(os.times()[:2])
    found |= {"end_s": time.time(), "used_s": used}
    answers.put(found)


def ask_round(port: int, args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Figures of one round, from all client processes."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    requests = [request_of(port, ids, args.output) for ids in prompts]
    begin_s = time.time() + 1.0
    clients = [
        context.Process(
            target=client_process,
            args=(
                port,
                requests[number :: args.clients],
                args.concurrency // args.clients,
                args.output,
                begin_s,
                answers,
            ),
        )
        for number in range(args.clients)
    ]
    for client in clients:
        client.start()
    found = [answers.get(timeout=args.timeout_s) for _ in clients]
    for client in clients:
        client.join()
    seconds = max(part["end_s"] for part in found) - begin_s
    firsts = sorted(first for part in found for first in part["firsts"])
    return {
        "tokens_per_s": len(requests) * args.output / seconds,
        "events_per_s": sum(part["events"] for part in found) / seconds,
        "ttft_p50_ms": 1e3 * firsts[len(firsts) // 2],
        "client_busy": max(part["used_s"] for part in found) / seconds,
    }


def server_cpu_s(server: psutil.Process) -> dict[str, float]:
    """Processor seconds so far of the server's processes, by the name of each."""
    used = {}
    for process in (server, *server.children(recursive=True)):
        try:
            times = process.cpu_times()
            words = " ".join(process.cmdline())[:60] or process.name()
        except psutil.Error:
            continue
        used[f"{words} {process.pid}"] = times.user + times.system
    return used


def over_http(folder: str, servers: str, args: argparse.Namespace, vocab_size: int) -> Iterator[dict[str, Any]]:
    """Start a server, and yield the figures of each round."""
    command = [
        sys.executable, "-m", "pagemill", "serve", folder,
        "--load-format", "dummy", "--dtype", "bfloat16", "--port", "0",
        "--max-model-len", str(args.max_model_len), "--max-num-seqs", str(args.concurrency),
        "--served-model-name", "m", "--api-server-count", servers, *args.flags,
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            port = wait_ready(process, log)
            server = psutil.Process(process.pid)
            for turn in range(args.rounds):
                before = server_cpu_s(server)
                figures = ask_round(port, args, prompts_of(args.requests, args.input, vocab_size, 100 + turn))
                after = server_cpu_s(server)
                used = {name: round(after[name] - before.get(name, 0.0), 2) for name in after}
                busiest = dict(sorted(used.items(), key=lambda pair: -pair[1])[:8])
                yield {"where": "HTTP", "servers": servers, "round": turn} | figures | {"server_cpu_s": busiest}
        finally:
            process.terminate()
            process.wait()
            if args.log:
                args.log.write_bytes(os.pread(log.fileno(), 1 << 20, 0))


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row, printed."""
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}))
    sys.stdout.flush()
    return row


def main() -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.2-1b", help="a folder of benchmarks/configs")
    parser.add_argument("--servers", default="auto", help="values of --api-server-count, one after the other")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--input", type=int, default=512)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--clients", type=int, default=4, help="processes that ask")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of a round")
    parser.add_argument("--log", type=Path, help="file for what the last server printed")
    parser.add_argument("--in-process", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="of pagemill serve, after --")
    args = parser.parse_args()
    if args.concurrency % args.clients or args.requests % args.concurrency:
        parser.error("--clients must divide --concurrency, and --concurrency --requests: the last wave would be small")
    if args.in_process:
        vocab_size = int(json.loads(Path(args.in_process, "config.json").read_text())["vocab_size"])
        in_process(args.in_process, args, vocab_size)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = make_model(args.model, Path(folder))
        own = [argument for argument in sys.argv[1:] if argument != "--"]
        own = own[: len(own) - len(args.flags)]
        said = subprocess.run(
            [sys.executable, __file__, *own, "--in-process", folder], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        print(said, end="", flush=True)
        alone = [json.loads(line)["tokens_per_s"] for line in said.splitlines() if line.startswith("{")]
        for servers in args.servers.split(","):
            rates = [shown(row)["tokens_per_s"] for row in over_http(folder, servers, args, vocab_size)]
            shown({
                "servers": servers,
                "share_first": rates[0] / alone[0],
                "share_best": max(rates) / max(alone),
                "tokens_per_s": max(rates),
                "in_process": max(alone),
            })  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
