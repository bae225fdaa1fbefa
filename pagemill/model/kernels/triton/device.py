"""What reference.py computes, for device tensors. Knows where each kernel is."""

from pagemill.model.kernels.triton.argmax import argmax
from pagemill.model.kernels.triton.batching import gather_pair
from pagemill.model.kernels.triton.gated import gated
from pagemill.model.kernels.triton.linear import linear, linear_norm, linear_norm_linear, norm_linear
from pagemill.model.kernels.triton.mask import mask_
from pagemill.model.kernels.triton.norm import rms_norm
from pagemill.model.kernels.triton.rotary import attention_inputs, rotate_
from pagemill.model.kernels.triton.sampling import sample as sample_rows
from pagemill.model.kernels.triton.together import compile_together

__all__ = [
    "argmax",
    "attention_inputs",
    "compile_together",
    "gated",
    "gather_pair",
    "linear",
    "linear_norm",
    "linear_norm_linear",
    "mask_",
    "norm_linear",
    "rms_norm",
    "rotate_",
    "sample_rows",
]
