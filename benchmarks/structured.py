"""What structured output costs and saves: `python benchmarks/structured.py [--peer]`. For a quiet machine.

32 requests with 32 different schemas of the corpus beside as many free ones, by turns, with the tokens that a grammar
forces appended, and sampled like others. A step is one of the engine in which all requests got a token; the time of a
token is that from the first tokens of a request to its last, divided by the tokens after the first ones. Ratios are
medians of those to the free requests of the same turn. Then what a known schema adds to the first token, and how long
it takes to make grammars.

`--endless`: long arrays of the objects instead, so that no request ends before the others. Without it the batch
gets smaller, and tokens come faster, as soon as an output is complete: compare times of a token with `--endless` only.
`--seconds S --runs FILE`: as many turns as there is time for; figures of all turns in the file are shown, so that the
quiet that this needs can come in pieces. `--keep FOLDER` leaves the engines running for the next piece, stopped, since
vLLM compiles for minutes when it starts: `--turns 0` only starts them, `kill -KILL $(cat FOLDER/*.pid)` ends them.
`--model smollm2`: any model that this project reads, `--dtype` its type.
`--peer`: the same of vLLM's CPU build with xgrammar, in the same run (`benchmarks/setup_peers.sh vllm`), turn by turn.
`--shape NAME`: dummy weights in a shape of benchmarks/configs with the tokenizer of the same model, for a GPU.
"""

import argparse
import json
import lzma
import os
import select
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.contestants import CORES, ENGINES, FOLDER, ours, vllm
from peers.processes import Command, last_words, log_of

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
    *("engine", "requests", "step, ms", "ratio", "CPU, ms", "ratio", "token, ms", "ratio", "s in all", "ratio"),
    *("steps of all", "steps", "tokens", "tokens/s", "complete", "turns"),
)
COMPARED = ("step_ms", "cpu_ms", "token_ms", "seconds")
COUNTED = ("steps_of_all", "steps", "tokens", "tokens_per_s", "complete")
Schema = dict[str, Any]
Figures = dict[str, float]
Turn = dict[str, Any]
"""`engine`, and by the names of kinds of requests their figures."""


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
    """An engine in a process of its own (engines/structured_engine.py), stopped while it is not its turn. `folder`
    has the pipes to it and its process id; an engine that runs there already is used."""

    def __init__(self, name: str, command: Command, folder: Path) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        jobs, answers = (self._pipe(folder / f"{name}.{what}") for what in ("jobs", "answers"))
        self._jobs, self._answers = os.fdopen(jobs, "w"), os.fdopen(answers)
        pid = folder / f"{name}.pid"
        if pid.exists():
            self._pid = int(pid.read_text())
            return
        with log_of(f"structured-{name}").open("w") as log:
            self._pid = command.start(log, stdin=jobs, stdout=answers).pid
        self._answer()
        pid.write_text(f"{self._pid}\n")
        os.killpg(self._pid, signal.SIGSTOP)

    @staticmethod
    def _pipe(path: Path) -> int:
        """Opened for both directions, so that neither end sees the other one leave."""
        if not path.exists():
            os.mkfifo(path)
        return os.open(path, os.O_RDWR)

    def ask(self, work: str, **arguments: Any) -> Any:
        """What the engine answers to a job."""
        os.killpg(self._pid, signal.SIGCONT)
        self._jobs.write(json.dumps({"work": work} | arguments) + "\n")
        self._jobs.flush()
        answer = self._answer()
        os.killpg(self._pid, signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the process."""
        os.killpg(self._pid, signal.SIGKILL)

    def _answer(self) -> Any:
        while not select.select([self._answers], [], [], 1)[0]:
            if self._has_ended():
                raise RuntimeError(f"{self.name} ended:\n{last_words(f'structured-{self.name}')}")
        return json.loads(self._answers.readline())

    def _has_ended(self) -> bool:
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"


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


def one_turn(contestant: Contestant, kinds: dict[str, dict[str, Any]], num_tokens: int, backwards: bool) -> Turn:
    """All kinds of requests of one engine, one after the other."""
    order = list(kinds)[:: -1 if backwards else 1]
    return {"engine": contestant.name} | {
        kind: contestant.ask("run", num_tokens=num_tokens, **kinds[kind]) for kind in order
    }


def print_turns(turns: list[Turn]) -> None:
    """A table: medians over the turns of an engine, and of ratios within a turn."""
    print("|", " | ".join(COLUMNS), "|")
    print("|", " | ".join(["---"] * len(COLUMNS)), "|")
    for engine in dict.fromkeys(turn["engine"] for turn in turns):
        own = [turn for turn in turns if turn["engine"] == engine]
        for kind in [name for name in own[0] if name != "engine"]:
            runs = [turn for turn in own if kind in turn]
            columns = []
            for name in COMPARED:
                columns.append(f"{statistics.median(turn[kind][name] for turn in runs):.2f}")
                columns.append(f"{statistics.median(turn[kind][name] / turn['free'][name] for turn in runs):.3f}")
            columns += [f"{statistics.median(turn[kind][name] for turn in runs):.0f}" for name in COUNTED]
            print("|", " | ".join([engine, kind, *columns, str(len(runs))]), "|")


def print_first_token(contestant: Contestant, schema: Schema) -> None:
    """What a known schema adds to the first token."""
    first = contestant.ask("first_token", schema=schema, times=30)
    added, cpu = (first[f"held{kind}_ms"] - first[f"free{kind}_ms"] for kind in ("", "_cpu"))
    print(
        f"{contestant.name}: first token {first['free_ms']:.2f} ms, a known schema adds {added:.2f} ms; "
        f"CPU {first['free_cpu_ms']:.2f} ms, and {cpu:.2f} ms"
    )


def main() -> None:
    """Prints tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="begin no turn after so many seconds of turns")
    parser.add_argument("--runs", type=Path, help="a file of turns, to which those of this run are added")
    parser.add_argument("--keep", type=Path, help="a folder for engines that are left running, and used where they run")
    parser.add_argument("--endless", action="store_true", help="arrays of the objects of the corpus")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--threads", type=int, default=0, help="of this project; 0: a thread for each core")
    parser.add_argument("--model", help=f"of this project (default: {FOLDER})")
    parser.add_argument("--dtype", default="auto", help="of this project's model")
    parser.add_argument(
        "--apart", action="store_true", help="also with masks that change logits in a pass of their own"
    )
    parser.add_argument("--shape", help="dummy weights in a shape of benchmarks/configs, such as qwen3-8b")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = in_shape(arguments.shape, Path(folder)) if arguments.shape else arguments.model or FOLDER
        engine = str(ENGINES / "structured_engine.py")
        sizes = str(arguments.requests), str(arguments.threads)
        wanted = {"pagemill": ours(engine, "pagemill", str(model), *sizes, arguments.dtype)}
        if arguments.peer:
            wanted["vllm"] = vllm(engine, "vllm", str(FOLDER), *sizes, "bfloat16")
            wanted["vllm"].environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{CORES - 1}"
        measure(wanted, arguments, arguments.keep or Path(folder))


def measure(wanted: dict[str, Command], arguments: argparse.Namespace, folder: Path) -> None:
    """Prints tables of these contestants."""
    contestants = [Contestant(name, command, folder) for name, command in wanted.items()]
    try:
        if arguments.turns == 0:
            return
        chosen = schemas(arguments.endless or arguments.shape is not None)[: 2 * arguments.requests]
        for contestant in contestants:
            supported = contestant.ask("supported", schemas=chosen)
            print(f"{contestant.name} supports {sum(supported)} of {len(chosen)} schemas", file=sys.stderr)
            chosen = [schema for schema, can in zip(chosen, supported, strict=True) if can]
        chosen = chosen[: arguments.requests]
        print_turns(all_turns(contestants, chosen, arguments))
        for contestant in contestants:
            print_first_token(contestant, chosen[0])
    finally:
        if not arguments.keep:
            for contestant in contestants:
                contestant.close()
    times = compile_times(chosen)
    print(f"grammars: {len(times)}, median {statistics.median(times):.1f} ms, most {max(times):.1f} ms")


def all_turns(contestants: list[Contestant], chosen: list[Schema], arguments: argparse.Namespace) -> list[Turn]:
    """Those of the file, if there is one, and those that are run now: the engines in turn."""
    file: Path | None = arguments.runs
    found = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    began = time.perf_counter()
    for number in range(arguments.turns):
        if arguments.seconds is not None and time.perf_counter() - began > arguments.seconds:
            break
        for contestant in contestants:
            kinds = kinds_of(chosen, whole=contestant.name == "pagemill", apart=arguments.apart)
            turn = one_turn(contestant, kinds, arguments.tokens, backwards=number % 2 == 0)
            found.append(turn)
            if file:
                with file.open("a") as lines:
                    print(json.dumps(turn), file=lines)
    return found


if __name__ == "__main__":
    main()
