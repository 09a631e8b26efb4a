"""What the ranks print, into the step's own output: there people look for it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from jurymast.errors import RunDirectoryError
from jurymast.journal import FileTail
from jurymast.rundir import RunDirectory
from jurymast.script.output import Output

EVERY_S = 0.5
READ_BYTES = 1 << 20
# Of more ranks only the first is relayed: one process reads the logs of all.
RANKS_MAX = 64


class Relay:
    """While it is entered, on a thread of its own; everything is there when it is left."""

    def __init__(self, run: RunDirectory, output: Output, after: int, place: int | None = None) -> None:
        """Of attempts `after` this one; of all ranks, or of those of the node at this `place`."""
        self._run, self._output = run, output
        plan = run.plan()
        each, first = plan.ranks_per_node, (place or 0) * plan.ranks_per_node
        ranks = range(plan.active * each) if place is None else range(first, first + each)
        self._ranks = ranks if len(ranks) <= RANKS_MAX else ranks[:1]
        self._attempt_shown = after + 1
        self._tails: dict[Path, FileTail] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        over = False
        try:
            while not over:
                over = self._over.wait(EVERY_S)
                newest = newest_attempt(self._run)
                while self._attempt_shown < newest:  # an attempt before the newest says nothing any more
                    self._copy_all(self._attempt_shown, whole=True)
                    self._attempt_shown += 1
                self._copy_all(self._attempt_shown, whole=over)
        except OSError:
            return  # whoever read it has gone; the logs have all of it

    def _copy_all(self, attempt: int, *, whole: bool) -> None:
        for log in self._logs(attempt):
            self._copy(self._tails.setdefault(log, FileTail(log)), whole=whole)

    def _logs(self, attempt: int) -> list[Path]:
        return [self._run.rank_log(attempt, rank) for rank in self._ranks]

    def _copy(self, tail: FileTail, *, whole: bool) -> None:
        rank = int(tail.path.stem.removeprefix("rank-"))
        while lines := tail.lines(READ_BYTES, partial=whole):
            self._output.write(rank, lines)
            if not tail.more:
                return


def newest_attempt(run: RunDirectory) -> int:
    """0 when there was none, or nobody knows."""
    try:
        return run.newest_attempt()
    except RunDirectoryError:
        return 0
