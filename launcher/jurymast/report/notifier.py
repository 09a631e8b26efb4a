"""`python -m jurymast.report.notifier RUN_DIRECTORY`: tells people, by the policy's `notify`, what happens in
a run.

It is a process beside the supervisor and only reads the journal, so that a receiver that fails or hangs
concerns no run. It ends with its input, that is with the supervisor: at once if the run goes on, because the
next supervisor has one of its own; else once the run's end is told. Which notices were sent is in a file of
the run directory.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from jurymast import foreign
from jurymast.core.run.notices import Notice, Quota, due
from jurymast.core.state.settings import Receiver
from jurymast.errors import JurymastError
from jurymast.processes import leave_no_core, log_as
from jurymast.report.follow import end_lines
from jurymast.report.liveness import Liveness
from jurymast.report.sentences import short_reason
from jurymast.report.status import StatusWatcher, incident_json
from jurymast.report.trouble import after_failure
from jurymast.rundir import RunDirectory, write_json

log = logging.getLogger("jurymast.notifier")

POLL_S = 1.0
TRIES, TRY_AGAIN_S, TRY_LIMIT_S = 3, 5.0, 10.0
# After the supervisor's end, for what is not delivered yet.
END_S = 20.0
REASON_CHARACTERS = 500
NICE = 10

Message = dict[str, Any]


def message_of(notice: Notice, watcher: StatusWatcher) -> Message:
    """The notice for people and for programs: `text` is one sentence or more, `next` the command to go on
    with ("" if none is needed)."""
    state = watcher.state
    name = state.name or watcher.plan.name
    following = ""
    if notice.last:
        text, *more = end_lines(state, Liveness("ended", state.phase.value))
        following = next((line.removeprefix("  next: ") for line in more if line.startswith("  next: ")), "")
    elif notice.kind == "alert":
        text, following = state.alerts[notice.number].message, f"jurymast status {state.run}"
    else:
        incident = next(one for one in state.incidents if one.id == notice.number)
        where = f" on {incident.node}" if incident.node else ""
        why = short_reason(incident.evidence, incident.why, REASON_CHARACTERS)
        text = f"incident {incident.id}: {incident.cause}{where}: {why}"
        if notice.kind == "spare":
            left = len(state.spare_nodes())
            text = f"a spare is used for {incident.node or 'a node'}, {left} left ({incident.cause})"
        elif incident.action == "stop":
            following = "; ".join(after_failure(state.run, incident_json(incident)))
    return {
        "run": state.run, "name": name, "kind": notice.kind, "at": notice.t, "text": text, "next": following,
        "step": state.best_step, "directory": str(watcher.directory.root),
    }  # fmt: skip


def spoken(message: Message) -> tuple[str, str]:
    """(title, body) for people."""
    more = (
        f"\n({message['held_back']} notices before this one were held back)" if message["held_back"] else ""
    )
    following = f"\nnext: {message['next']}" if message["next"] else ""
    return f"{message['name']} ({message['run']}): {message['kind']}", f"{message['text']}{following}{more}"


def deliver(receiver: Receiver, message: Message) -> str:
    """Deliver; returns what went wrong, or ""."""
    if receiver.command:
        return _run(receiver.command, message)
    return _post(receiver.url, *spoken(message))


def _run(command: tuple[str, ...], message: Message) -> str:
    text = {f"JURYMAST_NOTICE_{name.upper()}": str(message[name]) for name in ("run", "kind", "text", "next")}
    try:
        done = subprocess.run(
            command, input=json.dumps(message).encode(), env={**os.environ, **text}, timeout=TRY_LIMIT_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"took more than {TRY_LIMIT_S:.0f} s"
    told = done.stderr.decode(errors="replace").strip()[-200:]
    return f"exit code {done.returncode}: {told}" if done.returncode else ""


def _post(url: str, title: str, body: str) -> str:
    try:
        import apprise
    except ImportError:
        return "a url needs Apprise: pip install 'jurymast[notify]'"
    sender = apprise.Apprise()
    if not sender.add(url):
        return "Apprise does not know such an address"
    return "" if sender.notify(title=title, body=body) else "it was refused, or there was no answer"


def shown(receiver: Receiver) -> str:
    """The receiver without what may be a secret."""
    return receiver.command[0] if receiver.command else f"{urlsplit(receiver.url).scheme}://..."


class Mailbox(threading.Thread):
    """Delivers to one receiver, one notice after the other, in a thread that nobody waits for for ever."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(daemon=True)
        self.receiver = receiver
        self._queue: SimpleQueue[Message] = SimpleQueue()
        self._open = 0
        self._changed = threading.Condition()

    def put(self, message: Message) -> None:
        with self._changed:
            self._open += 1
        self._queue.put(message)

    def run(self) -> None:
        if self.receiver.url:  # at the run's end there is no time for it
            with suppress(ImportError):
                import apprise  # noqa: F401
        while True:
            message = self._queue.get()
            for trial in range(TRIES):
                problem = deliver(self.receiver, message)
                if not problem:
                    break
                log.warning("notify %s: %s: %s", shown(self.receiver), message["kind"], problem)
                if trial + 1 < TRIES:
                    time.sleep(TRY_AGAIN_S)
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def empty(self, until: float) -> bool:
        """Whether everything is delivered, or given up, by this time of the monotonic clock."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, max(0.0, until - time.monotonic()))


class Notifier:
    def __init__(self, directory: RunDirectory) -> None:
        self._watcher = StatusWatcher(directory)
        receivers = directory.own_plan().settings.notify
        self._boxes = [(Quota(receiver), Mailbox(receiver)) for receiver in receivers]
        self._file = directory.notices_file
        self._told = _read_told(directory)
        for _, box in self._boxes:
            box.start()

    def look(self) -> None:
        """Tell what is new in the journal."""
        self._watcher.poll()
        new = due(self._watcher.state, self._told)
        for notice in new:
            message = message_of(notice, self._watcher)
            for quota, box in self._boxes:
                if quota.wants(notice) and (before := quota.takes(notice, time.time())) is not None:
                    box.put({**message, "held_back": before})
        if new:
            self._told.update(notice.key for notice in new)
            write_json(self._file, {"told": sorted(self._told)})

    def finish(self) -> None:
        """Deliver the rest, if the run has ended."""
        self.look()
        until = time.monotonic() + END_S
        if self._watcher.state.ended:
            for _, box in self._boxes:
                box.empty(until)


def _read_told(directory: RunDirectory) -> set[str]:
    try:
        found: Mapping[str, Any] = foreign.load(directory.notices_file, foreign.PLAN_BYTES_MAX)
        return {str(key) for key in found["told"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def main(run_directory: str) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        # The job's; this ends with its input. Not SIG_IGN, which commands would inherit.
        signal.signal(number, lambda *_: None)
    os.nice(NICE)
    log_as("notifier")
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it may tell addresses
    leave_no_core()
    try:
        notifier = Notifier(RunDirectory(run_directory))
        problem = ""
        while not select.select([0], [], [], POLL_S)[0]:
            try:
                notifier.look()
            except (OSError, JurymastError) as error:  # of storage, say, which is tried again
                if str(error) != problem:
                    log.warning("%s", error)
                problem = str(error)
        notifier.finish()
    except (OSError, JurymastError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # a receiver that hangs is not waited for
