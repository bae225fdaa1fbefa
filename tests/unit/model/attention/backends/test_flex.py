"""FLEX_ATTENTION, uncompiled, against the definition of attention."""

import pytest
import torch
import torch.nn.attention.flex_attention

from pagemill.model.attention.backends.flex import FlexBackend
from pagemill.model.attention.capability import AttentionLayerSpec
from tests.fakes.paged_attention import PagedCase

BATCHES = {"decodes": [(1, 1), (1, 37), (1, 200)], "mixed": [(16, 80), (1, 33), (5, 5), (33, 129)]}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.cases(one_in=3)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "traits",
    [
        {}, {"window": 20}, {"chunk_size": 24}, {"soft_cap": 8.0}, {"has_sinks": True},
        {"alibi_slopes": (0.5, 0.1, 0.2, 0.3)}, {"window": 5, "soft_cap": 30.0, "has_sinks": True},
    ],
    ids=lambda traits: "-".join(traits) or "plain",
)  # fmt: skip
def test_it_equals_the_definition(batch, traits):
    case = PagedCase(AttentionLayerSpec(4, 2, 32, 32**-0.5, **traits), BATCHES[batch])
    torch.testing.assert_close(case.run(FlexBackend).double(), case.expected(), rtol=1e-4, atol=1e-4)


def test_padding_is_written_nowhere_that_counts():
    case = PagedCase(AttentionLayerSpec(2, 2, 32, 0.2), [(3, 10)])
    common = case.common()
    common.slot_mapping[1] = -1
    cache = case.cache(FlexBackend)
    before = cache.clone()
    impl = FlexBackend.impl(case.spec)
    plan = FlexBackend.metadata_builder(case.spec, torch.device("cpu")).build(common)
    impl.forward(case.query, case.key, case.value, cache, plan)
    changed = (cache.nan_to_num(9.0) != before.nan_to_num(9.0)).any(-1).any(-1).nonzero().tolist()
    slots = {block * 16 + offset for block, _, offset in changed}
    assert slots == {0, int(common.slot_mapping[0]), int(common.slot_mapping[2])}, "the null block takes it"
