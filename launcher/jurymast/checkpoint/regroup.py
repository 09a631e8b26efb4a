"""The process groups that a script has before `Checkpointer.run`, as those of its device meshes: they are
made anew for the next attempt, in the place of the old ones wherever these are referred to.

A DeviceMesh, a DTensor and FSDP2's modules find their groups by attributes and by name, so they go on with
the new groups as they are.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class _Recipe:
    """How a group is made. `number`: torch names groups by the order in which they are made."""

    number: int
    ranks: tuple[int, ...]
    timeout: timedelta
    description: str


def why_not() -> str:
    """Why the groups of this process cannot be made anew; "" if they can."""
    world, default = distributed_c10d._world, distributed_c10d._get_default_group()
    for group, name in world.pg_names.items():
        if group._get_sequence_number_for_group():
            return (
                "ranks talk to each other before `run` (DistributedDataParallel does, when it is made); do "
                "that in the function that it calls"
            )
        if group is not default and not (group.group_desc.startswith("mesh_") and name.isdecimal()):
            return "the script makes process groups before `run`; make them in the function that it calls"
    if len(world.pg_map) > 1 and distributed_c10d._is_barrier_after_init():
        return "TORCH_DIST_INIT_BARRIER is set, with which groups of some ranks wait for all ranks"
    return ""


class GroupsBefore:
    """The groups of this process, as they are when this is made."""

    def __init__(self) -> None:
        world, default = distributed_c10d._world, distributed_c10d._get_default_group()
        self._timeout = _timeout(default)
        self._recipes = sorted(
            (
                _Recipe(int(name), _ranks(world.pg_group_ranks[group]), _timeout(group), group.group_desc)
                for group, name in world.pg_names.items()
                if group is not default
            ),
            key=lambda one: one.number,
        )
        self._count = world.group_count
        self._groups: dict[str, Any] = {name: group for group, name in world.pg_names.items()}
        self._places: list[tuple[Any, Any, str]] = []

    def leave(self) -> None:
        """Give all groups up, and note who refers to those that will be made anew."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if not self._places:
            self._places = list(_references(self._groups))

    def make(self) -> None:
        """Make them anew with the ranks of this attempt. Collective."""
        world = distributed_c10d._world
        # Where making the group failed, its number stays taken, and a new rank begins with the first.
        world.group_count = 0
        dist.init_process_group("gloo", timeout=self._timeout)
        for one in self._recipes:
            world.group_count = one.number
            dist.new_group(list(one.ranks), timeout=one.timeout, backend="gloo", group_desc=one.description)
        world.group_count = self._count
        self._groups = {name: group for group, name in world.pg_names.items()}
        for holder, key, name in self._places:
            if isinstance(holder, CellType):
                holder.cell_contents = self._groups[name]
            else:
                holder[key] = self._groups[name]
        self._places = []


def forget_meshes() -> None:
    """Have torch's caches forget all meshes. A mesh that equals one of theirs would be taken for that one, as
    that of a sharded parameter, and its groups are gone. They would also keep these open."""
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper and one.__module__.startswith(
            "torch.distributed.tensor"
        ):
            one.cache_clear()
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    for where, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (redistribute, "clear_redistribute_planner_cache"),
    ):
        clear = getattr(where, name, None)  # of newer torch
        if clear is not None:
            clear()


def _timeout(group: Any) -> timedelta:
    made: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return made


def _ranks(places: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted(places, key=lambda rank: places[rank]))


def _references(groups: dict[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield each dict, list or variable of an inner function that refers to one of the groups, the key or
    index there, and the group's name."""
    names = {id(group): name for name, group in groups.items()}
    for holder in gc.get_referrers(*groups.values()):
        if holder is groups:
            continue
        if isinstance(holder, CellType):
            yield holder, None, names[id(holder.cell_contents)]
            continue
        place: Sequence[tuple[Any, Any]] = ()
        if type(holder) is list:
            place = list(enumerate(holder))
        elif type(holder) is dict:
            place, holder = list(holder.items()), holder
        elif hasattr(holder, "__dict__") and type(vars(holder)) is dict:
            place, holder = list(vars(holder).items()), vars(holder)
        yield from ((holder, key, names[id(value)]) for key, value in place if id(value) in names)
