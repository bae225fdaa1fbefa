"""Linear layers in which a row has the same bits whatever is computed beside it (`--deterministic`), by one_sum.py and
one_sum_early.py.

Nothing goes to cuBLAS, which divides the inputs of some products into parts, by sizes of which one is the number of
rows. Knows shapes, not layers.
"""

import torch
from torch import Tensor

from pagemill.model.kernels.gpu_facts import is_hopper, num_processors
from pagemill.model.kernels.triton import gated_prompts
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.kernels.triton.one_sum import few_rows, many_rows
from pagemill.model.kernels.triton.one_sum_choices import MOST_EARLY, MOST_FEW, early_tiles, few_tiles, many_tiles
from pagemill.model.kernels.triton.one_sum_early import early_rows


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As reference.linear: [T, K] times [N, K] -> [T, N], with a gate [T, N / 2]. Elements of two bytes, K a multiple
    of 8, the weight contiguous and at a multiple of 16 bytes."""
    out_dtype = out_dtype or x.dtype
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    num_rows = len(x)
    if 0 < num_rows <= MOST_FEW:
        shape = (len(weight) // (1 if gate is None else 2), weight.shape[1], gate is not None)
        if num_rows <= MOST_EARLY and is_hopper(x.device):
            processors = num_processors(x.device)
            return early_rows(x, weight, early_tiles(num_rows, shape, processors), bias, gate, out_dtype, processors)
        return few_rows(x, weight, few_tiles(num_rows, shape), bias, gate, out_dtype)
    if gate is not None and bias is None and out_dtype == x.dtype and gated_prompts.takes(x, weight):
        return gated_prompts.gated_many(x, weight, gate == "gelu_tanh")
    out = torch.empty(num_rows, len(weight), dtype=out_dtype, device=x.device)
    if num_rows:
        processors = num_processors(x.device)
        tiles_of_many = many_tiles(num_rows, len(weight), processors, out.element_size())
        many_rows(x, weight, tiles_of_many, bias, out, processors)
    return out if gate is None else gated(out, gate == "gelu_tanh")
