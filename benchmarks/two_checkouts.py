"""Two checkouts of pagemill by turns on one machine: what a change cost, as ratios of pairs with their confidence.

    python benchmarks/two_checkouts.py --before ../before [--after .] [--pairs 15] [--only single_decode_bf16 http_64]

Each checkout needs a `.venv` of its own (`make test` or `make check` make it); `benchmarks/setup_peers.sh models llama`
makes the weights in three precisions. For every row the two take turns, in an order that is reversed from pair to pair;
a ratio above 1 is better after. Printed are the medians of both, and the median of the ratios with the interval that
holds it with 95% confidence (by order statistics, without assumptions about the distribution).
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peers import http_load
from peers.contestants import OURS, Contestant, Fresh, Server, WornIn, output_of
from peers.processes import Command, Engine, free_port, log_of
from workload import FULL, TINY, Sizes

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True)
class Checkout:
    """A checkout with an environment of its own."""

    name: str
    path: Path

    def python(self, *argv: str) -> Command:
        """Its Python, and its package."""
        return Command([str(self.path / ".venv/bin/python"), *argv], {"PYTHONPATH": str(self.path)})

    def engine(self, precision: str) -> Contestant:
        """`LLM` with the default model's weights in one precision, in a process that stays."""
        script = str(self.path / "benchmarks/engines/pagemill_engine.py")
        return WornIn(Engine(f"{self.name} engine {precision}", self.python(script, str(OURS[precision]))))

    def server(self) -> Contestant:
        """`pagemill serve`."""
        return WornIn(self._server())

    def fresh_server(self) -> Contestant:
        """`pagemill serve`, started anew for each work."""
        return Fresh(f"{self.name} fresh server", self._server)

    def host_time(self) -> Contestant:
        """benchmarks/host_time.py."""
        return HostTime(self)

    def _server(self) -> Server:
        port = free_port()
        argv = [
            "-m",
            "pagemill",
            "serve",
            "--model",
            DEFAULT_MODEL,
            "--port",
            str(port),
            "--served-model-name",
            "model",
        ]
        return Server(f"{self.name} server", self.python(*argv), http_load.Address(port, "model"))


class HostTime:
    """Milliseconds of a step around a model that does nothing."""

    pid = None

    def __init__(self, checkout: Checkout) -> None:
        self.name = f"{checkout.name} null model"
        self._checkout = checkout

    def run(self, work: str, repetition: int, sizes: Sizes) -> dict[str, float]:
        """batch_1_ms and batch_1024_ms."""
        argv = [str(self._checkout.path / "benchmarks/host_time.py"), "--json"]
        command = self._checkout.python(*argv, *(["--steps", "20"] if sizes == TINY else []))
        return dict(json.loads(output_of(self.name, command)))

    def close(self) -> None:
        """Nothing stays."""


@dataclass(frozen=True)
class Row:
    """One figure of one kind of contestant."""

    contestant: Callable[[Checkout], Contestant]
    work: str
    figure: str
    less_is_better: bool = False


def rows_of_an_engine(precision: str, works: tuple[str, ...]) -> dict[str, Row]:
    """Rows of `LLM` with weights of one precision; they share its two processes."""
    contestant = partial(Checkout.engine, precision=precision)
    return {f"{work}_{precision}": Row(contestant, work, work) for work in works}


ROWS: Mapping[str, Row] = {
    **rows_of_an_engine("bf16", ("single_decode", "prefill", "throughput")),
    **rows_of_an_engine("8-bit", ("single_decode", "prefill", "throughput")),
    **rows_of_an_engine("4-bit", ("single_decode", "shared_prefix")),
    "http_64": Row(Checkout.server, "throughput", "tokens_per_s"),
    "http_8": Row(Checkout.server, "served", "tokens_per_s"),
    "http_8_ttft": Row(Checkout.server, "served", "ttft_p50_ms", less_is_better=True),
    "start": Row(Checkout.fresh_server, "start", "start_s", less_is_better=True),
    "host_1": Row(Checkout.host_time, "", "batch_1_ms", less_is_better=True),
    "host_1024": Row(Checkout.host_time, "", "batch_1024_ms", less_is_better=True),
}


def interval_of_median(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values between which the median of what they are drawn from lies with this confidence, or with as
    much as so few of them allow."""
    ordered = sorted(values)
    count = len(ordered)
    outside = 0.0
    index = 0
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - confidence:
            break
        index = below
    return ordered[index], ordered[count - 1 - index]


def measure(
    rows: Mapping[str, Row], checkouts: tuple[Checkout, Checkout], pairs: int, sizes: Sizes
) -> dict[str, list[tuple[float, float]]]:
    """Row -> a figure before and after for each pair. Rows of one contestant and work share its runs."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    makers = {row.contestant: None for row in rows.values()}
    for maker in makers:
        mine = {name: row for name, row in rows.items() if row.contestant is maker}
        contestants = [maker(checkout) for checkout in checkouts]
        try:
            for pair in range(pairs):
                for work in {row.work: None for row in mine.values()}:
                    order = (0, 1) if pair % 2 == 0 else (1, 0)
                    figures = {side: contestants[side].run(work, pair, sizes) for side in order}
                    for name, row in mine.items():
                        if row.work == work:
                            found[name].append((figures[0][row.figure], figures[1][row.figure]))
        finally:
            for contestant in contestants:
                contestant.close()
        for name, row in mine.items():
            print(report(name, row, found[name]), flush=True)
    return found


def report(name: str, row: Row, values: list[tuple[float, float]]) -> str:
    """One line of the table."""
    ratios = [before / after if row.less_is_better else after / before for before, after in values]
    low, high = interval_of_median(ratios)
    medians = [statistics.median(side) for side in zip(*values, strict=True)]
    return (
        f"| {name} ({row.figure}) | {medians[0]:,.4g} | {medians[1]:,.4g} | "
        f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--after", type=Path, default=Path(), help="the checkout that is compared (default: here)")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of runs for each row (default: 15)")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--tiny", action="store_true", help="very little work: to see that it runs")
    parser.add_argument("--output-json", type=Path, help="file for the figures of every pair")
    args = parser.parse_args()
    checkouts = (Checkout("before", args.before.resolve()), Checkout("after", args.after.resolve()))
    for checkout in checkouts:
        if not (checkout.path / ".venv/bin/python").exists():
            sys.exit(f"{checkout.path} has no .venv; run `make check` there")
    log_of("before")  # makes the folder of logs
    print("| row | before | after | ratio, 95% interval |\n| --- | --- | --- | --- |")
    rows = {name: ROWS[name] for name in args.only}
    found = measure(rows, checkouts, args.pairs, TINY if args.tiny else FULL)
    if args.output_json:
        args.output_json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
