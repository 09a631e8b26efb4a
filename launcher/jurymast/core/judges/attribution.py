"""Determines who is at fault: the root cause among the reports of one incident.

When a rank dies, its peers' collectives fail a moment later, so the most frequent report is rarely the cause.
All reports count that arrived within `FIRST_S` of the first one that could be a root cause. Order of
precedence, and within one of these the earliest report:

1. a lost node (more than two, over a tenth of the run: the fabric), unless only its agent was killed for
want of memory, a request by a user; 2. a finding for
which a node leaves, unless the program failed before it; 3. an end of a rank that a finding on its node
explains (within `NEAR_S`), or that indicates broken hardware; 4. a process killed from outside, then a
stopped one; 5. an exception of the user's code, or an exit code without one; a torchrun host that died; a
crash; 6. a process that got a request to end; 7. if only collectives failed or hang: a suspect finding near,
trouble with storage near, what many nodes reported at once, ranks that never reached the collective in which
the others hang, a collective that timed out, one that failed, a hang.

A node that was chosen to leave for its slowness is the cause, unless ranks failed for a reason of their own.

Tables of exception texts and signals interpret what ranks report when they end; the classes are those of
`core.state.incident`. Rows are tried in order; the first match counts. Sources of the texts: strerror(3) for
errno names, `cudaGetErrorString` in NVIDIA's CUDA runtime documentation, `ncclGetErrorString` and torch's own
messages.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jurymast.core.judges import stacks
from jurymast.core.judges.blame import ACTING_KINDS, OOM_KILL, SHM_FULL, acts, describe
from jurymast.core.state import findings, incident
from jurymast.core.state.events import NodeLost, RanksHung, StacksTaken, WorkerFailed
from jurymast.core.state.findings import Finding, Verdict
from jurymast.core.state.incident import AHEAD, APPLICATION, CAUSES
from jurymast.core.state.run import EndOrder, Findings
from jurymast.core.state.signatures import ErrorSignature, Signature, error_signature
from jurymast.core.state.texts import NODES_TOLD, count, request, some

# ---- what the end of a rank says

# Messages of torch, gloo, NCCL and the socket layer when the *other* side has failed.
COMMUNICATION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer closed|socket (closed|timeout)|"
    r"ncclremoteerror|nccl(system|internal)error|remote process exited|nccl communicator was aborted|"
    r"unhandled (system|cuda) error|nccl error|"
    r"timed out waiting .*(recv|send|operation)|gloo.*(timeout|timed out|read error|write error)|"
    r"\bdist(network|store|backend)error|rendezvous.*(closed|timeout)|tcpstore|watchdog",
    re.IGNORECASE,
)
# Of these, a rank's own time-out: it has waited, and others may never have come.
TIMED_OUT = re.compile(
    r"watchdog|collective operation timeout|timed out waiting|gloo.*timeout|(wait|socket) timeout",
    re.IGNORECASE,
)


# A loader's worker had this exception, and torch's loader raises one of its own.
_RAISED_AGAIN = r"(?:\w+: caught )?"
BAD_ALLOC = r"std::bad_alloc"
# What the "CLASS: message" of an exception says, by the class that it indicates; the first match counts.
EXCEPTIONS = {
    "gpu_bad": r"uncorrectable (ecc|nvlink) error|\bgpu (is lost|has fallen off)|gpu requires reset",
    "gpu_unavailable": (
        r"no cuda-capable device|cuda-capable device\(s\) is/are busy|system not yet initialized|"
        r"system has unsupported display driver|cuda driver initialization failed|cuda unknown error"
    ),
    "gpu_out_of_memory": (
        r"cuda.*out of memory|outofmemoryerror|hip.*out of memory|\b(cu|hip|miopen|roc)\w*_alloc_failed"
    ),
    "gpu_exception": (
        r"device-side assert|illegal memory access|illegal instruction was encountered|misaligned address|"
        r"unspecified launch failure|cublas_status_execution_failed"
    ),
    # Last: what torch.save says when a file ends before what it wrote, without the errno.
    "storage_full": (
        r"no space left on device|disk quota exceeded|\[errno (28|122)\]|unexpected pos \d+ vs \d+"
    ),
    "storage_failed": (  # 107, 108 and 110 come from sockets, too, but then without a path
        r"input/output error|stale file handle|read-only file system|\[errno (5|30|116)\]|"
        r"\[errno (107|108|110)\][^']*: '|pytorchstreamwriter failed"
    ),
    "import_failed": (
        rf"^{_RAISED_AGAIN}(import|modulenotfound)error|cannot open shared object file|undefined symbol"
    ),
    "out_of_memory": (
        rf"^{_RAISED_AGAIN}[\w.]*memoryerror|defaultcpuallocator: can't allocate|cannot allocate memory"
        rf"|{BAD_ALLOC}"
    ),
}
# The class instead, if the text names a path on the node itself.
_ON_THE_NODE = {"storage_full": "disk_full", "storage_failed": "disk_failed"}

# By number; those that are not here were sent by somebody else (`worker_killed`).
SIGNALS = {
    4: "worker_crash",  # SIGILL
    6: "worker_crash",  # SIGABRT
    7: "bus_error",  # SIGBUS
    8: "worker_crash",  # SIGFPE
    11: "worker_crash",  # SIGSEGV
    15: "worker_terminated",  # SIGTERM
}
SIGNAL_NAMES = {
    1: "SIGHUP", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV",
    15: "SIGTERM",
}  # fmt: skip
# With this much of /dev/shm in use, a SIGBUS means that a page could not be allocated.
SHM_FULL_SHARE = 0.98


@lru_cache(maxsize=64)  # thousands of ranks fail with the same words
def exception_class(text: str, local_paths: tuple[str, ...]) -> str:
    """Return the class that an exception's "CLASS: message" indicates; "" if nothing matches. Trouble with
    storage is the node's own if the text names a path below one of `local_paths`."""
    for kind, pattern in EXCEPTIONS.items():
        if re.search(pattern, text, re.IGNORECASE):
            here = any(re.search(rf"(?<![\w/.-]){re.escape(path)}(/|\b)", text) for path in local_paths)
            return _ON_THE_NODE.get(kind, kind) if here else kind
    return ""


# ---- the cause

# A finding this close to an end of ranks, before or after it, is related to it (seconds).
NEAR_S = 180.0
OUT_OF_MEMORY = "out_of_memory"
# The error of a rank that waits for what it is to restore.
RESTORE_FAILED = "RestoreFailed"
# The error of a rank whose storage has given no answer for too long while it restores.
STORAGE_HANGS = "StorageHangs"
# Reports of one failure arrive within this time; later ones are consequences (seconds).
FIRST_S = 2.0
MANY_LOST, MANY_LOST_FRACTION = 2, 0.1
LOCAL_PATHS = ("/tmp", "/var/tmp", "/dev/shm")

# Ends of ranks that a broken machine explains as well as the program, by the kinds of findings that do.
_MACHINE = (findings.HARDWARE, findings.HOST)
_EXPLAINED_BY = {
    "worker_crash": (findings.HARDWARE,),
    "gpu_exception": (findings.HARDWARE,),
    "gpu_unavailable": _MACHINE,
    "bus_error": _MACHINE,
    "worker_killed": _MACHINE,
    "host_died": _MACHINE,
}
# On every node at once the program is the cause, although on a single node the node is.
_OF_ONE_NODE = ("bus_error", "shm_full", "gpu_unavailable", "disk_full")
# The cause that many nodes' simultaneous reports lead to, by the kind of finding.
_OF_MANY = {
    findings.NETWORK: "fabric_fault",
    findings.SYMPATHETIC: "fabric_fault",
    findings.STORAGE: "storage_failed",
}
_KILLED = (OUT_OF_MEMORY, "worker_killed", "bus_error", "shm_full")
_CASCADES = ("communication", "collective_timeout", "worker_terminated")
# Ends of ranks by precedence; all other kinds have the place that is empty here.
_PRECEDENCE = (incident.FROM_FINDINGS, _KILLED, (), ("host_died",), ("worker_crash",), _CASCADES)
_OTHERS, _LAST = _PRECEDENCE.index(()), _PRECEDENCE.index(_CASCADES)


@dataclass(frozen=True)
class Cause:
    """`kind` is the incident's class; `charged` names the restart budget that pays: infrastructure,
    application or nobody. `signature` is equal whenever the same cause returns."""

    kind: str
    charged: str
    node: str
    nodes: tuple[str, ...]
    rank: int | None
    exit_code: int
    evidence: str
    signature: Signature


@dataclass(frozen=True)
class Surroundings:
    """What was found around the failure: (node, finding) pairs, earliest first.

    `leaving`: those for which nodes are to leave; `near`: others on placed nodes, within `NEAR_S`; `common`:
    what many nodes reported at once, with `common_kind`, the kind of finding. `nodes`: how many have ranks.
    """

    leaving: Sequence[tuple[str, Finding]] = ()
    near: Sequence[tuple[str, Finding]] = ()
    common: str = ""
    common_kind: str = ""
    nodes: int = 0
    local_paths: tuple[str, ...] = LOCAL_PATHS

    def against(self, node: str, kinds: Collection[str] = ACTING_KINDS) -> Finding | None:
        """Return the worst finding on this node that is of one of these kinds."""
        found = [f for n, f in (*self.leaving, *self.near) if n == node and acts(f) and f.kind in kinds]
        return min(found, key=lambda f: f.verdict is not Verdict.BAD, default=None)

    def has(self, node: str, code: str) -> bool:
        return any(n == node and f.code == code for n, f in (*self.leaving, *self.near))


def attribute(found: Findings, around: Surroundings | None = None) -> Cause:
    """Return the root cause of an incident with these findings; there must be one (ValueError)."""
    around, hung = around or Surroundings(), found.hung
    if found.lost:
        return lost_cause(found.lost, around)
    if found.asked is not None:
        told = f"{request(found.asked.what, found.asked.node)} requested by {found.asked.by}"
        kind = AHEAD if found.asked.reserved else f"{found.asked.what}_asked"
        return cause_of(kind, told, found.asked.node)
    classed = [(_class_of(failure, around), failure) for failure in found.failures.values()]
    if around.leaving and not _program_failed_before(classed, around.leaving):
        return _found_cause(around.leaving)
    first = min((f.t for kind, f in classed if kind not in _CASCADES), default=0.0)
    roots = [pair for pair in classed if pair[0] in _CASCADES or pair[1].t <= first + FIRST_S]
    place = min((_place(kind) for kind, _ in roots), default=_LAST)
    if hung is not None and hung.ranks and place >= _OTHERS:
        return _hang_cause("rank_frozen", hung, found.stacks)
    if place < _LAST:
        return _failure_cause([pair for pair in roots if _place(pair[0]) == place], around)
    if (slow := found.straggling) is not None:
        signature = Signature("straggler", slow.node)
        return cause_of("straggler", slow.evidence, slow.node, rank=slow.rank, signature=signature)
    return _collective_cause(roots, found, around)


def _place(kind: str) -> int:
    return next((place for place, kinds in enumerate(_PRECEDENCE) if kind in kinds), _OTHERS)


def _program_failed_before(
    classed: Sequence[tuple[str, WorkerFailed]], leaving: Sequence[tuple[str, Finding]]
) -> bool:
    """Whether the program failed before a finding: a node may turn bad while ranks are being stopped."""
    since = min(finding.at for _, finding in leaving)
    nodes = {node for node, _ in leaving}
    return any(
        CAUSES[kind].charged == APPLICATION and f.t < since and f.node not in nodes for kind, f in classed
    )


def _collective_cause(
    classed: Sequence[tuple[str, WorkerFailed]], found: Findings, around: Surroundings
) -> Cause:
    """The cause if no rank's own end explains the incident."""
    hung = found.hung
    terminated = [pair for pair in classed if pair[0] == "worker_terminated"]
    if terminated:
        return _failure_cause(terminated, around)
    if not classed and hung is None and not around.common:
        raise ValueError("an incident without any finding has no cause")
    # A process that a rank waited for, or was connected to, was killed; that rank was not.
    if killed := [(OUT_OF_MEMORY, failure) for _, failure in classed if failure.oom_kills]:
        return _failure_cause(killed, around)
    # A rank is told as ended before its failure is known.
    if ended := sorted({*found.ended} - {failure.rank for _, failure in classed}):
        return _early_end(classed, found, ended)
    suspects = [
        (node, finding) for node, finding in around.near
        if acts(finding) and (finding.kind != findings.HOST or finding.verdict is Verdict.BAD)
    ]  # fmt: skip
    if suspects:
        return _found_cause(suspects[:1])
    storage = [f"{n}: {describe(f)}" for n, f in around.near if f.kind == findings.STORAGE]
    if storage:
        return cause_of("storage_failed", "; ".join(storage[:3]))
    if around.common:
        return cause_of(_OF_MANY.get(around.common_kind, "common_fault"), around.common)
    killed_near = [f"{node}: {describe(f)}" for node, f in around.near if f.code == OOM_KILL]
    if hung is not None and killed_near:
        return cause_of(OUT_OF_MEMORY, "; ".join([hung.evidence, *killed_near[:3]]))
    # Ranks that are stopped because all hang lose their connections meanwhile, which explains nothing.
    if hung is not None and (_absent(found.stacks) or all(failure.t >= hung.t for _, failure in classed)):
        return _hang_cause("hang", hung, found.stacks)
    timed_out = [failure for kind, failure in classed if kind == "collective_timeout"]
    if hung is None and timed_out and _absent(found.stacks):
        return _hang_cause("hang", _ended_by_torch(timed_out), found.stacks)
    for kind in ("collective_timeout", "communication"):
        if failed := [pair for pair in classed if pair[0] == kind]:
            return _failure_cause(failed, around)
    assert hung is not None
    return _hang_cause("hang", hung, found.stacks)


ENDED_EARLY = Signature("worker_exit", error=ErrorSignature(message="ended early"))


def _early_end(classed: Sequence[tuple[str, WorkerFailed]], found: Findings, ended: Sequence[int]) -> Cause:
    """The cause if some ranks had `ended` without an error, so that the others waited, or lost them: one rank
    had less data, say."""
    unknown = {*found.without_code}
    ends = (
        (sorted({*ended} - unknown), "ended early, with exit code 0"),
        (sorted({*ended} & unknown), "ended early, stopped before the exit code was known"),
    )
    told = "; ".join(f"{stacks.ranks_told(ranks)} {how}" for ranks, how in ends if ranks)
    others, code = "", 0
    if classed:
        first, code = classed[0][1], max(failure.exit_code for _, failure in classed)  # as srun ends then
        at = " ".join(["rank", str(first.rank), stacks.raised(first.traceback)]).rstrip()
        others = f"the others then failed: {at}: {_told(first)}"
    if found.hung is not None:
        code = 0
        others = "; ".join([f"the others hang: {found.hung.evidence}", *stacks.evidence(found.stacks)])
    evidence = f"{told}; {others}"
    return cause_of("worker_exit", evidence, rank=ended[0], exit_code=code, signature=ENDED_EARLY)


def _class_of(failure: WorkerFailed, around: Surroundings) -> str:
    kind = _own_class(failure, around)
    finding = around.against(failure.node, _EXPLAINED_BY.get(kind, ()))
    return kind if finding is None else incident.of_finding(finding)


def _own_class(failure: WorkerFailed, around: Surroundings) -> str:
    if failure.error == RESTORE_FAILED:
        return "restore_failed"
    if failure.error == STORAGE_HANGS:
        return "storage_failed"
    if failure.rank < 0:
        return OUT_OF_MEMORY if failure.oom_kills else "host_died"
    if failure.exit_code < 0:
        number = -failure.exit_code
        if number == 9:
            # The cgroup's own count knows; a finding within minutes may be of an earlier attempt.
            seen = around.has(failure.node, OOM_KILL) if failure.oom_kills is None else failure.oom_kills > 0
            return OUT_OF_MEMORY if seen else "worker_killed"
        if number == 7 and (failure.shm_used >= SHM_FULL_SHARE or around.has(failure.node, SHM_FULL)):
            return "shm_full"
        if number == 6 and TIMED_OUT.search(failure.log):
            return "collective_timeout"
        if number == 6 and re.search(BAD_ALLOC, failure.log):
            return OUT_OF_MEMORY
        return SIGNALS.get(number, "worker_killed")
    text = f"{failure.error}: {failure.message}"
    kind = exception_class(text, around.local_paths)
    if kind:
        return kind
    if COMMUNICATION.search(text):
        return "collective_timeout" if TIMED_OUT.search(text) else "communication"
    if failure.oom_kills:  # of a process that the rank had started, such as a loader's worker
        return OUT_OF_MEMORY
    return "worker_exception" if failure.error else "worker_exit"


# Causes from what was chosen.


def cause_of(
    kind: str, evidence: str, node: str = "", nodes: tuple[str, ...] = (), *, rank: int | None = None,
    exit_code: int = 0, charged: str = "", signature: Signature | None = None,
) -> Cause:  # fmt: skip
    """Return the cause of this class. `node` is at fault, or each of `nodes` shows it. `charged` and
    `signature` are those of the class if not given."""
    charged = charged or (CAUSES[kind].charged if kind in CAUSES else incident.NOBODY)
    nodes = nodes or ((node,) if node else ())
    return Cause(kind, charged, node, nodes, rank, exit_code, evidence, signature or Signature(kind))


# What the end of a job does to ranks and agents. All else has a cause of its own.
OF_AN_END = frozenset({
    "worker_terminated", "worker_killed", "worker_exit", "host_died", "node_crash", "node_taken",
    "communication", "collective_timeout",
})  # fmt: skip
# Causes that a node's loss leads to.
OF_A_LOSS = frozenset({"node_lost", "node_crash", "fabric_fault"})
# What Slurm says of jobs whose end nobody ordered. All other words are orders.
FAILED_JOBS = {
    "node_fail": "allocation_lost", "boot_fail": "allocation_lost", "launch_failed": "allocation_lost",
    "failed": "allocation_lost", "out_of_memory": "out_of_memory",
}  # fmt: skip


def cause_of_end(order: EndOrder | None) -> Cause:
    """Return why an allocation ended without a decision of the run."""
    if order is None:
        return cause_of(
            "allocation_lost",
            "the allocation ended, and it is not known why: neither its supervisor nor Slurm's accounting "
            "has a reason",
        )
    kind = "preempted" if order.why == "preempted" else FAILED_JOBS.get(order.why, "job_ended")
    said = f"Slurm's reason: {order.why}" if order.why else "Slurm gave no reason"
    return cause_of(kind, f"Slurm ended the job; {said}")


def lost_cause(lost: Sequence[NodeLost], around: Surroundings) -> Cause:
    """The cause if nodes were lost, or only their agents were killed for want of memory."""
    words = {
        "closed": "its agent's connection was reset", "left": "its agent left",
        "taken": "its agent got a SIGTERM while the job went on",
    }  # fmt: skip
    parts = []
    if len(killed := [event for event in lost if event.oom_kills]) == len(lost):
        return _out_of_memory(killed[0].node, killed[0].oom_kills, len(killed) - 1)
    lost = [event for event in lost if not event.oom_kills]
    names = tuple(dict.fromkeys(event.node for event in lost))
    for event in lost:
        told = words.get(event.how) or f"silent for {event.silent_s:.1f} s (limit {event.limit_s:.1f} s)"
        found = around.against(event.node)
        before = f", before that {describe(found)}" if found else ""
        parts.append(f"{event.node}: {told}" + (f", {event.evidence}" if event.evidence else "") + before)
    failed = [event for event in lost if event.how != "taken"]
    kind = "node_taken" if not failed else "node_lost" if failed[0].how == "silent" else "node_crash"
    if failed and len(names) > max(MANY_LOST, MANY_LOST_FRACTION * around.nodes) and around.nodes:
        kind = "fabric_fault"
    node, evidence = names[0] if len(names) == 1 else "", some(parts, NODES_TOLD, "; ")
    return cause_of(kind, evidence, node, names, signature=Signature(kind, node))


def _out_of_memory(node: str, kills: int, more: int = 0) -> Cause:
    """The cause if the kernel killed the agent of a node, and of `more` others, for want of memory. The
    program used the memory, so no node is at fault."""
    evidence = f"{node}: its agent was killed after {count(kills, 'out-of-memory kill')} in the node's cgroup"
    evidence += f" (and {count(more, 'more node')})" if more else ""
    return cause_of(OUT_OF_MEMORY, evidence, node, exit_code=-9)


def _found_cause(found: Sequence[tuple[str, Finding]]) -> Cause:
    """The finding that counts: bad before suspect, then the earliest."""
    (node, finding), *more = sorted(found, key=lambda pair: pair[1].verdict is not Verdict.BAD)
    kind = incident.of_finding(finding)
    evidence = some([f"{n}: {describe(f)}" for n, f in ((node, finding), *more)], NODES_TOLD, "; ")
    nodes = tuple(dict.fromkeys(n for n, _ in ((node, finding), *more)))
    return cause_of(kind, evidence, node, nodes, signature=Signature(kind, node, finding.code))


def _failure_cause(found: Sequence[tuple[str, WorkerFailed]], around: Surroundings) -> Cause:
    kind, first = found[0]
    same = [failure for other, failure in found if other == kind]
    nodes = tuple(dict.fromkeys(f.node for f in same))
    charged = CAUSES[kind].charged
    if kind in _OF_ONE_NODE and len(nodes) > 1 and len(nodes) == around.nodes:
        charged = APPLICATION
    # A failure that is no node's fault names none, or the next incident would count it against the node; but
    # storage may hang on one node alone. A rank whose time-out ended its wait is where the fault is not.
    of_many = kind.startswith("storage_") and first.error != STORAGE_HANGS
    named = len(nodes) == 1 and not of_many and kind != "collective_timeout"
    also = f" (and {count(len(same) - 1, 'more rank')})" if len(same) > 1 else ""
    who = f"rank {first.rank} on {first.node}" if first.rank >= 0 else first.node
    evidence = f"{who}: {_told(first)}{also}"
    finding = around.against(first.node) if kind in incident.FROM_FINDINGS else None
    evidence += f"; {describe(finding)}" if finding else ""
    evidence += "".join(
        f"; {describe(f)}" for n, f in around.near if n == first.node and f.kind == findings.APPLICATION
    )
    # The kernel chooses whom it kills, and what its peers say of that.
    if kind == OUT_OF_MEMORY:
        named_node = nodes[0] if named else ""
        return cause_of(kind, evidence, named_node, nodes, rank=first.rank, exit_code=first.exit_code)
    # A broken machine or network interrupts a script at a random place; an error of the script has one place.
    error = error_signature(first.error, first.message, first.traceback if charged == APPLICATION else "")
    return cause_of(
        kind, evidence, nodes[0] if named else "", nodes, rank=first.rank, exit_code=first.exit_code,
        charged=charged, signature=Signature(kind, exit_code=first.exit_code, error=error),
    )  # fmt: skip


def _told(failure: WorkerFailed) -> str:
    told = " ".join([describe_exit(failure.exit_code), stacks.raised(failure.traceback)]).rstrip()
    if failure.error:
        told = f"{failure.error}: {failure.message}" if failure.message else failure.error
    if failure.oom_kills:
        told += f", after {count(failure.oom_kills, 'out-of-memory kill')} in the node's cgroup"
    elif failure.exit_code == -7:
        told += f", {failure.shm_used:.0%} of /dev/shm in use"
    ends = "its log ends" if failure.rank >= 0 else "it said last"
    return f"{told}; {ends}: {failure.log}" if failure.log else told


def _absent(taken: Sequence[StacksTaken]) -> dict[int, str]:
    """The nodes of the ranks that never reached the place where the others wait, by rank."""
    node_of = {rank: event.node for event in taken for rank in event.ranks}
    flight = stacks.in_flight(taken)
    late = stacks.absent(stacks.places(taken)) if flight is None else flight.ranks
    return {rank: node_of[rank] for rank in late if rank in node_of}


def _ended_by_torch(timed_out: Sequence[WorkerFailed]) -> RanksHung:
    """The hang of ranks for which others waited until torch's time-out."""
    first, ranks = timed_out[0], sorted(failure.rank for failure in timed_out)
    told = f"torch's time-out ended the wait of {stacks.ranks_told(ranks)}"
    return RanksHung(
        t=first.t, attempt=first.attempt, ranks=(), node="", silent_s=0.0, limit_s=0.0, evidence=told
    )


def _hang_cause(kind: str, hung: RanksHung, taken: Sequence[StacksTaken]) -> Cause:
    missing = {} if hung.ranks else _absent(taken)
    nodes = tuple(dict.fromkeys(missing.values())) or ((hung.node,) if hung.node else ())
    node = nodes[0] if len(nodes) == 1 else ""
    rank = next(iter(hung.ranks or missing), None)
    evidence = "; ".join([hung.evidence, *stacks.evidence(taken)])
    places = stacks.places(taken)
    at = {*places.values()} if rank is None else {places[rank]} if rank in missing else set()
    where = next((one.text for one in at if len(at) == 1 and one.kind in stacks.OF_THE_SCRIPT), "")
    signature = Signature(kind, error=ErrorSignature(message=where))
    return cause_of(kind, evidence, node, nodes, rank=rank, signature=signature)


def describe_exit(exit_code: int) -> str:
    """Describe an exit as a shell user would: "exit code 3", "killed by SIGKILL"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"killed by {SIGNAL_NAMES.get(-exit_code, f'signal {-exit_code}')}"
