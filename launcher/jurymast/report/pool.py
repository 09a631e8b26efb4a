"""What waits in a pool of nodes, and which run took what."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import msgspec

from jurymast import foreign
from jurymast.cluster.pool import TAKEN, WAITING, Claimed, PoolDirectory, queued, sweep
from jurymast.core.judges.pool import PoolMember
from jurymast.report.text import Block, Line, Table, clock, duration, iso

# So many of the newest claims are shown.
CLAIMS_SHOWN = 20


def pool_view(place: PoolDirectory) -> dict[str, Any]:
    """Raises OSError, ClusterUnavailableError."""
    now = time.time()
    waiting, taken = ({one.job: one for one in place.members(kind)} for kind in (WAITING, TAKEN))
    queue = queued()
    rows = []
    for job in sweep(place):
        member = waiting.get(job) or taken.get(job)
        state = "starting" if queue[job][0] != "PENDING" else "queued"
        if member is not None:
            state = "taken" if job in taken else "waiting"
        rows.append(_row(job, state, member, now))
    return {
        "directory": str(place.root),
        "members": rows,
        "claims": [_claim(one) for one in claims_in(place)],
    }


def _row(job: str, state: str, member: PoolMember | None, now: float) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("node", "partition", "account", "since", "waited_s", "ends_at"))
    row |= {"job": job, "state": state, "options": []}
    if member is None:
        return row
    return row | {
        "node": member.node, "partition": member.partition, "account": member.account,
        "since": iso(member.since), "waited_s": max(0.0, now - member.since),
        "ends_at": iso(member.ends_at), "options": [*member.options],
    }  # fmt: skip


def claims_in(place: PoolDirectory) -> list[Claimed]:
    """The newest, oldest first; lines that are damaged are passed over. Raises OSError."""
    try:
        text = foreign.read_own(place.claims, foreign.PLAN_BYTES_MAX)
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=Claimed))
        except (msgspec.DecodeError, ValueError):
            continue
    return sorted(found, key=lambda one: one.t)[-CLAIMS_SHOWN:]


def _claim(one: Claimed) -> dict[str, Any]:
    return {
        "at": iso(one.t), "run": one.run, "job": one.job, "node": one.node, "since": iso(one.since),
        "waited_s": max(0.0, one.t - one.since),
    }  # fmt: skip


def pool_blocks(view: dict[str, Any]) -> list[Block]:
    members, claims = view["members"], view["claims"]
    blocks: list[Block] = [Line("" if members else f"no node waits in {view['directory']}", "dim")]
    if members:
        headers = ("JOB", "STATE", "NODE", "PARTITION", "WAITS SINCE", "FOR", "OPTIONS")
        blocks = [Table(headers, [_cells(one) for one in members])]
    if claims:
        rows = [
            (_time(one["at"]), one["run"], one["node"], one["job"], duration(one["waited_s"]))
            for one in claims
        ]
        blocks += [Line(""), Table(("TAKEN AT", "BY", "NODE", "JOB", "HAD WAITED"), rows)]
    return blocks


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    waited = "-" if one["waited_s"] is None else duration(one["waited_s"])
    return (
        one["job"], one["state"], one["node"] or "-", one["partition"] or "-", _time(one["since"]), waited,
        " ".join(one["options"]) or "-",
    )  # fmt: skip


def _time(at: str | None) -> str:
    return clock(datetime.fromisoformat(at).timestamp()) if at else "-"
