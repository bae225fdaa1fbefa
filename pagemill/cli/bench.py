"""`pagemill bench KIND`: flags of the measurements. What is measured is in pagemill.bench."""

import argparse
import asyncio
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill import envs
from pagemill.cli.engine_flags import add_engine_flags, given_settings
from pagemill.cli.errors import ServerError, UsageError
from pagemill.cli.sampling_flags import check_params
from pagemill.cli.session import DEFAULT_URL

if TYPE_CHECKING:
    from pagemill.bench.offline import Generator
    from pagemill.bench.workload import WorkItem
    from pagemill.llm import LLM

SPECULATION_FLAGS = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
"""Engine settings that say who proposes drafts."""
WORKLOAD_NOT_ENGINE = ("seed",)
"""Engine settings whose flag means the workload's here; what benchmarks sample need not be repeatable."""


def add_parser(subparsers: Any) -> None:
    """Add the command, its own commands and their flags."""
    parser = subparsers.add_parser("bench", description="Measure.", allow_abbrev=False)
    parser.set_defaults(measure=None, print_help=parser.print_help)
    kinds = parser.add_subparsers(title="measurements", metavar="MEASUREMENT")
    for add in (_add_throughput, _add_latency, _add_serve, _add_scheduler):
        add(kinds)


def run(args: argparse.Namespace) -> int:
    """Measure and print the figures; 0, or 1 when a request failed."""
    if args.measure is None:
        args.print_help()
        return 0
    code: int = args.measure(args)
    return code


def _add_throughput(kinds: Any) -> None:
    parser = kinds.add_parser("throughput", help="output tokens/s of many requests, offline", allow_abbrev=False)
    parser.set_defaults(measure=_throughput)
    parser.add_argument("--num-prompts", type=int, help="requests (default: 64, or all of --workload)")
    parser.add_argument(
        "--compare-speculation", type=int, metavar="TURNS", help="run it with drafts and without, in so many turns"
    )
    _add_workload_flags(parser, input_len=128, output_len=128)
    _add_offline_flags(parser)
    add_engine_flags(parser, skip=WORKLOAD_NOT_ENGINE)


def _add_latency(kinds: Any) -> None:
    parser = kinds.add_parser("latency", help="time that one batch takes, offline", allow_abbrev=False)
    parser.set_defaults(measure=_latency)
    parser.add_argument("--batch-size", type=int, default=1, help="requests in the batch (default: 1)")
    parser.add_argument("--num-iterations", type=int, default=5, help="measured runs (default: 5)")
    parser.add_argument("--num-warmups", type=int, default=1, help="runs before those (default: 1)")
    _add_workload_flags(parser, input_len=32, output_len=128, file=False)
    _add_offline_flags(parser)
    add_engine_flags(parser, skip=WORKLOAD_NOT_ENGINE)


def _add_serve(kinds: Any) -> None:
    parser = kinds.add_parser("serve", help="load on a running server", allow_abbrev=False)
    parser.set_defaults(measure=_serve)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument("--model", help="name of the model there (default: the server's)")
    parser.add_argument("--api-key", help="key that the server asks for (default: PAGEMILL_API_KEY)")
    parser.add_argument("--num-prompts", type=int, help="requests (default: 64, or all of --workload)")
    parser.add_argument("--request-rate", type=float, default=math.inf, help="requests/s (default: inf, all at once)")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson arrivals; less: bursts (default: 1)")
    parser.add_argument("--max-concurrency", type=int, help="most requests at a time (default: no limit)")
    parser.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="goals, as in ttft:500 tpot:50")
    _add_workload_flags(parser, input_len=128, output_len=128)


def _add_scheduler(kinds: Any) -> None:
    parser = kinds.add_parser("scheduler", help="cost of the scheduler, without a model", allow_abbrev=False)
    parser.set_defaults(measure=_scheduler)
    parser.add_argument("--steps", type=int, default=160, help="measured steps of a repetition (default: 160)")
    parser.add_argument("--repetitions", type=int, default=5, help="of every measurement (default: 5)")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there too")


def _add_workload_flags(parser: argparse.ArgumentParser, input_len: int, output_len: int, file: bool = True) -> None:
    group = parser.add_argument_group("workload", "Random token ids; end-of-sequence is ignored.")
    if file:
        group.add_argument("--workload", type=Path, metavar="FILE", help="JSON Lines instead: prompt_token_ids, ...")
    group.add_argument("--input-len", type=int, default=input_len, help=f"prompt tokens (default: {input_len})")
    group.add_argument("--output-len", type=int, default=output_len, help=f"tokens to generate (default: {output_len})")
    group.add_argument("--range-ratio", type=float, default=0.0, help="lengths vary by +- this share (default: 0)")
    group.add_argument("--prefix-len", type=int, default=0, help="tokens that all prompts share, in front (default: 0)")
    group.add_argument("--vocab-size", type=int, default=10_000, help="ids are drawn below this (default: 10000)")
    group.add_argument("--seed", type=int, default=0, help="of the workload and of the arrivals (default: 0)")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the figures there too")


def _add_offline_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding", "Greedy by default.")
    for flag, kind, text in (
        ("--temperature", float, "sample with this temperature (default: 0)"),
        ("--top-k", int, "sample from this many most likely tokens"),
        ("--top-p", float, "sample from the most likely tokens that together reach this probability"),
    ):
        group.add_argument(flag, type=kind, help=text)
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="afterwards, run once more and write what the GPU did there (.json or .json.gz, for a trace viewer)",
    )


def _throughput(args: argparse.Namespace) -> int:
    from pagemill.bench.offline import measure_throughput  # deferred: numpy

    if args.compare_speculation is not None:
        return _compare_speculation(args)
    workload = _workload(args, args.num_prompts)
    sampling = _sampling(args)
    llm = _load_llm(args)
    code = _show(args, measure_throughput(llm, workload, sampling))
    if args.profile is not None:
        again = workload if args.workload is not None else _workload(args, args.num_prompts, args.seed + 1)
        _profile(args.profile, llm, again, sampling)
    return code


def _compare_speculation(args: argparse.Namespace) -> int:
    from pagemill.bench.result import write_json  # deferred: with the measurement's own modules
    from pagemill.bench.speculation import compare_speculation, comparison_table

    if args.compare_speculation < 1:
        raise UsageError(f"--compare-speculation {args.compare_speculation} must be at least 1")
    if args.profile is not None:
        raise UsageError("--profile is not allowed with --compare-speculation")
    workload = _workload(args, args.num_prompts)
    sampling = _sampling(args) | {"seed": args.seed}
    without = _load_llm(args, skip=SPECULATION_FLAGS, speculative_config={"method": "none"})
    found = compare_speculation(without, _load_llm(args), workload, args.compare_speculation, sampling)
    print(comparison_table(found))
    if args.output_json is not None:
        write_json(args.output_json, dataclasses.asdict(found), _shown_arguments(args))
    return 0


def _latency(args: argparse.Namespace) -> int:
    from pagemill.bench.offline import measure_latency  # deferred: numpy

    if args.num_iterations < 1 or args.num_warmups < 0:
        raise UsageError("--num-iterations must be at least 1, and --num-warmups not negative")
    size = args.batch_size
    num_batches = args.num_iterations + args.num_warmups
    sampling = _sampling(args)
    items = _workload(args, size * num_batches)
    batches = [items[start : start + size] for start in range(0, len(items), size)]
    llm = _load_llm(args)
    code = _show(args, measure_latency(llm, batches, args.num_warmups, sampling))
    if args.profile is not None:
        _profile(args.profile, llm, _workload(args, size, args.seed + 1), sampling)
    return code


def _serve(args: argparse.Namespace) -> int:
    from pagemill.bench.arrivals import arrival_times_s  # deferred, with the next two: httpx and numpy
    from pagemill.bench.load import Target, run_load
    from pagemill.bench.serving_report import make_report, parse_goals

    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise UsageError(f"--max-concurrency {args.max_concurrency} must be at least 1")
    goals_ms = parse_goals(args.goodput)
    workload = _workload(args, args.num_prompts)
    arrivals_s = arrival_times_s(len(workload), args.request_rate, args.burstiness, args.seed)
    target = Target(args.url.rstrip("/").removesuffix("/v1"), args.model, args.api_key or envs.api_key())
    report = make_report(asyncio.run(run_load(target, workload, arrivals_s, args.max_concurrency)), goals_ms)
    if report.num_completed == 0:
        raise ServerError(f"no request to {target.url} was answered; the first error: {report.first_error}")
    _show(args, report)
    return 1 if report.num_failed else 0


def _scheduler(args: argparse.Namespace) -> int:
    from pagemill.bench.result import write_json  # deferred, with the next two: numpy
    from pagemill.bench.scheduler import measure, report
    from pagemill.bench.scheduler.work import SchedulerWork

    measured = measure.measure(SchedulerWork(num_steps=args.steps, num_repetitions=args.repetitions))
    print(report.table(measured))
    if args.output_json is not None:
        write_json(args.output_json, report.figures(measured), _shown_arguments(args))
    return 0


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Sampling parameters by name; raises RequestError that names the one out of range."""
    given = {name: getattr(args, name) for name in ("top_k", "top_p") if getattr(args, name) is not None}
    sampling = {"temperature": 0.0 if args.temperature is None else args.temperature, **given}
    check_params(sampling)
    return sampling


def _profile(path: Path, llm: "Generator", workload: "list[WorkItem]", sampling: dict[str, Any]) -> None:
    from pagemill.bench.gpu_timeline import gpu_table, read_trace, summarize_gpu  # deferred: like the measurement
    from pagemill.bench.offline import run_timed
    from pagemill.bench.profiling import gpu_trace

    with gpu_trace(path):
        run_timed(llm, workload, sampling)
    timeline = summarize_gpu(read_trace(path))
    print(f"the trace {path} shows no work of a GPU" if timeline is None else f"\n{gpu_table(timeline)}")


def _workload(args: argparse.Namespace, num_prompts: int | None, seed: int | None = None) -> "list[WorkItem]":
    from pagemill.bench.workload import RandomShape, random_workload, read_workload  # deferred: numpy

    if getattr(args, "workload", None) is not None:
        return read_workload(args.workload, num_prompts)
    shape = RandomShape(args.input_len, args.output_len, args.range_ratio, args.prefix_len, args.vocab_size)
    return random_workload(64 if num_prompts is None else num_prompts, shape, args.seed if seed is None else seed)


def _load_llm(args: argparse.Namespace, skip: tuple[str, ...] = (), **settings: Any) -> "LLM":
    """`skip`: settings whose flags are left out of account; `settings`: more of them."""
    from pagemill.llm import LLM  # deferred: torch

    return LLM(**given_settings(args, skip=WORKLOAD_NOT_ENGINE + skip), **settings)


def _show(args: argparse.Namespace, result: Any) -> int:
    from pagemill.bench.result import table, write_json  # deferred: with the measurement's own modules

    print(table(result))
    if args.output_json is not None:
        write_json(args.output_json, dataclasses.asdict(result), _shown_arguments(args))
    return 0


def _shown_arguments(args: argparse.Namespace) -> dict[str, str | int | float]:
    """What was asked for, for the record: no secret, and no infinity, which JSON has not."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    return {
        name: value
        for name, value in given.items()
        if name != "api_key" and isinstance(value, (str, int, float)) and value != math.inf
    }
