"""Orders accesses to shared memory, also on processors that reorder stores (Arm: Grace hosts, Graviton).

Python has no memory barrier, but its locks are made of atomic operations: no earlier access passes the store
that releases a lock, no later access passes the load that takes the next one, and Arm keeps these two in
order. So what is written before `fence()` is seen before what is written after it, and the same for reads. On
x86 all stores are seen in order anyway. A fence costs some tenths of a microsecond.
"""

from __future__ import annotations

from threading import Lock


def fence() -> None:
    """Make this thread's accesses before the fence visible to other processes before those after it."""
    lock = Lock()  # a new one: nobody waits for it, and no fork inherits it locked
    with lock:
        pass
    with lock:
        pass
