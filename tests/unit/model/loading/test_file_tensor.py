"""Tensors that are read from the middle of a file, by whoever wants them, and files that are shorter than they say."""

import gc
import os
from pathlib import Path

import pytest
import torch

from pagemill.errors import ModelError
from pagemill.model.loading.file_tensor import FileTensor, OpenFile

BYTES = bytes(range(200))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(BYTES)
    return path


def test_any_bytes_of_the_file(path):
    tensor = FileTensor(OpenFile(path), 50, (5, 10), torch.bfloat16)
    assert tensor.nbytes == 100
    assert torch.equal(tensor.read(), torch.frombuffer(bytearray(BYTES[50:150]), dtype=torch.bfloat16).view(5, 10))
    assert FileTensor(tensor.file, 50, (), torch.uint8).read() == 50
    assert FileTensor(tensor.file, 500, (0, 3), torch.float32).read().shape == (0, 3)


def test_a_file_that_ends_early_is_named(path):
    file = OpenFile(path)
    assert len(FileTensor(file, 150, (50,), torch.uint8).read()) == 50
    with pytest.raises(ModelError, match=r"^x\.bin ends before the last of its tensors"):
        FileTensor(file, 150, (51,), torch.uint8).read()


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"cannot be read: IsADirectoryError"):
        FileTensor(OpenFile(tmp_path), 0, (4,), torch.uint8).read()
    with pytest.raises(FileNotFoundError):
        OpenFile(tmp_path / "nothing")


def test_equal_are_the_same_bytes_of_the_same_file(path):
    one, other = (FileTensor(OpenFile(path), 8, (2, 3), torch.uint8) for _ in range(2))
    assert one == other
    assert {one: 1}[other] == 1
    assert FileTensor(one.file, 9, (2, 3), torch.uint8) != one
    assert FileTensor(one.file, 8, (6,), torch.uint8) != one
    assert FileTensor(one.file, 8, (2, 3), torch.int8) != one
    assert FileTensor(OpenFile(path.parent), 8, (2, 3), torch.uint8) != one


def test_a_file_is_closed_with_its_last_tensor(path):
    file = OpenFile(path)
    tensors = [FileTensor(file, 0, (1,), torch.uint8), FileTensor(file, 1, (1,), torch.uint8)]
    del file

    def is_open():
        gc.collect()
        return str(path) in {os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}

    tensors.pop()
    assert is_open()
    tensors.pop()
    assert not is_open()
