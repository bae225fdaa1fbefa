"""Measure pagemill on GPUs, row by row, beside the reference engine if there is one.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --only smoke --output-json gpu.json
    python benchmarks/gpu.py --only 8b-batch1,8b-256 --output-json gpu.json --reference-path FOLDER[:FOLDER]
    python benchmarks/gpu.py --all --budget-s 1500 --output-json gpu.json

Needs a GPU, Python with torch, and this repository; nothing has to be installed. Weights are random, shapes are real
(benchmarks/configs). Every engine runs in a fresh process; rows of one setup share it. Results are merged into the JSON
file after every work, so a run that was cut off is resumed by the same command: rows that the file has are not run
again, unless --again says so. Logs and profiles go beside the file. --reference-path is what PYTHONPATH must be for
`import vllm` to work; without it, ours is compared with figures recorded earlier.
"""

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import bytecode
from gpu_rows import BY_NAME, OWN_WORKS, Goal, Row, Script, Setup

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "benchmarks" / "engines" / "gpu_engine.py"
PACKAGES = {"ours": "pagemill", "reference": "vllm"}
CACHE_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME",
    "VLLM_CACHE_ROOT",
    "CUDA_CACHE_PATH",
)
BYTECODE = Path(tempfile.gettempdir()) / "pagemill-bytecode"
"""Kept, for packages that have none of their own."""
QUIET_REFERENCE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_DEEP_GEMM": "0"}
LEAST_S = 20.0
"""With less time left, no further process is started."""
GRACE_S = 30.0
"""What an engine that has answered everything gets to shut down."""


class Results:
    """The JSON file: {"machine": ..., "rows": {ROW: {ENGINE: {"figures": ...} or {"error": ...}}}}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self._all: dict[str, Any] = {"machine": machine(), "rows": {}} | known

    def has(self, row: str, engine: str) -> bool:
        """Whether the row was measured; a failure does not count."""
        return "figures" in self._all["rows"].get(row, {}).get(engine, {})

    def of(self, row: str, engine: str) -> dict[str, Any]:
        """What was measured, or {"error": ...}, or {}."""
        found: dict[str, Any] = self._all["rows"].get(row, {}).get(engine, {})
        return found

    def put(self, row: str, engine: str, result: dict[str, Any]) -> None:
        """Add and save."""
        stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._all["rows"].setdefault(row, {})[engine] = result | {"at": stamp}
        self._save()

    def merge(self, path: Path) -> None:
        """Take over what another file has; a failure there replaces no figures here."""
        other = json.loads(path.read_text())
        self._all["machine"] = other["machine"]
        for row, engines in other["rows"].items():
            for engine, result in engines.items():
                if "figures" in result or not self.has(row, engine):
                    self._all["rows"].setdefault(row, {})[engine] = result
        self._save()

    @property
    def names(self) -> list[str]:
        """Rows that something is known of, in the order of the table."""
        return [name for name in BY_NAME if name in self._all["rows"]]

    def _save(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._all, indent=1) + "\n")
        partial.replace(self._path)


def machine() -> dict[str, Any]:
    """The GPUs, as nvidia-smi sees them: torch would take memory."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which("nvidia-smi") is None:
        return {"gpus": []}
    lines = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.splitlines()
    return {"gpus": [line.strip() for line in lines if line.strip()], "cpus": os.cpu_count()}


class Runner:
    """Runs engines and scripts, and says what they say."""

    def __init__(self, args: argparse.Namespace, results: Results) -> None:
        self._args = args
        self._results = results
        self._deadline_s = None if args.budget_s is None else time.monotonic() + args.budget_s
        self._logs: Path = args.output_json.resolve().parent / (args.output_json.stem + "-logs")
        self._logs.mkdir(parents=True, exist_ok=True)

    @property
    def is_late(self) -> bool:
        """Whether the budget has no time for another process."""
        return self._deadline_s is not None and self._deadline_s - time.monotonic() < LEAST_S

    @property
    def limit_s(self) -> float:
        """What the next process gets."""
        limit_s: float = self._args.time_limit_s
        return limit_s if self._deadline_s is None else min(limit_s, self._deadline_s - time.monotonic())

    def run_setup(self, setup: Setup, rows: list[Row], engine: str) -> None:
        """Start the engine once or, where that is measured, several times, and do the works of the rows."""
        rows = [row for row in rows if engine == "ours" or row.work not in OWN_WORKS]
        if not self._args.again:
            rows = [row for row in rows if not self._results.has(row.name, engine)]
        if not rows:
            return
        if setup.num_starts > 1:
            self._measure_starts(setup, rows, engine)
            return
        waiting = {row.work: row for row in rows}
        log = self._logs / f"{setup.name}-{engine}.log"
        settings = setup.settings_of(engine) | (self._args.settings if engine == "ours" else {})
        start: dict[str, Any] = {}
        why = f"the engine ended before; see {log.name}"
        for answer in self._engine(setup, engine, settings, list(waiting), log, {}):
            if answer["work"] == "start":
                start = answer.get("figures", {})
                why = answer.get("error", why)
            elif answer["work"] in waiting:
                row = waiting.pop(answer.pop("work"))
                self._results.put(row.name, engine, answer | {"start": start, "settings": settings})
            _say(engine, setup.name, answer)
        for row in waiting.values():
            self._results.put(row.name, engine, {"error": why})

    def run_script(self, script: Script) -> None:
        """A benchmark of its own; the end of its output is kept."""
        if self._results.has(script.name, "ours") and not self._args.again:
            return
        path = self._logs / f"{script.name}.log"
        environment = os.environ | {"PYTHONPATH": _joined(str(ROOT), os.environ.get("PYTHONPATH"))}
        with path.open("w") as log:
            try:
                done = subprocess.run(
                    [sys.executable, *script.command],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=max(1.0, self.limit_s),
                    check=False,
                )
                code: int | str = done.returncode
            except subprocess.TimeoutExpired:
                code = "the time limit"
        tail = path.read_text(errors="replace").splitlines()[-80:]
        result = {"output": tail} | ({"figures": {}} if code == 0 else {"error": f"ended with {code}"})
        self._results.put(script.name, "ours", result)
        print(f"== {script.name}: {'done' if code == 0 else result['error']}", *tail, sep="\n", flush=True)

    def _measure_starts(self, setup: Setup, rows: list[Row], engine: str) -> None:
        """From the process's start to the first token, with empty caches and then with those that it left."""
        settings = setup.settings_of(engine) | (self._args.settings if engine == "ours" else {})
        seconds, answers = [], []
        with tempfile.TemporaryDirectory(prefix="pagemill-caches-") as folder:
            caches = {name: str(Path(folder) / name.lower()) for name in CACHE_VARIABLES}
            caches |= bytecode.compiled(self._environment(engine), BYTECODE)
            for number in range(setup.num_starts):
                log = self._logs / f"{setup.name}-{engine}-{number}.log"
                for answer in self._engine(setup, engine, settings, [], log, caches):
                    answers.append(answer)
                    seconds.append(answer.get("figures", {}).get("first_token_s"))
                    _say(engine, setup.name, answer)
        complete = len(seconds) == setup.num_starts and None not in seconds
        figures = {"first_start_s": seconds[0], "warm_start_s": min(seconds[1:])} if complete else {}
        result = {"figures": figures} if complete else {"error": f"not every start succeeded: {answers}"[:400]}
        for row in rows:
            self._results.put(row.name, engine, result | {"starts": answers, "settings": settings})

    def _environment(self, engine: str) -> dict[str, str]:
        if engine == "ours":
            return os.environ | {"PYTHONPATH": _joined(str(ROOT), os.environ.get("PYTHONPATH"))}
        return os.environ | QUIET_REFERENCE | {"PYTHONPATH": self._args.reference_path}

    def _engine(
        self, setup: Setup, engine: str, settings: dict[str, Any], works: list[str], log: Path, caches: dict[str, str]
    ) -> Iterator[dict[str, Any]]:
        """The answers of one engine process, as they come; it is killed at the time limit."""
        job = {
            "package": PACKAGES[engine],
            "model": str(setup.folder),
            "settings": settings,
            "works": works,
            "born_s": time.time(),
            "folder": str(self._logs),
        }
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-u", str(ENGINE), json.dumps(job)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment(engine) | caches,
                start_new_session=True,
            )
            limit = threading.Timer(max(1.0, self.limit_s), _kill_group, [process.pid])
            limit.start()
            try:
                for line in process.stdout or ():
                    yield json.loads(line)
                _wait(process, GRACE_S)
            finally:
                limit.cancel()
                _kill_group(process.pid)
                process.wait()
        if process.returncode:
            print(f"   {log}:", *log.read_text(errors="replace").splitlines()[-15:], sep="\n   ", flush=True)


def _wait(process: subprocess.Popen[str], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"   process {process.pid} did not end and is killed", flush=True)


def _kill_group(group: int) -> None:
    """The process and whatever it started; all of it may be gone."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _joined(*paths: str | None) -> str:
    return os.pathsep.join(path for path in paths if path)


def _say(engine: str, setup: str, answer: dict[str, Any]) -> None:
    figures = answer.get("figures", {"error": answer.get("error")})
    short = {name: _shown(value) for name, value in figures.items() if not isinstance(value, (list, dict))}
    print(f"{setup} {engine} {answer.get('work', '')} " + " ".join(f"{k}={v}" for k, v in short.items()), flush=True)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(names: list[str], results: Results) -> str:
    """One line per goal of every row that was asked for: ours, the reference's, and whether it is enough."""
    lines = [f"{'row':18}{'figure':28}{'ours':>10}{'reference':>12}{'ratio':>8}  goal"]
    for name in names:
        row = BY_NAME[name]
        if isinstance(row, Script):
            lines.append(f"{name:18}{results.of(name, 'ours').get('error') or 'see its log'}")
            continue
        ours, reference = results.of(name, "ours"), results.of(name, "reference")
        if "figures" not in ours:
            lines.append(f"{name:18}{ours.get('error', 'not run')}")
            continue
        for goal in row.goals:
            lines.append(f"{name:18}" + _goal_line(goal, ours["figures"], reference.get("figures", {})))
    return "\n".join(lines)


def _goal_line(goal: Goal, ours: dict[str, Any], reference: dict[str, Any]) -> str:
    value = ours[goal.figure]
    beside = reference.get(goal.figure)
    other = goal.recorded if beside is None else beside
    ratio = value / other if other else None
    wanted = []
    if goal.ratio is not None and ratio is not None:
        wanted.append((f"{goal.ratio:g}x", ratio >= goal.ratio))
    if goal.least is not None:
        wanted.append((f">={goal.least:g}", value >= goal.least))
    if goal.most is not None:
        wanted.append((f"<={goal.most:g}", value <= goal.most))
    verdict = "" if not wanted else " ok" if all(met for _, met in wanted) else " MISSED"
    named = "" if other is None else _shown(float(other)) + ("" if beside is not None else " r")
    return (
        f"{goal.figure:28}{_shown(value):>10}{named:>12}{'' if ratio is None else f'{ratio:.2f}':>8}  "
        + " ".join(text for text, _ in wanted)
        + verdict
    )


def choose(args: argparse.Namespace, num_gpus: int) -> list[str]:
    """Names of the rows to run. Raises SystemExit for a name that is none."""
    if args.all:
        return [
            name
            for name, row in BY_NAME.items()
            if (row.setup.num_gpus <= num_gpus if isinstance(row, Row) else (ROOT / row.command[0]).exists())
        ]
    names = [name for name in args.only.split(",") if name]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown or not names:
        raise SystemExit(f"--only {args.only!r}: unknown rows {unknown}; known: {', '.join(BY_NAME)}")
    return names


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--only", metavar="ROW,ROW", help="these rows")
    which.add_argument("--all", action="store_true", help="every row that this machine has the GPUs for")
    which.add_argument("--list", action="store_true", help="name the rows")
    which.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing: merge files of other runs")
    which.add_argument("--smoke", action="store_const", const="smoke", dest="only", help="the same as --only smoke")
    parser.add_argument("--output-json", type=Path, default=Path("gpu.json"), metavar="FILE")
    parser.add_argument("--again", action="store_true", help="also rows that the file has")
    parser.add_argument("--reference-path", metavar="PATHS", help="PYTHONPATH with which `import vllm` works")
    parser.add_argument("--engines", default="ours,reference", help="which of these run (default: both)")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of LLM arguments, over ours alone")
    parser.add_argument("--time-limit-s", type=float, default=460.0, help="of one engine process (default: 460)")
    parser.add_argument("--budget-s", type=float, help="end after this many seconds, whatever is missing")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    if args.list:
        print("\n".join(f"{name:18}{_described(row)}" for name, row in BY_NAME.items()))
        return 0
    results = Results(args.output_json)
    if args.merge:
        for path in args.merge:
            results.merge(path)
        print(table(results.names, results))
        return 0
    names = choose(args, len(machine()["gpus"]))
    runner = Runner(args, results)
    engines = [engine for engine in args.engines.split(",") if engine == "ours" or args.reference_path]
    groups: dict[str, list[Row | Script]] = {}
    for row in map(BY_NAME.__getitem__, names):
        groups.setdefault(row.name if isinstance(row, Script) else row.setup.name, []).append(row)
    for name, group in groups.items():
        for engine in engines:
            if runner.is_late:
                print(f"-- out of time before {name}, {engine}", flush=True)
                continue
            rows = [row for row in group if isinstance(row, Row)]
            if rows:
                runner.run_setup(rows[0].setup, rows, engine)
            elif engine == "ours":
                runner.run_script(*(row for row in group if isinstance(row, Script)))
    print(f"\n{table(names, results)}\n(r: recorded earlier) -> {args.output_json}", flush=True)
    return 0 if all(results.has(name, "ours") for name in names) else 1


def _described(row: Row | Script) -> str:
    if isinstance(row, Script):
        return " ".join(row.command)
    return f"{row.setup.name}: {row.work}" + (f", {row.setup.num_gpus} GPUs" if row.setup.num_gpus > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
