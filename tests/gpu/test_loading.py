"""Tensors of files reach the GPU as they are, through pinned buffers that are used again and again."""

import pytest
import torch

from pagemill.model.loading.upload import MAX_THREADS, NUM_BUFFERS, PIECE_BYTES, Upload

SIDE = 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_larger_than_all_buffers(dtype: torch.dtype):
    num_rows = (NUM_BUFFERS + 2) * PIECE_BYTES // SIDE // dtype.itemsize + 3
    source = torch.randint(0, 255, (num_rows, SIDE * dtype.itemsize), dtype=torch.uint8).view(dtype)
    with Upload(torch.device("cuda")) as upload:
        sent = [upload(source), upload(source[:, 8:-8]), upload(source[1 : MAX_THREADS * 40])]
    expected = [source, source[:, 8:-8], source[1 : MAX_THREADS * 40]]
    for found, wanted in zip(sent, expected, strict=True):
        assert found.is_cuda
        assert torch.equal(found.cpu().view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_what_is_sent_as_it_is():
    tensors = [
        torch.tensor(3.0),
        torch.empty(0, 7),
        torch.randn(5),
        torch.randn(SIDE, 300).t(),
        torch.randn(1, PIECE_BYTES // 4 + 1),
        torch.randn(3, device="cuda"),
    ]
    with Upload(torch.device("cuda")) as upload:
        for tensor in tensors:
            assert torch.equal(upload(tensor).cpu(), tensor.cpu())
