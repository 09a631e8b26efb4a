"""Nodes over all runs: the rows of `jurymast nodes`, and their table."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from jurymast.cluster.earlier import out_of_service, until_text, watched_in
from jurymast.core.nodes.history import NodeRecord, comebacks, history, more_exposure
from jurymast.core.planning.failure_rate import AFTER_REPAIR, learned_before, node_rate, prior
from jurymast.past_runs import forgiven_nodes, past_runs
from jurymast.report.text import Block, Line, Table, clock, count, duration, iso

Row = dict[str, Any]


def node_rows(runs: Path, exclusion_s: float) -> list[Row]:
    """One row per node that served a run below `runs`. The nodes that are most suspect come first."""
    now = time.time()
    out = out_of_service(now)
    earlier, forgiven = past_runs(runs), forgiven_nodes(runs)
    watched = [one for run in earlier for one in watched_in(run)]
    watched += more_exposure(earlier, comebacks(earlier, forgiven))
    fleet = prior().learned(*learned_before(watched, now)).rate
    records = history(
        earlier, now, exclusion_s, out_s={name: seconds for name, (seconds, _) in out.items()},
        forgiven=forgiven,
    )  # fmt: skip
    worst = sorted(
        records.values(),
        key=lambda r: (
            not r.for_good,
            not r.excluded,
            -r.lemon_score,
            -r.strikes,
            -len(r.departures),
            r.name,
        ),
    )
    return [_row(record, out.get(record.name), fleet, now) for record in worst]


def _row(record: NodeRecord, out: tuple[float, str] | None, fleet: float, now: float) -> Row:
    """The row of one node. `fleet`: failures per 1,000 node-days of all nodes."""
    last = record.departures[-1] if record.departures else None
    after_repair = AFTER_REPAIR if record.fresh(now) else 1.0
    rate = node_rate(fleet, record.failures, record.exposure_days) * after_repair
    return {
        "node": record.name, "runs": record.runs, "node_days": round(record.node_days, 3),
        "incidents": len(record.departures), "strikes": record.strikes,
        "last_cause": last.cause if last else None, "last_at": iso(last.at) if last else None,
        "last_evidence": last.evidence if last else None,
        "lemon_score": record.lemon_score,
        "expected_rate": round(rate, 3), "rate_times": round(rate / fleet, 3),
        "after_repair": record.fresh(now), "why_rate": record.why_frail(now),
        "signals": [
            {"name": s.name, "value": s.value, "limit": s.limit, "shows": s.shows, "evidence": s.evidence}
            for s in record.signals
        ],
        "excluded": record.excluded, "excluded_for_good": record.for_good,
        "excluded_until": iso(record.excluded_until), "why": record.why or None,
        "out_of_service_s": round(out[0], 1) if out else None, "slurm_reason": out[1] if out else None,
        "history": [{**asdict(departure), "at": iso(departure.at)} for departure in record.departures],
    }  # fmt: skip


def node_blocks(rows: list[Row], *, everything: bool) -> list[Block]:
    """Lay out the table. Without `everything` it has only nodes that something speaks against."""
    shown = [r for r in rows if everything or r["incidents"] or r["lemon_score"] or r["excluded"]]
    blocks: list[Block] = []
    if shown:
        headers = ("NODE", "RUNS", "INCIDENTS", "LAST", "STRIKES", "LEMON", "RATE", "KEPT OUT", "LAST CAUSE")
        table = [_cells(row) for row in shown]
        blocks.append(Table(headers, table, frozenset({1, 2, 4, 5, 6})))
    quiet = len(rows) - len(shown)
    if quiet:
        blocks.append(Line(f"{count(quiet, 'node')} without an incident", "dim"))
    return blocks


def _cells(row: Row) -> list[str]:
    signs = [s["evidence"] for s in row["signals"] if s["shows"]]
    cause = f"{row['last_cause']}: {row['last_evidence']}" if row["last_cause"] else "-"
    if signs:
        cause += f" ({'; '.join(signs)})"
    if row["after_repair"]:
        cause += f"; {row['why_rate']}"
    if row["out_of_service_s"] is not None:
        reason = row["slurm_reason"] or "no reason"
        cause += f"; out of service in Slurm for {duration(row['out_of_service_s'])}: {reason}"
    return [
        row["node"], str(row["runs"]), str(row["incidents"]), _when(row["last_at"]), str(row["strikes"]),
        f"{row['lemon_score']}/{len(row['signals'])}", _times(row["rate_times"]), _kept_out(row), cause,
    ]  # fmt: skip


def _when(at: str | None) -> str:
    return clock(datetime.fromisoformat(at).timestamp())[:16] if at else "-"


def _times(factor: float) -> str:
    return f"x {factor:,.0f}" if factor >= 10.0 else f"x {factor:.2g}"


def _kept_out(row: Row) -> str:
    if row["excluded_for_good"]:
        return until_text(None)
    until = row["excluded_until"]
    return until_text(datetime.fromisoformat(until).timestamp()) if until else "-"
