"""A failure and its recovery, with the duration of each phase; warnings that wait for people; and every class
of cause that an incident can have: what happened, whose restart budget pays, what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jurymast.core.state import findings
from jurymast.core.state.events import NodeLost
from jurymast.core.state.signatures import Signature

INFRASTRUCTURE = "infrastructure"
APPLICATION = "application"
PREEMPTION = "preemption"
NOBODY = "nobody"  # somebody chose it, or nothing shows whose fault it is
AHEAD = "reservation_ahead"


@dataclass(frozen=True)
class CauseClass:
    """`charged`: infrastructure, application, preemption or nobody. `todo`: for who is on call, after what
    jurymast has already done."""

    name: str
    charged: str
    meaning: str
    todo: str


_CLASSES = (
    CauseClass("node_lost", INFRASTRUCTURE, "a node went silent: power, kernel or network",
               "have the node checked before it is used again"),
    CauseClass("node_crash", INFRASTRUCTURE, "the agent of a node ended or restarted",
               "read the node's log to find what ended the agent"),
    CauseClass("fabric_fault", INFRASTRUCTURE, "many nodes lost their network at once",
               "check the switch, the fabric manager and the power supply; no node is blamed"),
    CauseClass("common_fault", INFRASTRUCTURE, "many nodes reported the same fault at once",
               "find what these nodes have in common; no node is blamed"),
    CauseClass("allocation_lost", INFRASTRUCTURE, "the whole allocation ended without notice",
               "use sacct to find why the job ended"),
    CauseClass("gpu_bad", INFRASTRUCTURE, "a GPU, its memory or its links are broken",
               "drain the node; it needs a reset, a reboot or a repair"),
    CauseClass("gpu_suspect", INFRASTRUCTURE, "a GPU shows signs that it is about to fail",
               "nothing; the node is tested before it is used again, or used last"),
    CauseClass("network_bad", INFRASTRUCTURE, "a node's network device is broken",
               "check the cable, the port and the device of that node"),
    CauseClass("network_suspect", INFRASTRUCTURE, "a node's network device is down or flaps",
               "check the cable and the port; the ranks work without the device for now"),
    CauseClass("host_bad", INFRASTRUCTURE, "a node's host is broken: driver, memory, disk or clock",
               "drain the node and have it checked"),
    CauseClass("host_suspect", INFRASTRUCTURE, "a node's host shows signs of a fault",
               "nothing; the node is tested before it is used again, or used last"),
    CauseClass("gpu_unavailable", INFRASTRUCTURE, "a rank could not use its GPU",
               "check the driver and the fabric manager of that node"),
    CauseClass("worker_killed", INFRASTRUCTURE, "a rank was killed from outside",
               "read the node's kernel log to find what killed it"),
    CauseClass("worker_terminated", INFRASTRUCTURE, "a rank got a SIGTERM that jurymast did not send",
               "find who sent the SIGTERM: an epilog, a user, a preemption"),
    CauseClass("bus_error", INFRASTRUCTURE, "a rank accessed mapped memory that has no backing",
               "check the file system whose files the rank maps"),
    CauseClass("shm_full", INFRASTRUCTURE, "/dev/shm of a node was full",
               "remove files that others left in /dev/shm, or reduce what data loaders use"),
    CauseClass("host_died", INFRASTRUCTURE, "a node's torchrun host died with its ranks",
               "read the log of the node's agent"),
    CauseClass("rank_frozen", INFRASTRUCTURE, "the process of a rank was stopped",
               "find who stopped the process, or what it waits for in the kernel"),
    CauseClass("hang", INFRASTRUCTURE, "no rank made progress",
               "compare where the ranks waited: a rank that differs is the lead"),
    CauseClass("restore_failed", INFRASTRUCTURE, "the image of a rank did not reach its node",
               "check the network between the named nodes"),
    CauseClass("collective_timeout", NOBODY, "a collective took longer than its time-out, nobody knows why",
               "compare where the ranks waited: a rank that differs is the lead"),
    CauseClass("communication", INFRASTRUCTURE, "ranks lost connections; nothing else was found",
               "if it recurs, check the network between the named ranks"),
    CauseClass("storage_full", INFRASTRUCTURE, "shared storage is full or over quota",
               "free space; no node is blamed"),
    CauseClass("storage_failed", INFRASTRUCTURE, "shared storage failed or was too slow",
               "check the file system; no node is blamed"),
    CauseClass("disk_full", INFRASTRUCTURE, "a node's own disk is full",
               "free space on that node"),
    CauseClass("disk_failed", INFRASTRUCTURE, "a node's own disk failed",
               "drain the node and replace the disk"),
    CauseClass("out_of_memory", APPLICATION, "a rank used more memory than the job has",
               "request more memory (--mem), or reduce what data loaders use"),
    CauseClass("gpu_out_of_memory", APPLICATION, "a rank used more memory than the GPU has",
               "use a smaller batch, or more sharding"),
    CauseClass("gpu_exception", APPLICATION, "GPU code of the training accessed an illegal address",
               "run once with CUDA_LAUNCH_BLOCKING=1 to see where"),
    CauseClass("import_failed", APPLICATION, "a module or library failed to load",
               "repair the environment of the script"),
    CauseClass("worker_exception", APPLICATION, "the training's code raised an exception",
               "read the traceback"),
    CauseClass("worker_exit", APPLICATION, "the training's code ended a rank: too early, or as failed",
               "read the log of that rank"),
    CauseClass("script_fault", APPLICATION, "the same failure comes at the same point, whatever the node",
               "find what the script does there: what it waits for, how it fills memory, whom it kills"),
    CauseClass("worker_crash", APPLICATION, "the training's code crashed a rank",
               "read the log of that rank; a core dump has more"),
    CauseClass("preempted", PREEMPTION, "Slurm preempted the job for another one",
               "nothing; the run goes on when Slurm starts the job again"),
    CauseClass("job_ended", NOBODY, "Slurm or a user ended the job, and it was started again",
               "use sacct to find why it ended, if nobody knows"),
    CauseClass("node_taken", NOBODY, "the agent of a node was told to end: by Slurm or by a reboot",
               "ask who took the node, if it was not announced"),
    CauseClass("straggler", NOBODY, "a node slowed down all others",
               "nothing; the node is tested before it is used again, or used last"),
    CauseClass("relaunch_asked", NOBODY, "a supervisor had all ranks started anew, for want of another way",
               "nothing; the evidence says why"),
    CauseClass("grow_asked", NOBODY, "nodes were there again for a run that went on with fewer", "nothing"),
    CauseClass("restart_asked", NOBODY, "a user requested a restart", ""),
    CauseClass("drain_asked", NOBODY, "a user removed a node", ""),
    CauseClass(AHEAD, NOBODY, "a reservation was about to begin, and the ranks left its nodes",
               "nothing"),
    CauseClass("requeue_asked", NOBODY, "the job begins anew: before its time limit, or as a user asked", ""),
    CauseClass("rollback_asked", NOBODY, "a user rolled back to an older checkpoint", ""),
)  # fmt: skip
CAUSES = {cause.name: cause for cause in _CLASSES}

# The cause that a finding leads to, by its kind.
_OF_KIND = {findings.HARDWARE: "gpu", findings.NETWORK: "network", findings.HOST: "host"}
FROM_FINDINGS = frozenset(f"{name}_{verdict}" for name in _OF_KIND.values() for verdict in ("bad", "suspect"))


def of_finding(finding: findings.Finding) -> str:
    """Return the class of an incident that this finding, bad or suspect, caused. KeyError: it is of a kind
    for which no node is responsible."""
    part = _OF_KIND[finding.kind]
    if part == "gpu" and not (finding.code.startswith(("xid-", "gpu-")) or finding.device.startswith("gpu")):
        part = "host"  # broken memory of the machine is hardware, too
    return f"{part}_{finding.verdict.value}"


# What the run chose by itself.
CHOSEN = frozenset({"straggler", "relaunch_asked", "grow_asked"})
# Ends that somebody or Slurm ordered: no failures, neither of a node nor of the script.
ORDERED = frozenset(cause.name for cause in _CLASSES if cause.charged in (PREEMPTION, NOBODY)) - {
    *CHOSEN, "collective_timeout",
}  # fmt: skip


def meaning(name: str) -> str:
    """Return one sentence without its full stop; "" for a class of another version."""
    return CAUSES[name].meaning if name in CAUSES else ""


@dataclass
class Alert:
    """Something that people must decide, because no node may be blamed for it. It lasts while more `nodes`
    are affected, the last of them at `until`; alerts of one `subject` soon after each other are one."""

    subject: str
    at: float
    until: float
    message: str
    nodes: dict[str, None]


def because(evidence: str, why: str) -> str:
    """Return a decision's whole reason as one sentence: what was found, and what followed from it."""
    return "; ".join(part for part in (evidence, why) if part)


@dataclass
class Incident:
    """Times are seconds since the epoch, None until known. Steps are the training's own. `why`: the reason
    for `action`, without the evidence. The attempt had done `steps_done`, and its ranks had been up for
    `lived_s`; `place` is the node's group rank, -1 if none is at fault. Unless `numbered`, the step from
    which it lost counts from the attempt's start; `in_process`: ranks went on in their processes, from
    `kept_steps` steps after the save (0: from a save, or it is not heard of yet), or else `went_back` says
    why from a save. Unless `rework_known`, nobody knows when that was done
    again, and the rework took at least what is told. Another failure, or the run's end, may have cut the
    rework short."""

    id: int
    fault_at: float
    detected_at: float
    attempt: int
    step_lost_from: int
    steps_done: int = 0
    lived_s: float = 0.0
    place: int = -1
    cause: str = ""
    charged: str = ""
    node: str = ""
    rank: int | None = None
    evidence: str = ""
    traceback: str = ""
    signature: Signature = Signature()
    action: str = ""
    why: str = ""
    stopped_at: float | None = None
    decided_at: float | None = None
    launched_at: float | None = None
    started_at: float | None = None
    restored_at: float | None = None
    restore_s: float = 0.0
    step_restored: int | None = None
    recovered_at: float | None = None
    cut_short_at: float | None = None
    ended_at: float | None = None
    tiers: dict[str, int] = field(default_factory=dict)
    lost: tuple[NodeLost, ...] = ()  # nodes, if that was told as the cause
    numbered: bool = True
    rework_known: bool = True
    in_process: bool = False
    kept_steps: int = 0
    went_back: str = ""

    @property
    def reason(self) -> str:
        return because(self.evidence, self.why)

    @property
    def open(self) -> bool:
        return self.ended_at is None

    def launches(self, t: float, *, in_process: bool) -> None:
        """Ranks are launched, maybe once more: what those before them had restored counts no longer."""
        self.launched_at, self.in_process = t, in_process
        self.started_at, self.restored_at, self.restore_s = None, None, 0.0

    def end_unrecovered(self, t: float, stepped_at: float | None, until: float) -> None:
        """End it at `t`, before all lost steps were done again. Of these, some were from `stepped_at`, the
        attempt's first step, `until` then."""
        self.ended_at = t
        if self.launched_at is not None and stepped_at is not None:
            self.cut_short_at = max(until, stepped_at)

    def seconds(self) -> dict[str, float]:
        """Return the exclusive phases in order; they sum to the time from fault to recovery (or the last
        known point)."""
        restore_from = None if self.restored_at is None else self.restored_at - self.restore_s
        marks = (
            ("detect", self.detected_at),
            ("diagnose", self.stopped_at),
            ("decide", self.decided_at),
            ("replace", self.launched_at),
            ("launch", restore_from if restore_from is not None else self.started_at),
            ("restore", self.restored_at),
            ("rework", self.recovered_at or self.cut_short_at),
        )
        parts: dict[str, float] = {}
        reached = self.fault_at
        for name, until in marks:
            until = reached if until is None else max(reached, until)
            parts[name] = until - reached
            reached = until
        return parts

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "cause": self.cause, "node": self.node or None, "rank": self.rank,
            "evidence": self.evidence, "traceback": self.traceback or None, "charged": self.charged,
            "action": self.action, "why": self.why, "reason": self.reason, "attempt": self.attempt,
            "at": self.fault_at, "recovered_at": self.recovered_at, "open": self.open,
            "seconds": {name: round(value, 6) for name, value in self.seconds().items()},
            "numbered": self.numbered, "rework_known": self.rework_known,
            "step_lost_from": self.step_lost_from, "step_restored": self.step_restored, "tiers": self.tiers,
        }  # fmt: skip
