"""What structured output costs and saves: `python benchmarks/structured.py [--peer]`. For a quiet machine.

32 requests with 32 different schemas of the corpus beside as many free ones, by turns: the time between two tokens is
that of a step of the engine in which all of them get one, medians over all repetitions; with the tokens that a grammar
forces appended, and sampled like others. Then what a known schema adds to the first token, and how long it takes to
make grammars. `--peer`: the same of vLLM's CPU build with xgrammar, in the same run (`benchmarks/setup_peers.sh vllm`).
`--shape NAME`: dummy weights in a shape of benchmarks/configs with the tokenizer of the same model, for a GPU.
"""

import argparse
import json
import lzma
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.contestants import ENGINES, FOLDER, ours, vllm
from peers.processes import Command, end, last_words, log_of

from pagemill.errors import RequestError
from pagemill.grammar.backends.guidance import GuidanceBackend
from pagemill.grammar.translate import translated
from pagemill.grammar.vocabulary import token_table
from pagemill.messages.structured_outputs import StructuredOutputsParams
from pagemill.tokenizers.load import load_tokenizer

CORPUS = Path(__file__).parents[1] / "tests/conformance/data/json-schemas.jsonl.xz"
CONFIGS = Path(__file__).parent / "configs"
MIN_PROPERTIES = 3
MANY_ITEMS = 1000
COLUMNS = (
    *("engine", "requests", "step, ms", "ratio", "CPU, ms", "ratio", "steps of all", "steps", "tokens", "tokens/s"),
    "complete",
)
Schema = dict[str, Any]
Figures = dict[str, float]


def schemas(endless: bool) -> list[Schema]:
    """Objects of the corpus that are supported here. `endless`: long arrays of them instead, as random weights would
    end most objects after a few tokens; an object that refers to itself as the root is left out then."""
    found = []
    with lzma.open(CORPUS, "rt") as lines:
        for line in lines:
            schema = json.loads(line)["schema"]
            if not isinstance(schema, dict) or len(schema.get("properties", ())) < MIN_PROPERTIES:
                continue
            if endless:
                if "$ref" in line:
                    continue
                schema = {"type": "array", "items": schema, "minItems": MANY_ITEMS}
            try:
                translated(StructuredOutputsParams(json=schema))
            except RequestError:
                continue
            found.append(schema)
    return found


class Contestant:
    """An engine in a process of its own (engines/structured_engine.py), stopped while it is not its turn."""

    def __init__(self, name: str, command: Command) -> None:
        self.name = name
        with log_of(f"structured-{name}").open("w") as log:
            self._process = command.start(log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._answer()
        os.killpg(self._process.pid, signal.SIGSTOP)

    def ask(self, work: str, **arguments: Any) -> Any:
        """What the engine answers to a job."""
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(json.dumps({"work": work} | arguments) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process."""
        os.killpg(self._process.pid, signal.SIGCONT)
        end(self._process)

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended:\n{last_words(f'structured-{self.name}')}")
        return json.loads(line)


def in_shape(name: str, target: Path) -> Path:
    """A folder without weights: a configuration of benchmarks/configs, and the tokenizer of FOLDER."""
    shutil.copy(CONFIGS / name / "config.json", target)
    for file in FOLDER.glob("*token*.json"):
        shutil.copy(file, target)
    return target


def compile_times(found: list[Schema]) -> list[float]:
    """Milliseconds for the grammar of each schema, here."""
    tokenizer = load_tokenizer(FOLDER)
    vocabulary = GuidanceBackend(token_table(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids), tokenizer)
    times = []
    for schema in found:
        source = translated(StructuredOutputsParams(json=schema))
        began = time.perf_counter()
        vocabulary.matcher(source)
        times.append(1000 * (time.perf_counter() - began))
    return times


def kinds_of(chosen: list[Schema], *, whole: bool, apart: bool) -> dict[str, dict[str, Any]]:
    """What is compared, and how it is asked for. `whole`: also what only this project knows."""
    kinds: dict[str, dict[str, Any]] = {"free": {"schemas": None}}
    kinds["with forms, nothing forced"] = {"schemas": chosen, "forces": False}
    if whole:
        kinds["with forms, forced"] = {"schemas": chosen}
    if whole and apart:
        for forces in (False, True):
            name = f"with forms, {'' if forces else 'nothing '}forced, masks apart"
            kinds[name] = {"schemas": chosen, "forces": forces, "apart": True}
    return kinds


def compare(contestant: Contestant, kinds: dict[str, dict[str, Any]], num_tokens: int, turns: int) -> None:
    """Prints the rows of one engine."""
    found: dict[str, list[Figures]] = {kind: [] for kind in kinds}
    for turn in range(turns):
        for kind in list(kinds)[:: 1 if turn % 2 else -1]:
            found[kind].append(contestant.ask("run", num_tokens=num_tokens, **kinds[kind]))
    middle = {
        kind: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for kind, runs in found.items()
    }
    for kind, figures in middle.items():
        columns = []
        for name in ("step_ms", "cpu_ms"):
            columns += [f"{figures[name]:.2f}", f"{figures[name] / middle['free'][name]:.3f}"]
        columns += [f"{figures[name]:.0f}" for name in ("steps_of_all", "steps", "tokens", "tokens_per_s", "complete")]
        print("|", " | ".join([contestant.name, kind, *columns]), "|")


def main() -> None:
    """Prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--threads", type=int, default=0, help="of this project; 0: a thread for each core")
    parser.add_argument(
        "--apart", action="store_true", help="also with masks that change logits in a pass of their own"
    )
    parser.add_argument("--shape", help="dummy weights in a shape of benchmarks/configs, such as qwen3-8b")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = in_shape(arguments.shape, Path(folder)) if arguments.shape else FOLDER
        engine = str(ENGINES / "structured_engine.py")
        sizes = str(model), str(arguments.requests), str(arguments.threads)
        wanted = {"pagemill": ours(engine, "pagemill", *sizes)}
        if arguments.peer:
            wanted["vllm"] = vllm(engine, "vllm", *sizes)
        measure(wanted, arguments)


def measure(wanted: dict[str, Command], arguments: argparse.Namespace) -> None:
    """Prints tables of these contestants."""
    contestants = [Contestant(name, command) for name, command in wanted.items()]
    try:
        chosen = schemas(arguments.shape is not None)[: 2 * arguments.requests]
        for contestant in contestants:
            supported = contestant.ask("supported", schemas=chosen)
            print(f"{contestant.name} supports {sum(supported)} of {len(chosen)} schemas", file=sys.stderr)
            chosen = [schema for schema, can in zip(chosen, supported, strict=True) if can]
        chosen = chosen[: arguments.requests]
        print("|", " | ".join(COLUMNS), "|")
        print("|", " | ".join(["---"] * len(COLUMNS)), "|")
        for contestant in contestants:
            kinds = kinds_of(chosen, whole=contestant.name == "pagemill", apart=arguments.apart)
            compare(contestant, kinds, arguments.tokens, arguments.turns)
        for contestant in contestants:
            first = contestant.ask("first_token", schema=chosen[0], times=30)
            added, cpu = (first[f"held{kind}_ms"] - first[f"free{kind}_ms"] for kind in ("", "_cpu"))
            print(
                f"{contestant.name}: first token {first['free_ms']:.2f} ms, a known schema adds {added:.2f} ms; "
                f"CPU {first['free_cpu_ms']:.2f} ms, and {cpu:.2f} ms"
            )
    finally:
        for contestant in contestants:
            contestant.close()
    times = compile_times(chosen)
    print(f"grammars: {len(times)}, median {statistics.median(times):.1f} ms, most {max(times):.1f} ms")


if __name__ == "__main__":
    main()
