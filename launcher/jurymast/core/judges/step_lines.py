"""Step lines in the log of a training that does not say its steps to jurymast: what common loops and trainers
print (`step 12`, `iter 12/100`, Megatron's iterations, tqdm's and Lightning's bars, Hugging Face's losses).

Only one kind of line counts, the most frequent one: a trainer that prints a bar and a line for each step says
the same twice. Lines about checkpoints, evaluations or settings are none, and neither are bars of anything
but the training.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone

# An epoch's thousandths stand for steps where a log tells only epochs.
PER_EPOCH = 1000

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORD = re.compile(
    r"\b(?:global[ _])?(?:step|iter|iteration)\b[\"' =:#\]\[]{1,8}(\d{1,12})\b(?!\.\d)", re.IGNORECASE
)
# The log may be another user's: a number has an end, and no line takes longer than its length.
_BAR = re.compile(r"(\d{1,12})/(\d{1,12}) \[?((?:\d{1,6}:)?\d{1,3}:\d\d)(?:<| •)")
_EPOCH = re.compile(r"\bepoch\b[ :=\[]*(\d{1,9})(?!\d)", re.IGNORECASE)
_LOSS = re.compile(r"\{'(?:loss|train_loss)': [^{]*'epoch': '?(\d{1,9}(?!\d)(?:\.\d{1,17})?)")
# Slurm's own messages: its steps are others.
_SLURMS = re.compile(r"^(?:srun|slurmstepd|slurmd)\b.*?:|\*\*\* (?:STEP|JOB) ")
# What srun says of a task that a SIGKILL ended.
_KILLED = re.compile(r"^srun: error: \S+: tasks? [\d,-]+: Killed")
# Before a number of a step, these words say that the line is about something else.
_OTHER = re.compile(
    r"\b(?:resum|restor|load(?:ed|ing)?\b|sav(?:e|ed|es|ing)\b|checkpoint|eval|valid|val\b|test|total|max\b|warm)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"^(?:\[?[a-z]*\d+\]?: *)+")  # of a task or rank
_TRAINS = re.compile(r"\b(?:epoch|train|step|iter)", re.IGNORECASE)
_TIME = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(?: ?(Z\b|[+-]\d\d:?\d\d\b))?"
)


@dataclass(frozen=True)
class StepLine:
    """A line after step `step`, at `at` (seconds since the epoch), or `since_s` after a bar began; None if it
    does not say. `epoch` and `total` are those of a bar, `kind` the kind of line."""

    step: int
    at: float | None = None
    since_s: float | None = None
    epoch: int | None = None
    total: int | None = None
    kind: str = "word"


def time_in(line: str) -> float | None:
    """The first date and time in a line, in seconds since the epoch. Without a zone it is local time."""
    found = _TIME.search(line)
    if found is None:
        return None
    zone = (found[8] or "").replace("Z", "+0000").replace(":", "")
    try:
        at = datetime(*(int(found[part]) for part in range(1, 7)))  # type: ignore[arg-type]
        if zone:
            seconds = int(zone[1:3]) * 3600 + int(zone[3:5]) * 60
            at = at.replace(tzinfo=timezone.utc)
            return at.timestamp() - (seconds if zone[0] == "+" else -seconds) + _fraction(found[7])
        return at.timestamp() + _fraction(found[7])
    except (ValueError, OverflowError, OSError):
        return None


def _fraction(digits: str | None) -> float:
    return float(f"0.{digits}") if digits else 0.0


def step_line(text: str) -> StepLine | None:
    """What one line tells of a step; None for any other line."""
    line = _COLOURS.sub("", text)
    if _SLURMS.search(line):
        return None
    if (bar := _BAR.search(line)) is not None:
        before = _LABEL.sub("", line[: bar.start()].rsplit("|", 2)[0])
        if _OTHER.search(before) or (re.search(r"[A-Za-z]", before) and not _TRAINS.search(before)):
            return None
        epoch = _EPOCH.search(before)
        return StepLine(
            int(bar[1]), time_in(line), _clock_s(bar[3]), int(epoch[1]) if epoch else None, int(bar[2]), "bar"
        )  # fmt: skip
    if (loss := _LOSS.search(line)) is not None:
        return StepLine(round(float(loss[1]) * PER_EPOCH), time_in(line), kind="epoch")
    word = _WORD.search(line)
    if word is None or _OTHER.search(line[: word.start()]):
        return None
    return StepLine(int(word[1]), time_in(line))


def _clock_s(text: str) -> float:
    seconds = 0
    for part in text.split(":"):
        seconds = 60 * seconds + int(part)
    return float(seconds)


@dataclass(frozen=True)
class StepLog:
    """The step lines of a log, with increasing numbers as long as a training goes on. `numbered`: its numbers
    are those of the whole training, and not of one pass over the data. `killed`: steps after whose lines a
    rank was killed."""

    lines: tuple[StepLine, ...] = ()
    numbered: bool = True
    killed: frozenset[int] = frozenset()

    @property
    def kind(self) -> str:
        return self.lines[0].kind if self.lines else ""


def read_steps(texts: Iterable[str]) -> StepLog:
    """Read the step lines of a log."""
    kinds: defaultdict[tuple[str, int | None], list[StepLine]] = defaultdict(list)
    killed, newest = set[int](), 0
    for text in texts:
        found = step_line(text)
        if found is None and _KILLED.match(text):
            killed.add(newest)
        if found is not None:
            newest = found.step
            lines = kinds[found.kind, found.total]  # a bar of another length is another loop's
            if not lines or lines[-1] != found:
                lines.append(found)
    most = max(kinds.values(), key=len, default=[])
    base, numbered, lines = 0, True, list[StepLine]()
    for line, before in zip(most, [None, *most], strict=False):
        if line.epoch is not None and line.total:
            lines.append(replace(line, step=line.epoch * line.total + line.step))
            continue
        if before is not None and before.total and before.step >= before.total and line.step < before.step:
            base, numbered = base + before.total, False  # the next pass over the data
        elif before is not None and line.kind == "bar" and line.step < before.step:
            base = 0  # another attempt
        lines.append(replace(line, step=base + line.step))
    return StepLog(tuple(lines), numbered, frozenset(killed))


def times_of(log: StepLog, written_at: float | None) -> Iterator[tuple[float, int]]:
    """(time, step) of each line whose time is known. Where lines have none, bars tell how long after their
    beginning each was printed; the newest was printed when the log was last `written_at`, or before that, so
    this is the latest that it can have been."""
    dated = [(line.at, line.step) for line in log.lines if line.at is not None]
    if dated or written_at is None:
        yield from dated
        return
    timed = [(line.since_s, line.step) for line in log.lines if line.since_s is not None]
    last: list[tuple[float, int]] = []
    later, end = None, written_at
    for since_s, step in reversed(timed):
        if later is not None and since_s > later:
            break  # of an earlier bar, of whose end nothing is known
        last.append((end - timed[-1][0] + since_s, step))
        later = since_s
    yield from reversed(last)
