"""From `kill -9` of an engine core to the next token of a running stream, beside a cold start.

    python benchmarks/recovery.py --model smollm2 --runs 5

A cold start is the time from the start of `pagemill serve` to the first token of the first request, which is sent as
soon as the server is ready. Recovery is the longest silence of a stream in the middle of which its core is killed.
Both as medians over the runs, and their ratio. Arguments after `--` go to `pagemill serve`.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx
import psutil
from ready_server import wait_ready

BODY = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}
TOKENS_BEFORE, TOKENS_AFTER = 20, 5


def token_times(url: str) -> Iterator[float]:
    """When each event of a stream came."""
    with (
        httpx.Client(timeout=600) as client,
        client.stream("POST", f"{url}/v1/completions", json=BODY) as response,
    ):
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                yield time.perf_counter()


def core_of(pid: int) -> int:
    """The engine core among the children of a server."""
    children = psutil.Process(pid).children()
    return next(child.pid for child in children if child.cmdline()[0].startswith("pagemill: engine core 0"))


def run_once(command: list[str]) -> tuple[float, float]:
    """(cold start, recovery) in seconds."""
    with tempfile.TemporaryFile() as log:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            times = token_times(f"http://127.0.0.1:{wait_ready(process, log)}")
            last = next(times)
            cold_s = last - begin
            for _ in range(TOKENS_BEFORE):
                last = next(times)
            os.kill(core_of(process.pid), signal.SIGKILL)
            longest_s = 0.0
            for num_after, now in enumerate(times, 1):  # a few tokens may be on their way while the core dies
                longest_s, last = max(longest_s, now - last), now
                if num_after > TOKENS_AFTER and longest_s > cold_s / 10:
                    break
            return cold_s, longest_s
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("serve", nargs="*", help="further arguments of `pagemill serve`")
    args = parser.parse_args()
    command = [sys.executable, "-m", "pagemill", "serve", args.model, "--port", "0", "--shutdown-timeout", "0"]
    pairs = []
    for number in range(args.runs):
        cold_s, recovery_s = run_once([*command, *args.serve])
        pairs.append((cold_s, recovery_s))
        print(f"run {number}: cold start {cold_s:.2f} s, recovery {recovery_s:.2f} s", flush=True)
    cold_s, recovery_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"median: cold start {cold_s:.2f} s, recovery {recovery_s:.2f} s, ratio {recovery_s / cold_s:.2f}")


if __name__ == "__main__":
    main()
