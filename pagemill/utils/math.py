"""Integer arithmetic used in every plane."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Smallest integer >= numerator / denominator, for positive denominators."""
    return -(-numerator // denominator)


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= value."""
    return ceil_div(value, multiple) * multiple
