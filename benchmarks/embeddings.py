"""Embeddings of all-MiniLM-L6-v2 on a CPU: sequences/s beside sentence-transformers, by turns in one run.

    PYTHONPATH=. python benchmarks/embeddings.py --peer PYTHON [--lengths 16 64 8,24,96] [--rounds 5] [--count 128]

PYTHON is one that imports sentence_transformers. `python -m tests.conformance.fetch_minilm` fetches the model.
pagemill runs in bfloat16, sentence-transformers in float32 and in bfloat16, of which the faster counts; each is a
process of its own that waits while another works. `--lengths` are cases: of the words of a text, in turn where there
are several. Printed are, of each engine, the fastest round's sequences/s and tokens/s (without padding), and the ratio.
Where a step costs its tokens and not its padding, tokens/s of texts of unequal lengths are those of equal ones. The
least cosine between the vectors of both sides says whether they have done the same.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "docs" / "kv-cache.md"
"""The words of the texts."""
OURS = "pagemill bfloat16"
PEERS = ("float32", "bfloat16")


def texts(count: int, lengths: list[int]) -> list[str]:
    """So many, of these numbers of words in turn: the same at every call."""
    words = SOURCE.read_text().split()
    chosen = random.Random(0)
    return [" ".join(chosen.choices(words, k=lengths[index % len(lengths)])) for index in range(count)]


def serve(embed: Any) -> None:
    """Answer cases on stdin: for each the seconds that all texts took, and their vectors."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        asked = texts(case["count"], case["lengths"])
        start_s = time.perf_counter()
        vectors = embed(asked)
        took_s = time.perf_counter() - start_s
        print(json.dumps({"seconds": took_s, "vectors": [list(map(float, vector)) for vector in vectors]}), flush=True)


def serve_ours(model: str) -> None:
    """With pagemill."""
    from pagemill import LLM

    with LLM(model, runner="pooling", dtype="bfloat16") as llm:
        serve(lambda asked: [out.outputs.embedding for out in llm.embed(asked, use_tqdm=False)])


def serve_peer(model: str, dtype: str) -> None:
    """With sentence-transformers, with batches of its default size."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    encoder = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    serve(lambda asked: encoder.encode(asked, normalize_embeddings=True, show_progress_bar=False).astype("float32"))


class Engine:
    """One side, in a process of its own."""

    def __init__(self, python: str, *arguments: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [python, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('"ready"', '{"seconds"')):
                return json.loads(line)
        raise SystemExit(f"an engine ended with exit status {self._process.wait()}")

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Seconds and vectors."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def least_cosine(first: list[list[float]], second: list[list[float]]) -> float:
    """Between vectors of the same text."""

    def cosine(one: list[float], other: list[float]) -> float:
        product = sum(a * b for a, b in zip(one, other, strict=True))
        return float(product / (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5)

    return min(cosine(one, other) for one, other in zip(first, second, strict=True))


def measure(engines: dict[str, Engine], case: dict[str, Any], rounds: int, num_tokens: int) -> None:
    """Print a line for each engine."""
    best = dict.fromkeys(engines, float("inf"))
    vectors = {}
    for name, engine in engines.items():  # warms up
        vectors[name] = engine.run(case)["vectors"]
    for _ in range(rounds):
        for name, engine in engines.items():
            best[name] = min(best[name], engine.run(case)["seconds"])
    words = ",".join(map(str, case["lengths"]))
    for name, seconds in best.items():
        rates = f"{case['count'] / seconds:8.1f} sequences/s {num_tokens / seconds:9.0f} tokens/s"
        cosine = least_cosine(vectors[name], vectors[OURS])
        print(f"{words:>10} words  {name:32} {rates}  least cosine {cosine:.4f}", flush=True)
    fastest = min(seconds for name, seconds in best.items() if name != OURS)
    print(f"{words:>10} words  ours / the faster of theirs: {fastest / best[OURS]:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--lengths", nargs="+", default=["16", "64", "8,24,96"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=128)
    parser.add_argument("--serve", choices=("ours", *PEERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve == "ours":
        serve_ours(args.model)
        return
    if args.serve:
        serve_peer(args.model, args.serve)
        return
    from pagemill.tokenizers.load import load_tokenizer
    from tests.conformance.fetch_minilm import minilm_path

    model = args.model or str(minilm_path())
    tokenizer = load_tokenizer(Path(model))
    engines = {OURS: Engine(sys.executable, "--model", model, "--serve", "ours")}
    for dtype in PEERS:
        engines[f"sentence-transformers {dtype}"] = Engine(args.peer, "--model", model, "--serve", dtype)
    for written in args.lengths:
        case = {"count": args.count, "lengths": [int(length) for length in written.split(",")]}
        num_tokens = sum(len(tokenizer.encode(text)) for text in texts(**case))
        measure(engines, case, args.rounds, num_tokens)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
