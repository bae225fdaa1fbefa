"""Attention over latent vectors: every backend against the definition, over mixed batches, splits and padding."""

import pytest
import torch

from pagemill.errors import ConfigError
from pagemill.messages.kv_spec import MLASpec
from pagemill.model.attention.capability import AttentionContext, AttentionLayerSpec
from pagemill.model.attention.interface import CommonAttentionMetadata
from pagemill.model.attention.selector import BackendPreferences, BackendSelector
from tests.fakes.triton_interpreter import DEVICE
from tests.marks import slow

from pagemill.model.attention.backends import cpu_mla, torch_mla, triton_mla  # isort: skip

pytestmark = pytest.mark.cases(one_in=2)

BACKENDS = [torch_mla.TorchMlaBackend, triton_mla.TritonMlaBackend]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
BLOCK = 16
REQUESTS = {
    "decode": [(1, 37), (1, 1), (1, 16)],
    "mixed": [(5, 21), (1, 40), (3, 3)],
    "prefill": [(18, 18)],
}


def make_case(requests, spec, dtype, num_padded):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)

    num_blocks = 1 + sum(-(-length // BLOCK) for _, length in requests)
    cache = torch.full((num_blocks, BLOCK, spec.head_size), torch.nan, dtype=dtype, device=DEVICE)
    cache[0] = 0
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    table = torch.zeros(len(requests), 8, dtype=torch.int32)
    query, key, slots, expected = [], [], [], []
    for row, (count, length) in enumerate(requests):
        blocks = [order.pop() for _ in range(-(-length // BLOCK))]
        table[row, : len(blocks)] = torch.tensor(blocks)
        entries, q = random(length, spec.head_size), random(count, spec.num_heads, spec.head_size)
        places = [blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)]
        flat = cache.view(-1, spec.head_size)
        flat[torch.tensor(places[: length - count], dtype=torch.long, device=DEVICE)] = entries[: length - count]
        scores = torch.einsum("qhd,sd->hqs", q.double(), entries.double()) * spec.scale
        hidden = torch.arange(length) > torch.arange(length - count, length).unsqueeze(1)
        weights = scores.masked_fill(hidden.to(DEVICE), -torch.inf).softmax(-1)
        expected.append(torch.einsum("hqs,sd->qhd", weights, entries[:, -spec.latent_size :].double()))
        query.append(q)
        key.append(entries[length - count :].unsqueeze(1))
        slots += places[length - count :]
    counts = [count for count, _ in requests]
    pad = [random(num_padded, spec.num_heads, spec.head_size)], [random(num_padded, 1, spec.head_size)]
    common = CommonAttentionMetadata(
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([length for _, length in requests], dtype=torch.int32, device=DEVICE),
        block_table=table.to(DEVICE),
        slot_mapping=torch.tensor(slots + [-1] * num_padded, device=DEVICE),
        num_requests=len(requests),
        num_tokens=sum(counts) + num_padded,
        max_query_len=max(counts),
        max_seq_len=max(length for _, length in requests),
        block_size=BLOCK,
    )
    return common, torch.cat(query + pad[0]), torch.cat(key + pad[1]), cache, torch.cat(expected)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, torch_mla.TorchMlaBackend) for name in REQUESTS),
        *((name, cpu_mla.CpuMlaBackend) for name in REQUESTS),
        ("decode", triton_mla.TritonMlaBackend),
        slow("mixed", triton_mla.TritonMlaBackend),
        slow("prefill", triton_mla.TritonMlaBackend),
    ],
)
@pytest.mark.parametrize(
    ("heads", "latent", "turned", "dtype"),
    [
        (4, 32, 8, torch.float32), slow(20, 24, 16, torch.bfloat16),
        slow(4, 32, 8, torch.bfloat16), slow(20, 24, 16, torch.float32),
    ],
)  # fmt: skip
def test_backends_equal_the_definition(backend, name, heads, latent, turned, dtype):
    spec = AttentionLayerSpec(heads, 1, latent + turned, 0.2, latent_size=latent)
    on_cpu = backend is cpu_mla.CpuMlaBackend
    if on_cpu and (DEVICE != "cpu" or backend.unsupported(spec, "cpu", str(dtype)[6:], AttentionContext(mla=True))):
        pytest.skip("there are no native kernels here")
    num_padded = 2 if name != "decode" and not on_cpu else 0  # steps on a CPU have no padding
    common, query, key, cache, expected = make_case(REQUESTS[name], spec, dtype, num_padded)
    metadata = backend.metadata_builder(spec, torch.device(DEVICE)).build(common)
    result = backend.impl(spec).forward(query, key, key, cache, metadata)
    assert result.shape == (common.num_tokens, heads, latent)
    step = ROUNDING[dtype]
    torch.testing.assert_close(result[: len(expected)].double(), expected, rtol=step, atol=step)
    assert not cache[0].isnan().any()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_splits_add_up(num_splits):
    from pagemill.model.kernels.triton.mla import attend_latents

    spec = AttentionLayerSpec(4, 1, 40, 0.2, latent_size=32)
    common, query, key, cache, expected = make_case(REQUESTS["decode"], spec, torch.float32, 0)
    cache.view(-1, 40)[common.slot_mapping] = key.squeeze(1)
    requests = torch.arange(3, dtype=torch.int32, device=DEVICE)
    result = attend_latents(
        query, cache, common.block_table, requests, common.seq_lens, spec.scale, spec.latent_size, num_splits
    )
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_block_is_one_vector_per_token():
    assert MLASpec(16, 1, 576, "bfloat16").page_bytes() == 16 * 576 * 2


def test_layers_of_each_kind_find_their_backends():
    chooser = BackendSelector("cpu", "float32", ("CPU_ATTN", "TORCH_CPU", "TORCH_MLA"))
    assert chooser(AttentionLayerSpec(4, 1, 40, 0.2, latent_size=32)).name == "TORCH_MLA"
    assert chooser(AttentionLayerSpec(4, 2, 40, 0.2)).name not in ("TORCH_MLA", "CPU_MLA")
    with pytest.raises(ConfigError, match="TORCH_MLA is not valid"):
        BackendSelector("cpu", "float32", (), BackendPreferences("TORCH_MLA"))(AttentionLayerSpec(4, 2, 40, 0.2))
