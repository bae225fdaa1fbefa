"""CPUs of the calling thread."""

import os
import threading

from pagemill.utils.cpu_affinity import current_cpus, pin_to


def test_a_thread_keeps_to_its_cpus_and_others_do_not():
    before, seen = current_cpus(), []
    assert before == os.sched_getaffinity(0)

    def work():
        pin_to(frozenset([min(before)]))
        pin_to(frozenset())
        pin_to(frozenset([60_000]))
        seen.append(current_cpus())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [{min(before)}]
    assert current_cpus() == before
