"""Time of a gated layer of many rows, one kernel (gated_prompts.py) beside cuBLAS and a kernel for the gate.

    python benchmarks/gpu_gated.py [--shapes 12288x4096,8192x2048] [--rows 300,512,...]

Needs a Hopper GPU. Microseconds of a call in captured graphs, with weights in turns that no cache holds.
"""

import argparse

import torch
from torch.nn import functional

from benchmarks.gpu_deterministic import microseconds, noise, weights_of
from pagemill.model.kernels.gpu_facts import num_processors
from pagemill.model.kernels.triton import gated_prompts
from pagemill.model.kernels.triton.gated import gated


def main() -> None:
    """Print a line for every shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="12288x4096,8192x2048", help="outputs x inputs of each")
    parser.add_argument("--rows", default="300,512,768,1024,1500,2048,4096,8192")
    asked = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    processors = num_processors(torch.device("cuda", torch.cuda.current_device()))
    for shape in asked.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        weights = weights_of((outputs, inputs, True))
        for rows in map(int, asked.rows.split(",")):
            x = noise(rows, inputs)
            apart = microseconds(lambda weight, x=x: gated(functional.linear(x, weight), False), weights)
            alone = microseconds(lambda weight, x=x: functional.linear(x, weight), weights)
            together = microseconds(lambda weight, x=x: gated_prompts.gated_many(x, weight, False), weights)
            use = gated_prompts.share_of_use(rows, outputs, processors)
            print(
                f"{shape} {rows} rows: cuBLAS and gate {apart:.0f} (cuBLAS alone {alone:.0f}), one kernel "
                f"{together:.0f}, {apart / together:.2f} times as fast; share of use {use:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
