"""Which waiting node of a pool suits a run, how many the pool lacks, and when one ends by itself."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

import msgspec

# A member that Slurm ends sooner would have to be replaced soon, unless the run ends before (seconds).
LEAST_LEFT_S = 600.0
# One whose sign was taken and that was told nothing by then was taken by a process that is gone (seconds).
TAKEN_LIMIT_S = 20.0
# Options of which a member may have more than a run asks for.
_AMOUNTS = re.compile(r"--(?:mem|gpus|gpus-per-node|gres)=")
_AMOUNT = re.compile(r"(.*?)(\d+)([KMGT]?)$", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


class PoolMember(msgspec.Struct, frozen=True, kw_only=True):
    """A node that waits in the pool, as its sign tells. `partition` and `account`: Slurm's; `root`: the type
    of its root file system; `options`: sbatch's, for one node; `ends_at`: its time limit (Unix time; None: it
    has none); `since`: when it began to wait."""

    job: str
    node: str
    partition: str
    account: str
    root: str
    options: tuple[str, ...]
    ends_at: float | None
    since: float


class PoolNeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a run asks of a node, in the same words. `left_s`: how long the run may last; `exclude`: nodes
    that it has, or does not want."""

    partition: str
    account: str
    root: str
    options: tuple[str, ...]
    left_s: float
    exclude: frozenset[str]


def unsuitable(member: PoolMember, need: PoolNeed, now: float) -> str:
    """Why the run cannot use this member; "" if it can."""
    for what in ("partition", "account", "root"):
        has, wants = getattr(member, what), getattr(need, what)
        if has != wants:
            return f"its {what} is {has or 'unknown'}, not {wants or 'unknown'}"
    if member.node in need.exclude:
        return "the run has this node already, or excludes it"
    if not _covers(member.options, need.options):
        return f"it was submitted with {' '.join(member.options) or 'no options'}"
    if _left_s(member, now) < min(LEAST_LEFT_S, need.left_s):
        return f"Slurm ends it in {_left_s(member, now):.0f} s"
    return ""


def best(members: Sequence[PoolMember], need: PoolNeed, now: float) -> PoolMember | None:
    """The member that the run takes: of those that last as long as it does the one that ends first, so that
    others are left to longer runs; else the one that lasts longest."""
    suitable = [one for one in members if not unsuitable(one, need, now)]
    lasting = [one for one in suitable if _left_s(one, now) >= need.left_s]
    if lasting:
        return min(lasting, key=lambda one: (_left_s(one, now), one.since, one.job))
    return max(suitable, key=lambda one: (_left_s(one, now), one.job), default=None)


def _left_s(member: PoolMember, now: float) -> float:
    return math.inf if member.ends_at is None else member.ends_at - now


def _covers(has: Collection[str], wants: Collection[str]) -> bool:
    """Whether a job with the options `has` has got all that `wants` ask for: the same, or of GPUs and memory
    more."""
    has, wants = {*has}, {*wants}
    more, less = sorted(has - wants), sorted(wants - has)
    return len(more) == len(less) and all(map(_at_least, more, less))


def _at_least(has: str, wants: str) -> bool:
    if not (_AMOUNTS.match(has) and _AMOUNTS.match(wants)):
        return False
    mine, theirs = _AMOUNT.fullmatch(has), _AMOUNT.fullmatch(wants)
    if mine is None or theirs is None or mine[1] != theirs[1]:
        return False
    return _size(mine) >= _size(theirs)


def _size(amount: re.Match[str]) -> float:
    if amount[1] == "--mem=" and int(amount[2]) == 0:  # all of the node's
        return math.inf
    return int(amount[2]) * _UNITS[amount[3].upper()]


def lacking(wanted: int, there: int) -> int:
    """How many jobs are to be submitted for the pool, in which so many wait for a node, or for a run."""
    return max(0, wanted - there)


def why_end(now: float, used_at: float, idle_s: float, *, taken_s: float | None) -> str:
    """Why a member ends by itself; "" if it goes on. `used_at`: when a run last had a use for the pool;
    `taken_s`: since when its sign is taken without a word from who took it, None if it is there."""
    if taken_s is not None:
        return "whoever took it is gone" if taken_s > TAKEN_LIMIT_S else ""
    if now - used_at > idle_s:
        return f"no run has used the pool for {idle_s:.0f} s"
    return ""
