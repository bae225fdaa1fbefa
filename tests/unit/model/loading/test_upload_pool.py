"""The library of the threads that send weights: compiled once, or missing with a reason; what they read of memory."""

import os
import stat

import pytest
import torch

from pagemill.errors import ModelError, PagemillError
from pagemill.model.loading import upload_pool
from pagemill.model.loading.upload_pool import IN_MEMORY, Source, UploadPool, pool_library
from tests.fakes.late_copier import LateCopier


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A machine on which nothing has been compiled."""
    monkeypatch.setenv("PAGEMILL_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    pool_library.cache_clear()
    yield tmp_path
    pool_library.cache_clear()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_it_is_compiled_once(fresh, monkeypatch):
    assert pool_library() is not None
    (made,) = fresh.rglob("*.so")
    pool_library.cache_clear()
    monkeypatch.setattr(upload_pool, "make_library", lambda *_: pytest.fail("compiled again"))
    assert pool_library() is not None
    made.chmod(made.stat().st_mode | stat.S_IWOTH)
    pool_library.cache_clear()
    assert pool_library() is None  # others may have changed it


def test_a_compiler_that_fails_is_one_line(fresh, monkeypatch, caplog):
    compiler = fresh / "cc"
    compiler.write_text("#!/bin/sh\necho 'what.c: error: no such thing' >&2\necho more >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert pool_library() is None
    assert warnings_of(caplog) == [
        "weights go to the GPU slowly: what sends them does not compile: what.c: error: no such thing"
    ]
    assert not list(fresh.rglob("*.so"))


def test_without_a_compiler_there_is_no_library(fresh, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(fresh))
    assert pool_library() is None
    assert warnings_of(caplog) == ["weights go to the GPU slowly: there is no C compiler (cc, gcc, clang); set CC"]


@pytest.fixture
def copier():
    return LateCopier()


@pytest.fixture
def pool(copier):
    library = pool_library()
    assert library is not None
    return UploadPool(library, copier, 3, 4096, 2)


def test_rows_apart_from_each_other(pool, copier):
    whole = torch.arange(100 * 1000, dtype=torch.int32).view(100, 1000)
    target = torch.zeros(100, 300, dtype=torch.int32)
    source = Source(IN_MEMORY, whole[:, 10:310].data_ptr(), target.nbytes, 1200, 4000)
    pool.wait(pool.add(source, target.data_ptr()), "x")
    pool.close([])
    assert torch.equal(target, whole[:, 10:310])
    assert [size for _, size in copier.copies].count(3600) == 33  # whole rows
    assert copier.is_over, copier.errors


def test_what_nobody_waits_for_is_given_up(pool, copier):
    kept = torch.zeros(1 << 20, dtype=torch.uint8)
    targets = [torch.zeros_like(kept) for _ in range(20)]
    left = [pool.add(Source(IN_MEMORY, kept.data_ptr(), kept.nbytes, 1, 1), made.data_ptr()) for made in targets]
    pool.close(left)
    assert len(copier.copies) < 20 * 256
    assert copier.is_over, copier.errors


def test_what_cannot_be_read_is_named_and_the_rest_goes_on(pool, copier, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(range(256)) * 40)
    targets = [torch.zeros(10240, dtype=torch.uint8) for _ in range(3)]
    descriptors = [os.open(name, os.O_RDONLY) for name in (path, tmp_path)]
    sources = [Source(descriptors[0], 1, 10240), Source(descriptors[1], 0, 10), Source(descriptors[0], 0, 10240)]
    ended, folder, whole = (pool.add(*pair) for pair in zip(sources, map(torch.Tensor.data_ptr, targets), strict=True))
    with pytest.raises(ModelError, match=r"^x ends before the last of its tensors"):
        pool.wait(ended, "x")
    with pytest.raises(ModelError, match=r"^folder cannot be read: Is a directory"):
        pool.wait(folder, "folder")
    pool.wait(whole, "x")
    assert targets[2].numpy().tobytes() == path.read_bytes()
    pool.close([])
    for descriptor in descriptors:
        os.close(descriptor)
    assert copier.is_over, copier.errors


@pytest.mark.parametrize("failing", ["make_event", "record"])
def test_a_device_that_has_failed(copier, failing):
    library = pool_library()
    assert library is not None
    pool = UploadPool(library, copier, 2, 4096, 2)
    copier.fails = {failing}
    with pytest.raises(PagemillError, match="weights cannot be sent to the device: the fake says 700"):
        pool.add(Source(IN_MEMORY, 0, 0, 1, 1), 0)
    pool.close([])
    assert copier.is_over, copier.errors


def test_what_is_pinned_is_kept_for_the_next_pool_of_as_large_buffers():
    copier = LateCopier(keeps=True)
    library = pool_library()
    assert library is not None
    sources = [torch.arange(50_000, dtype=torch.int32) + begin for begin in range(3)]
    pinned = []
    for source, buffer_bytes in zip(sources, (12_288, 12_288, 20_480), strict=True):
        pool = UploadPool(library, copier, 1, buffer_bytes, 2)
        target = torch.zeros_like(source)
        pool.wait(pool.add(Source(IN_MEMORY, source.data_ptr(), source.nbytes, 1, 1), target.data_ptr()), "x")
        pool.close([])
        assert torch.equal(target, source)
        pinned.append(set(copier.pinned))
    assert len(pinned[0]) == 1
    assert pinned[1] == pinned[0]
    assert len(pinned[2]) == 2
    assert pinned[2] > pinned[1]
    copier.pinned.clear()
    assert copier.is_over, copier.errors
