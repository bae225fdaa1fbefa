import numpy as np
import torch

from pagemill.worker.batch.buffers import DEPTH, UploadRing, on_device
from tests.fakes.queued_platform import QueuedTransfers

CPU = torch.device("cpu")


def test_arrays_arrive_as_they_are():
    ring = UploadRing(QueuedTransfers(), CPU, 64)
    sent = ring.send([np.arange(3, dtype=np.int32), np.zeros(0, np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)])
    assert [tensor.tolist() for tensor in sent] == [[0, 1, 2], [], [[0, 1, 2], [3, 4, 5]]]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in sent)
    assert ring.num_uploads == 1


def test_a_buffer_grows_for_what_is_larger():
    ring = UploadRing(QueuedTransfers(), CPU, 8)
    many = np.arange(1000, dtype=np.int32)
    assert ring.send([many])[0].tolist() == many.tolist()


def test_a_buffer_is_written_again_only_when_its_reader_is_done():
    transfers = QueuedTransfers()
    ring = UploadRing(transfers, CPU, 8)
    for _ in range(DEPTH):
        ring.send([np.zeros(4, np.int32)])
        ring.uploads_consumed()
    first = transfers.open[0]
    assert not first.reached()
    ring.send([np.zeros(4, np.int32)])
    assert first.reached()
    assert len(transfers.open) == DEPTH - 1


def test_on_the_host_a_tensor_is_the_array():
    array = np.arange(5, dtype=np.int32)
    tensor = on_device(array, CPU)
    array[2] = 7
    assert tensor.tolist() == [0, 1, 7, 3, 4]
    assert on_device(array, torch.device("meta")).shape == (5,)
