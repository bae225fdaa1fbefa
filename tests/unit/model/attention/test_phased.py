"""Two backends for one layer, by phase."""

import pytest
import torch

from pagemill.model.attention.backends.torch_cpu import TorchCpuBackend
from pagemill.model.attention.backends.torch_paged import TorchPagedBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.graph_support import AttentionCGSupport
from pagemill.model.attention.phased import phased
from tests.fakes.paged_attention import PagedCase

SPEC = AttentionLayerSpec(4, 2, 32, 0.2)
BOTH = phased(TorchCpuBackend, TorchPagedBackend)


@pytest.mark.parametrize("requests", [[(1, 5), (1, 40)], [(7, 20), (1, 33)]])
def test_either_gives_what_attention_is(requests):
    case = PagedCase(SPEC, requests)
    torch.testing.assert_close(case.run(BOTH).double(), case.expected(), rtol=1e-4, atol=1e-4)


def test_the_phase_decides(monkeypatch):
    builder = BOTH.metadata_builder(SPEC, torch.device("cpu"))
    assert builder.build(PagedCase(SPEC, [(1, 5)]).common()).decodes
    assert not builder.build(PagedCase(SPEC, [(1, 5), (2, 5)]).common()).decodes


def test_graphs_of_decode_need_the_decoding_backend_only():
    assert BOTH.metadata_builder(SPEC, torch.device("cpu")).graph_support is (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )


def test_both_share_what_belongs_to_the_layer():
    impl = BOTH.impl(SPEC)
    impl.tensors.key_scale = torch.ones(1)
    assert impl._prefill.tensors is impl._decode.tensors is impl.tensors
