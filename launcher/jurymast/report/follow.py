"""Follows a run to its end: the output of `submit --wait`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TextIO

from jurymast.core.state import events as ev
from jurymast.core.state.effects import Launch, RaiseAlert, Requeue
from jurymast.core.state.run import RunState
from jurymast.journal import Entry
from jurymast.report.incidents import incident_json
from jurymast.report.liveness import Liveness, keeps_nodes_for, look
from jurymast.report.next_steps import after_failure
from jurymast.report.sentences import is_routine, sentence, short_reason
from jurymast.report.status import (
    StatusWatcher,
    doubts,
    exit_code_of,
    public_state,
    shown_step,
    step_known,
)
from jurymast.report.text import count, duration, one_line, rates, step_told, throughput
from jurymast.rundir import RunDirectory

POLL_S = 0.2
FIRST_LOOK_S = 1.0
LOOK_EVERY_S = 5.0
# A log file gets a line of progress only now and then; on a terminal the line is replaced.
PROGRESS_EVERY_S = 30.0
# A job that has just ended may still be writing its last entries.
LAST_WORDS_S = 2.0
# How often the supervisor of a run that has ended is asked whether its last checkpoint is written.
ASK_EVERY_S = 0.5
# The report and --json have the whole text.
REASON_CHARACTERS = 240
# Shown in fewer words by the incident's own line.
_TOLD_ELSEWHERE = frozenset(
    kind.__name__
    for kind in (
        ev.AllocationEnded, ev.Progress, ev.Saved, ev.NodeJoined, ev.NodeLost, ev.WorkerFailed, ev.RanksHung,
    )
)  # fmt: skip
_DECISIONS_SHOWN = frozenset(kind.__name__ for kind in (Launch, Requeue, RaiseAlert))


class ProgressLine:
    """Prints lines on `stream`; on a terminal, a line of progress below them is replaced again and again. A
    pipe gets a line of progress every `every_s` seconds."""

    def __init__(self, stream: TextIO, every_s: float = PROGRESS_EVERY_S) -> None:
        self._stream = stream
        self._every_s = every_s
        self.terminal = stream.isatty()
        self._drawn = False
        self._shown_at = float("-inf")
        self._shown = ""

    def say(self, text: str, t: float | None = None) -> None:
        """Print a line that stays, about something that happened at `t` (seconds since the epoch)."""
        self.write(f"{time.strftime('%H:%M:%S', time.localtime(t))} {one_line(text)}")

    def write(self, text: str) -> None:
        """Print a line without a time."""
        self._put(text + "\n")

    def show(self, text: str) -> None:
        """Show the newest progress."""
        now = time.monotonic()
        if text == self._shown and self._drawn == self.terminal:  # it is still there
            return
        if self.terminal:
            self._put(one_line(text)[: shutil.get_terminal_size((111, 24)).columns - 1])
            self._drawn, self._shown = True, text
        elif now - self._shown_at >= self._every_s:
            self._shown_at, self._shown = now, text
            self.say(text)

    def close(self) -> None:
        if self._drawn:
            self._put("")

    def _put(self, text: str) -> None:
        erase = "\r\x1b[K" if self._drawn else ""
        # A stream's encoding may be plain ASCII, and a character it lacks must not end the command.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(erase + text.encode(encoding, errors="replace").decode(encoding))
        self._stream.flush()
        self._drawn = False


class Narrator(StatusWatcher):
    """Prints new journal entries as lines."""

    def __init__(self, directory: RunDirectory, progress: ProgressLine) -> None:
        super().__init__(directory)
        self._progress = progress
        self._told = 0  # number of incidents whose decision was printed

    def tell(self) -> None:
        """Print what is new."""
        for entry in self.poll():
            if "decision" in entry:
                self._tell_incidents(entry["t"])
            self._tell(entry)
        self._tell_incidents(self.state.now)
        if self.state.attempt and not self.state.ended:
            self._progress.show(progress_line(self.state))

    def _tell(self, entry: Entry) -> None:
        kind = entry.get("decision") or entry.get("event")
        failed_save = kind == "Saved" and not entry["ok"]
        if "decision" in entry:
            shown = kind in _DECISIONS_SHOWN
        else:
            shown = not is_routine(entry) and (kind not in _TOLD_ELSEWHERE or failed_save)
        if shown:
            self._progress.say(sentence(entry), entry["t"])

    def _tell_incidents(self, until: float) -> None:
        """Print the incidents decided by `until`: a decision is best understood after its cause."""
        for incident in self.state.incidents[self._told :]:
            if incident.decided_at is None or incident.decided_at > until:
                return
            self._told += 1
            why = short_reason(incident.evidence, incident.why, REASON_CHARACTERS)
            self._progress.say(f"incident {incident.id}: {incident.cause}: {why}", incident.decided_at)


def progress_line(state: RunState) -> str:
    """One line with state, attempt, step, step time and newest checkpoint."""
    line = f"{state.public_state}, attempt {state.attempt}, {_step(state)}"
    if state.step_s:
        line += f", {duration(state.step_s)} a step"
    line = ", ".join([line, *rates(throughput(state.samples_s, state.tokens_s))])
    return line + (f", saved step {state.saved_step}" if state.saved_step is not None else "")


def wait(run_directory: Path | str, stream: TextIO | None = None) -> int:
    """Follow the run until it ends, and its last checkpoint is on storage, printing its progress on `stream`
    (stderr); returns its exit code.

    If the job ends without an outcome from the supervisor: 79, or 80 if Slurm reports a cancel. Raises
    RunDirectoryError.
    """
    directory = RunDirectory(run_directory)
    progress = ProgressLine(sys.stderr if stream is None else stream)
    narrator = Narrator(directory, progress)
    try:
        life = _follow(narrator, progress)
        while what := keeps_nodes_for(directory, narrator.state):
            progress.show(f"{narrator.state.public_state}; {what}")
            time.sleep(ASK_EVERY_S)
    finally:
        progress.close()
    for line in end_lines(narrator.state, life):
        progress.say(line)
    return exit_code_of(narrator.state, life) or 0


def _follow(narrator: Narrator, progress: ProgressLine) -> Liveness:
    """Wait until the run has ended, by its journal or by its job."""
    look_at, told, gone_at = time.monotonic() + FIRST_LOOK_S, "", 0.0
    life = Liveness("unknown")
    while True:
        narrator.tell()
        if narrator.state.ended:
            return Liveness("ended", narrator.state.phase.value)
        now = time.monotonic()
        if life.kind == "gone" and now > gone_at + LAST_WORDS_S:
            return life
        if now >= look_at:
            look_at = now + LOOK_EVERY_S
            before, life = life, look(narrator.directory, narrator.state)
            gone_at = gone_at if before.kind == "gone" else now
            if life.kind == "pending" and life.detail != told:
                progress.say(f"job {life.job} waits: {life.detail}")
            told = life.detail if life.kind == "pending" else ""
        time.sleep(POLL_S)


def _step(state: RunState) -> str:
    return step_told(shown_step(state), state.attempt, known=step_known(state))


def end_lines(state: RunState, life: Liveness) -> list[str]:
    """How the run ended; for a failure, the cause with its traceback."""
    word, why = public_state(state, life)
    if word == "succeeded":
        spent = duration((state.ended_at or state.now) - state.submitted_at)
        incidents = count(len(state.incidents), "incident")
        doubted = [f"  warning: {text}" for text in doubts(state)]
        return [f"the run succeeded: {_step(state)} after {spent}, {incidents}", *doubted]
    lines = [f"the run {word}: {one_line(why, REASON_CHARACTERS)}"]
    if word == "failed" and state.incidents:
        ways = after_failure(state.run, incident_json(state.incidents[-1]))
        lines.append(f"  next: {'; '.join(ways)}")
        lines += [f"  {line}" for line in state.incidents[-1].traceback.rstrip().splitlines()]
    return lines + [f"  warning: {text}" for text in doubts(state)]
