"""`python -m jurymast.storage`: carries out orders, a JSON object a line on stdin; answers on stdout.

Orders: {"do": "drain" | "prune" | "warm" | "cancel", "id", "tier", ...}; see the tiers' `drain` for what
else is in one. Answers: {"id", "said": "progress", "bytes"}, and at the end "done" (with "bytes", "seconds"
and what the tier has to say) or "failed" (with "why", one line). Orders for one tier are carried out one
after another, those for several at the same time. It ends with its stdin: nothing half-done of it is ever
taken as whole.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable

import psutil

from jurymast.checkpoint.directory import one_line
from jurymast.processes import become_helper
from jurymast.storage import local, object_store, shared
from jurymast.storage.job import Job, Message, StorageFailure

TIERS: dict[str, dict[str, Callable[[Message, Job], Message]]] = {
    "local": {"drain": local.drain, "prune": local.prune},
    "shared": {"drain": shared.drain, "prune": shared.prune, "warm": shared.warm},
    "object": {"drain": object_store.drain, "prune": object_store.prune},
}
NICE = 10


class Service:
    """Hands orders to one thread a tier."""

    def __init__(self, output: int) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._queues: dict[str, queue.Queue[Job]] = {}

    def say(self, message: Message) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._output, data) :]

    def take(self, order: Message) -> None:
        if order["do"] == "cancel":
            if job := self._jobs.get(order["id"]):
                job.cancelled.set()
            return
        job = Job(order, self.say)
        if order["do"] not in TIERS.get(order["tier"], {}):
            self.say({"id": order["id"], "said": "failed", "why": f"there is no tier {order['tier']!r}"})
            return
        self._jobs[order["id"]] = job
        if order["tier"] not in self._queues:
            waiting: queue.Queue[Job] = queue.Queue()
            self._queues[order["tier"]] = waiting
            threading.Thread(target=self._serve, args=(waiting,), name=order["tier"], daemon=True).start()
        self._queues[order["tier"]].put(job)

    def _serve(self, waiting: queue.Queue[Job]) -> None:
        while True:
            job = waiting.get()
            self.say(self._carry_out(job))
            del self._jobs[job.order["id"]]

    def _carry_out(self, job: Job) -> Message:
        order = job.order
        job.begin()
        try:
            job.check()
            found = TIERS[order["tier"]][order["do"]](order, job)
        except StorageFailure as failure:
            return {"id": order["id"], "said": "failed", "why": str(failure)}
        except Exception as error:  # a mistake of ours must be heard of, and must not end the others' work
            sys.excepthook(*sys.exc_info())
            return {"id": order["id"], "said": "failed", "why": f"unexpected {one_line(error)}"}
        notes = {"notes": job.notes} if job.notes else {}
        return {"id": order["id"], "said": "done", "seconds": round(job.seconds, 3), **found, **notes}


def main() -> None:
    output = become_helper(NICE)
    psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, 7)
    service = Service(output)
    for line in sys.stdin.buffer:
        service.take(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
