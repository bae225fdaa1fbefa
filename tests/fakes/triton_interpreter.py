"""Import this before any Triton kernel: on a machine without a GPU, kernels run in Triton's interpreter from then on."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
