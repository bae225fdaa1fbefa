"""This server beside vLLM's CPU build over HTTP, on a model that is next to nothing: serving is what costs time.

    PEERS_HOME=... benchmarks/setup_peers.sh vllm
    PEERS_HOME=... PYTHONPATH=. .venv/bin/python benchmarks/serving_peer.py [--streams 64] [--tokens 128] [--turns 5]

Both serve the same random Llama of 2 layers, 64 wide, with SmolLM2's tokenizer and vocabulary in bfloat16, in an engine
process beside one API process. In turn, the other one stopped (SIGSTOP): so many completions at once, streamed, greedy,
of so many tokens, for prompts of text that nobody has seen. Figures: tokens a second, milliseconds to the first event
and between events, events for a token (both servers send several tokens in an event where they do not keep up), and
processor time for a token: of the API process, and of all processes of the server.

vLLM runs with --enforce-eager unless --compiled says otherwise: compiling takes minutes at every start, and has little
to gain on such a model. `--keep FOLDER` leaves the servers running, stopped, for the next run: it uses them.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from peers.contestants import CORES, FOLDER, ours, vllm
from peers.http_load import Address, Answer, complete
from peers.processes import PATIENCE_S, Command, cpu_seconds, free_port, last_words, log_of, pause, tree
from serving import quantile

WORDS = "paper mill water wheel pulp sheet press dry cut fold bind print read write keep"
MAX_LEN = 1024
Row = dict[str, Any]


def tiny_model(folder: Path) -> Path:
    """A random Llama with SmolLM2's tokenizer, in a folder that may have it already."""
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Served:
    """A server in a session of its own, stopped while it is not its turn. `folder` has its process id and its port; one
    that runs there already is used."""

    def __init__(self, name: str, command: Command, port: int, folder: Path) -> None:
        self.name = name
        kept = folder / f"{name}.json"
        if kept.exists():
            self._pid, port = json.loads(kept.read_text())
        else:
            with log_of(f"serving-{name}").open("w") as log:
                self._pid = command.start(log).pid
        self._address = Address(port, "model")
        pause(self._pid, False)
        self._wait_healthy(time.perf_counter())
        kept.write_text(json.dumps([self._pid, port]))
        pause(self._pid, True)

    def run(self, prompts: list[str], num_tokens: int) -> Row:
        """The figures of one turn."""
        pause(self._pid, False)
        try:
            time.sleep(0.5)  # what has waited since the last turn
            api, whole = self._api_seconds(), cpu_seconds(self._pid)
            answers = complete(self._address, prompts, num_tokens, len(prompts))
            api, whole = self._api_seconds() - api, cpu_seconds(self._pid) - whole
        finally:
            pause(self._pid, True)
        return {"server": self.name} | figures(answers, num_tokens, api, whole)

    def close(self) -> None:
        """End the server."""
        for pid in reversed(tree(self._pid)):
            psutil.Process(pid).kill()

    def _api_seconds(self) -> float:
        """Processor time of the process that was started, which answers HTTP in both servers."""
        return float(sum(psutil.Process(self._pid).cpu_times()[:2]))

    def _wait_healthy(self, since: float) -> None:
        url = f"http://127.0.0.1:{self._address.port}/health"
        process = psutil.Process(self._pid)
        while time.perf_counter() - since < PATIENCE_S and process.status() != psutil.STATUS_ZOMBIE:
            try:
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"{self.name} does not come up:\n{last_words(f'serving-{self.name}')}")


def figures(answers: list[Answer], num_tokens: int, api_s: float, whole_s: float) -> Row:
    """Of completions that ran at once."""
    end_s = max(answer.piece_times_s[-1] for answer in answers)
    start_s = min(answer.start_s for answer in answers)
    firsts = [1e3 * (answer.piece_times_s[0] - answer.start_s) for answer in answers]
    gaps = [1e3 * (b - a) for answer in answers for a, b in pairwise(answer.piece_times_s)]
    total = num_tokens * len(answers)
    return {
        "tokens_per_s": total / (end_s - start_s),
        "ttft_p50_ms": statistics.median(firsts),
        "ttft_p99_ms": quantile(firsts, 0.99),
        "itl_p50_ms": statistics.median(gaps),
        "itl_p99_ms": quantile(gaps, 0.99),
        "events_per_token": sum(len(answer.piece_times_s) for answer in answers) / total,
        "api_cpu_us_per_token": 1e6 * api_s / total,
        "cpu_us_per_token": 1e6 * whole_s / total,
    }


def prompts_of(turn: int, num_streams: int) -> list[str]:
    """About 80 tokens each; no two begin alike."""
    return [f"{turn}.{number} {WORDS * 4}" for number in range(num_streams)]


def started(args: argparse.Namespace, folder: Path) -> list[Served]:
    """Both servers."""
    model = str(tiny_model(folder / "tiny-llama"))
    common = ["--served-model-name", "model", "--max-model-len", str(MAX_LEN), "--max-num-seqs", str(args.streams)]
    ports = free_port(), free_port()
    own = ["-m", "pagemill", "serve", model, "--dtype", "bfloat16", "--port", str(ports[0]), *common]
    peer = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"]
    peer += ["--port", str(ports[1]), *common]
    peer += [] if args.compiled else ["--enforce-eager"]
    theirs = vllm(*peer)
    theirs.environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{CORES - 1}"
    wanted = {"pagemill": (ours(*own), ports[0]), "vllm": (theirs, ports[1])}
    found: list[Served] = []
    try:
        for name, (command, port) in wanted.items():
            found.append(Served(name, command, port, folder))
            print(f"{name} is ready", file=sys.stderr)
    except BaseException:
        for server in found:
            server.close()
        raise
    return found


def report(rows: list[Row]) -> None:
    """A table of medians, and of the ratios within a turn."""
    own, theirs = ([row for row in rows if row["server"] == name] for name in ("pagemill", "vllm"))
    print("| median of turns | pagemill | vLLM | ours / theirs, within a turn: median (lowest to highest) |")
    print("| --- | --- | --- | --- |")
    for figure in [name for name in own[0] if name != "server"]:
        values = [statistics.median(row[figure] for row in side) for side in (own, theirs)]
        ratios = sorted(a[figure] / b[figure] for a, b in zip(own, theirs, strict=True))
        median = statistics.median(ratios)
        print(f"| {figure} | {values[0]:.2f} | {values[1]:.2f} | {median:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) |")


def main() -> int:
    """Print the figures of each turn as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--compiled", action="store_true", help="vLLM without --enforce-eager")
    parser.add_argument("--keep", type=Path, help="a folder for servers that are left running, and used where they run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        servers = started(args, folder)
        try:
            rows = []
            for turn in range(args.turns + 1):
                for server in servers if turn % 2 else reversed(servers):
                    row = server.run(prompts_of(time.monotonic_ns(), args.streams), args.tokens)
                    if turn:  # the first one warms both up
                        rows.append(row)
                        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}))
                        sys.stdout.flush()
        finally:
            if not args.keep:
                for server in servers:
                    server.close()
    if rows:
        report(rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    raise SystemExit(main())
