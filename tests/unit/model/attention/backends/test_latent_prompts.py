"""Prompts whose keys and values are made of latent vectors: which, in which passes, and what comes of it."""

import dataclasses

import numpy as np
import pytest
import torch

from pagemill.model.attention.backends import latent_prompts
from pagemill.model.attention.backends.latent_prompts import LatentPrompts, LatentSizes, Workspace, wanted
from pagemill.model.attention.backends.torch_mla import TorchMlaBackend
from pagemill.model.attention.interface import BatchLens
from pagemill.model.attention.phased import phased
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow

from benchmarks.latent_case import LatentCase, LatentShape  # isort: skip
from pagemill.model.attention.backends.triton_mla import MlaBuilder, TritonMlaBackend  # isort: skip

SHAPE = LatentShape(heads=3, turned=8, plain=16, value=12, latent=32)
BATCH = [(40, 70), (1, 33), (150, 150), (130, 300), (5, 9)]
"""(new tokens, all tokens): three prompts of which two go on, a request that decodes and one with few tokens."""
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def lens_of(requests):
    counts, lens = zip(*requests, strict=True)
    return BatchLens(np.array([0, *np.cumsum(counts)], np.int32), np.array(lens, np.int32))


def test_keys_that_few_tokens_see_are_not_made():
    requests = [(1, 5000), (48, 5000), (50, 5000), (50, 50), (95, 95), (96, 96), (8192, 8192)]
    assert wanted(lens_of(requests), 128, 1 << 30).tolist() == [False, False, True, False, False, True, True]


def test_a_prompt_for_whose_sums_there_is_no_room_is_left_to_the_others():
    assert wanted(lens_of([(1100, 1100), (1000, 1000)]), 128, 1 << 20).tolist() == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "room"),
    [
        (torch.float32, 100 << 10),
        slow(torch.float32, 1 << 20),
        slow(torch.float32, 120 << 10),
        slow(torch.bfloat16, 50 << 10),
    ],
)
def test_attention_equals_the_definition(dtype, room, monkeypatch):
    monkeypatch.setattr(latent_prompts, "TOKENS_PER_KEY", 20)
    case = LatentCase(SHAPE, BATCH, dtype, DEVICE, padding=3)
    builder = MlaBuilder(SHAPE.spec, torch.device(DEVICE), room)
    expected = case.expected()
    result = case.run(TritonMlaBackend, builder)
    step = ROUNDING[dtype]
    torch.testing.assert_close(result[: len(expected)].double(), expected, rtol=step, atol=step)
    assert not result[len(expected) :].any(), "padding"
    case.common = dataclasses.replace(case.common, asks_for_ends=True)
    metadata, impl = builder.build(case.common), TritonMlaBackend.impl(SHAPE.spec)
    asked = impl.attend_latents(case.query, case.kept, case.cache, impl.for_asked_rows(metadata), case.weights)
    ends = case.lens.query_start[1:] - 1
    torch.testing.assert_close(asked[ends], result[ends], rtol=0, atol=0)
    prompts = metadata.prompts
    assert prompts.others.tolist() == [40, *range(321, 326)]
    found = prompts.passes(latent_prompts.sizes_of(case.weights, case.cache))
    assert any(each.num_carried for each in found) == (room < 1 << 20)


def test_another_backend_may_decode(monkeypatch):
    monkeypatch.setattr(latent_prompts, "TOKENS_PER_KEY", 20)
    case = LatentCase(SHAPE, [(1, 33), (60, 60)], torch.float32, DEVICE)
    result = case.run(phased(TritonMlaBackend, TorchMlaBackend))
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_compiled_layers_attend_in_the_latent_space_whatever_was_planned(monkeypatch):
    monkeypatch.setattr(latent_prompts, "TOKENS_PER_KEY", 20)
    case = LatentCase(SHAPE, [(1, 33), (60, 60)], torch.float32, DEVICE)
    metadata = MlaBuilder(SHAPE.spec, torch.device(DEVICE)).build(case.common)
    assert metadata.prompts is not None
    query = case.weights.absorb(case.query)
    attended = TritonMlaBackend.impl(SHAPE.spec).forward(query, case.kept, case.kept, case.cache, metadata)
    result = case.weights.expand(attended.flatten(1))
    torch.testing.assert_close(result.double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_steps_of_which_the_host_knows_no_lengths_are_as_ever():
    case = LatentCase(SHAPE, BATCH[:2], torch.float32, DEVICE)
    builder = MlaBuilder(SHAPE.spec, torch.device(DEVICE), 1 << 20)
    assert builder.build(case.common).prompts is None, "few tokens see a key"
    case.common = dataclasses.replace(case.common, batch_lens=None)
    assert builder.build(case.common).prompts is None


@pytest.mark.parametrize("heads", [1, slow(16), slow(128)])
@pytest.mark.parametrize("room", [4 << 20, 32 << 20, 256 << 20])
def test_every_key_is_made_once_for_every_head_and_there_is_room_for_all_of_a_pass(heads, room):
    sizes = LatentSizes(heads, kept=576, expanded=256, value=128, element=2)
    random = np.random.default_rng(heads)
    for _ in range(20):
        counts = random.integers(1, 3000, random.integers(1, 12))
        lens = lens_of([(count, count + random.choice([0, int(random.integers(0, 60000))])) for count in counts])
        chosen = wanted(lens, 128, room)
        if not chosen.any():
            continue
        seen = {request: np.zeros((heads, length), int) for request, length in enumerate(lens.seq_lens)}
        for each in LatentPrompts(lens, chosen, torch.device("cpu"), room).passes(sizes):
            used = sizes.bytes_for(each.num_rows, each.heads) + sizes.carried_bytes(each.num_carried, each.heads)
            assert 0 < used <= room
            rows = np.zeros(each.num_rows, int)
            for request, position, count, row in each.pieces.tolist():
                seen[request][each.first_head : each.first_head + each.heads, position : position + count] += 1
                rows[row : row + count] += 1
            assert (rows == 1).all()
            check_records(each, lens, chosen)
            ends = [record for record in each.records.tolist() if sum(record[:2]) in lens.query_start]
            assert sorted(each.ends.tolist()) == sorted(ends)
        assert all((seen[request] == chosen[request]).all() for request in seen)


def check_records(each, lens, chosen):
    """The tiles of a pass: each sees what it may see of the keys that are there."""
    assert each.counter.tolist() == each.ends_counter.tolist() == [0]
    records = each.records.numpy()
    assert (np.diff(records[:, 3]) <= 0).all(), "those of the most keys come first"
    assert (records[:, 3] > 0).all() and (records[:, 3] <= records[:, 5]).all()
    for token, count, first, keys, base, there, begun, goes_on in records.tolist():
        request = int(np.searchsorted(lens.query_start, token, side="right")) - 1
        assert chosen[request] and token + count <= lens.query_start[request + 1]
        assert base + there <= each.num_rows and begun + goes_on <= 2 * bool(each.num_carried)
        last = int(lens.seq_lens[request]) - (int(lens.query_start[request + 1]) - token) + count
        begin = last - count - first
        assert bool(begun) == (begin > 0) and bool(goes_on) == (last > begin + there)
        assert keys == min(first + count, there)


def test_parts_of_the_workspace_lie_side_by_side():
    sizes = LatentSizes(heads=4, kept=40, expanded=28, value=12, element=2)
    lens = lens_of([(300, 500)])
    workspace = Workspace(torch.device("cpu"), 60 << 10)
    for step in LatentPrompts(lens, wanted(lens, 12, 60 << 10), torch.device("cpu"), workspace.num_bytes).passes(sizes):
        parts = workspace.parts(step, sizes, torch.bfloat16)
        for index, part in enumerate(parts):
            part.fill_(index)
            assert part.data_ptr() % 16 == 0
        assert [float(part.float().mean()) for part in parts] == [0, 1, 2, 3]
        assert parts[0].shape == (step.num_rows, 40) and parts[1].shape == (step.num_rows, step.heads, 28)
        assert step.num_carried == 300 and parts[2].shape == (300, step.heads, 12)
