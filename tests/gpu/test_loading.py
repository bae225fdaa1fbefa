"""Tensors of files reach the GPU as they are and in their order, through buffers that are used again and again."""

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.model.loading.file_tensor import FileTensor, OpenFile
from pagemill.model.loading.upload_pool import pool_library
from pagemill.model.loading.uploads import AHEAD_BYTES, PIECE_BYTES, Uploads
from pagemill.platforms.cuda import CudaPlatform

SIDE = 4096
GPU = torch.device("cuda")


def new_uploads():
    copier = CudaPlatform().copier()
    library = pool_library()
    assert copier is not None
    assert library is not None
    return Uploads(library, copier, GPU)


@pytest.fixture
def uploads():
    return new_uploads()


def bytes_of(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_more_than_is_sent_ahead(uploads, dtype):
    num_rows = PIECE_BYTES // SIDE // dtype.itemsize * 5 + 3
    whole = torch.randint(0, 255, (num_rows, SIDE * dtype.itemsize), dtype=torch.uint8).view(dtype)
    sources = [whole, whole[:, 8:-8], whole[1:901]] * (AHEAD_BYTES // whole.nbytes + 1)
    named = [(str(index), source) for index, source in enumerate(sources)]
    used = []
    with uploads:
        for name, made in uploads.arriving(named):
            assert made.is_cuda
            used.append((name, made.view(torch.uint8).clone()))
            made.zero_()  # and its memory is free for the next
    assert [name for name, _ in used] == [name for name, _ in named]
    for (_, found), (_, wanted) in zip(used, named, strict=True):
        assert torch.equal(bytes_of(found), bytes_of(wanted))


@pytest.mark.parametrize("on_a_stream", [False, True])
def test_what_is_left_in_files_guessed_or_not(tmp_path, on_a_stream):
    path = tmp_path / "x.bin"
    content = torch.randint(0, 255, (700 << 20,), dtype=torch.uint8)
    content.numpy().tofile(path)
    file = OpenFile(path)
    sizes = [1, 5000, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 7, 34 << 20] * 8
    places = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    tensors = [FileTensor(file, begin, (size,), torch.uint8) for begin, size in places]
    stream = torch.cuda.Stream() if on_a_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream), new_uploads() as sent:
        sent.guess(tensors[: len(tensors) // 2 : 2])
        for (name, made), (begin, size) in zip(sent.arriving(enumerate(tensors)), places, strict=True):
            assert name == places.index((begin, size))
            assert torch.equal(made.clone().cpu(), content[begin : begin + size])
            made.zero_()


def test_what_is_sent_as_it_is(uploads):
    tensors = [
        torch.tensor(3.0),
        torch.empty(0, 7),
        torch.randn(5),
        torch.randn(SIDE, 300).t(),
        torch.randn(1, PIECE_BYTES // 4 + 1),
        torch.randn(3, device="cuda"),
    ]
    with uploads:
        found = list(uploads.arriving([*enumerate(map(str, "ab")), *(("tensor", tensor) for tensor in tensors)]))
    assert found[:2] == [(0, "a"), (1, "b")]
    for (_, made), tensor in zip(found[2:], tensors, strict=True):
        assert made.is_cuda
        assert torch.equal(made.cpu(), tensor.cpu())


def test_a_source_that_fails(uploads):
    def source():
        yield "first", torch.zeros(PIECE_BYTES // 4, 8)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"), uploads:
        list(uploads.arriving(source()))


def test_a_file_that_ends_early(uploads, tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(3 * PIECE_BYTES))
    tensor = FileTensor(OpenFile(path), PIECE_BYTES, (9 * PIECE_BYTES,), torch.uint8)
    with pytest.raises(ModelError, match="ends before"), uploads:
        list(uploads.arriving([("long", tensor)]))


def test_what_the_driver_says_is_in_the_error(uploads):
    with uploads:
        assert uploads._copier.describe(201).startswith("the CUDA driver says 201, invalid")
