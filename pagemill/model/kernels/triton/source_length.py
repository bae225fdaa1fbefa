"""`source_length`: how much there is to compile of a kernel, which says how long it takes."""

import re
from functools import cache
from typing import Any

from triton.runtime.jit import JITCallable

_NAME = re.compile(r"[A-Za-z_]\w*")


@cache
def source_length(kernel: Any) -> int:
    """Characters of its source and of all functions that it names, each counted once; 0 where it has none, as in
    Triton's interpreter."""
    if not isinstance(kernel, JITCallable):
        return 0
    found = [kernel]
    for function in found:
        names = dict.fromkeys(_NAME.findall(function.src))
        named = (function.__globals__.get(name) for name in names)
        found += [other for other in named if isinstance(other, JITCallable) and other not in found]
    return sum(len(function.src) for function in found)
