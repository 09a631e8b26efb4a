"""Slurm's reservations of nodes that the run has, which somebody else needs."""

from __future__ import annotations

import grp
import os
import pwd
import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from jurymast.cluster.allocation import Allocation
from jurymast.cluster.control import time_of
from jurymast.core.state.texts import expanded
from jurymast.core.supervision.ahead import Reservation
from jurymast.jobs import run_command

# Of these no job has to leave its nodes: jobs in it may use others, it needs none, or its beginning is always
# as far away as now.
_NEED_NONE = frozenset({"FLEX", "ANY_NODES", "LICENSE_ONLY", "TIME_FLOAT"})
# What its owner wrote, with whatever spaces and `Nodes=` it contains, stands last.
_RECORD = re.compile(r"^ReservationName=(.*?) (StartTime=.*?)(?: Comment=.*)?$", re.MULTILINE)
# Where it has only some of a node's cores, these are named.
_CORES = "CoreIDs="


@dataclass(frozen=True)
class JobOwner:
    """Who the run's job is for Slurm. `reservation`: the one that it runs in; "": in none."""

    user: str = ""
    groups: frozenset[str] = field(default_factory=frozenset)
    account: str = ""
    reservation: str = ""


def of_others(allocation: Allocation, nodes: Sequence[str]) -> list[Reservation]:
    """Those that have some of these nodes, now or later, and that the run's job may not use. Raises
    ClusterUnavailableError."""
    told = run_command(["scontrol", "show", "reservation", "--oneliner"], utc=True)
    return found_in(told, nodes, _owner(allocation.account), time.time())


def found_in(told: str, nodes: Collection[str], own: JobOwner, now: float) -> list[Reservation]:
    """The same from what scontrol prints, with times in UTC."""
    here, found = frozenset(nodes), []
    for name, text in _RECORD.findall(told):
        fields: dict[str, str] = {}
        for word in text.split():
            key, _, value = word.partition("=")
            fields.setdefault(key, "" if value == "(null)" else value)
        flags = frozenset(fields.get("Flags", "").split(","))
        starts_at, ends_at = time_of(fields.get("StartTime", "")), time_of(fields.get("EndTime", ""))
        over = starts_at is None or (ends_at is not None and ends_at <= now)
        partly = _CORES in text and "MAINT" not in flags
        if over or partly or flags & _NEED_NONE or name == own.reservation or _may_use(fields, own):
            continue
        mine = tuple(node for node in expanded(fields.get("Nodes", "")) if node in here)
        if mine and starts_at is not None:
            found.append(Reservation(name, mine, starts_at, "MAINT" in flags))
    return found


def _may_use(fields: dict[str, str], own: JobOwner) -> bool:
    """Whether Slurm would let the job in: it has to be among the users, or in one of the groups, and to have
    one of the accounts, as far as each is told. A name with a minus is shut out."""
    people = [_allows(fields.get("Users", ""), {own.user}), _allows(fields.get("Groups", ""), own.groups)]
    who = [one for one in people if one is not None]
    account = _allows(fields.get("Accounts", ""), {own.account})
    if not who and account is None:
        return False
    return (any(who) or not who) and account is not False


def _allows(listed: str, own: Collection[str]) -> bool | None:
    """None: nothing is listed."""
    names = [name for name in listed.split(",") if name]
    if not names:
        return None
    if names[0].startswith("-"):
        return not any(f"-{name}" in names for name in own)
    return any(name in names for name in own)


def _owner(account: str) -> JobOwner:
    user, groups = os.environ.get("SLURM_JOB_USER", ""), set[str]()
    with suppress(KeyError):  # of a user without an entry, as in some containers
        user = user or pwd.getpwuid(os.geteuid()).pw_name
    for number in os.getgroups():
        with suppress(KeyError):
            groups.add(grp.getgrgid(number).gr_name)
    return JobOwner(user, frozenset(groups), account, os.environ.get("SLURM_JOB_RESERVATION", ""))
