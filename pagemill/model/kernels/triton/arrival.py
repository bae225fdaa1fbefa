"""Programs that each leave a part of a result: the last of them to come to its end finds all parts, and puts them
together."""

import triton
import triton.language as tl


@triton.jit
def arrives_last(arrived, others):
    """Whether so many others have been here before this program: what they wrote before is there to be read, from the
    L2 cache. The last has to set the counter back to 0."""
    # All threads have written before one of them tells so.
    tl.debug_barrier()
    return tl.atomic_add(arrived, 1, sem="acq_rel") == others
