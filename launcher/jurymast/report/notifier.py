"""Tells people, by the policy's `notify`, what happens in a run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from jurymast import foreign, programs
from jurymast.core.run.notices import Notice, Quota, due
from jurymast.core.state.incident import CAUSES
from jurymast.core.state.settings import Receiver
from jurymast.reading import patiently
from jurymast.report.follow import end_lines
from jurymast.report.incidents import incident_json
from jurymast.report.liveness import Liveness
from jurymast.report.mailbox import Mailbox
from jurymast.report.next_steps import after_failure
from jurymast.report.sentences import short_reason
from jurymast.report.status import StatusWatcher
from jurymast.rundir import RunDirectory, write_json

log = logging.getLogger("jurymast.notifier")

TRY_LIMIT_S = 10.0
REASON_CHARACTERS = 500

Message = dict[str, Any]


def message_of(notice: Notice, watcher: StatusWatcher) -> Message:
    """The notice for people and for programs: `text` is one sentence or more, `next` what to do, or the
    command to go on with ("" if none is needed)."""
    state = watcher.state
    name = state.name or watcher.plan.name
    following = ""
    if notice.last:
        text, *more = end_lines(state, Liveness("ended", state.phase.value))
        following = next((line.removeprefix("  next: ") for line in more if line.startswith("  next: ")), "")
        text = "\n".join([text, *(line.strip() for line in more if line.startswith("  warning: "))])
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
        if incident.action == "stop":
            following = "; ".join(after_failure(state.run, incident_json(incident)))
        elif incident.cause in CAUSES:
            following = CAUSES[incident.cause].todo
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
        # Not a pipe, which whatever the command leaves behind in the background would keep open.
        with tempfile.TemporaryFile(dir=foreign.temporary_place()) as errors:
            done = subprocess.run(
                command, executable=programs.executable(command[0]),
                input=json.dumps(message).encode(), env={**os.environ, **text}, timeout=TRY_LIMIT_S,
                stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            )  # fmt: skip
            errors.seek(0)
            told = errors.read().decode(errors="replace").strip()[-200:]
    except (OSError, ValueError) as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"took more than {TRY_LIMIT_S:.0f} s"
    return f"exit code {done.returncode}: {told}" if done.returncode else ""


def _post(url: str, title: str, body: str) -> str:
    try:
        import apprise
    except ImportError:
        return "a url needs Apprise: pip install 'jurymast[notify]'"
    sender = apprise.Apprise()
    if not sender.add(url):
        return "Apprise does not know such an address"
    # As text: in a mail, which is HTML by default, it would be a part of the page.
    told = sender.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT)
    return "" if told else "it was refused, or there was no answer"


def shown(receiver: Receiver) -> str:
    """The receiver without what may be a secret."""
    return receiver.command[0] if receiver.command else f"{urlsplit(receiver.url).scheme}://..."


class Notifier:
    """Tells people, by the policy's `notify`. Which notices were sent is in a file of the run directory."""

    def __init__(self, watcher: StatusWatcher, receivers: Sequence[Receiver]) -> None:
        self._watcher = watcher
        self._boxes = [
            (Quota(one), Mailbox(f"notify {shown(one)}", partial(deliver, one), log)) for one in receivers
        ]
        self._file = watcher.directory.notices_file
        self._told = _read_told(watcher.directory)
        for _, box in self._boxes:
            box.start()
        if any(receiver.url for receiver in receivers):  # at the run's end there is no time for it
            threading.Thread(target=_load_apprise, daemon=True).start()

    def look(self) -> None:
        """Tell what is new."""
        new = due(self._watcher.state, self._told)
        for notice in new:
            message = message_of(notice, self._watcher)
            for quota, box in self._boxes:
                if quota.wants(notice) and (before := quota.takes(notice, time.monotonic())) is not None:
                    box.put({**message, "held_back": before})
        if new:
            self._told.update(notice.key for notice in new)
            write_json(self._file, {"told": sorted(self._told)})

    def finish(self, until: float) -> None:
        """Deliver the rest, if the run has ended."""
        if self._watcher.state.ended:
            for _, box in self._boxes:
                box.empty(until)


def _load_apprise() -> None:
    with suppress(ImportError):
        import apprise  # noqa: F401


def _read_told(directory: RunDirectory) -> set[str]:
    path = directory.notices_file
    try:  # whoever cannot read it for a moment must not tell everything again
        found: Mapping[str, Any] = patiently(
            lambda: foreign.load(path, foreign.PLAN_BYTES_MAX), directory.root
        )
        return {str(key) for key in found["told"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
