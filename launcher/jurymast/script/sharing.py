"""How srun's options share a node out to its tasks: which become ranks here, of one task of Slurm's that has
the whole node."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from jurymast import foreign
from jurymast.cluster.control import Binding
from jurymast.cluster.sbatch import CommandLine, Given
from jurymast.core.judges.slurm_variables import scaled
from jurymast.core.state.settings import TaskShares

# The options, which our own srun does not get, and the variables from which some release of srun reads the
# same: see `read_by`.
VARIABLES = {
    "cpu-bind": "SLURM_CPU_BIND", "cpus-per-task": "SRUN_CPUS_PER_TASK", "distribution": "SLURM_DISTRIBUTION",
    "exact": "SLURM_EXACT", "gpu-bind": "SLURM_GPU_BIND", "gpus-per-task": "SLURM_GPUS_PER_TASK",
    "hint": "SLURM_HINT", "ntasks-per-core": "SLURM_NTASKS_PER_CORE",
    "ntasks-per-gpu": "SLURM_NTASKS_PER_GPU", "ntasks-per-socket": "SLURM_NTASKS_PER_SOCKET",
    "threads-per-core": "SLURM_THREADS_PER_CORE", "tres-bind": "SLURM_TRES_BIND",
    "tres-per-task": "SLURM_TRES_PER_TASK",
}  # fmt: skip
OPTIONS = frozenset(VARIABLES)
# Options that say how many GPUs a step has on a node. A total (--gpus) does not where a task's are known.
SIZES = ("gpus-per-node", "gpus-per-socket", "gres", "tres-per-node")
GPUS_PER_NODE = "SLURM_GPUS_PER_NODE"
# What Slurm derives from the same options for whoever reads it. Newer sruns (24.11, 26.05) do, and not the
# variable above: their steps have as many processors for each task as their job asked for.
JOBS_CPUS = "SLURM_CPUS_PER_TASK"
DERIVED = (JOBS_CPUS,)
# Releases that are known to do so; those between 22.05 and this one were not tried.
INHERITS_SINCE = TOTALS_COUNT_SINCE = (24, 11)
CPUS = re.compile(r"cpu[=:](\d+)$")
LISTS = r"map_cpu|mask_cpu|map_ldom|mask_ldom"
UNITS = {
    "threads": "threads", "cores": "cores", "sockets": "sockets", "ldoms": "ldoms", "rank": "rank",
    "rank_ldom": "rank_ldom", "none": "none", "no": "none",
    "thread": "threads", "core": "cores", "socket": "sockets", "ldom": "ldoms",
}  # fmt: skip
# --hint: to what it binds, and how many threads of a core it uses.
HINTS = {
    "nomultithread": ("threads", 1), "multithread": ("threads", 0),
    "compute_bound": ("cores", 1), "memory_bound": ("cores", 1),
}  # fmt: skip


def each_nodes_gpus(
    srun: CommandLine, environment: dict[str, str], active: int, release: tuple[int, ...] = ()
) -> list[str]:
    """A step's own total of GPUs (--gpus) on its `active` nodes as an option for our srun, which has spare
    nodes as well and refuses most totals that are not the job's. In older releases of Slurm, a job's
    --gpus-per-node counts for more: srun gives such a step all GPUs of its nodes. Takes the job's total,
    which would contradict it, out of the `environment` of our srun."""
    total = srun.last("gpus")
    if total is None or (GPUS_PER_NODE in environment and release < TOTALS_COUNT_SINCE):
        return []
    environment.pop("SLURM_GPUS", None)
    return [f"--gpus-per-node={scaled(total, 1, active)}"]


def all_gpus(srun: CommandLine, environment: Mapping[str, str]) -> list[Given]:
    """The option by which our one task has all GPUs of its node also in a job that asks for some for each of
    several tasks: without it Slurm would give it a single task's."""
    of_a_task = [environment.get(VARIABLES[name], "") for name in ("gpus-per-task", "ntasks-per-gpu")]
    each = any(of_a_task) or "gpu" in environment.get(VARIABLES["tres-per-task"], "")
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    if not each or not count.isdigit() or srun.has(*SIZES):
        return []
    return [Given("gpus-per-node", count, (f"--gpus-per-node={count}",))]


def gpus_on_node(srun: CommandLine, environment: Mapping[str, str], read: Collection[str], tasks: int) -> int:
    """How many GPUs Slurm would give to a step with so many `tasks` on each node; 0: as many as ours has,
    whose only task there has the whole node. `read`: see `read_by`."""
    each, sharing = _gpus_of_tasks(StepOptions(srun, environment, read))
    whole = srun.has(*SIZES) or GPUS_PER_NODE in environment
    return 0 if whole else each * -(-tasks // sharing)


def read_by(srun: str, release: tuple[int, ...]) -> frozenset[str]:
    """Return which of our variables this srun reads. The program itself tells, by the names that it has; if
    it does not, as a site's script, the `release` of Slurm tells some."""
    names = {*VARIABLES.values(), *DERIVED}
    try:
        program = foreign.read(srun, foreign.SCRIPT_BYTES_MAX)
    except OSError:
        program = b""
    cpus = {VARIABLES["cpus-per-task"], JOBS_CPUS}
    found = frozenset(name for name in names if f"\0{name}\0".encode() in program)
    if found & cpus:
        return found
    return frozenset(names - {VARIABLES["cpus-per-task"] if release >= INHERITS_SINCE else JOBS_CPUS})


def fits(cpus: int, tasks: int, nodes: int, environment: Mapping[str, str]) -> bool:
    """Whether a job has processors for so many `tasks` on each of its `nodes`, one each if nothing says how
    many; True if it does not say how many it has."""
    each = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    has = sum(int(count) * int(times or 1) for count, times in each)
    return not has or max(cpus, 1) * tasks * nodes <= has


def with_cpus(tres: str, cpus: int) -> str:
    """The value of --tres-per-task that srun tells tasks which have so many processors each."""
    others = [entry for entry in tres.split(",") if entry and not CPUS.match(entry)]
    return ",".join([f"cpu={cpus}", *others])


class StepOptions:
    """What a step's options and variables say; an option counts before its variable."""

    def __init__(self, srun: CommandLine, environment: Mapping[str, str], read: Collection[str]) -> None:
        """`read`: the variables that count."""
        self._srun = srun
        self._environment = {name: value for name, value in environment.items() if name in read}

    def cpus(self) -> int:
        """Processors of a task; 0 if nothing says it."""
        said = self._srun.last("cpus-per-task") or _cpus_of(self._srun.last("tres-per-task") or "")
        said = said or self("cpus-per-task") or self._environment.get(JOBS_CPUS, "")
        said = said or _cpus_of(self("tres-per-task"))
        return int(said) if said.isdigit() else 0

    def __call__(self, option: str) -> str:
        return self._srun.last(option) or self._environment.get(VARIABLES[option], "")

    def number(self, option: str) -> int:
        text = self(option)
        return int(text) if text.isdigit() else 0

    @property
    def has_own_gpus(self) -> bool:
        """Whether the step itself says how many GPUs a task has, and not how they are bound."""
        of_a_task = self._srun.has("gpus-per-task") or "gpu" in (self._srun.last("tres-per-task") or "")
        return of_a_task and not self._srun.has("gpu-bind", "tres-bind")

    def has(self, option: str) -> bool:
        return self._srun.has(option) or VARIABLES[option] in self._environment


def shares_of(
    srun: CommandLine, environment: Mapping[str, str], slurm: Binding, read: Collection[str]
) -> TaskShares:
    """How a step's tasks share their node, where Slurm binds tasks as its configuration says. `read`: see
    `read_by`."""
    said = StepOptions(srun, environment, read)
    gpus, tasks_per_gpu, gpu_list = _gpus(said)
    cpus = said.cpus()
    bound_to = _bound_to(said) if slurm.tasks else "none"
    hinted = HINTS.get(said("hint"), ("", int("one_thread" in said("cpu-bind"))))
    return TaskShares(
        gpus=gpus,
        tasks_per_gpu=tasks_per_gpu,
        gpu_list=gpu_list,
        cpus=cpus,
        bound_to=bound_to or hinted[0] or _by_limits(said),
        otherwise=slurm.otherwise,
        exactly=bool(cpus) or said.has("exact"),
        distribution=_over_sockets(said("distribution"), slurm.distribution),
        threads_per_core=said.number("threads-per-core")
        or hinted[1]
        or int("one_thread" in said("cpu-bind")),
        unbound_mask=JOBS_CPUS in read,  # as sruns that read it do
        verbose=slurm.tasks and not {"v", "verbose"}.isdisjoint(said("cpu-bind").lower().split(",")),
    )


def _bound_to(said: StepOptions) -> str:
    """What --cpu-bind says; "" if it says nothing."""
    text = said("cpu-bind")
    if listed := re.search(rf"\b(?:{LISTS}):[\da-fA-Fx*,]+", text):
        return listed[0].rstrip(",")
    return next((UNITS[word] for word in text.lower().split(",") if word in UNITS), "")


def _by_limits(said: StepOptions) -> str:
    if said.number("ntasks-per-socket"):
        return "sockets"
    if said.number("ntasks-per-core"):
        return "cores"
    return "threads" if said.number("threads-per-core") else ""


def _over_sockets(text: str, default: str) -> str:
    """The second part of --distribution, which is for the sockets of a node."""
    nodes, _, sockets = text.lower().split(",")[0].partition(":")
    sockets = sockets.partition(":")[0]
    if nodes.startswith("plane"):
        return "block"
    return {"block": "block", "cyclic": "cyclic", "fcyclic": "fcyclic"}.get(sockets, default)


def _cpus_of(tres: str) -> str:
    """The processors of --tres-per-task; "" if it has none."""
    found = [match[1] for entry in tres.split(",") if (match := CPUS.match(entry))]
    return found[-1] if found else ""


def _gpus(said: StepOptions) -> tuple[int, int, str]:
    """How many GPUs a task sees, how many tasks see the same, and a list of who sees which."""
    kind, _, value = _gpu_bind(said).partition(":")
    if kind.startswith(("map", "mask")) and re.fullmatch(r"[\da-fA-Fx*,]+", value):
        return 0, 1, f"{kind.partition('_')[0]}_gpu:{value}"
    if kind in ("single", "per_task") and value.isdigit() and int(value):
        return (1, int(value), "") if kind == "single" else (int(value), 1, "")
    if kind in (
        "closest",
        "none",
    ):  # Slurm knows which are close to which processors, and shows all otherwise
        return 0, 1, ""
    return (*_gpus_of_tasks(said), "")


def _gpus_of_tasks(said: StepOptions) -> tuple[int, int]:
    """How many GPUs a step has for a task, and for how many tasks they are; (0, 1) if it does not say."""
    per_task = said("gpus-per-task").rpartition(":")[2]
    for entry in said("tres-per-task").split(","):  # cpu=2,gres/gpu:h100:1 and the like
        name, _, rest = re.sub(r"^gres[:/]", "", entry).replace("=", ":").partition(":")
        if name == "gpu":
            per_task = per_task or (rest or "1").rpartition(":")[2]
    if per_task.isdigit():
        return int(per_task), 1
    sharing = said.number("ntasks-per-gpu")
    return (1, sharing) if sharing else (0, 1)


def _gpu_bind(said: StepOptions) -> str:
    """What --gpu-bind says, or --tres-bind of GPUs (`gres/gpu:verbose,single:1+gres/nic:closest`). Newer
    releases set the latter for a job's own GPUs of a task, where a step may say another number of them."""
    if said.has_own_gpus:
        return ""
    found = said("gpu-bind")
    for entry in said("tres-bind").split("+"):
        if named := re.fullmatch(r"(?:gres[:/])?gpu:(.*)", entry):
            found = found or named[1]
    return re.sub(r"^(verbose|v|quiet|q),", "", found.lower())
