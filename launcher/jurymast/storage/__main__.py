"""`python -m jurymast.storage`: carries out orders from stdin, one after another, and answers on stdout; see
`storage.orders`.

The process ends with its stdin; nothing that it leaves half-written counts as whole.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time

import msgspec
import psutil

from jurymast.checkpoint.directory import one_line
from jurymast.core.state.message import Unreadable
from jurymast.core.state.messages import WritePhase
from jurymast.errors import never
from jurymast.processes import become_helper
from jurymast.storage import local, object_store, orders, shared
from jurymast.storage.orders import PROGRESS_EVERY_S, Answer, AnyOrder, Done, Job, Progress, Reached

# How much nicer than the ranks this process is while it writes. Not while it imports torch: on a busy node
# that took minutes, during which no checkpoint got to storage.
NICE = 10
STARTED_NICE = os.getpriority(os.PRIO_PROCESS, 0)


def serve(waiting: queue.SimpleQueue[AnyOrder], jobs: dict[int, Job], output: int) -> None:
    """Carry out orders; this runs in a thread of its own, so that they can be cancelled meanwhile."""
    while True:
        order = waiting.get()
        answer = _carried_out(order, jobs[order.id])
        del jobs[order.id]  # nothing more is said of it once it is answered
        _say(output, msgspec.structs.replace(answer, id=order.id))


_saying = threading.Lock()


def _say(output: int, answer: Answer | Reached | Progress) -> None:
    data = msgspec.json.encode(answer) + b"\n"
    with _saying:  # helpers of an order tell of its progress
        while data:
            data = data[os.write(output, data) :]


def _job(order: AnyOrder, output: int) -> Job:
    said_at = time.monotonic()

    def advance(_count: int) -> None:
        nonlocal said_at
        if time.monotonic() >= said_at + min(PROGRESS_EVERY_S, order.limit_s / 2):
            said_at = time.monotonic()
            _say(output, Progress(id=order.id, bytes=job.bytes))

    def reached(phase: WritePhase) -> None:
        _say(output, Reached(id=order.id, phase=phase))

    job = Job(order.limit_s, advance, reached)
    return job


def _carried_out(order: AnyOrder, job: Job) -> Answer:
    job.begin()
    try:
        job.check()
        return _carry_out(order, job)
    except orders.DamagedImage as failure:
        return orders.StorageFailed(why=str(failure), damaged=failure.rank)
    except orders.StorageFailure as failure:
        return orders.StorageFailed(why=str(failure))
    except Exception as error:  # a bug must be reported, and must not end other orders
        sys.excepthook(*sys.exc_info())
        return orders.StorageFailed(why=f"unexpected {one_line(error)}")


def _carry_out(order: AnyOrder, job: Job) -> Done:
    if not isinstance(order, orders.Warm):
        # Of this thread, and of the threads that it starts from now on.
        os.setpriority(os.PRIO_PROCESS, 0, min(STARTED_NICE + NICE, 19))
    match order:
        case orders.WriteLocal():
            done = local.write(order, job)
        case orders.WriteShared():
            done = shared.write(order, job)
        case orders.Warm():
            shared.preload()
            done = Done()
        case orders.Upload():
            done = object_store.upload(order, job)
        case _:
            never(order)
    return done


def load_ahead(order: AnyOrder) -> None:
    """Have torch loaded for an order that needs it, by a thread that is as fast as ranks: that of the orders
    stands back for good once it has written. A node may have to lead only because the one that had torch
    loaded was lost, and then the whole job waits for this write before it leaves its nodes."""
    if isinstance(order, orders.WriteShared) and order.lead:
        threading.Thread(target=shared.preload, daemon=True).start()


def main() -> None:
    output = become_helper(nice=0)
    psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    waiting: queue.SimpleQueue[AnyOrder] = queue.SimpleQueue()
    jobs: dict[int, Job] = {}
    threading.Thread(target=serve, args=(waiting, jobs, output), daemon=True).start()
    for line in sys.stdin.buffer:
        told = orders.read_told(line)
        if isinstance(told, Unreadable):
            sys.stderr.write(f"no order: {told}\n")
        elif not isinstance(told, orders.Cancel | orders.Continue):
            jobs[told.id] = _job(told, output)
            load_ahead(told)
            waiting.put(told)
        elif job := jobs.get(told.id):
            job.cancel() if isinstance(told, orders.Cancel) else job.go_on(told)
    os._exit(0)


if __name__ == "__main__":
    main()
