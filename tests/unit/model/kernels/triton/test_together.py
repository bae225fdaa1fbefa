"""Kernels are compiled together, and none is launched in a precompilation."""

from pathlib import Path

import pytest
import torch

from tests.fakes.own_process import run_cases
from tests.fakes.triton_interpreter import DEVICE

from pagemill.model.kernels.triton import launch, linear, norm  # isort: skip


@pytest.mark.slow
def test_cases_of_the_compiler():
    run_cases(Path(__file__).with_name("together_cases.py"), timeout_s=200)


def test_products_of_a_precompilation_have_their_shape_and_are_not_computed(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    with launch.no_launches():
        for rows in (1, 3):
            x, weight = (torch.zeros(count, 8, device=DEVICE) for count in (rows, 6))
            assert linear.linear(x, weight).shape == (rows, 6)
            assert linear.linear(x, weight, gate="silu").shape == (rows, 3)


def test_nothing_is_written_without_launches():
    residual = torch.ones(2, 8, device=DEVICE)
    with launch.no_launches():
        norm.rms_norm(torch.ones_like(residual), torch.ones(8, device=DEVICE), 1e-6, residual)
    assert launch.launches() and (residual == 1).all()
    norm.rms_norm(torch.ones_like(residual), torch.ones(8, device=DEVICE), 1e-6, residual)
    assert (residual == 2).all()
