"""`python -m jurymast.storage`: carries out orders from stdin and answers on stdout; see `storage.orders`.

Orders for one tier are carried out one after another, those for different tiers at the same time. The process
ends with its stdin; nothing that it leaves half-written counts as whole.
"""

from __future__ import annotations

import os
import queue
import sys
import threading

import msgspec
import psutil

from jurymast.checkpoint.directory import one_line
from jurymast.core.message import Strange
from jurymast.errors import never
from jurymast.processes import become_helper
from jurymast.storage import layout, local, object_store, shared
from jurymast.storage.orders import (
    Answer,
    AnyOrder,
    Cancel,
    Done,
    Job,
    StorageFailed,
    StorageFailure,
    Told,
    Upload,
    Warm,
    WriteLocal,
    WriteShared,
    read_told,
)

# How much nicer than the ranks this process is while it writes. Not while it imports torch: on a busy node
# that took minutes, during which no checkpoint got to storage.
NICE = 10
STARTED_NICE = os.getpriority(os.PRIO_PROCESS, 0)


class Service:
    """Passes orders to one thread per tier."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._queues: dict[str, queue.Queue[tuple[AnyOrder, Job]]] = {}

    def _answer(self, answer: Answer) -> None:
        data = msgspec.json.encode(answer) + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._output, data) :]

    def take(self, told: Told) -> None:
        if isinstance(told, Cancel):
            if job := self._jobs.get(told.id):
                job.cancelled.set()
            return
        job = self._jobs[told.id] = Job(told.limit_s)
        if told.tier not in self._queues:
            waiting: queue.Queue[tuple[AnyOrder, Job]] = queue.Queue()
            self._queues[told.tier] = waiting
            threading.Thread(target=self._serve, args=(waiting,), name=told.tier, daemon=True).start()
        self._queues[told.tier].put((told, job))

    def _serve(self, waiting: queue.Queue[tuple[AnyOrder, Job]]) -> None:
        while True:
            order, job = waiting.get()
            self._answer(msgspec.structs.replace(_carried_out(order, job), id=order.id))
            del self._jobs[order.id]


def _carried_out(order: AnyOrder, job: Job) -> Answer:
    job.begin()
    try:
        job.check()
        done = _carry_out(order, job)
    except StorageFailure as failure:
        return StorageFailed(why=str(failure))
    except Exception as error:  # a bug must be reported, and must not end other orders
        sys.excepthook(*sys.exc_info())
        return StorageFailed(why=f"unexpected {one_line(error)}")
    return msgspec.structs.replace(done, seconds=round(job.seconds, 3))


def _be_nice() -> None:
    """Make this thread, and the threads that it starts from now on, nicer."""
    os.setpriority(os.PRIO_PROCESS, 0, min(STARTED_NICE + NICE, 19))


def _carry_out(order: AnyOrder, job: Job) -> Done:
    if not isinstance(order, Warm):
        _be_nice()
    match order:
        case WriteLocal():
            done = local.write(order, job)
        case WriteShared():
            done = shared.write(order, job)
        case Warm():
            layout.preload()
            done = Done()
        case Upload():
            done = object_store.upload(order, job)
        case _:
            never(order)
    return done


def main() -> None:
    output = become_helper(nice=0)
    psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    service = Service(output)
    for line in sys.stdin.buffer:
        told = read_told(line)
        if isinstance(told, Strange):
            sys.stderr.write(f"no order: {told}\n")
        else:
            service.take(told)
    os._exit(0)


if __name__ == "__main__":
    main()
