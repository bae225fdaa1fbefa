"""When Python's garbage collector works: not while something starts, and not on what has started.

Start-up makes a million objects, nearly all of which stay: looking through them takes a tenth of torch's import, and
later, in the middle of a step, some 100 ms each time that the oldest generation is looked through.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection in the body, and none ever after of what there is at its end (until `gc.unfreeze()`), unless an
    exception ends it: most of that is garbage. Inside another one, or where the collector is off anyway, it does
    nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
