"""What drafts gain and cost: `LLM` with ngram and with suffix beside plain decoding, by turns, in a process each.

    PYTHONPATH=. python benchmarks/speculation.py [--model FOLDER] [--workloads editing quotes code random]
        [--requests 1 8 64] [--each] [--methods ngram suffix] [--max-tokens 64] [--turns 3] [--drafts 8] [--fixed]
        [--cpu-time] [--llama FOLDER --llama-model FILE] [--draft FILE]

Workloads are prompts in benchmarks/texts/speculation, which repeat when there are more requests than prompts: texts
that are copied with a few changes, sentences that are quoted, code that is copied with a name changed (and `code_more`:
with other changes too), unrelated words. `--each`: not as many at once as `--requests` says, but each of them alone,
one after the other. Outputs are greedy, but for those of `random`, which are sampled from all tokens at temperature 1
(a small model repeats itself otherwise). Whether the model does what a prompt asks is not checked: the mean acceptance
length is what came of it. No proposer remembers former outputs, which would be the same text. Prompts are in the prefix
cache, so that what is timed is decoding and little else. `--fixed`: as many drafts as there are, whatever they cost.
`--cpu-time`: CPU time of all processes of an engine, which computes with one thread, instead of the time that passes:
for machines that others use too.

With --llama, the folder of llama.cpp's programs (setup_peers.sh llama), these answer the first prompt of each workload
where there is one request, as often as there are turns: plainly, in the lookup mode and, with --draft, with that model
as the draft. `--methods draft_model` proposes with it here; `--methods default` is what there is where nothing is said.

Printed are tokens a second of plain decoding (median of turns), the median of the ratios within a turn with the
smallest and the largest, the ratio of the times of all turns together, and tokens per verified guess (1: none was
right; -: there were none); in the end, what the machine's memory allows plain decoding of one request: the bytes of the
checkpoint, read once for each token.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from cpu_peaks import PeakMeter, Peaks
from llama_drafts import Decoded, Llama

from pagemill import LLM, SamplingParams
from pagemill.artifacts.describe import locate

TEXTS = Path(__file__).parent / "texts/speculation"
SEPARATOR = "=====\n"
PLAIN = "plain"
DEFAULT = "default"
COUNTERS = {"vllm:spec_decode_num_drafts": "num_drafts", "vllm:spec_decode_num_accepted_tokens": "num_accepted"}


class Job(NamedTuple):
    """Prompts to be answered."""

    prompts: list[str]
    temperature: float
    max_tokens: int
    cpu_time: bool
    each: bool
    """One after the other."""


class Answer(NamedTuple):
    """What came of a job."""

    outputs: list[list[int]]
    seconds: float
    num_drafts: float
    """Guesses that were verified."""
    num_accepted: float
    """Tokens of them that were right."""


def counts_of(llm: LLM) -> list[float]:
    """Of the engine until now, in the order of COUNTERS."""
    found: dict[str, float] = {metric.name: getattr(metric, "value", 0.0) for metric in llm.get_metrics()}
    return [found.get(name, 0.0) for name in COUNTERS]


def cpu_seconds() -> float:
    """That this process has taken, and those that it started and that they started."""
    pids, total = [os.getpid()], 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
            pids.extend(map(int, (task / "children").read_text().split()))
    return total / 1e9


def serve(jobs: Connection, settings: dict[str, Any]) -> None:
    """The process of one engine, until there is None instead of a job: several in one process would share its threads'
    places to wait."""
    llm = LLM(**settings)
    while (job := jobs.recv()) is not None:
        params = [
            SamplingParams(temperature=job.temperature, seed=seed, max_tokens=job.max_tokens, ignore_eos=True)
            for seed in range(len(job.prompts))
        ]
        before = counts_of(llm)
        clock = cpu_seconds if job.cpu_time else time.perf_counter
        began = clock()
        if job.each:
            asked = zip(job.prompts, params, strict=True)
            outputs = [output for prompt, param in asked for output in llm.generate([prompt], [param], use_tqdm=False)]
        else:
            outputs = llm.generate(job.prompts, params, use_tqdm=False)
        seconds = clock() - began
        changes = [now - then for now, then in zip(counts_of(llm), before, strict=True)]
        jobs.send(Answer([list(output.outputs[0].token_ids) for output in outputs], seconds, *changes))
    jobs.close()


@dataclass
class Engine:
    """One way to decode, in a process of its own, and what was measured of it."""

    name: str
    settings: dict[str, Any]
    answers: list[Answer] = field(default_factory=list)
    """Turn by turn."""

    def __post_init__(self) -> None:
        self._jobs, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve, args=(theirs, self.settings), daemon=True)
        self._process.start()
        theirs.close()

    def run(self, job: Job) -> list[list[int]]:
        """The outputs of one turn."""
        self._jobs.send(job)
        answer: Answer = self._jobs.recv()
        self.answers.append(answer)
        return answer.outputs

    def end(self) -> None:
        """The process."""
        self._jobs.send(None)
        self._process.join()

    @property
    def speeds(self) -> list[float]:
        """Tokens a second, turn by turn."""
        return [sum(map(len, answer.outputs)) / answer.seconds for answer in self.answers]

    @property
    def acceptance_length(self) -> str:
        """Tokens per guess that was verified."""
        num_drafts = sum(answer.num_drafts for answer in self.answers)
        return f"{1 + sum(answer.num_accepted for answer in self.answers) / num_drafts:.2f}" if num_drafts else "-"

    @property
    def guesses_per_token(self) -> str:
        """How often a guess was verified."""
        num_tokens = sum(len(output) for answer in self.answers for output in answer.outputs)
        return f"{sum(answer.num_drafts for answer in self.answers) / num_tokens:.2f}"


def prompts_of(workload: str, count: int) -> list[str]:
    """So many; the same ones again where the file has fewer."""
    texts = [text.rstrip("\n") for text in (TEXTS / f"{workload}.txt").read_text().split(SEPARATOR)]
    return [texts[index % len(texts)] for index in range(count)]


def engines_of(args: argparse.Namespace) -> list[Engine]:
    """Plain decoding first."""
    common: dict[str, Any] = {
        "model": args.model,
        "max_model_len": 2048,
        "max_num_seqs": max(args.requests),
        "kv_cache_memory_bytes": 1 << 30,
        "disable_log_stats": False,
    }
    if args.cpu_time:
        common["cpu_threads"] = 1
    if args.dtype:
        common["dtype"] = args.dtype
    engines = [Engine(PLAIN, common | {"speculative_config": {"method": "none"}})]
    for method in args.methods:
        if method == DEFAULT:
            engines.append(Engine(method, common))
            continue
        asked = {"method": method, "num_speculative_tokens": args.drafts, "adaptive": not args.fixed}
        if method == "suffix":
            asked["suffix_decoding_max_cached_requests"] = 0
        if method == "draft_model":
            asked |= {"model": str(args.draft), "num_speculative_tokens": min(args.drafts, 4)}
        engines.append(Engine(method, common | {"speculative_config": asked}))
    return engines


def compare(engines: Sequence[Engine], workload: str, count: int, args: argparse.Namespace) -> list[str]:
    """The rows of one workload with so many requests."""
    temperature = 1.0 if workload == "random" else 0.0
    job = Job(prompts_of(workload, count), temperature, args.max_tokens, args.cpu_time, args.each)
    for engine in engines:  # prompts into the prefix cache
        engine.run(job._replace(max_tokens=1))
        engine.answers.clear()
    same = True
    for turn in range(args.turns):
        outputs = [engine.run(job) for engine in (engines if turn % 2 == 0 else engines[::-1])]
        same = same and all(found == outputs[0] for found in outputs)
    plain, *others = engines
    asked = f"{count} alone" if args.each else str(count)
    rows = []
    for engine in others:
        ratios = [mine / theirs for mine, theirs in zip(engine.speeds, plain.speeds, strict=True)]
        total = sum(answer.seconds for answer in plain.answers) / sum(answer.seconds for answer in engine.answers)
        rows.append(
            f"| {workload} | {asked} | {median(plain.speeds):.1f} | {engine.name} | {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {total:.3f} | {engine.guesses_per_token} | "
            f"{engine.acceptance_length} | "
            f"{'yes' if same else 'no'} |"
        )
    return rows


def beside(llama: Llama, workload: str, args: argparse.Namespace) -> list[str]:
    """The rows of llama.cpp for one request."""
    [prompt] = prompts_of(workload, 1)
    answers: dict[str, list[Decoded]] = {way: [] for way in llama.ways}
    for turn in range(args.turns):
        for way in llama.ways if turn % 2 == 0 else llama.ways[::-1]:
            answers[way].append(llama.run(way, prompt, args.max_tokens, args.drafts))
    plain = [answer.tokens_per_s for answer in answers[PLAIN]]
    rows = []
    for way, found in answers.items():
        if way == PLAIN:
            continue
        ratios = [mine.tokens_per_s / theirs for mine, theirs in zip(found, plain, strict=True)]
        shares = [answer.acceptance for answer in found if answer.acceptance is not None]
        right = f"{median(shares):.0%} right" if shares else "-"
        rows.append(
            f"| {workload} | 1 | {median(plain):.1f} | llama.cpp {way} | {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | | | {right} | |"
        )
    return rows


def checkpoint_bytes(path: Path) -> int:
    """Of the weights in a folder, or of a file."""
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype")
    parser.add_argument("--workloads", nargs="+", default=["editing", "quotes", "code", "random"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--llama", type=Path)
    parser.add_argument("--llama-model", type=Path)
    parser.add_argument("--draft", type=Path)
    args = parser.parse_args()
    llama = None
    if args.llama is not None:
        llama = Llama(args.llama.resolve(), args.llama_model, args.draft, torch.get_num_threads())
    peaks = Peaks()
    PeakMeter(torch.get_num_threads()).measure(peaks)
    engines = engines_of(args)
    print(
        "| workload | requests | plain, tokens/s | drafts | ratio | sum | guesses per token | tokens per guess | same |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for workload in args.workloads:
        for count in args.requests:
            for row in compare(engines, workload, count, args):
                print(row, flush=True)
            if llama is not None and count == 1 and workload != "random":
                print("\n".join(beside(llama, workload, args)), flush=True)
    for engine in engines:
        engine.end()
    size = checkpoint_bytes(locate(args.model))
    roof = peaks.bytes_per_s["memory"] / size
    print(f"\nroofline of plain decoding, one request: {roof:.0f} tokens/s ({size / 1e6:.0f} MB a token)")


if __name__ == "__main__":
    main()
