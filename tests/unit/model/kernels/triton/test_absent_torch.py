"""Modules of kernels are imported where torch is not."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[5]
FOLDER = ROOT / "pagemill/model/kernels/triton"


@pytest.mark.slow
def test_every_module_of_kernels_is_imported_without_torch_and_has_its_kernels():
    names = [f"pagemill.model.kernels.triton.{path.stem}" for path in sorted(FOLDER.glob("[a-z]*.py"))]
    code = textwrap.dedent(
        f"""
        import importlib, sys
        from pagemill.model.kernels.triton.absent_torch import leave_out_torch
        leave_out_torch()
        modules = [importlib.import_module(name) for name in {names}]
        assert type(sys.modules["torch"]).__module__ == leave_out_torch.__module__
        from triton.runtime.jit import JITFunction
        kernels = [each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)]
        assert len({{each.cache_key for each in kernels}}) > 50
        """
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


def test_what_stands_for_torch_is_good_for_annotations_and_constants():
    code = textwrap.dedent(
        """
        from pagemill.model.kernels.triton.absent_torch import leave_out_torch
        leave_out_torch()
        import torch
        from torch import Tensor
        from torch.nn import functional
        def add(x: Tensor, y: Tensor | None, device: dict[torch.device, int]) -> tuple[Tensor, torch.dtype]: ...
        assert len({torch.float32, torch.bfloat16, torch.float32}) == 2
        assert torch.tensor([1, 2], dtype=torch.int8).to(torch.int16) is not None
        assert not hasattr(torch, "__version__") and not hasattr(Tensor, "__len__")
        """
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
