"""`gc_paused`: no garbage collection while something starts, nor later of what has started.

Start-up makes a million objects, nearly all of which stay: looking through them delays the start, and later stops a
step each time that the oldest generation is looked through.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection inside the block, then freeze every object alive at its end, so that later collections
    skip it (until `gc.unfreeze()`). A block that raises freezes nothing. Inside another such block, or where collection
    is off anyway, it does nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
