"""Which numbers of tokens get a CUDA graph. Pure."""

_STEPS = ((8, 256), (16, 512), (64, 1 << 30))
"""(distance between sizes, up to): padding costs most where steps are short."""
_FIRST = (1, 2, 4)
USUAL_LARGEST = 512


def default_largest(max_num_seqs: int, token_budget: int, query_len: int = 1) -> int:
    """Twice the requests up to a bound, for steps that prefill a little besides; but no decode step goes without."""
    return min(token_budget, max(min(2 * max_num_seqs, USUAL_LARGEST), max_num_seqs * query_len))


def capture_sizes(largest: int) -> tuple[int, ...]:
    """Ascending, up to and with `largest`."""
    sizes = [size for size in _FIRST if size < largest]
    size = 0
    for step, end in _STEPS:
        while size < min(end, largest):
            size += step
            if size < largest:
                sizes.append(size)
    return (*sizes, largest)
