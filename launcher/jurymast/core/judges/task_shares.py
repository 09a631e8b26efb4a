"""Which processors and GPUs each task of a node has where Slurm would start it.

Slurm's task/affinity plugin (src/plugins/task/affinity/dist_tasks.c) does this in the step's daemon, with the
options of `TaskShares` (here `how`, as a mapping). Compared with what Slurm 22.05 does on machines of two
sockets with four cores of one and of two threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Processor(NamedTuple):
    """Where a processor is; `domain`: that of its memory."""

    socket: int
    core: int
    domain: int = 0


Machine = Mapping[int, Processor]

# ---- processors


def processors(machine: Machine, own: Collection[int], count: int, how: Mapping[str, Any]) -> list[list[int]]:
    """Return the processors of each of `count` tasks on a `machine` of whose processors the job has its
    `own`; [] if each has all of these."""
    to, _, entries = how["bound_to"].partition(":")
    if to == "none" or not count:
        return []
    if entries or to in ("rank", "rank_ldom"):
        found = [_listed(to, entries, number, machine) for number in range(count)]
        return _allowed(found, set(own), to)
    here = _of_the_step({number: machine[number] for number in own}, count, how)
    to = to or _chosen(machine, here, count * (how["cpus"] or 1)) or how["otherwise"]
    if not to or len(here) < count:
        return [list(here)] * count if how["exactly"] else []
    return [_whole(task, to, here, machine) for task in _laid_out(here, count, to, how)]


def _listed(kind: str, entries: str, number: int, machine: Machine) -> list[int]:
    """What a list gives to the task of this number; a list that is too short begins again."""
    if kind.startswith("rank"):
        wanted = {number % (len(machine) if kind == "rank" else 1 + max(p.domain for p in machine.values()))}
    else:
        each = [*repeated(entries)]
        entry = each[number % len(each)]
        wanted = bits(entry) if kind.startswith("mask") else {int(entry, 0)}
    domains = kind.endswith("_ldom")
    return [n for n, place in sorted(machine.items()) if (place.domain if domains else n) in wanted]


def _allowed(found: list[list[int]], own: set[int], kind: str) -> list[list[int]]:
    """What is left of lists in a job with its `own` processors: one that names none of them is no list, and
    if a map names others, none of it counts."""
    if kind == "map_cpu" and any(not own.issuperset(task) or not task for task in found):
        return []
    return [[number for number in task if number in own] or sorted(own) for task in found]


def repeated(entries: str) -> Iterator[str]:
    """The entries of a list such as `0x3*2,0xc`."""
    for entry in entries.split(","):
        value, _, times = entry.partition("*")
        yield from [value] * int(times or 1)


def bits(mask: str) -> set[int]:
    """The numbers of the bits that are set in a hexadecimal mask."""
    value = int(mask, 16)
    return {number for number in range(value.bit_length()) if value >> number & 1}


def _ordered(places: Machine) -> dict[int, Processor]:
    return dict(sorted(places.items(), key=lambda item: (item[1].socket, item[1].core, item[0])))


def _cores(places: Machine) -> dict[tuple[int, int], list[int]]:
    """The processors of each core, by socket."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, place in _ordered(places).items():
        found.setdefault((place.socket, place.core), []).append(number)
    return found


def _of_the_step(own: Machine, count: int, how: Mapping[str, Any]) -> dict[int, Processor]:
    """The processors that Slurm gives to a step, of those of its job: whole cores, socket by socket in turn,
    unless tasks share cores, which they do not if there are as many."""
    cores = _cores(own)
    if not how["exactly"] or not cores:
        return _ordered(own)
    threads = min(how["threads_per_core"] or len(next(iter(cores.values()))), max(map(len, cores.values())))
    each = how["cpus"] or 1
    shared = each < threads
    unit = 1 if shared else -(-each // threads)
    needed = -(-count * each // threads) if shared and count != len(cores) else count * unit
    left = {socket: [core for core in cores if core[0] == socket] for socket, _ in cores}
    chosen: list[tuple[int, int]] = []
    while len(chosen) < min(needed, len(cores)):
        for socket in left:
            taken = needed if shared or how["distribution"] == "block" else unit
            taken = min(taken, needed - len(chosen))
            chosen += left[socket][:taken]
            left[socket] = left[socket][taken:]
    return _ordered({number: own[number] for core in chosen for number in cores[core]})


def _chosen(machine: Machine, here: Machine, wanted: int) -> str:
    """To what Slurm binds tasks that want so many processors if nobody says it."""
    for name, key in (("sockets", _socket), ("cores", _core)):
        touched = {key(place) for place in here.values()}
        missing = {key(place) for number, place in machine.items() if number not in here}
        if touched and not touched & missing and wanted == len(touched):
            return name
    return "threads" if wanted == len(here) else ""


def _socket(place: Processor) -> tuple[int, ...]:
    return (place.socket,)


def _core(place: Processor) -> tuple[int, ...]:
    return (place.socket, place.core)


def _laid_out(here: Machine, count: int, to: str, how: Mapping[str, Any]) -> Iterator[list[int]]:
    """Yield the processors with which each task begins, before they are made whole. If they are used up,
    tasks share them."""

    def fresh() -> list[list[list[int]]]:
        cores = _cores(here)
        limited = {core: threads[: how["threads_per_core"] or None] for core, threads in cores.items()}
        if how["distribution"] == "block":
            return [list(limited.values())]
        sockets = sorted({socket for socket, _ in cores})
        return [[threads for core, threads in limited.items() if core[0] == one] for one in sockets]

    pools = fresh()
    each = max(1, min(how["cpus"] or 1, sum(map(len, (core for pool in pools for core in pool))) // count))
    at = 0
    for _ in range(count):
        task: list[int] = []
        while len(task) < each:
            if not any(pools):
                pools = fresh()
            while not pools[at % len(pools)]:
                at += 1
            pool = pools[at % len(pools)]
            task.append(pool[0].pop(0))
            if not pool[0] or (to == "cores" and len(task) == each):
                pool.pop(0)
            at += how["distribution"] == "fcyclic"
        at += how["distribution"] != "fcyclic"
        yield task


def _whole(task: list[int], to: str, here: Machine, machine: Machine) -> list[int]:
    """The whole cores, sockets or domains that the task has begun."""
    if to == "ldoms":
        domains = {machine[number].domain for number in task}
        return [number for number, place in machine.items() if place.domain in domains]
    if to == "threads":
        return task
    key = _socket if to == "sockets" else _core
    touched = {key(here[number]) for number in task}
    return [number for number, place in here.items() if key(place) in touched]


# ---- GPUs


def gpus(devices: Sequence[str], local_rank: int, how: Mapping[str, Any]) -> list[int]:
    """Return the places in the list of its node's `devices` of those that a task sees, by its number on the
    node; [] if it sees all."""
    kind, _, entries = how["gpu_list"].partition(":")
    if kind:
        each = [*repeated(entries)]
        entry = each[local_rank % len(each)]
        wanted = sorted(bits(entry)) if kind.startswith("mask") else [int(entry)]
        if all(str(number) in devices for number in wanted):
            return [devices.index(str(number)) for number in wanted]
        return [number for number in wanted if number < len(devices)]
    first = local_rank // how["tasks_per_gpu"] * how["gpus"]
    return [(first + number) % len(devices) for number in range(min(how["gpus"], len(devices)))]
