"""What is garbage in cycles after a piece of work: only a collection finds it, and holds everything up meanwhile."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_in_cycles() -> Iterator[Counter[str]]:
    """Filled at the end of the block: what was made in it and is gone but for a collection, by type and name."""
    found = Counter[str]()
    gc.collect()
    gc.freeze()  # what others have left goes when it likes
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(f"{type(each).__qualname__} {getattr(each, '__qualname__', '')}" for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
