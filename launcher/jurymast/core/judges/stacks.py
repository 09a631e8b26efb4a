"""Where hanging ranks are, and which of them never reached the place where the others wait: from dumps of
stacks.

A rank waits for others if it is in `torch.distributed`, or in a backward (gradients are reduced in it). On a
GPU, collectives run asynchronously, and the program waits at a line of its own code that needs their result.
So if no rank is seen to wait, the place where most of them are counts as the waiting one.

Records of torch's flight recorders show who has not entered a collective in which others are.

Each process group numbers its collectives, and all its members enter them in order. So a member whose newest
number is lower than another's is missing there. It may be missing because it waits in another group; then the
culprit is a rank that is missing and waits nowhere. Point-to-point transfers are left out, because the
records do not name the other side.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from jurymast.core.state.evidence import Entered, RankPlace

if TYPE_CHECKING:  # agents do without, and start sooner so
    from jurymast.core.state.events import StacksTaken

# A rank is in as many groups as its parallelism has dimensions, and a few more.
GROUPS_MAX = 32
NAME_MAX = 80


def entered(rank: int, record: Mapping[str, Any]) -> list[Entered]:
    """Parse torch's record of one rank (version 2 of its format: torch 2.4 and later). Raises KeyError,
    TypeError, ValueError or AttributeError for anything that is not such a record."""
    newest: dict[str, Mapping[str, Any]] = {}
    for entry in record["entries"]:
        if not entry.get("is_p2p"):
            group = str(entry["process_group"][0])
            if group not in newest or entry["collective_seq_id"] >= newest[group]["collective_seq_id"]:
                newest[group] = entry
    found = [
        Entered(
            rank, group, int(entry["collective_seq_id"]),
            str(entry["profiling_name"]).rpartition(":")[2][:NAME_MAX],
            not entry.get("retired") and entry.get("state") != "completed",
        )
        for group, entry in newest.items()
    ]  # fmt: skip
    never = [group for group in record.get("pg_config", {}) if group and group not in newest]
    found += [Entered(rank, group, 0, "", False) for group in never]
    return found[:GROUPS_MAX]


@dataclass(frozen=True)
class Missing:
    """`ranks` never entered this collective, in which `waiting` are."""

    collective: str
    number: int
    group: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


def missing(seen: Iterable[Entered]) -> Missing | None:
    """Return the collective in which the run hangs, or None if the records do not show it. Ranks without a
    record are not judged."""
    known = list(seen)
    stuck = {one.rank for one in known if one.waits}
    groups: dict[str, list[Entered]] = {}
    for one in known:
        groups.setdefault(one.group, []).append(one)
    found = [each for name, ones in groups.items() if (each := _of_group(name, ones)) is not None]
    # A missing rank that waits elsewhere is itself held up; the root cause is where the missing ranks wait
    # nowhere.
    return min(found, key=lambda each: len(stuck & set(each.ranks)) / len(each.ranks), default=None)


def _of_group(name: str, ones: Sequence[Entered]) -> Missing | None:
    furthest = max(ones, key=lambda one: one.number)
    waiting = tuple(sorted({one.rank for one in ones if one.number == furthest.number and one.waits}))
    late = tuple(sorted({one.rank for one in ones if one.number < furthest.number}))
    if not waiting or not late:
        return None
    return Missing(furthest.collective, furthest.number, name, late, waiting)


COLLECTIVE, BACKWARD, LOADER, CODE, UNKNOWN = "collective", "backward", "loader", "code", "unknown"
BLOCKED = "blocked"  # by a process of its own that is stopped, or gone
WAITING = (COLLECTIVE, BACKWARD)
OF_THE_SCRIPT = (CODE, LOADER)  # a line of the script says where such a rank is
MAY_BLOCK = (LOADER, UNKNOWN)  # its loader's processes are worth a look
PLACES_TOLD = 4
RANKS_TOLD = 6
# faulthandler: File "train.py", line 57 in main, with a comma in a traceback; py-spy: main (train.py:57)
_FRAME = re.compile(r'^ +File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$')
_PY_SPY_FRAME = re.compile(r"^ +(?P<function>\S+) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_MAIN_THREAD = re.compile(r'^(Current thread |Thread .*"MainThread")')
_THREAD = re.compile(r"^(Current thread |Thread )")
# Files that belong neither to the user's script nor to its modules.
_NOT_THE_USERS = re.compile(r"^<|/lib/python3[^/]*/|/(site|dist)-packages/|/jurymast/(worker|checkpoint)/")
# torch's and torchdata's, of a process that loads data, and where it stands while it has nothing to load
_WORKER_LOOP = "_worker_loop"
_AWAITS_WORK = re.compile(r"/multiprocessing/(queues|connection)\.py$|/selectors\.py$")
# By a frame's file; the innermost frame that is in this table, or the user's, says where the rank stands.
_AUTOGRAD = re.compile(r"/torch/autograd/")
_IN_COLLECTIVE = re.compile(r"/torch/(distributed/|nn/parallel/distributed\.py)")
_COMPILES = re.compile(r"/torch/_(inductor|dynamo)/|/subprocess\.py$")  # or waits for a program of its own
_LOADS = re.compile(r"/torch/utils/data/|/torchdata/")
_PLACES = (
    (_COMPILES, CODE),
    (re.compile(r"/torch/distributed/checkpoint/"), CODE),  # writes and reads files
    (_IN_COLLECTIVE, COLLECTIVE),
    (_AUTOGRAD, BACKWARD),
    (_LOADS, LOADER),
)
_SAID = {COLLECTIVE: "", BACKWARD: "backward", LOADER: "the data loader"}
# Decorators, and helpers of collectives.
_INNER = re.compile(r"^(wrapper|inner|_?wait\w*|_\w+)$")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass(frozen=True)
class Place:
    """Where a rank is: `kind` is one of the above, `text` is for people: "in all_reduce at train.py:57", with
    the line as `where` ("" if unknown)."""

    kind: str
    text: str
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class LoaderWorker:
    """A process that loads data for a rank: its number, in the order of their starts, the kernel's letter for
    its state ("" if it is gone), and the stack of its main thread, if it gave one."""

    number: int
    state: str
    stack: tuple[Frame, ...] = ()

    def trouble(self) -> str:
        """Say what keeps it from delivering, as far as can be seen; "" for one that waits for work."""
        if self.state in ("", "Z", "X"):
            return "has ended"
        if self.state == "T":
            return "is stopped (state T)"
        if not self.stack:
            return f"gave no stack (state {self.state})"
        inner = [frame.function for frame in self.stack]
        begun = _WORKER_LOOP in inner
        # The frames outside its loop only show what its rank was doing when it forked the process.
        own = self.stack[: inner.index(_WORKER_LOOP)] if begun else self.stack[:1]
        if begun and all(_AWAITS_WORK.search(frame.file) for frame in own):
            return ""
        at = next((frame for frame in own if not _NOT_THE_USERS.search(frame.file)), self.stack[0])
        where = f"in {at.function} at {at.place}"
        return f"is {where}" if begun else f"has not begun: {where}"


def loads_data(stack: Sequence[Frame]) -> bool:
    """Return whether a process with this stack was started to load data, which is what its rank was doing
    when it forked the process."""
    return any(_LOADS.search(frame.file) for frame in stack)


def behind(at: Place, workers: Sequence[LoaderWorker]) -> Place:
    """Return the place of a rank that waits for its data loader (or may, if it gave no stack), with what
    holds the loader up."""
    dead = [worker for worker in workers if worker.state in ("", "Z", "X", "T")]
    holding = dead or [worker for worker in workers if worker.trouble() and at.kind == LOADER]
    if at.kind not in MAY_BLOCK or not holding:
        return at
    told = ", ".join(f"worker {worker.number}, which {worker.trouble()}" for worker in holding[:PLACES_TOLD])
    if at.kind == UNKNOWN:
        return Place(UNKNOWN, f"{at.text}, may wait for its DataLoader {told}")
    return Place(BLOCKED if dead else LOADER, f"waiting at {at.where} for its DataLoader {told}", at.where)


def stand(stack: Sequence[Frame], at: Place, busy: int = 0) -> RankPlace:
    """Return what one look shows. A rank that waits for others may poll within torch: it stays where the
    user's code is. A backward that runs Python (a compilation, a function of the user's) does not wait. Other
    ranks count as moving while they, or their processes, are at work: `busy` counts the looks at which they
    were."""
    works = at.kind == BACKWARD and not _AUTOGRAD.search(stack[0].file)
    if stack and (at.kind not in (*WAITING, BLOCKED) or works):
        return RankPlace(
            CODE if works else at.kind, f"{zlib.crc32(repr((stack, busy)).encode()):08x}", at.text
        )
    return RankPlace(at.kind, at.text, at.text)


def frames(dump: str) -> list[Frame]:
    """Return the frames of the main thread, innermost first, from the output of faulthandler or py-spy; [] if
    there are none."""
    found: list[Frame] = []
    inside = False
    for line in dump.splitlines():
        if _THREAD.match(line):
            if inside and found:
                break
            inside = bool(_MAIN_THREAD.match(line))
        frame = _FRAME.match(line) or _PY_SPY_FRAME.match(line)
        if inside and frame:
            found.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return found


def raised(traceback: str) -> str:
    """Say where a rank was when it raised an exception; "" for a traceback without frames."""
    found = [frame for line in traceback.splitlines() if (frame := _FRAME.match(line))]
    stack = [Frame(frame["file"], int(frame["line"]), frame["function"]) for frame in reversed(found)]
    return place(stack).text if stack else ""


def place(stack: Sequence[Frame], process: str = "") -> Place:
    """Return where a rank is. `process`: what the kernel says about it, for a rank that gave no stack."""
    if not stack:
        return Place(UNKNOWN, f"without a stack{f' ({process})' if process else ''}")
    users = next((frame for frame in stack if not _NOT_THE_USERS.search(frame.file)), None)
    for frame in stack:
        if frame is users:
            break
        kind = next((kind for pattern, kind in _PLACES if pattern.search(frame.file)), "")
        if kind == CODE:
            break
        if kind:
            where = (users or frame).place
            return Place(kind, f"in {_SAID[kind] or _collective(stack, frame)} at {where}", where)
    innermost = users or stack[0]
    return Place(CODE, f"in {innermost.function} at {innermost.place}", innermost.place)


def _collective(stack: Sequence[Frame], innermost: Frame) -> str:
    """The user's name for the collective whose innermost torch frame this is."""
    for frame in stack[stack.index(innermost) :]:
        if not _NOT_THE_USERS.search(frame.file):
            break
        if _IN_COLLECTIVE.search(frame.file) and not _INNER.match(frame.function):
            return f"DDP's {frame.function}" if "/nn/parallel/" in frame.file else frame.function
    return "a collective"


def absent(places: Mapping[int, Place]) -> tuple[int, ...]:
    """Return the ranks that never reached the place where the others wait; () if all did, or it cannot be
    told. If a process of its own holds up a few ranks, these are returned, whatever the others do."""
    blocked = tuple(sorted(rank for rank, at in places.items() if at.kind == BLOCKED))
    if len(blocked) == 1 or 0 < 2 * len(blocked) < len(places):
        return blocked
    waiting = {rank for rank, at in places.items() if at.kind in WAITING}
    if not waiting:
        texts = Counter(at.text for at in places.values() if at.kind != UNKNOWN)
        most = max(texts, key=texts.__getitem__, default="")
        if 2 * texts[most] > len(places):
            waiting = {rank for rank, at in places.items() if at.text == most}
    if not waiting:
        return ()
    missing = set(places) - waiting
    # A rank without a stack may be where the others are: it is named only if no rank was seen elsewhere.
    seen = {rank for rank in missing if places[rank].kind != UNKNOWN}
    return tuple(sorted(seen or missing))


def describe(places: Mapping[int, Place]) -> str:
    """Return one sentence; ranks that are alone somewhere come first, and of these those that do not wait for
    others. "" without any ranks."""
    groups: dict[str, list[int]] = {}
    for rank, at in sorted(places.items()):
        groups.setdefault(at.text, []).append(rank)
    fewest = sorted(groups.items(), key=lambda group: (len(group[1]), places[group[1][0]].kind in WAITING))
    parts = [f"{ranks_told(ranks)} {text}" for text, ranks in fewest[:PLACES_TOLD]]
    if len(fewest) > PLACES_TOLD:
        parts.append(f"the others in {len(fewest) - PLACES_TOLD} more places")
    return ", ".join(parts)


def places(taken: Sequence[StacksTaken]) -> dict[int, Place]:
    """Return the places of all ranks of all nodes. Most ranks are at the same few."""
    known: dict[tuple[str, str], Place] = {}
    found = {}
    for event in taken:
        for rank, kind, text in zip(event.ranks, event.kinds, event.places, strict=False):
            if (kind, text) not in known:
                known[kind, text] = Place(kind, text)
            found[rank] = known[kind, text]
    return found


def in_flight(taken: Sequence[StacksTaken]) -> Missing | None:
    """Return the collective that some ranks never entered, from the flight recorders of all nodes. On GPUs,
    where collectives run asynchronously, they show more than stacks."""
    try:
        return missing(msgspec.convert([one for event in taken for one in event.flights], list[Entered]))
    except msgspec.ValidationError:
        return None


def evidence(taken: Sequence[StacksTaken]) -> list[str]:
    """Return what an incident says about stacks: where the ranks were, which were missing, and where it is
    saved."""
    at = places(taken)
    if not at:
        return []
    told = [describe(at)]
    flight = in_flight(taken)
    if flight is not None:
        told.append(
            f"{ranks_told(flight.ranks)} never entered {flight.collective} number {flight.number} of group "
            f"{flight.group}, where {ranks_told(flight.waiting)} wait{'s' * (len(flight.waiting) == 1)}"
        )
    elif late := absent(at):
        told.append(f"{ranks_told(late)} never reached the place where the others wait")
    asked = [rank for event in taken if event.recorded for rank in event.ranks]
    silent = sorted(set(asked) - {rank for event in taken for rank in event.records})
    if silent:
        told.append(f"no flight record from {ranks_told(silent)}")
    folder = next((event.folder for event in taken if event.folder), "")
    return [*told, f"stacks in {folder}"] if folder else told


def ranks_told(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", or only how many there are."""
    if len(ranks) > RANKS_TOLD:
        return f"{len(ranks)} ranks"
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
