"""Order between words of shared memory, also on processors that reorder stores (Arm: Grace hosts, Graviton).

Python has no memory barrier, but its locks are made of atomic operations: releasing one is a store that no
earlier access passes, and taking the next one a load that no later access passes; Arm keeps those two in
order. So what is written before `fence()` is seen before what is written after it, and the same for reads.
On x86 all stores are seen in order anyway. Costs some tenths of a microsecond.
"""

from __future__ import annotations

from threading import Lock


def fence() -> None:
    """For every other process, this thread's accesses before the fence come before those after it."""
    lock = Lock()  # one of its own: nobody waits for it, and no fork inherits it taken
    with lock:
        pass
    with lock:
        pass
