"""FLASH_ATTN with a provider that computes by definition: what it is told, and what becomes of padding."""

import pytest
import torch

from tests.fakes.triton_interpreter import DEVICE  # isort: skip

from pagemill.model.attention.backends import flash_attn
from pagemill.model.attention.backends.flash_attn import FlashBackend
from pagemill.model.attention.backends.torch_cpu import TorchCpuBackend
from pagemill.model.attention.capability import AttentionContext, AttentionLayerSpec
from pagemill.model.attention.flash_providers import FlashProvider, FlashStep, providers
from pagemill.model.attention.graph_support import AttentionCGSupport
from tests.fakes.paged_attention import PagedCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Reference(FlashProvider):
    name = "reference"
    block_multiple = 16
    soft_cap = False

    def __init__(self, version=3):
        self.version = version
        self.plans = 0

    def plan(self, spec, common, dtype):
        self.plans += 1
        return FlashStep(common)

    def attend(self, query, keys, values, spec, step, own):
        cache = torch.stack([keys, values]).transpose(2, 3).contiguous()
        plan = TorchCpuBackend.metadata_builder(spec, torch.device("cpu")).build(step.common)
        return TorchCpuBackend.impl(spec).forward(query, None, None, cache, plan)


@pytest.fixture
def provider(monkeypatch):
    found = Reference()
    monkeypatch.setattr(flash_attn, "providers", lambda compute: [found])
    return found


WHERE = AttentionContext((9, 0), block_size=16)
SPEC = AttentionLayerSpec(4, 2, 32, 32**-0.5, window=30)


@pytest.mark.parametrize("requests", [[(1, 5), (1, 40)], [(7, 20), (1, 33)]])
def test_it_writes_plans_once_and_attends(provider, requests):
    backend = FlashBackend.configured(SPEC, WHERE)
    case = PagedCase(SPEC, requests, device=DEVICE)
    torch.testing.assert_close(case.run(backend).double(), case.expected(), rtol=1e-4, atol=1e-4)
    assert provider.plans == 1


def test_rows_of_padding_are_not_given_to_it(provider):
    backend = FlashBackend.configured(SPEC, WHERE)
    case = PagedCase(SPEC, [(1, 5), (1, 40)], device=DEVICE)
    plan = backend.metadata_builder(SPEC, torch.device(DEVICE)).build(case.common())
    padded = torch.cat([case.query, case.query[:1]])
    cache = case.cache(backend)
    flash_attn.write_kv(case.key, case.value, cache, plan.common.slot_mapping)
    result = backend.impl(SPEC).forward(padded, None, None, cache, plan)
    assert len(result) == 3
    torch.testing.assert_close(result[:2].double(), case.expected(), rtol=1e-4, atol=1e-4)


def test_it_says_what_the_provider_lacks(provider):
    capped = AttentionLayerSpec(4, 2, 32, 0.2, soft_cap=8.0)
    assert FlashBackend.unsupported(capped, "cuda", "bfloat16", WHERE) == ["soft cap not supported by reference"]
    provider.block_multiple = 256
    assert FlashBackend.unsupported(SPEC, "cuda", "bfloat16", WHERE) == ["block size 16 not supported by reference"]
    assert FlashBackend.unsupported(SPEC, "cuda", "bfloat16", AttentionContext((9, 0), block_size=512)) == []


def test_graphs(monkeypatch):
    for version, support in ((2, AttentionCGSupport.UNIFORM_BATCH), (3, AttentionCGSupport.ALWAYS)):
        found = Reference(version)
        monkeypatch.setattr(flash_attn, "providers", lambda compute, found=found: [found])
        builder = FlashBackend.configured(SPEC, WHERE).metadata_builder(SPEC, torch.device("cpu"))
        assert builder.graph_support is support


def test_providers_that_are_here_are_found_without_importing_them():
    names = [(one.name, one.version) for one in providers((9, 0))]
    assert ("torch.nn.attention.varlen", 2) in names or torch.__version__ < "2.12"


def test_a_package_provides_the_versions_that_it_was_built_with(tmp_path, monkeypatch):
    folder = tmp_path / "vllm" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "_vllm_fa3_C.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = [one.version for one in providers.__wrapped__((9, 0)) if one.name == "vllm.vllm_flash_attn"]
    assert found == [3]
    assert "vllm.vllm_flash_attn" not in [one.name for one in providers.__wrapped__((8, 0))]
