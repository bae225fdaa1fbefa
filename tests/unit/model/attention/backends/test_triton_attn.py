"""TRITON_ATTN in Triton's interpreter against the definition of attention."""

import dataclasses
import random

import pytest
import torch

from tests.marks import slow

from tests.fakes.triton_interpreter import DEVICE  # isort: skip

from pagemill.model.attention.backends import triton_attn
from pagemill.model.attention.backends.triton_attn import TritonBackend, TritonBuilder, write_kv
from pagemill.model.attention.capability import AttentionLayerSpec
from pagemill.model.kernels.triton.attention_tiles import Tiles
from tests.fakes.paged_attention import PagedCase

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.cases(one_in=15)]
BATCHES = {
    "decodes": [(1, 1), (1, 37), (1, 64), (1, 330)],
    "prefills": [(70, 70), (3, 3), (16, 16)],
    "mixed": [(16, 80), (1, 33), (5, 5), (33, 129), (1, 200)],
}


def check(case: PagedCase, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(case.run(TritonBackend).double(), case.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("batch", ["decodes", slow("prefills"), "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(4, 1, 64), slow(3, 3, 96), slow(6, 2, 128), slow(8, 1, 256)]
)
def test_sizes(batch, heads, kv_heads, head_size):
    spec = AttentionLayerSpec(heads, kv_heads, head_size, head_size**-0.5)
    check(PagedCase(spec, BATCHES[batch], device=DEVICE))


@pytest.mark.parametrize("batch", ["decodes", slow("prefills"), slow("mixed")])
@pytest.mark.parametrize(
    "traits",
    [
        slow({"window": 20}), {"chunk_size": 24}, slow({"soft_cap": 8.0}), slow({"has_sinks": True}),
        {"alibi_slopes": (0.5, 0.1)},
        {"window": 5, "soft_cap": 30.0, "has_sinks": True},
    ],
    ids=lambda traits: "-".join(traits),
)  # fmt: skip
def test_traits(batch, traits):
    check(PagedCase(AttentionLayerSpec(2, 1, 32, 32**-0.5, **traits), BATCHES[batch], device=DEVICE))


@pytest.mark.parametrize("seed", [*map(slow, range(7)), 7])
def test_random_batches(seed):
    pick = random.Random(seed)
    group, kv_heads = pick.randint(1, 8), pick.randint(1, 2)
    head_size = pick.choice([64, 96, 128, 256])
    requests = []
    for _ in range(pick.randint(1, 5)):
        query_len = pick.choice([1, 1, pick.randint(1, 60)])
        requests.append((query_len, query_len + pick.randint(0, 250)))
    traits = {
        "window": pick.choice([None, pick.randint(1, 200)]),
        "soft_cap": pick.choice([None, 20.0]),
        "has_sinks": pick.random() < 0.3,
    }
    if pick.random() < 0.3:
        traits["alibi_slopes"] = tuple(pick.random() for _ in range(group * kv_heads))
    if traits["window"] is None:
        traits["chunk_size"] = pick.choice([None, pick.randint(1, 100)])
    spec = AttentionLayerSpec(group * kv_heads, kv_heads, head_size, head_size**-0.5, **traits)
    check(PagedCase(spec, requests, pick.choice([16, 32, 48]), device=DEVICE, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["decodes", slow("prefills"), slow("mixed")])
def test_bfloat16_is_close(batch):
    spec = AttentionLayerSpec(8, 2, 64, 0.125)
    check(PagedCase(spec, BATCHES[batch], dtype=torch.bfloat16, device=DEVICE), 2e-2)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, slow(torch.float8_e5m2)])
def test_cache_of_one_byte_floats(cache_dtype):
    spec = AttentionLayerSpec(8, 2, 64, 0.125)
    # Float16: the interpreter does not convert one-byte floats to bfloat16.
    check(PagedCase(spec, BATCHES["mixed"], dtype=torch.float16, device=DEVICE, cache_dtype=cache_dtype), 5e-3)


def test_what_is_written():
    cache = torch.full((3, 2, 16, 2, 8), torch.nan, device=DEVICE)
    new = torch.randn(4, 6, 8, device=DEVICE)
    key, value = new[:, 1:3], new[:, 4:]
    slots = torch.tensor([17, -1, 47, 0], device=DEVICE)
    write_kv(key, value, cache, slots)
    for half, part in ((0, key), (1, value)):
        assert torch.equal(cache[[1, 2, 0], half, [1, 15, 0]], part[[0, 2, 3]])
    assert cache.isnan().sum() == cache.numel() - 3 * 2 * 16, "padding is written nowhere"


def test_what_is_written_as_one_byte_floats():
    cache = torch.zeros(2, 2, 16, 1, 16, device=DEVICE).to(torch.float8_e4m3fn)
    key = torch.linspace(-900, 900, 32, device=DEVICE).view(2, 1, 16)
    two, four = torch.full((1,), 2.0, device=DEVICE), torch.full((1,), 4.0, device=DEVICE)
    write_kv(key, key, cache, torch.tensor([3, 20], device=DEVICE), two, four)
    kept = cache.float()[[0, 1], :, [3, 4], 0]
    torch.testing.assert_close(kept[:, 0], (key[:, 0] / 2).clamp(-448, 448), rtol=0.125, atol=0.1)
    torch.testing.assert_close(kept[:, 1], key[:, 0] / 4, rtol=0.125, atol=0.1)


@pytest.mark.parametrize("traits", [{}, slow({"has_sinks": True, "soft_cap": 9.0}), slow({"window": 40})], ids=str)
def test_a_common_prefix_is_attended_to_once_for_all(traits, monkeypatch):
    monkeypatch.setattr(triton_attn, "MIN_PREFIX", 64)
    requests = [(1, 65), (1, 80), (1, 130), (1, 66), (1, 200), (1, 70), (1, 64 + 16), (1, 97), (1, 111)]
    case = PagedCase(AttentionLayerSpec(6, 2, 32, 0.2, **traits), requests, device=DEVICE, prefix=64)
    builder = TritonBackend.metadata_builder(case.spec, torch.device(DEVICE))
    assert (builder.build(case.common()).cascade is None) == ("window" in traits)
    check(case)


@pytest.mark.parametrize("traits", [{}, slow({"window": 20})], ids=str)
@pytest.mark.parametrize(
    ("requests", "shape"),
    [
        ([(70, 70)], (96, 1)),
        ([(96, 150)], (96, 1)),
        ([(2, 300)], (96, 1)),
        slow([(1, 200), (70, 70), (1, 33)], (96, 16)),
        slow([(1, 200), (1, 5)], (16, 16)),
        slow(BATCHES["prefills"], (96, 3)),
        slow(BATCHES["mixed"], (64, 5)),
    ],
)
def test_a_padded_plan_computes_the_same(requests, shape, traits):
    case = PagedCase(AttentionLayerSpec(4, 2, 32, 0.2, **traits), requests, device=DEVICE)
    expected, told = case.expected(), {"min_query_len": 2} if shape[1] == 1 else {}
    found = case.padded(*shape, **told).run(TritonBackend)
    torch.testing.assert_close(found[: len(expected)].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("traits", [{}, {"window": 20}, slow({"chunk_size": 24, "soft_cap": 9.0})], ids=str)
@pytest.mark.parametrize(("heads", "head_size"), [((8, 2), 32), slow((4, 4), 64), slow((16, 2), 128)])
@pytest.mark.parametrize(
    ("requests", "shape"),
    [([(6, 330), (1, 64), (3, 3), (4, 700)], (24, 4)), ([(5, 90)], (6, 1)), ([(2, 2), (6, 131)], (48, 8))],
)
def test_steps_that_verify_drafts_have_their_keys_split(requests, shape, heads, head_size, traits):
    """Each request has as many tokens as it verifies, and one; the rest of the shape is padding at the end."""
    case = PagedCase(AttentionLayerSpec(*heads, head_size, head_size**-0.5, **traits), requests, device=DEVICE)
    told = {"max_query_len": 6, "decode_len": 6}
    expected, padded = case.expected(), case.padded(*shape, **told)
    plan = TritonBackend.metadata_builder(case.spec, torch.device(DEVICE)).build(padded.common())
    assert plan.num_tiles == 0
    found = padded.run(TritonBackend)
    torch.testing.assert_close(found[: len(expected)].double(), expected, rtol=1e-4, atol=1e-4)


def test_a_plan_depends_on_the_shape_alone():
    spec = AttentionLayerSpec(4, 2, 32, 0.2)
    builder = TritonBackend.metadata_builder(spec, torch.device(DEVICE))
    plans = [
        builder.build(PagedCase(spec, requests, device=DEVICE).padded(64, 4).common())
        for requests in ([(1, 300), (40, 40)], [(64, 64)], [(16, 90), (16, 20), (16, 16), (1, 1)])
    ]
    assert (
        len({(plan.num_splits, plan.num_tiles, id(plan.splits), id(plan.tiles), id(plan.partial)) for plan in plans})
        == 1
    )
    for plan in plans:
        assert int(plan.tiles.first[4]) <= plan.num_tiles and int(plan.splits.first[4]) <= plan.num_splits


def test_prompts_alone_have_no_part_for_requests_that_decode():
    spec = AttentionLayerSpec(4, 2, 32, 0.2)
    builder = TritonBackend.metadata_builder(spec, torch.device(DEVICE))
    common = PagedCase(spec, [(7, 7), (20, 31)], device=DEVICE).common()
    assert builder.build(common).num_splits > 0
    assert builder.build(dataclasses.replace(common, min_query_len=7)).num_splits == 0


def test_lists_of_work_stay_where_they_are():
    spec = AttentionLayerSpec(4, 2, 32, 0.2)
    builder = TritonBackend.metadata_builder(spec, torch.device(DEVICE))
    first = builder.build(PagedCase(spec, [(1, 500), (1, 3), (1, 70)], device=DEVICE).common())
    again = builder.build(PagedCase(spec, [(1, 5), (1, 300), (1, 1)], device=DEVICE).common())
    assert first.splits is again.splits and first.partial is again.partial
    ends = again.splits.first[:4].tolist()
    assert ends[0] == 0 and ends[1] == 1 and ends[3] == ends[2] + 1, "short requests are not split"
    assert ends[2] - ends[1] > 1 and ends[3] <= again.num_splits
    assert again.splits.request[: ends[3]].tolist() == [0] + [1] * (ends[2] - 1) + [2]


@pytest.mark.parametrize(
    "batch", [[(1, 330), (1, 5), (1, 64), (1, 700)], slow([(1, 200), (33, 129), (1, 330), (1, 65)])]
)
@pytest.mark.parametrize("traits", [slow({}), slow({"has_sinks": True}), {"window": 200}], ids=str)
@pytest.mark.parametrize("average", [0, slow(100)])
def test_parts_are_merged_by_the_last_of_them_or_apart(batch, traits, average, monkeypatch):
    monkeypatch.setattr(triton_attn, "FEW_PARTS", average)
    case = PagedCase(AttentionLayerSpec(6, 2, 96, 0.1, **traits), batch, device=DEVICE)
    builder = TritonBackend.metadata_builder(case.spec, torch.device(DEVICE))
    plan, impl = builder.build(case.common()), TritonBackend.impl(case.spec)
    assert plan.merges == (average == 0)
    assert int(plan.splits.first[:-1].diff().max()) > 1, "some are split"
    impl.tensors.sinks = case.sinks
    cache = case.cache(TritonBackend)
    results = [impl.forward(case.query, case.key, case.value, cache, plan) for _ in range(2)]
    torch.testing.assert_close(results[0].double(), case.expected(), rtol=1e-4, atol=1e-4)
    assert torch.equal(results[0], results[1])
    assert not plan.arrived.any(), "the next step counts from 0"


@pytest.mark.parametrize(
    ("size", "length", "alone"), [(96, 700, True), (96, 1300, True), (96, 50, True), (64, 700, False)]
)
def test_one_request_has_its_parts_merged_by_the_last_of_them(size, length, alone):
    case = PagedCase(AttentionLayerSpec(6, 2, size, 0.1), [(1, length)], device=DEVICE)
    builder = TritonBackend.metadata_builder(case.spec, torch.device(DEVICE))
    plan, impl = builder.build(case.common()), TritonBackend.impl(case.spec)
    assert plan.merges != alone
    cache = case.cache(TritonBackend)
    results = [impl.forward(case.query, case.key, case.value, cache, plan) for _ in range(2)]
    torch.testing.assert_close(results[0].double(), case.expected(), rtol=1e-4, atol=1e-4)
    assert torch.equal(results[0], results[1])
    assert not plan.arrived.any()


@pytest.mark.parametrize(
    ("lens", "split"),
    [
        ([640] * 8, False),
        ([640] * 6 + [560, 700], False),
        ([640] * 15, False),
        ([640] * 3, True),
        ([640] * 9, True),
        ([300] * 7 + [900], True),
    ],
)
def test_what_fills_the_device_is_not_split(lens, split):
    spec = AttentionLayerSpec(4, 2, 32, 0.2)
    builder = TritonBuilder(spec, torch.device(DEVICE), decode=Tiles(16, 64, 2, 3, programs_per_sm=4))
    assert builder._slots == 8, "of the interpreter"
    common = PagedCase(spec, [(1, 1)] * len(lens), device=DEVICE).common()
    plan = builder.build(dataclasses.replace(common, seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE)))
    items = int(plan.splits.first[len(lens)])
    assert (items > len(lens)) == split


@pytest.mark.parametrize(
    ("lens", "parts"),
    [([640], [5]), ([640, 100], [5, 1]), ([130], [3]), ([5000], [27]), ([100_000], [63])],
)
def test_a_request_has_no_more_parts_than_its_turns_need(lens, parts, monkeypatch):
    """Parts are whole turns of 64 keys: 640 keys for eight programs are five parts of two turns. With programs to spare
    a part has at least twice the square root of the keys: 5,000 are 27 parts of three turns."""
    spec = AttentionLayerSpec(4, 2, 32, 0.2)
    builder = TritonBuilder(spec, torch.device(DEVICE), decode=Tiles(16, 64, 2, 3, programs_per_sm=4))
    builder._most_parts = 64
    monkeypatch.setattr(triton_attn, "split_budget", lambda requests, slots: 7 if max(lens) < 1000 else 100)
    common = PagedCase(spec, [(1, 1)] * len(lens), device=DEVICE).common()
    plan = builder.build(dataclasses.replace(common, seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE)))
    assert plan.splits.first[: len(lens) + 1].diff().tolist() == parts


@pytest.mark.parametrize("num_requests", [1, 2, 5, slow(31), slow(64), slow(300)])
def test_no_plan_has_more_items_than_the_grid(num_requests):
    spec = AttentionLayerSpec(4, 2, 32, 0.2)
    generator = torch.Generator().manual_seed(num_requests)
    lens = torch.randint(1, 3000, (num_requests,), generator=generator, dtype=torch.int32)
    builder = TritonBackend.metadata_builder(spec, torch.device(DEVICE))
    common = PagedCase(spec, [(1, 1)] * num_requests, device=DEVICE).common()
    plan = builder.build(dataclasses.replace(common, seq_lens=lens.to(DEVICE)))
    counts = plan.splits.first[: num_requests + 1].diff()
    assert int(counts.min()) >= 1
    assert int(plan.splits.first[num_requests]) <= plan.num_splits
