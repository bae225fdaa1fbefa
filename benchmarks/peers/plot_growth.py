"""Draws what benchmarks/growth.py measured: python plot_growth.py FILE FOLDER. Needs matplotlib; knows no engine."""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

COLOURS = {"ours": "#1f6feb", "peer": "#d9822b"}
LABELS = {"ours": "pagemill", "peer": "llama.cpp"}
FIXED = {"batch": "context 128", "context": "one request"}
SWEEPS = {"batch": "requests that decode together", "context": "tokens of context"}


def draw(axes: Axes, results: list[dict], sweep: str, suffix: str) -> None:
    """Curves of both sides, a line style per number of threads."""
    most = max(result["threads"] for result in results)
    for threads in sorted({result["threads"] for result in results}, reverse=True):
        # A sweep of contexts begins with the first point of the sweep of batches.
        mine = [
            result
            for result in results
            if result["threads"] == threads and (result["sweep"] == sweep or result["batch"] == 1)
            and (sweep == "context" or result["sweep"] == "batch")
        ]  # fmt: skip
        for side, colour in COLOURS.items():
            axes.plot(
                [result[sweep] for result in mine],
                [result[side + suffix] for result in mine],
                color=colour,
                linestyle="-" if threads == most else "--",
                marker="o",
                markersize=3,
                label=f"{LABELS[side]}, {threads} thread{'s' if threads > 1 else ''}",
            )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.2, 0.5)))
    axes.set_xlabel(f"{SWEEPS[sweep]} ({FIXED[sweep]})")
    axes.grid(alpha=0.3, which="both")


def main() -> None:
    """A picture per model."""
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for model in sorted({result["model"] for result in results}):
        own = [result for result in results if result["model"] == model]
        figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
        for column, sweep in enumerate(SWEEPS):
            draw(axes[0][column], own, sweep, "")
            draw(axes[1][column], own, sweep, "_itl_ms")
        axes[0][0].set_ylabel("output tokens/s")
        axes[1][0].set_ylabel("inter-token latency, ms")
        axes[0][0].legend(fontsize=8)
        figure.suptitle(f"{model}, decode")
        path = folder / f"growth-{model.split()[0].lower()}.png"
        figure.savefig(path, dpi=110)
        print(path)


if __name__ == "__main__":
    main()
