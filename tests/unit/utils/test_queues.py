"""Reading a queue until it is empty."""

from queue import SimpleQueue

from pagemill.utils.queues import waiting_items


def test_items_are_removed_in_order_until_none_is_left():
    queue: SimpleQueue[int] = SimpleQueue()
    for number in range(3):
        queue.put(number)
    found = []
    for number in waiting_items(queue):
        found.append(number)
        if number == 1:
            queue.put(3)
    assert found == [0, 1, 2, 3]
    assert queue.empty()
