"""What can happen to a run. Events are the lines of the journal; the state of a run is computed from them in
order.

Every event has `t`, seconds since the Unix epoch on the supervisor's clock (monotonic within one epoch of the
supervisor). Durations end in `_s` and are seconds; sizes end in `_bytes`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jurymast.core.state.evidence import SparedRank


class Event(msgspec.Struct, frozen=True, kw_only=True):
    t: float


class RunStarted(Event, frozen=True, kw_only=True):
    """The first event of a run: what was requested."""

    run: str
    name: str
    active: int
    spares: int
    ranks_per_node: int
    script: str
    submitted_at: float
    policy_hash: str = ""
    version: str = ""
    guessed: bool = False  # as in the plan
    kill_on_bad_exit: bool = False  # likewise


class AllocationStarted(Event, frozen=True, kw_only=True):
    """Slurm (or the local cluster) granted nodes to the run; `restarts` counts requeues of this Slurm job.
    `before`: how the allocation before ended, if nobody has recorded why: in the words of `Signalled`, by
    Slurm's accounting; "" if that says nothing. `partition` and `account` are Slurm's, "" if it has none.
    `began_at`: since when the run has the nodes, which is long before `t` if storage hung; 0.0: unknown."""

    slurm_job: str
    restarts: int
    nodes: tuple[str, ...]
    host: str
    eligible_at: float
    before: str = ""
    partition: str = ""
    account: str = ""
    began_at: float = 0.0


class RefillAsked(Event, frozen=True, kw_only=True):
    """The run asks Slurm for a node, with small job `number` of this run, counted from 1; or it proves to
    have asked, as no supervisor could write (`found`)."""

    number: int
    found: bool = False


class RefillRefused(Event, frozen=True, kw_only=True):
    """Slurm does not take the small job, or it is not known that it has."""

    number: int
    why: str


class RefillExpected(Event, frozen=True, kw_only=True):
    """Slurm has taken the small job, as `job`, and expects it to start at this time (Unix time; None: it does
    not say)."""

    number: int
    job: str
    starts_at: float | None = None


class RefillStarted(Event, frozen=True, kw_only=True):
    """The small job runs on `node`."""

    number: int
    node: str


class RefillEnded(Event, frozen=True, kw_only=True):
    """The small job is over, or was ended. `unneeded`: nobody needed its node any more."""

    number: int
    why: str
    unneeded: bool = False


class AllocationEnded(Event, frozen=True, kw_only=True):
    """The nodes were released. Written at an orderly end, or else by the next allocation."""

    slurm_job: str
    why: str


class SupervisorStarted(Event, frozen=True, kw_only=True):
    """A supervisor took over the run under this epoch. If it runs on another node than the last one, that one
    had been silent for `silent_s`. `read`: by epoch, the last line of the journal that it had read."""

    epoch: int
    node: str
    silent_s: float = 0.0
    read: dict[str, int] | None = None


class NodeJoined(Event, frozen=True, kw_only=True):
    """An agent connected and authenticated itself. `incarnation` is new with every agent process;
    `oom_kills`: how many kills for want of memory ended the one before it."""

    node: str
    address: str
    incarnation: str
    pid: int = 0
    boot_id: str = ""
    gpus: int = 0
    oom_kills: int = 0


class NodeReady(Event, frozen=True, kw_only=True):
    """The node's torchrun host is ready for a launch; its next store listens on `store_port`."""

    node: str
    store_port: int


class NodeLost(Event, frozen=True, kw_only=True):
    """`how`: silent (no heartbeat for `silent_s`), closed (its connection was reset), left (it said so),
    environment (it said that the run's Python cannot load torch there) or taken (its agent got a SIGTERM,
    while the job goes on). `oom_kills`: of processes in its cgroup, if such a
    kill ended its agent."""

    node: str
    how: str
    silent_s: float
    limit_s: float = 0.0
    evidence: str = ""
    oom_kills: int = 0


class WorkersStarted(Event, frozen=True, kw_only=True):
    """The processes of a node's ranks run."""

    node: str
    attempt: int
    pids: tuple[int, ...]


class WorkerFailed(Event, frozen=True, kw_only=True):
    """A rank's process failed: `exit_code` as a shell gives it, negative for a signal.

    The state of its node then: `oom_kills` of its cgroup during the attempt (None: not counted), `shm_used`,
    the share of /dev/shm in use (0..1), and `log`, the end of the rank's log (only after a signal).
    """

    node: str
    attempt: int
    rank: int
    exit_code: int
    error: str = ""
    message: str = ""
    traceback: str = ""
    oom_kills: int | None = 0
    shm_used: float = 0.0
    log: str = ""


class RanksEnded(Event, frozen=True, kw_only=True):
    """These ranks had reached the end of their script, without an error, before the others were stopped.
    `unknown`: those of them that were stopped before they had an exit code. Of tasks that are each for
    themselves: these have ended, and the others run on."""

    attempt: int
    ranks: tuple[int, ...]
    unknown: tuple[int, ...] = ()


class RanksHung(Event, frozen=True, kw_only=True):
    """No rank stepped for `silent_s`, longer than `limit_s`; `ranks` are those with evidence against them."""

    attempt: int
    ranks: tuple[int, ...]
    node: str
    silent_s: float
    limit_s: float
    evidence: str


class WorkersStopped(Event, frozen=True, kw_only=True):
    """All ranks of this node have left the attempt, and are gone but for those that are `spared`; its host
    waits for the next launch with a new store.

    `store_port` 0: the host is gone, too, and NodeReady will report the next one.
    """

    node: str
    attempt: int
    store_port: int
    spared: tuple[SparedRank, ...] = ()


class AttemptFound(Event, frozen=True, kw_only=True):
    """An agent, or the attempt file (`node` ""), knows an attempt that is missing in the journal: its disk
    was full or did not answer when the supervisor that launched the attempt ended."""

    node: str
    attempt: int


class Unfindable(Event, frozen=True, kw_only=True):
    """The run directory does not answer, so nodes that are to return (`who`) cannot look up the supervisor
    there. "": it answers again, or nobody looks any more."""

    who: str


class LaunchWaits(Event, frozen=True, kw_only=True):
    """The launch of `attempt` is decided, but has waited `seconds` for `what` and still waits."""

    attempt: int
    what: str
    seconds: float


class NodeFinished(Event, frozen=True, kw_only=True):
    """Every rank of the node ended with exit code 0."""

    node: str
    attempt: int


class Progress(Event, frozen=True, kw_only=True):
    """The slowest rank has done `step` steps; `stepped_at` is when the last one ended.

    `absolute`: `step` is the training's own number; otherwise it counts from the attempt's start. `given`:
    the script itself says which step it is.
    Later in a run this also reports the regular saves since the previous line: `saves` of them in the tier
    `saved_in`, `saved_step` the newest. Training stood still for `stall_s` for all of them together.
    `samples` and `tokens`: what all ranks together have trained on in this attempt, 0 if the script does not
    say it. `joules`: what all nodes' GPUs have used in this run, at least, as their counters say; 0.0: they
    were not read.
    """

    attempt: int
    step: int
    stepped_at: float
    absolute: bool
    given: bool = False
    step_s: float = 0.0
    saves: int = 0
    saved_step: int = 0
    saved_in: str = ""
    stall_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    joules: float = 0.0


class Saved(Event, frozen=True, kw_only=True):
    """A checkpoint of `step` is complete in `tier`, or (`ok` False) was not saved.

    `stall_s` is how long the training stood still for it. `copied`: agents copied it there from memory while
    the training continued, in so many `seconds` (0.0: not measured). Later in a run not every save is
    recorded: see `core.run.recording`.
    """

    attempt: int
    step: int
    tier: str
    ok: bool
    stall_s: float
    size_bytes: int = 0
    error: str = ""
    copied: bool = False
    seconds: float = 0.0


class RestorePlanned(Event, frozen=True, kw_only=True):
    """What the ranks of `attempt` are to restore: `step`, and how many bytes of it from which tier.

    `tier` is memory when agents hold all images (in whatever tier), else shared, or "" for a fresh start.
    """

    attempt: int
    step: int
    tier: str
    expected_s: float
    tiers: dict[str, int]
    reason: str


class RestoreFailed(Event, frozen=True, kw_only=True):
    """`rank` cannot restore `step` of attempt `of` (0: from the shared tier), because its image cannot be
    brought to the node, or what is stored cannot be read now. The rank waits."""

    node: str
    attempt: int
    rank: int
    step: int
    of: int
    why: str


class RestoreWaits(Event, frozen=True, kw_only=True):
    """`rank` restores, and the storage of `path` has not answered for `seconds`."""

    node: str
    attempt: int
    rank: int
    path: str
    seconds: float


class Fetched(Event, frozen=True, kw_only=True):
    """A node got an image from elsewhere than planned, because copies were damaged or missing (`why`)."""

    attempt: int
    node: str
    rank: int
    tiers: dict[str, int]
    why: tuple[str, ...]


class Restored(Event, frozen=True, kw_only=True):
    """All ranks restored `step` (0: a fresh start) from `tier` in `seconds`. `why`: see `within.Restored`."""

    attempt: int
    step: int
    tier: str
    seconds: float
    size_bytes: int = 0
    skipped: tuple[str, ...] = ()
    why: str = ""


class BeganAt(Event, frozen=True, kw_only=True):
    """The ranks of a script that has not numbered its steps begin their first step: after `step` steps, by
    the optimizer's own count (None: it keeps none). `reads` is a file that the script read although the run
    had written it; without one the attempt begins where the first one did. `given`: later in the attempt the
    script told the number of a step, from which `step` follows."""

    attempt: int
    step: int | None
    reads: str = ""
    given: bool = False


class GroupMade(Event, frozen=True, kw_only=True):
    """A task makes a process group with others, so that all are the ranks of one training. Recorded once."""

    attempt: int
    node: str
    rank: int


class TimeOutSet(Event, frozen=True, kw_only=True):
    """The script gave a process group this time-out, in seconds: ranks may rightly wait so long for one that
    does something else. Recorded if it is longer than all that were known in the attempt."""

    attempt: int
    rank: int
    seconds: float


class LossNotFinite(Event, frozen=True, kw_only=True):
    """A rank's script says that its loss at `step` is `loss`: nan, inf or -inf; or that is seen, or of its
    gradients, or that there are none: see `within`. Recorded once in a run."""

    attempt: int
    rank: int
    step: int
    loss: str
    of: str = "loss"


class BatchDiffers(Event, frozen=True, kw_only=True):
    """With `ranks` of `wanted` ranks the batch of a step is another one than with all, and `why`, although
    the policy wants it kept."""

    attempt: int
    ranks: int
    wanted: int
    why: str


class ColdStart(Event, frozen=True, kw_only=True):
    """A rank had to load everything itself, which took `seconds`, because the preloaded modules do not fit
    its script. Recorded once in a run; later attempts start without preloading."""

    attempt: int
    node: str
    rank: int
    why: str
    seconds: float


class SavesTo(Event, frozen=True, kw_only=True):
    """The ranks save their checkpoints to this directory. Recorded when it changes."""

    attempt: int
    directory: str


RELAUNCH, REQUEUE, GROW, STEP_ENDED = "relaunch", "requeue", "grow", "step_ended"


class Asked(Event, frozen=True, kw_only=True):
    """A user requested something: cancel, restart, save, rollback, or drain: the replacement of `node`. Or
    the supervisor itself did: a relaunch, which is a restart that nobody ordered, a requeue, or to grow: to
    go on with nodes that were lacking. Or Slurm has ended the step of all agents, but not the job, which is a
    cancel by whoever had it do so. A save with a `node` comes before that node is removed. `timeout`: a
    requeue is for the time limit. `reserved`: it is because a reservation is about to begin. `grace_s`: so
    long the ranks have to keep what they have to, if that is more than the policy's."""

    what: str
    by: str
    node: str = ""
    timeout: bool = False
    reserved: bool = False
    grace_s: float = 0.0


CAUGHT = "caught"


class Signalled(Event, frozen=True, kw_only=True):
    """Slurm signalled the job: `signal` is SIGTERM (it ends), SIGUSR2 (its time limit is near), or, once
    Slurm was asked why it ends, timeout, preempted, requeued, Slurm's own word for another reason, or
    running: it does not end. Or caught: the ranks got a signal that they catch, and may leave."""

    signal: str


class CadenceSet(Event, frozen=True, kw_only=True):
    """All ranks have agreed on when to save: from `from_step` on, at `first_step` and every `every_steps`
    after it (0: there only, else as the script itself says).

    `interval_s` is the time wanted between saves, from `stall_s` (0.0: not measured yet) and `mtbf_s`;
    `slowdown` is how much slower training is while copies are written. `by` asked for a save now, if anybody.
    `stays`: ranks wait at `first_step` to be placed anew.
    """

    attempt: int
    number: int
    from_step: int
    first_step: int
    every_steps: int
    reason: str
    by: str = ""
    stays: bool = False
    step_s: float = 0.0
    interval_s: float = 0.0
    stall_s: float = 0.0
    copy_s: float = 0.0
    slowdown: float = 0.0
    mtbf_s: float = 0.0


class HealthFound(Event, frozen=True, kw_only=True):
    """A probe's finding on a node: the fields of `core.state.findings.Finding`, `at` in seconds since the
    epoch."""

    node: str
    probe: str
    code: str
    verdict: str
    kind: str
    message: str
    device: str = ""
    at: float = 0.0
    unit: str = ""


class NodeTested(Event, frozen=True, kw_only=True):
    """Active tests of a node (pre-flight, or before a suspect is used again) are over.

    `verdict` is ok, suspect, bad or unknown (not tested in time); `slowness` is its worst measure over the
    median of all nodes tested, 1.0 for a typical node; `partner` is who it was paired with, if anybody.
    """

    node: str
    verdict: str
    slowness: float
    message: str
    seconds: float = 0.0
    partner: str = ""


class Straggling(Event, frozen=True, kw_only=True):
    """A rank has been slower than the others for long: `slowness` is its own part of a step over the median,
    and all ranks lose `lost_s` in every step of `step_s`."""

    attempt: int
    node: str
    rank: int
    slowness: float
    own_s: float
    typical_s: float
    since_s: float
    evidence: str
    lost_s: float = 0.0
    step_s: float = 0.0


class StacksTaken(Event, frozen=True, kw_only=True):
    """Where the ranks of a node stood just before they were stopped for a hang: for each of `ranks` the kind
    of place (see `core.judges.stacks`) and its description. `records` are the ranks whose flight recorder has
    written what collectives it saw, `recorded` tells whether any was asked to, and `flights` what those say
    (`core.state.evidence.Entered`, as JSON). All of it is in `folder`."""

    node: str
    attempt: int
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    places: tuple[str, ...]
    folder: str = ""
    recorded: bool = False
    records: tuple[int, ...] = ()
    flights: tuple[Any, ...] = ()


class NodeDraining(Event, frozen=True, kw_only=True):
    """An administrator drains the node, for the reason `why`, or does not any more ("")."""

    node: str
    why: str


class ReservationAhead(Event, frozen=True, kw_only=True):
    """A reservation of Slurm's, for `maintenance` or for others, begins on these `nodes` of the run at
    `starts_at`; none: on none any more. `near`: from now on the run leaves them, as far as it can."""

    name: str
    nodes: tuple[str, ...]
    starts_at: float
    maintenance: bool = False
    near: bool = False


class Noted(Event, frozen=True, kw_only=True):
    """A note for people that changes no decision."""

    message: str
    node: str = ""


class Tick(Event, frozen=True, kw_only=True):
    """Time passed and a deadline was reached. Journalled only when it led to a decision."""


KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def to_json(event: Event) -> dict[str, Any]:
    """The journal's form: {"event": class name, field: value, ...}."""
    return {"event": type(event).__name__, **msgspec.structs.asdict(event)}


def from_json(line: dict[str, Any]) -> Event:
    """Inverse of `to_json`; fields this version does not know are ignored. KeyError: unknown event.
    ValueError: a field that is missing, or has another type of value."""
    return msgspec.convert(line, KINDS[line["event"]])
