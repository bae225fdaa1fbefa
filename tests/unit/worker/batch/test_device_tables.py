import numpy as np
import torch

from pagemill.model.kernels.batching_reference import write_places
from pagemill.worker.batch.device_tables import DeviceBlockTable


def sent(table):
    changes = table.take_changes()
    if changes is not None:
        write_places(table.device_blocks, *(torch.from_numpy(np.ascontiguousarray(part)) for part in changes))
    return changes


def test_the_device_has_what_the_host_has():
    table = DeviceBlockTable(3, 64, 4, torch.device("cpu"))
    table.reset(0, [5, 6])
    table.reset(2, [7])
    table.append(0, [8])
    sent(table)
    table.append(2, [9, 10])
    sent(table)
    assert table.device_blocks[0, :3].tolist() == [5, 6, 8]
    assert table.device_blocks[2, :3].tolist() == [7, 9, 10]
    assert not table.device_blocks[1].any() and not table.device_blocks[3].any()
    assert np.array_equal(table.device_blocks[:3].numpy(), table.blocks)


def test_blocks_are_sent_in_the_order_in_which_they_came():
    table = DeviceBlockTable(3, 64, 4, torch.device("cpu"))
    table.reset(0, [5, 6])
    table.reset(1, [])
    table.take_changes()
    table.append(1, [9])
    table.append(0, [8, 7])
    assert [part.tolist() for part in table.take_changes()] == [[16, 2, 3], [9, 8, 7]]


def test_nothing_is_sent_without_a_change():
    table = DeviceBlockTable(3, 64, 4, torch.device("cpu"))
    table.reset(0, [5])
    assert sent(table) is not None
    table.append(0, [])
    assert table.take_changes() is None


def test_of_a_slot_that_is_given_twice_before_anything_is_sent_the_last_counts():
    table = DeviceBlockTable(3, 64, 4, torch.device("cpu"))
    table.reset(1, [5, 6, 7])
    table.reset(1, [8])
    sent(table)
    assert table.device_blocks[1, 0] == 8
