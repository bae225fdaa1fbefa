"""FLASHINFER, with a library of plain torch in FlashInfer's place."""

import dataclasses

import pytest
import torch

from pagemill.model.attention.backends import flashinfer as backend_module
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import StepOnHost
from pagemill.model.attention.phased import phased
from tests.fakes import flashinfer_module
from tests.fakes.flashinfer_module import CpuFlashInfer
from tests.fakes.paged_attention import PagedCase

SPEC = AttentionLayerSpec(8, 2, 16, 0.25)
BATCHES = {
    "decodes": [(1, 1), (1, 37), (1, 64), (1, 130)],
    "mixed": [(16, 80), (1, 33), (5, 5), (13, 90)],
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    flashinfer_module.install(monkeypatch)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "traits", [{}, {"window": 20}, {"soft_cap": 8.0}], ids=lambda traits: "-".join(traits) or "plain"
)
def test_it_equals_the_definition(batch, traits):
    case = PagedCase(dataclasses.replace(SPEC, **traits), BATCHES[batch], null_value=0.0)
    torch.testing.assert_close(case.run(CpuFlashInfer).double(), case.expected(), rtol=1e-4, atol=1e-5)


def decode_step(case, slots, table):
    lens = torch.tensor([seq_len for _, seq_len in case.requests])
    return StepOnHost(lens, slots, table, case.block_size)


@pytest.mark.parametrize("backend", [CpuFlashInfer, phased(CpuFlashInfer, CpuFlashInfer)])
def test_a_captured_size_is_planned_anew_before_each_replay(backend):
    """Lengths, blocks and slots change between replays; the wrapper, and where its plan lies, do not."""
    cases = [PagedCase(SPEC, [(1, n) for n in lens], seed=sum(lens), null_value=0.0)
             for lens in ((1, 1, 1), (40, 7, 100), (41, 90, 16))]  # fmt: skip
    builder, impl = backend.metadata_builder(SPEC, torch.device("cpu")), backend.impl(SPEC)
    first = cases[0]
    impl.forward(first.query, first.key, first.value, first.cache(backend), builder.build(first.common()))
    wrappers = set()
    for case in cases:
        slots = torch.tensor([4, 0, 2], dtype=torch.int32)
        table = torch.zeros(5, 8, dtype=torch.int32)
        table[slots.long(), : case.table.shape[1]] = case.table[:, :8]
        builder.before_replay(decode_step(case, slots, table))
        common = dataclasses.replace(case.common(), replayed=True, seq_lens=torch.zeros(3, dtype=torch.int32))
        plan = builder.build(common)
        result = impl.forward(case.query, case.key, case.value, case.cache(backend), plan)
        torch.testing.assert_close(result.double(), case.expected(), rtol=1e-4, atol=1e-5)
        wrappers.add(getattr(plan, "plan", plan).wrapper(torch.float32, torch.float32))
    assert len(wrappers) == 1 and wrappers.pop().num_plans == 3


def test_sizes_share_the_memory_of_their_plans():
    builder = CpuFlashInfer.metadata_builder(SPEC, torch.device("cpu"))
    case = PagedCase(SPEC, [(1, 5)] * 4, null_value=0.0)
    CpuFlashInfer.impl(SPEC).forward(
        case.query, case.key, case.value, case.cache(CpuFlashInfer), plan := builder.build(case.common())
    )
    plan.wrapper(torch.float32, torch.float32)
    for size in (4, 2, 1):
        builder.before_replay(decode_step(PagedCase(SPEC, [(1, 5)] * size), torch.arange(size), case.table))
    found = [builder._captured[size] for size in (4, 2, 1)]
    assert len({one.pages.data_ptr() for one in found}) == len({one.plan_memory.data_ptr() for one in found}) == 1


def test_a_plan_before_any_step_is_an_error():
    case = PagedCase(SPEC, [(1, 5)])
    builder = CpuFlashInfer.metadata_builder(SPEC, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="before one ran"):
        builder.before_replay(decode_step(case, torch.zeros(1, dtype=torch.int32), case.table))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "mebibytes"),
    [(32, 8, 512, 256), (64, 8, 352, 512), (48, 1, 1, 512), (128, 8, 128, 512)],
)
def test_a_captured_size_has_the_workspace_that_its_padded_plan_needs(heads, kv_heads, size, mebibytes, monkeypatch):
    """64 heads of 128, 8 of keys: from 339 requests on more than 256 MiB."""
    monkeypatch.setattr(backend_module, "WORKSPACE_BYTES", 256 << 20)
    monkeypatch.setattr(backend_module, "num_processors", lambda device: 132)
    spec = AttentionLayerSpec(heads, kv_heads, 128, 0.1)
    builder = CpuFlashInfer.metadata_builder(spec, torch.device("cpu"))
    assert builder._workspace_bytes(size) == mebibytes << 20
