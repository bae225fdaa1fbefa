"""Every native CPU kernel against its floor, with the shapes of SmolLM2-135M, and whole steps against their sum.

    PYTHONPATH=. python benchmarks/cpu_roofline.py [--output-json FILE | --from-json FILE] [--filter linear]

Prints markdown tables. A floor is the larger of two times: all bytes that must be read or written, at the rate that
reading was measured at for the level of memory they lie in; and all operations, at the rate measured from registers.
Both ceilings are measured before and after, in the same run (cpu_peaks.py). Times are medians. Weights, keys and values
are used by turns so that they come from memory, as they do in a model; activations are used again, as they are there.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from cpu_kernels import attention_row, timed
from cpu_peaks import PeakMeter, Peaks
from cpu_steps import (
    FORMATS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LINEARS,
    NUM_LAYERS,
    VOCAB,
    Step,
    weight,
)

from pagemill.model.attention.backends.cpu import CpuBackend
from pagemill.model.kernels import native
from pagemill.model.kernels.linear import PackedLinear, linear
from pagemill.model.kernels.mirrors import LinearStruct

WEIGHTS_BYTES = 192 << 20
"""Several times the largest cache: less of it would stay there from one round to the next."""
ROWS = (1, 8, 64, 512)
STEP_LENGTH = 256
"""Tokens of each request of a step."""


@dataclass
class Row:
    """One kernel at one size."""

    group: str
    name: str
    num_bytes: float
    num_ops: float
    ops_kind: str
    """float32, bfloat16 or int8: what multiplies."""
    level: str
    seconds: float
    floor_s: float = 0.0
    bound: str = ""
    """What the floor is: reading from a level of memory, or multiplying."""

    def compare(self, peaks: Peaks) -> None:
        """Fill in the floor."""
        read, computed = peaks.read_seconds(self.num_bytes, self.level), self.num_ops / peaks.ops_per_s[self.ops_kind]
        self.floor_s = max(read, computed)
        self.bound = self.level if read >= computed else f"{self.ops_kind} products"


def seconds_of(run: Callable[[int], object]) -> float:
    return median(timed(run))


def linear_rows(threads: int) -> Iterator[Row]:
    """Every linear layer and the head, in every format."""
    for format_name in FORMATS:
        for layer, (outputs, inputs, gate) in LINEARS.items():
            first = weight(format_name, layer)
            nbytes = first.tensors[0].nbytes
            weights = [first, *(copy_of(first) for _ in range(WEIGHTS_BYTES // nbytes))]
            for rows in ROWS:
                if layer == "lm head" and rows > 64:
                    continue
                x = torch.randn(rows, inputs, dtype=torch.bfloat16)
                dtype = torch.float32 if layer == "lm head" else torch.bfloat16

                def run(_: int, x=x, weights=weights, dtype=dtype) -> None:
                    for one in weights:
                        linear(x, one, dtype)

                stored = rows * (outputs // 2 if gate else outputs) * dtype.itemsize
                kind = "bfloat16" if format_name == "BF16" else "int8"
                name = f"{layer} {outputs} x {inputs}, {rows} rows"
                ops = 2.0 * rows * outputs * inputs
                # What is written is not counted as read from memory: it stays in the caches, but for large results.
                num_bytes = nbytes + (stored if stored > 16 << 20 else 0)
                yield Row(f"linear {format_name}", name, num_bytes, ops, kind, "memory", seconds_of(run) / len(weights))


def copy_of(packed: PackedLinear) -> PackedLinear:
    """The same numbers at another place."""
    panels = packed.tensors[0].clone()
    struct = LinearStruct.from_buffer_copy(packed.struct)
    struct.weight = panels.data_ptr()
    return PackedLinear(struct, (panels,), packed.out_features)


def attention_rows(threads: int) -> Iterator[Row]:
    """Decoding reads keys and values; prompts multiply."""
    batches = {
        "decode, 1 request of 256": (1, 1, 256),
        "decode, 1 request of 2048": (1, 1, 2048),
        "decode, 8 requests of 256": (8, 1, 256),
        "decode, 64 requests of 256": (64, 1, 256),
        "decode, 64 requests of 2048": (64, 1, 2048),
        "prefill, 512 tokens": (1, 512, 512),
        "prefill, 64 x 128 tokens": (64, 128, 128),
        "chunk of 256 after 1792": (1, 256, 2048),
    }
    for name, batch in batches.items():
        seconds, kv_bytes, ops = attention_row(CpuBackend, (HEADS, KV_HEADS, HEAD_SIZE), batch)
        yield Row("attention", name, kv_bytes, ops, "bfloat16", "memory", seconds)


def row_kernel_rows(threads: int) -> Iterator[Row]:
    """Norms, rotary embedding, activation: everything is read and written once."""
    level = Peaks().level
    for rows in ROWS:
        x, residual = (torch.randn(rows, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        gain = torch.randn(HIDDEN, dtype=torch.bfloat16)
        heads = torch.randn(rows, HEADS + KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
        table = torch.randn(rows, HEAD_SIZE, dtype=torch.bfloat16)
        pair = torch.randn(rows, 2 * INNER, dtype=torch.bfloat16)
        cases: dict[str, tuple[Callable[[int], object], int]] = {
            "rms_norm": (lambda _, a=(x, gain): native.rms_norm(*a, 1e-5), 4 * x.numel()),
            "add + rms_norm": (lambda _, a=(x, gain, 1e-5, residual): native.rms_norm(*a), 8 * x.numel()),
            "rotate": (lambda _, a=(heads, table, table): native.rotate_(*a), 4 * heads.numel()),
            "silu_mul": (lambda _, a=pair: native.gated(a, False), 3 * pair.numel()),
        }
        for name, (run, num_bytes) in cases.items():
            found = level(num_bytes, threads)
            yield Row("norms, rotary, activation", f"{name}, {rows} rows", num_bytes, 0, "float32", found, many(run))


def many(run: Callable[[int], object], calls: int = 20) -> float:
    """Of short calls, several at a time: reading the clock takes a part of them."""

    def repeat(_: int) -> None:
        for _ in range(calls):
            run(0)

    return seconds_of(repeat) / calls


def sampling_rows(threads: int) -> Iterator[Row]:
    """Logits are read once, at least."""
    level = Peaks().level
    for rows in (1, 8, 64):
        ordinary = torch.randn(rows, VOCAB) * 3
        flat = torch.randn(rows, VOCAB) * 0.01
        uniforms = torch.rand(rows, dtype=torch.float64)
        ones, zeros = torch.ones(rows), torch.zeros(rows)
        no_k, k = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 50, dtype=torch.int32)
        p = torch.full((rows,), 0.95)
        cases: dict[str, Callable[[int], object]] = {
            "greedy": lambda _, a=ordinary: native.argmax(a),
            "temperature": lambda _, a=(ordinary, ones, zeros, no_k, ones, uniforms): native.sample(*a),
            "top-k 50": lambda _, a=(ordinary, ones, zeros, k, ones, uniforms): native.sample(*a),
            "top-p 0.95": lambda _, a=(ordinary, ones, zeros, no_k, p, uniforms): native.sample(*a),
            "top-k 50, top-p 0.95": lambda _, a=(ordinary, ones, zeros, k, p, uniforms): native.sample(*a),
            "top-p 0.95, flat": lambda _, a=(flat, ones, zeros, no_k, p, uniforms): native.sample(*a),
        }
        num_bytes = ordinary.nbytes
        for name, run in cases.items():
            found = level(num_bytes, threads)
            yield Row("sampling", f"{name}, {rows} rows", num_bytes, 0, "float32", found, seconds_of(run))


GROUPS: tuple[Callable[[int], Iterator[Row]], ...] = (linear_rows, attention_rows, row_kernel_rows, sampling_rows)


@dataclass
class StepRow:
    """One decode step of the whole model, as one native call."""

    format: str
    num_requests: int
    seconds: float
    sum_s: float
    """Of its kernels, called one by one."""
    floor_s: float


def step_rows(rows: Iterable[Row]) -> Iterator[StepRow]:
    """Steps of which all kernels were timed."""
    found = {(row.group, row.name): row for row in rows}
    for format_name in FORMATS:
        for requests in (1, 64):
            parts = step_parts(format_name, requests)
            if not all(key in found for key in parts):
                continue
            step = Step(format_name, requests, STEP_LENGTH)
            seconds = seconds_of(lambda _, step=step: step.run())
            total = sum(found[key].seconds * count for key, count in parts.items())
            floor = sum(found[key].floor_s * count for key, count in parts.items())
            yield StepRow(format_name, requests, seconds, total, floor)


def step_parts(format_name: str, requests: int) -> dict[tuple[str, str], int]:
    """(group, name) of the kernels of a step -> how often each runs."""
    parts = {
        (f"linear {format_name}", f"{layer} {outputs} x {inputs}, {requests} rows"): NUM_LAYERS
        for layer, (outputs, inputs, _) in LINEARS.items()
    }
    parts[f"linear {format_name}", f"lm head {VOCAB} x {HIDDEN}, {requests} rows"] = 1
    each = "1 request" if requests == 1 else f"{requests} requests"
    parts["attention", f"decode, {each} of {STEP_LENGTH}"] = NUM_LAYERS
    parts["norms, rotary, activation", f"add + rms_norm, {requests} rows"] = 2 * NUM_LAYERS + 1
    parts["norms, rotary, activation", f"rotate, {requests} rows"] = NUM_LAYERS
    parts["sampling", f"greedy, {requests} rows"] = 1
    return parts


def peaks_table(peaks: Peaks) -> str:
    cells = {f"read, {name}": f"{rate / 1e9:.1f} GB/s" for name, rate in peaks.bytes_per_s.items()}
    cells |= {f"{name} products": f"{rate / 1e9:.0f} G/s" for name, rate in peaks.ops_per_s.items()}
    return "\n".join(["| ceiling | measured |", "|---|---|", *(f"| {name} | {rate} |" for name, rate in cells.items())])


def rows_table(rows: Iterable[Row]) -> str:
    """Kernels down, numbers of rows across."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        name, _, number = row.name.removesuffix(" rows").rpartition(", ")
        found.setdefault(name, {})[int(number)] = row
    numbers = sorted({number for cells in found.values() for number in cells})
    lines = ["| floor / measured, us | " + " | ".join(f"{number} rows" for number in numbers) + " |"]
    lines.append("|---" * (1 + len(numbers)) + "|")
    for name, cells in found.items():
        lines.append(f"| {name} | " + " | ".join(cell(cells[n]) if n in cells else "" for n in numbers) + " |")
    return "\n".join(lines)


def cell(row: Row) -> str:
    """Both times, and the share of the floor."""
    return f"{microseconds(row.floor_s)} / {microseconds(row.seconds)} ({row.floor_s / row.seconds:.0%})"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}" if seconds >= 100e-6 else f"{seconds * 1e6:.1f}"


def list_table(rows: Iterable[Row]) -> str:
    """One line each, with what the floor is."""
    lines = ["| kernel | floor, us | measured, us | of the floor | floor of |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {microseconds(row.floor_s)} | {microseconds(row.seconds)} | {row.floor_s / row.seconds:.0%} "
        f"| {row.bound} |"
        for row in rows
    ]
    return "\n".join(lines)


def steps_table(steps: Iterable[StepRow]) -> str:
    lines = [
        "| weights, requests | floor, ms | sum of kernels, ms | step, ms | of the floor |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {step.format}, {step.num_requests} | {step.floor_s * 1e3:.2f} | {step.sum_s * 1e3:.2f} "
        f"| {step.seconds * 1e3:.2f} | {step.floor_s / step.seconds:.0%} |"
        for step in steps
    ]
    return "\n".join(lines)


@dataclass
class Report:
    """Everything that a run found; what `--output-json` holds."""

    isa: str
    threads: int
    peaks: Peaks
    rows: list[Row]
    steps: list[StepRow]

    @classmethod
    def read(cls, path: Path) -> "Report":
        """Of an earlier run."""
        found = json.loads(path.read_text())
        rows, steps = [Row(**row) for row in found["rows"]], [StepRow(**step) for step in found["steps"]]
        return cls(found["isa"], found["threads"], Peaks(**found["peaks"]), rows, steps)

    def markdown(self) -> str:
        """All tables."""
        parts = [f"{self.isa}, {self.threads} threads", peaks_table(self.peaks)]
        for group in dict.fromkeys(row.group for row in self.rows):
            table = list_table if group == "attention" else rows_table
            parts += [f"### {group}", table([row for row in self.rows if row.group == group])]
        if self.steps:
            parts += [f"### Whole decode steps, {STEP_LENGTH} tokens each", steps_table(self.steps)]
        return "\n\n".join(parts)


def measure(threads: int, wanted: str) -> Report:
    """All groups whose function's name contains `wanted`; steps when that is all of them."""
    torch.set_num_threads(threads)
    meter, peaks = PeakMeter(threads), Peaks()
    meter.measure(peaks)
    rows = [row for group in GROUPS if wanted in group.__name__ for row in group(threads)]
    meter.measure(peaks)
    for row in rows:
        row.compare(peaks)
    steps = [] if wanted else list(step_rows(rows))
    return Report(native.loaded_library().isa().decode(), threads, peaks, rows, steps)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--filter", default="", choices=["", "linear", "attention", "row_kernel", "sampling"])
    parser.add_argument("--output-json", type=Path, help="write everything there as well")
    parser.add_argument("--from-json", type=Path, help="measure nothing; print what an earlier run wrote")
    arguments = parser.parse_args()
    report = (
        measure(arguments.threads, arguments.filter) if not arguments.from_json else Report.read(arguments.from_json)
    )
    print(report.markdown())
    if arguments.output_json:
        arguments.output_json.write_text(json.dumps(asdict(report), indent=1))


if __name__ == "__main__":
    main()
