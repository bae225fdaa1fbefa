"""Tensors that threads send to a device whose copies run late: all there, in order, and nothing left behind, whatever
goes wrong."""

import itertools

import numpy as np
import pytest
import torch

from pagemill.errors import ModelError, PagemillError
from pagemill.model.loading import uploads
from pagemill.model.loading.file_tensor import FileTensor, OpenFile
from pagemill.model.loading.upload_pool import pool_library
from pagemill.model.loading.uploads import Uploads
from tests.fakes.late_copier import LateCopier

PIECE = 4096
AHEAD = 5 * PIECE
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(uploads, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(uploads, "AHEAD_BYTES", AHEAD)
    monkeypatch.setattr(uploads, "SMALL_BYTES", 8)


@pytest.fixture
def copier():
    copier = LateCopier()
    yield copier
    assert copier.is_over, copier.errors


@pytest.fixture
def file(tmp_path):
    """60,000 random bytes, and tensors of them in 17 sizes, from nothing to several pieces, one after the other."""
    path = tmp_path / "x.bin"
    path.write_bytes(np.random.default_rng(0).bytes(60_000))
    file = OpenFile(path)
    sizes = [0, 1, 2, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7, *[100] * 5, 4 * PIECE, 9, 2]
    offsets = itertools.accumulate(sizes, initial=3)
    return [FileTensor(file, offset, (size,), torch.uint8) for offset, size in zip(offsets, sizes, strict=False)]


def uploads_of(copier, num_threads):
    library = pool_library()
    assert library is not None
    return Uploads(library, copier, CPU, num_threads)


def named(tensors):
    return [(str(index), tensor) for index, tensor in enumerate(tensors)]


def check(found, tensors):
    assert [name for name, _ in found] == [name for name, _ in named(tensors)]
    for (_, made), tensor in zip(found, tensors, strict=True):
        assert made.dtype == tensor.dtype
        assert tuple(made.shape) == tensor.shape
        assert (
            made.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            == tensor.read().flatten().view(torch.uint8).numpy().tobytes()
        )


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("pins", [True, False])
def test_tensors_of_a_file_arrive_whole_and_in_order(file, num_threads, pins):
    copier = LateCopier(refuses_to_pin=not pins)
    found = []
    with uploads_of(copier, num_threads) as sent:
        for name, made in sent.arriving(iter(named(file))):
            found.append((name, made.clone()))
            made.zero_()  # and its memory is free for the next
    check(found, file)
    assert copier.most_pinned <= num_threads * uploads.NUM_BUFFERS * PIECE * pins
    assert copier.is_over, copier.errors


def test_shapes_and_types(copier, file):
    part = file[-3]
    dtypes = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool, torch.int64]
    tensors = [FileTensor(part.file, part.offset, (4, 3, 64), dtype) for dtype in dtypes]
    tensors.append(FileTensor(part.file, part.offset, (), torch.float32))
    with uploads_of(copier, 2) as sent:
        check(list(sent.arriving(named(tensors))), tensors)


def test_what_is_in_memory_is_sent_by_rows_or_as_it_is(copier):
    whole = torch.randn(400, 60)
    tensors = [
        whole,
        whole[:, 8:-8],
        whole[3:50],
        whole.bfloat16()[:, ::2],
        whole.t(),
        torch.randn(3, 5, 60)[:, 1:3],
        torch.randn(1, PIECE),
        torch.tensor(3.0),
        torch.empty(0, 7),
    ]
    with uploads_of(copier, 2) as sent:
        found = list(sent.arriving([("what else", "there is"), *named(tensors)]))
    assert found[0] == ("what else", "there is")
    for (_, made), tensor in zip(found[1:], tensors, strict=True):
        assert torch.equal(made, tensor)
    assert len(copier.copies) > len(tensors)


def test_no_more_is_under_way_than_is_allowed(copier, file):
    asked = []

    def source():
        for name, tensor in named(file):
            asked.append(tensor.nbytes)
            yield name, tensor

    used = 0
    with uploads_of(copier, 2) as sent:
        for _, made in sent.arriving(source()):
            used += made.nbytes
            assert sum(asked) - used <= AHEAD + max(asked)


def test_guesses_are_sent_once_and_only_what_is_asked_for_arrives(copier, file):
    wanted = [file[8], FileTensor(file[8].file, file[8].offset + 1, (5,), torch.uint8), file[5], file[7], file[8]]
    with uploads_of(copier, 2) as sent:
        sent.guess(file)
        check(list(sent.arriving(named(wanted))), wanted)
    # Only the part that nobody had guessed, and the tensor that is asked for twice, are sent beside the guesses.
    sizes = [size for _, size in copier.copies]
    assert sizes.count(5) <= 1 + [tensor.nbytes for tensor in file].count(5)
    assert sizes.count(7) == 2


def test_guesses_end_with_the_memory_for_them(file):
    copier = LateCopier(free=4 * 3 * PIECE)
    first = list(sent_first(file, 3 * PIECE))
    with uploads_of(copier, 1) as sent:
        sent.guess(file)
        check(list(sent.arriving(named(first))), first)
    assert sum(size for _, size in copier.copies) == sum(tensor.nbytes for tensor in first)


def sent_first(tensors, limit):
    total = 0
    for tensor in tensors:
        total += tensor.nbytes
        if total > limit:
            return
        yield tensor


def test_a_guess_that_cannot_be_read_is_no_error_unless_it_is_wanted(copier, file):
    with uploads_of(copier, 2) as sent:
        sent.guess([FileTensor(file[0].file, 59_000, (5000,), torch.uint8), *file])
        check(list(sent.arriving(named(file))), file)


@pytest.mark.parametrize("guessed", [True, False])
def test_a_file_that_ends_early_is_one_error_and_no_hang(copier, file, guessed):
    cut = [*file[:6], FileTensor(file[0].file, 60_000 - PIECE, (3 * PIECE,), torch.uint8), *file[6:]]
    found = []
    with pytest.raises(ModelError, match=r"^x\.bin ends before"), uploads_of(copier, 3) as sent:
        if guessed:
            sent.guess(cut)
        for name, made in sent.arriving(named(cut)):
            found.append((name, made))
    check(found, file[:6])


@pytest.mark.parametrize("fails", ["set_context", "make_stream", "make_event", "record", "hold", "finish", "copy"])
def test_a_device_that_fails_is_one_error_and_no_hang(file, fails):
    copier = LateCopier(fails=(fails,))
    with (
        pytest.raises(PagemillError, match="cannot be sent to the device: the fake says 700"),
        uploads_of(copier, 3) as sent,
    ):
        sent.guess(file)
        list(sent.arriving(named(file[4:])))


def test_a_source_that_fails(copier, file):
    def source():
        yield from named(file[:9])
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"), uploads_of(copier, 2) as sent:
        list(sent.arriving(source()))


def test_an_end_before_the_last(copier, file):
    with uploads_of(copier, 2) as sent:
        sent.guess(file)
        for name, _ in sent.arriving(named(file)):
            if name == "3":
                break
    with uploads_of(copier, 2) as sent:
        sent.guess(file)  # of a model that cannot be built
    with uploads_of(copier, 2):
        pass
