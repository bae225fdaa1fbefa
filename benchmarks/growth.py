"""How throughput and inter-token latency grow with batch, context and threads: ours beside llama.cpp, interleaved.

    PYTHONPATH=. python benchmarks/growth.py --output-json growth.jsonl --plots docs/img
    PYTHONPATH=. python benchmarks/growth.py --from-json growth.jsonl --plots docs/img       only draws

A point is a number of requests that decode together behind prompts of a length; its latency is that of one step. Two
sweeps per model and number of threads: batches at a context of 128, and contexts of one request. With fewer threads
than the machine has, every other point. Peers: benchmarks/setup_peers.sh models llama.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.contestants import CORES, ENGINES, FOLDER, THEIRS, llama, ours, output_of
from peers.processes import PEERS_HOME, REPOSITORY, Engine
from workload import Sizes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8064)
OUTPUT_TOKENS = 32


@dataclass(frozen=True)
class Model:
    """One model in the forms that the two sides read."""

    name: str
    ours: Path
    theirs: Path


@dataclass(frozen=True)
class Point:
    """Where on the curves."""

    model: str
    threads: int
    sweep: str
    """batch or context."""
    batch: int
    context: int


def models(names: list[str]) -> Iterator[Model]:
    """Those with a name in `names`."""
    if "smollm2" in names:
        yield Model("SmolLM2-135M bf16", FOLDER, THEIRS["bf16"])
    if "gemma3" in names:
        fetched = subprocess.run(
            [sys.executable, "-m", "tests.conformance.fetch_gemma"],
            cwd=REPOSITORY, check=True, capture_output=True, text=True,
        )  # fmt: skip
        path = Path(fetched.stdout.split()[-1])
        yield Model("Gemma-3-270M Q4_K_M", path, path)


def points(model: Model, threads: int, tiny: bool) -> list[Point]:
    """Both sweeps."""
    batches, contexts = ((1, 4), (128, 512)) if tiny else (BATCHES, CONTEXTS)
    if threads < CORES and not tiny:
        batches, contexts = (*batches[::2], batches[-1]), contexts[::2]
    return [
        *(Point(model.name, threads, "batch", batch, contexts[0]) for batch in batches),
        *(Point(model.name, threads, "context", 1, context) for context in contexts[1:]),
    ]


def our_rate(engine: Engine, point: Point, repetition: int) -> float:
    """Output tokens per second."""
    sizes = Sizes(requests=point.batch, prompt=point.context, output=OUTPUT_TOKENS)
    return engine.run("steady_decode", repetition, sizes)["steady_decode"]


def their_rate(model: Model, point: Point) -> float:
    """Output tokens per second, as llama.cpp's own benchmark of batches has it."""
    threads, room = str(point.threads), point.batch * (point.context + OUTPUT_TOKENS)
    what = ["-npp", str(point.context), "-ntg", str(OUTPUT_TOKENS), "-npl", str(point.batch)]
    command = llama(
        "llama-batched-bench", model.theirs, "-c", str(room), "-b", "2048", "-t", threads, "-tb", threads,
        "--output-format", "jsonl", *what,
    )  # fmt: skip
    lines = [line for line in output_of("llama.cpp batched", command).splitlines() if line.startswith("{")]
    return float(json.loads(lines[-1])["speed_tg"])


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One object per point: medians of both sides."""
    for model in models(args.models):
        for threads in args.threads:
            settings = {"cpu_threads": threads, "max_num_seqs": max(BATCHES)}
            engine = Engine(
                "ours growth", ours(str(ENGINES / "pagemill_engine.py"), str(model.ours), json.dumps(settings))
            )
            try:
                for index, point in enumerate(points(model, threads, args.tiny)):
                    rates = [
                        (our_rate(engine, point, 10 * index + repetition), their_rate(model, point))
                        for repetition in range(args.repeats)
                    ]
                    yield as_result(point, rates)
            finally:
                engine.close()


def as_result(point: Point, rates: list[tuple[float, float]]) -> dict[str, object]:
    """Rates of both sides in every repetition, as they go into the file."""
    mine, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
    return vars(point) | {
        "ours": mine,
        "peer": theirs,
        "ratio": mine / theirs,
        "ours_itl_ms": point.batch / mine * 1e3,
        "peer_itl_ms": point.batch / theirs * 1e3,
        "ours_all": [rate for rate, _ in rates],
        "peer_all": [rate for _, rate in rates],
    }


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["smollm2", "gemma3"], default=["smollm2", "gemma3"])
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, CORES}, reverse=True))
    parser.add_argument("--repeats", type=int, default=3, help="repetitions of a point (default: 3)")
    parser.add_argument("--tiny", action="store_true", help="few points: to see that it runs")
    parser.add_argument("--output-json", type=Path, help="file for one JSON object per point")
    parser.add_argument("--from-json", type=Path, help="draw what is in this file; measure nothing")
    parser.add_argument("--plots", type=Path, help="folder for the plots")
    args = parser.parse_args()
    file = args.from_json or args.output_json or PEERS_HOME / "growth.jsonl"
    if args.from_json is None:
        print(
            f"{'model':22}{'threads':>8}{'batch':>7}{'context':>9}{'ours':>10}{'llama.cpp':>11}{'ratio':>7}", flush=True
        )
        with file.open("w") as out:
            for result in measure(args):
                out.write(json.dumps(result) + "\n")
                out.flush()
                print(
                    "{model:22}{threads:8}{batch:7}{context:9}{ours:10.1f}{peer:11.1f}{ratio:7.2f}".format(**result),
                    flush=True,
                )
    if args.plots is not None:
        python = PEERS_HOME / "venvs/base/bin/python"  # it has matplotlib, which pagemill does not need
        script = REPOSITORY / "benchmarks/peers/plot_growth.py"
        subprocess.run([str(python), str(script), str(file), str(args.plots)], check=True)


if __name__ == "__main__":
    main()
