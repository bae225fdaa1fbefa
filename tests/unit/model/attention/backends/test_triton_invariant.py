"""TRITON_INVARIANT: the definition of attention, and on a GPU the same bits however it is cut."""

import dataclasses

import pytest
import torch

from tests.fakes.triton_interpreter import DEVICE  # isort: skip

from pagemill.model.attention.backends import triton_invariant
from pagemill.model.attention.backends.triton_invariant import InvariantBuilder, InvariantImpl, InvariantTritonBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.attention.interface import CommonAttentionMetadata
from tests.fakes.paged_attention import PagedCase

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SPEC = AttentionLayerSpec(4, 2, 64, 64**-0.5)


@pytest.mark.slow
@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize(
    "spec", [SPEC, AttentionLayerSpec(3, 1, 80, 80**-0.5, soft_cap=8.0)], ids=["plain", "soft cap, group of 3"]
)
@pytest.mark.parametrize("requests", [[(1, 1), (1, 300), (33, 129), (3, 290)], [(1, 600), (1, 256)]])
def test_attention(spec, requests):
    case = PagedCase(spec, requests, device=DEVICE)
    torch.testing.assert_close(case.run(InvariantTritonBackend).double(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_step_of_a_captured_graph():
    case = PagedCase(SPEC, [(1, 40), (1, 270)], device=DEVICE)
    found = case.padded(4, 4, min_query_len=0).run(InvariantTritonBackend)[:2]
    torch.testing.assert_close(found.double(), case.expected(), rtol=1e-4, atol=1e-4)


def step(query, begin, end):
    """The tokens [begin, end) of one request."""
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=DEVICE)  # noqa: E731
    return CommonAttentionMetadata(
        ints([0, end - begin]), ints([end]), torch.arange(-(-end // 16), dtype=torch.int32, device=DEVICE)[None],
        torch.arange(begin, end, device=DEVICE), 1, end - begin, end - begin, end, 16,
    )  # fmt: skip


def test_a_token_has_the_same_bits_in_a_prompt_in_a_part_of_it_and_decoded():
    generator = torch.Generator().manual_seed(0)
    spec = AttentionLayerSpec(2, 1, 64, 64**-0.5)
    query = torch.randn(560, 2, 64, generator=generator).half().to(DEVICE)
    cache = torch.randn(35, 2, 16, 1, 64, generator=generator).half().to(DEVICE)

    def attend(begin, end):
        plan = InvariantBuilder(spec, torch.device(DEVICE)).build(step(query, begin, end))
        return InvariantImpl(spec).forward(query[begin:end], None, None, cache, plan)

    whole = attend(0, 560)
    # The interpreter multiplies by NumPy, whose sums do depend on the number of rows.
    step_size = 0.0 if DEVICE == "cuda" else 2e-3
    for begin, end in ((500, 560), (250, 263), (255, 256), (256, 257), (559, 560)):
        torch.testing.assert_close(attend(begin, end), whole[begin:end], rtol=step_size, atol=step_size)


def test_few_programs_have_a_kernel_of_their_own(monkeypatch):
    query = torch.empty(1, 4, 64, dtype=torch.float16)
    impl = InvariantImpl(SPEC)
    assert impl._few_stages(1, query) == 0  # not on a Hopper GPU
    monkeypatch.setattr(triton_invariant, "is_hopper", lambda device: True)
    assert [impl._few_stages(requests, query) for requests in (1, 16, 17, 128, 129)] == [4, 4, 2, 2, 0]
    assert impl._few_stages(1, query.float()) == 0
    assert InvariantImpl(dataclasses.replace(SPEC, soft_cap=8.0))._few_stages(1, query) == 0


def test_what_it_can_do():
    capability = InvariantTritonBackend.capability
    for name, change in (
        ("head size 256", {"head_size": 256}), ("sliding window", {"window": 8}), ("chunked", {"chunk_size": 16}),
        ("sinks", {"has_sinks": True}), ("ALiBi", {"alibi_slopes": (0.5,) * 4}),
    ):  # fmt: skip
        reasons = capability.unsupported(dataclasses.replace(SPEC, **change), "cuda", "bfloat16")
        assert any(name in reason for reason in reasons), name
    assert not capability.unsupported(SPEC, "cuda", "bfloat16")
