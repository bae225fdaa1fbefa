"""Time of rows that become 8-bit floats with a factor for each 128 inputs, by inputs of a program, beside a factor for
each row; run by `python -m benchmarks.gpu_quantize [--rows 1,256,8192]`.

In captured graphs, each time of the same rows: those of few are read from the L2 cache, as behind a product.
"""

import argparse
from collections.abc import Callable

import torch

from benchmarks.gpu_kernels import time_us
from pagemill.model.kernels.triton import eight_bits_quantize, fp8_quantize, launch

FP8 = torch.float8_e4m3fn
AT_ONCE = (1024, 2048, 4096, 8192)
SHAPES = ((4096, None), (8192, None), (6144, "silu"), (12288, "silu"), (14336, "silu"), (18944, "silu"))
"""Inputs, and the gated activation before."""


def measure(rows: int, size: int, gate: str | None) -> None:
    """Print a line."""
    x = torch.randn(rows, size * (1 if gate is None else 2), device="cuda").to(torch.bfloat16)
    bytes_moved = x.numel() * 2 + rows * size + rows * size // 32

    def told(run: Callable[[], object]) -> str:
        us = time_us([run] * (4 if rows > 1024 else 24))
        return f"{us:.1f} us ({bytes_moved / us / 1e6:.2f} TB/s)"

    before = eight_bits_quantize.AT_ONCE
    times = []
    for at_once in AT_ONCE:
        eight_bits_quantize.AT_ONCE = at_once
        times.append(f"{at_once}: {told(lambda: eight_bits_quantize.quantize(x, 128, FP8, gate, 8))}")
    eight_bits_quantize.AT_ONCE = before
    per_row = told(lambda: fp8_quantize.quantize(x, gate))
    print(f"{rows} x {size}{' gated' if gate else ''}: {'; '.join(times)}; a factor per row: {per_row}", flush=True)


def main() -> None:
    """Print a line for every shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64,256,1024,8192")
    asked = parser.parse_args()
    launch.set_dependent(torch.cuda.get_device_capability() >= (9, 0))
    print(torch.cuda.get_device_name(), torch.__version__)
    torch.manual_seed(0)
    for size, gate in SHAPES:
        for rows in map(int, asked.rows.split(",")):
            measure(rows, size, gate)


if __name__ == "__main__":
    main()
