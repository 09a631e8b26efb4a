"""The result of a policy and a command line: the frozen values that decisions read. Times in seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec

from jurymast.core.state.failure_rate import FrailNode

# What a damaged plan, or a stranger's, may say at most.
COUNT_MAX = 10_000_000
Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
# Seconds since the epoch, before the year 10000: what a date can be written of.
Clock = Annotated[float, msgspec.Meta(ge=0.0, lt=253_402_300_800.0)]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """At most `count` restarts in any `window_s`; `count` None is unlimited."""

    count: int | None = None
    window_s: float = 3600.0


NOTICES = ("incident", "spare", "alert", "stopped", "finished")


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """Who is told of these kinds of NOTICES: a program, or an address (which may contain a secret)."""

    when: tuple[str, ...] = NOTICES
    command: tuple[str, ...] = ()
    url: str = ""


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Where the run's metrics are given out: at a socket in the run directory, at a TCP port (0: any) to
    whoever has the token in a file, as a file in a directory; and the plugins that write them by step."""

    socket: bool = False
    port: int | None = None
    token: str = ""  # "": in a file of the run directory
    textfile: str = ""
    trackers: tuple[str, ...] = ()

    @property
    def scraped(self) -> bool:
        return self.socket or self.port is not None or bool(self.textfile)

    def __bool__(self) -> bool:
        return self.scraped or bool(self.trackers)


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a GPU costs for an hour."""

    gpu_hour: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]  # as in ISO 4217

    def of(self, gpu_seconds: float) -> float:
        return self.gpu_hour * gpu_seconds / 3600.0

    def __str__(self) -> str:
        return f"{self.gpu_hour:g} {self.currency}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values with which the core decides.

    `node_lost_after_s` and `hang_s` are None for `auto`; `hang_s` 0 turns hang detection off. `cadence_steps`
    and `cadence_s` are both None for `auto`; at most one of them is set. `replicas` are copies of each image
    on other nodes.
    `shared_every_s` is None for `auto`: every save if the cadence is given, otherwise the interval that loses
    least and leaves the storage idle nine tenths of the time. Paths and addresses are "" for off.

    `rate` is the policy's failures per 1,000 node-days, None for `auto`. Failures within `burst_s` of one
    count as one, and past failures count half after `half_life_s`. `max_loss_s` limits an automatic cadence.

    `probes_off` names probes that do not run; `xid` and `thresholds` override the packaged tables.
    `preflight_s` is the time for tests before a first attempt, None for `auto` (only on nodes with GPUs), 0
    for off. `straggler` is the slowness at which a rank counts as a straggler, 0 for off. `workaround`: ranks
    avoid a failing network device if the node has another one. `bad_nodes` is exclude, drain or report
    (nothing is done). At most `excluded_fraction` of the run's nodes, and one in any case, are blamed at a
    time; an exclusion ends after `exclusion_s`. Findings within `together_s` have one origin; a bad node is
    kept for that long, because many may turn out to have the same fault. `spool` is the site's directory for
    verdicts if `bad_nodes` is drain. `warm_start`: ranks are forked from a process that has loaded torch.
    `renews`: before its time limit the job is requeued. `refill`: a small Slurm job brings a node in place
    of each that is lost; without a spare the run holds its nodes for it, for `hold_s`. `pool_nodes` nodes
    wait in such jobs for all runs with the same `pool_directory`, 0 for none, and end after `pool_idle_s`
    without a run. `nodes_min`: with so many nodes the run goes on if others are lacking, 0 for off; `batch`
    is constant then: global, or local.
    `encrypt`: images are encrypted on the network. `notify`: who is told what happens; `metrics`: where the
    run's are given out; `price`: of a GPU, None if nobody said it.
    """

    heartbeat_s: float = 0.5
    node_lost_after_s: float | None = None
    hang_s: float | None = None
    start_limit_s: float = 1800.0
    join_limit_s: float = 300.0
    stop_grace_s: float = 1.0
    infrastructure: Budget = field(default_factory=Budget)
    application: Budget = field(default_factory=lambda: Budget(count=3, window_s=3600.0))
    preemption: Budget = field(default_factory=Budget)
    requeues: int | None = None
    attempts_without_step: int | None = 20
    cadence_steps: int | None = None
    cadence_s: float | None = None
    memory: bool = True
    replicas: int = 1
    prefer_spares: bool = True
    local_path: str = ""
    shared_every_s: float | None = None
    keep: int = 3
    object_url: str = ""
    object_every_s: float = 21600.0
    object_keep: int = 3
    rate: float | None = None
    half_life_s: float = 14 * 86400.0
    burst_s: float = 600.0
    max_loss_s: float = 900.0
    probes_off: tuple[str, ...] = ()
    xid: dict[str, str] = field(default_factory=dict)
    thresholds: dict[str, float] = field(default_factory=dict)
    data_paths: tuple[str, ...] = ()
    preflight_s: float | None = None
    straggler: float = 1.5
    workaround: bool = True
    bad_nodes: str = "exclude"
    excluded_fraction: float = 0.02
    exclusion_s: float = 86400.0
    together_s: float = 180.0
    spool: str = "/var/spool/jurymast"
    warm_start: bool = True
    renews: bool = False
    refill: bool = False
    hold_s: float = 600.0
    pool_directory: str = ""
    pool_nodes: int = 0
    pool_idle_s: float = 600.0
    nodes_min: int = 0
    batch: str = "global"
    encrypt: bool = False
    notify: tuple[Receiver, ...] = ()
    metrics: Exposure = Exposure()
    price: Price | None = None


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """A node with a bad history in earlier runs, excluded `until` then (seconds since the epoch; None:
    permanently)."""

    node: str
    until: float | None
    why: str


@dataclass(frozen=True, kw_only=True)
class TaskShares:
    """How Slurm would share a node out to its tasks, as srun's options have it."""

    gpus: Count = 0  # 0: each sees all of its node's
    tasks_per_gpu: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)] = 1  # so many see the same
    gpus_on_node: Count = 0  # so many does Slurm say that the step has on a node; 0: what it says to ours
    gpu_list: str = ""  # which see which, one task after the other: `map_gpu:3,2`, `mask_gpu:0x3,0xc`
    cpus: Count = 0  # processors of a task; 0: not said
    # To what each is bound: to threads, cores, sockets, ldoms, a list (`map_cpu:1,2`), or to none; "": Slurm
    # chooses, by the numbers of tasks and processors.
    bound_to: str = "none"
    otherwise: str = ""  # what it chooses if those do not match
    exactly: bool = False  # the step has no more processors than its tasks need
    distribution: str = "cyclic"  # of tasks over the sockets: block, cyclic, or fcyclic
    threads_per_core: Count = 0  # at most so many are used; 0: all
    verbose: bool = False  # each says to what it is bound
    unbound_mask: bool = False  # also one that is not bound says which processors it has


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """One run as submitted (`plan.json`): who runs what, where, and on how many nodes."""

    run: str
    name: str
    directory: str
    cluster: str  # slurm | local
    active: Annotated[int, msgspec.Meta(ge=1, le=COUNT_MAX)]
    spares: Count
    ranks_per_node: Count
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False  # `script` is a module name, as with `python -m`
    # In a batch script's run, `script` is that script, and later the training that one of its steps runs.
    batch: bool = False
    observed: bool = False  # sbatch has the script as it is, and nothing of jurymast runs in the job
    # Each of its ranks stands for a task that srun would have started, not for one of torchrun's.
    tasks: bool = False
    # Nobody has said that they are one training: until one of them makes a process group, each is for itself.
    guessed: bool = False
    kill_on_bad_exit: bool = False  # then one that fails ends the others, as srun is told
    train: str = ""  # what the user says of such tasks: yes, no, or nothing
    shares: TaskShares = TaskShares()
    # `script` is a program, a shell say, that starts the Python of its rank itself.
    program: bool = False
    stderr_apart: bool = False  # ranks' stderr has logs of its own, because it goes elsewhere than stdout
    inputs: tuple[str, ...] = ()  # the file that all ranks read as standard input, or one a rank ("": none)
    prologs: tuple[str, ...] = ()  # programs that run before each rank, as Slurm's before a task
    epilogs: tuple[str, str] = ("", "")  # and after each: the step's own, the site's; "" for none
    working_directory: str = "."
    python: str = "python3"
    sbatch_options: tuple[str, ...] = ()
    typed_options: tuple[str, ...] = ()  # of these, what the user typed beside a batch script
    head_options: tuple[str, ...] = ()  # of a batch script, in its own lines
    exclude: tuple[str, ...] = ()  # by hand
    avoided: tuple[Avoided, ...] = ()
    # So long before the time limit the job's own --signal may end something of the run.
    signal_s: float = 0.0
    requeue: bool = True  # False: the user said --no-requeue, the Slurm job must never be requeued
    # A function that keeps its own state: so often the job is requeued at its time limit, and so long before
    # that the function is told, in seconds.
    timeouts: Count = 0
    keeps_s: float = 0.0
    submitted_at: Clock = 0.0
    policy_hash: str = ""
    earlier_incidents: float = 0.0  # of the infrastructure in other runs, after decay
    earlier_node_days: float = 0.0
    earlier_text: str = ""  # where these two come from, for people
    frail: tuple[FrailNode, ...] = ()  # nodes that are expected to fail more often than others
    settings: Settings = field(default_factory=Settings)

    @property
    def nodes(self) -> int:
        return self.active + self.spares

    @property
    def may_refill(self) -> bool:
        """Whether small jobs bring nodes. Tasks in place of srun's have shares of their step's node, which a
        small job does not have."""
        return self.settings.refill and self.cluster == "slurm" and not (self.tasks or self.observed)

    @property
    def pooled(self) -> bool:
        """Whether nodes of a pool may take the place of small jobs."""
        return self.may_refill and self.settings.pool_nodes > 0

    @property
    def nodes_min(self) -> int:
        """With how many nodes the run may go on; 0: only with all that it wants. Tasks in place of srun's are
        told Slurm's numbers, on which a script relies."""
        may = not (self.tasks or self.observed) and self.settings.nodes_min < self.active
        return self.settings.nodes_min if may else 0

    def excluded_at(self, now: float) -> tuple[str, ...]:
        """Return nodes, and ranges of nodes, that the run excludes from the start. `now`: seconds since the
        epoch."""
        avoided = (node.node for node in self.avoided if node.until is None or node.until > now)
        return tuple(dict.fromkeys((*self.exclude, *avoided)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunPlan:
        """Read a plan; unknown fields are ignored. Raises ValueError."""
        return msgspec.convert(values, cls)
