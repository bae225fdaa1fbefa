"""Run pagemill beside its peers on the same work, interleaved, and print medians and ratios.

Each engine is a process of its own that stays alive; the repetitions go round robin over the engines, so that a
machine that drifts drifts for all. Peers are expected under $PEERS_HOME (see docs/benchmarks.md):

    python benchmarks/side_by_side.py --peers transformers,vllm --work single_decode,throughput --repetitions 3
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ENGINES = Path(__file__).parent / "engines"
PEERS_HOME = Path(os.environ.get("PEERS_HOME", "~/.cache/pagemill-peers")).expanduser()


class Engine:
    """One engine's process."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | environment,
        )
        self._answer()

    def _answer(self) -> object:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit status {self._process.wait()}")
        return json.loads(line)

    def run(self, work: str, repetition: int) -> float:
        """The rate that the work reached."""
        self._process.stdin.write(json.dumps({"work": work, "repetition": repetition}) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(60)


def start(name: str, args: argparse.Namespace) -> Engine:
    """Start an engine by name."""
    environment: dict[str, str] = {}
    if name == "pagemill":
        command = [sys.executable, str(ENGINES / "pagemill_engine.py"), args.model, args.settings]
        environment["PYTHONPATH"] = str(ENGINES.parents[1])
    elif name == "transformers":
        command = [str(PEERS_HOME / "venvs/base/bin/python"), str(ENGINES / "transformers_engine.py"), args.peer_model]
    elif name == "vllm":
        command = [str(PEERS_HOME / "venvs/vllm/bin/python"), str(ENGINES / "vllm_engine.py"), args.peer_model]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
        preload = [path for path in _vllm_preloads() if path.exists()]
        environment["LD_PRELOAD"] = ":".join(map(str, preload))
    else:
        raise SystemExit(f"unknown engine {name!r}; known: pagemill, transformers, vllm")
    print(f"starting {name} ...", flush=True)
    return Engine(name, command, environment)


def _vllm_preloads() -> list[Path]:
    """The allocator and the OpenMP runtime that the wheel's documentation asks for."""
    return [PEERS_HOME / "lib/libtcmalloc_minimal.so.4", PEERS_HOME / "venvs/vllm/lib/libiomp5.so"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="transformers,vllm")
    parser.add_argument("--work", default="single_decode,prefill,throughput,shared_prefix")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model", default="smollm2", help="what pagemill runs")
    parser.add_argument("--peer-model", default=str(PEERS_HOME / "models/smollm2-135m-bf16"))
    parser.add_argument("--settings", default="{}", help="JSON of pagemill's LLM arguments")
    args = parser.parse_args()
    engines = [start(name, args) for name in ["pagemill", *filter(None, args.peers.split(","))]]
    print(f"\n{'work':14}" + "".join(f"{engine.name:>22}" for engine in engines) + "   ratio ours/peer")
    for work in args.work.split(","):
        rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for repetition in range(args.repetitions):
            for engine in engines:
                rates[engine.name].append(engine.run(work, repetition))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        cells = "".join(f"{medians[n]:>9.1f} ({min(v):.0f}-{max(v):.0f})".rjust(22) for n, v in rates.items())
        ratios = ", ".join(f"{n} {medians['pagemill'] / medians[n]:.2f}" for n in medians if n != "pagemill")
        print(f"{work:14}{cells}   {ratios}", flush=True)
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main()
