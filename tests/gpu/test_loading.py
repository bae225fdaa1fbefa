"""Tensors of files reach the GPU as they are and in their order, through buffers that are used again and again."""

import pytest
import torch

from pagemill.model.loading.upload import AHEAD_BYTES, PIECE_BYTES, uploaded

SIDE = 4096


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_more_than_is_sent_ahead(dtype: torch.dtype):
    num_rows = PIECE_BYTES // SIDE // dtype.itemsize * 5 + 3
    whole = torch.randint(0, 255, (num_rows, SIDE * dtype.itemsize), dtype=torch.uint8).view(dtype)
    sources = [whole, whole[:, 8:-8], whole[1:901]] * (AHEAD_BYTES // whole.nbytes + 1)
    named = [(str(index), source) for index, source in enumerate(sources)]
    used = []
    for name, made in uploaded(named, torch.device("cuda")):
        assert made.is_cuda
        used.append((name, made.view(torch.uint8).clone()))
        made.zero_()  # and its memory is free for the next
    assert [name for name, _ in used] == [name for name, _ in named]
    for (_, found), (_, wanted) in zip(used, named, strict=True):
        assert torch.equal(found.cpu(), wanted.contiguous().view(torch.uint8))


def test_what_is_sent_as_it_is():
    tensors = [
        torch.tensor(3.0),
        torch.empty(0, 7),
        torch.randn(5),
        torch.randn(SIDE, 300).t(),
        torch.randn(1, PIECE_BYTES // 4 + 1),
        torch.randn(3, device="cuda"),
    ]
    found = list(
        uploaded([*enumerate(map(str, "ab")), *(("tensor", tensor) for tensor in tensors)], torch.device("cuda"))
    )
    assert found[:2] == [(0, "a"), (1, "b")]
    for (_, made), tensor in zip(found[2:], tensors, strict=True):
        assert made.is_cuda
        assert torch.equal(made.cpu(), tensor.cpu())


def test_a_source_that_fails():
    def source():
        yield "first", torch.zeros(PIECE_BYTES // 4, 8)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        list(uploaded(source(), torch.device("cuda")))
