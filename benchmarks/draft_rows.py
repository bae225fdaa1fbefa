"""What drafts cost a step of one request: `PYTHONPATH=. python benchmarks/draft_rows.py [--length 300] [--repeats 40]`.

A decode step with the shapes of SmolLM2-135M and random weights, as one native call, with 1 to 9 rows: a token, and
drafts behind it. Printed are milliseconds, medians of steps that take turns, and what a step costs beside that of one
row.
"""

import argparse
import time
from statistics import median

from cpu_steps import FORMATS, Step

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    print(f"| format | {' | '.join(map(str, ROWS))} |\n| --- |{' --- |' * len(ROWS)}")
    for format_name in FORMATS:
        step = Step(format_name, 1, args.length, ROWS[-1] - 1)
        seconds: list[list[float]] = [[] for _ in ROWS]
        for _ in range(args.repeats + 2):
            for rows, found in zip(ROWS, seconds, strict=True):
                began = time.perf_counter()
                step.run(rows - 1)
                found.append(time.perf_counter() - began)
        times = [median(found[2:]) for found in seconds]  # the first ones make room
        cells = [f"{1e3 * found:.2f} ({found / times[0]:.2f})" for found in times]
        print(f"| {format_name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
