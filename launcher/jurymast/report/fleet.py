"""All runs of some runs directories together: read, kept below the directories, and shown as one JSON object,
as text, as CSV and as a page."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jurymast
from jurymast import foreign
from jurymast.cluster.earlier import NodeReader
from jurymast.cluster.kept import Kept, Stamp, stamp_of
from jurymast.core.fleet import (
    MONTH_DAYS,
    STEP,
    WAITING,
    WEEK_DAYS,
    RunGroup,
    RunSummary,
    failures_of,
    grouped,
    spares_used,
    spent_by_day,
)
from jurymast.core.goodput import DOUBTFUL, MEANINGS, ordered
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import DAY_S, FEW_FAILURES, LEVEL, Mtbf
from jurymast.core.state.incident import CAUSES
from jurymast.errors import RunDirectoryError
from jurymast.report.cost import energy_json, energy_text, kwh_text, money
from jurymast.report.goodput import RATIO_NAMES, Card
from jurymast.report.liveness import JournalTail
from jurymast.report.pages import render, slices
from jurymast.report.runs import rows_of_nodes
from jurymast.report.text import MERGED, Block, Line, Table, between, count, duration, iso, one_line, percent
from jurymast.rundir import RunDirectory, run_names, write_json

VERSION = 3  # of what is kept
OBSERVED = "observed"  # in place of the cluster: jurymast did not launch it, so it is in no figure
SUMMARY_BYTES_MAX = 16 << 20
# From so many journals on, reading them in several processes is worth starting these.
MANY, CHUNK, PROCESSES_MAX = 200, 25, 16
# New objects between two collections: those of some runs, so that a tenth of the time is saved.
GARBAGE = 50_000
NODES_SHOWN = 10
CAUSES_TOLD, CAUSES_MAX = 3, 100
DAYS_ALONE = 10
UNREADABLE_TOLD = 3
NAME_CHARACTERS, CELL_CHARACTERS = 40, 200
NODE_KEYS = (
    "node", "runs", "incidents", "strikes", "lemon_score", "last_at", "last_cause", "last_evidence",
)  # fmt: skip
DEFINITIONS = {
    "ettr": "time in steps that counted / time since the runs could have started (queue included), each run "
    "weighted with its active nodes",
    "allocation_goodput": "node-time in steps that counted / node-time allocated (spares included)",
    "asked for": "spares that stood by as asked, saves, and restarts, drains and rollbacks that somebody "
    "ordered: nothing of it is lost",
    "unknown": "allocated node-time of which the journals do not tell whether it counted",
    "energy": "what the counters of GPUs said, at least; the days are those on which they were read",
    "mtbf": f"time of one node between failures of the infrastructure; {MERGED}",
    "trend": f"the last {WEEK_DAYS} days against the {MONTH_DAYS - WEEK_DAYS} before them; unclear if the "
    "intervals overlap",
    "month": "days and months are those of UTC",
    "team": "the Slurm account of the job",
}

View = dict[str, Any]
_Told = tuple[Stamp, RunSummary]


# ---- reading


@dataclass
class Fleet:
    """`runs` by their directories; `unreadable`: (directory, why); so many `copies` of runs were left out."""

    runs: dict[str, RunSummary] = field(default_factory=dict)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    copies: int = 0


def kept_file(runs: Path) -> Path:
    """The file with the summaries of all runs that this user may read; users may share the directory."""
    return runs / f".fleet-{os.geteuid()}.json"


def read_fleet(places: Sequence[Path]) -> Fleet:
    """Read all runs below these directories. Whatever cannot be read is named, and ends nothing."""
    fleet = Fleet()
    newest: dict[tuple[str, str], str] = {}
    for place in dict.fromkeys(places):
        for name, run in _runs_in(place, fleet.unreadable):
            if run.cluster == OBSERVED:
                continue
            same = (run.user, run.past.run)
            other = newest.get(same)
            if other is None or run.past.until > fleet.runs[other].past.until:
                newest[same] = name
                fleet.runs.pop(other or "", None)
                fleet.runs[name] = run
            fleet.copies += other is not None
    return fleet


def _runs_in(place: Path, unreadable: list[tuple[str, str]]) -> list[tuple[str, RunSummary]]:
    kept = Kept(kept_file(place), _version(), RunSummary.from_json, RunSummary.to_json)
    found = []
    try:
        names = run_names(place)
    except OSError as error:
        unreadable.append((str(place), error.strerror or str(error)))
        return []
    new = [place / name for name in names if not kept.knows(name)]
    try:
        for name, told in zip(names, _told(names, new), strict=True):
            directory = RunDirectory(place / name)
            try:
                run = kept.of(directory, read_run, told)
                found.append((str(directory.root), replace(run, user=_owner(directory.root))))
            except (RunDirectoryError, OSError) as error:
                if _seems_a_run(directory):
                    unreadable.append((str(directory.root), str(error)))
    finally:  # whoever did not want to wait for all need not wait for these again
        kept.save(names)
    return found


def _told(names: Sequence[str], new: Sequence[Path]) -> Iterator[_Told | None]:
    """What other processes read of each of these runs, several at a time, if many of them are `new`."""
    processes = len(os.sched_getaffinity(0))
    if len(new) < MANY or processes < 2:
        yield from (None for _ in names)
        return
    unknown = {path.name for path in new}
    # From Python 3.14 on the usual way starts a Python, which imports from the directory it is started in.
    with ProcessPoolExecutor(
        min(processes, PROCESSES_MAX), get_context("fork"), initializer=_collect_seldom
    ) as pool:
        found = pool.map(_summary, new, chunksize=CHUNK)
        for name in names:
            told = None
            if name in unknown:
                try:
                    told = next(found)
                except BrokenExecutor:  # one was killed, for want of memory say: the rest is read here
                    unknown.clear()
            yield told


def _collect_seldom() -> None:
    """What was imported is no garbage: collections need not look at it. What is left of a run hardly is."""
    gc.freeze()
    gc.set_threshold(GARBAGE)


def _summary(root: Path) -> _Told | None:
    """The run's summary, and what it was read from; None if it cannot be read."""
    directory = RunDirectory(root)
    with contextlib.suppress(RunDirectoryError, OSError):
        return stamp_of(directory), read_run(directory)
    return None


def _owner(root: Path) -> str:
    return _user_name(foreign.link_status(root).st_uid)


_user_name = cache(foreign.user_name)  # a site's directory of users may be slow


def _seems_a_run(directory: RunDirectory) -> bool:
    try:
        return not {directory.plan_file.name, directory.journal.name}.isdisjoint(
            foreign.names(directory.root)
        )
    except OSError:  # nobody knows
        return True


class _RunReader(JournalTail):
    """Reads a journal once, for the run's account and for what its nodes did."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory)
        self.nodes = NodeReader(self.state, super()._feed)
        self.partition = self.account = ""
        self.joules: defaultdict[int, float] = defaultdict(float)  # by day

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.AllocationStarted):
            self.partition, self.account = event.partition, event.account
        before = self.state.joules
        self.nodes.take(event)
        if self.state.joules > before:
            self.joules[int(self.state.now // DAY_S)] += self.state.joules - before

    def summary(self) -> RunSummary:
        """What has been read, up to the newest entry. Raises ValueError."""
        account = self.ledger.account()
        return RunSummary(
            past=self.nodes.summary(self.plan.run, self.plan.exclude),
            cluster=OBSERVED if self.plan.observed else self.plan.cluster,
            partition=self.partition, account=self.account, gpus=account.gpus, spares=self.plan.spares,
            spares_used=spares_used(account), whole=not self.unread,
            days=spent_by_day(account, self.state.incidents, self.plan.submitted_at, self.joules),
            price=self.plan.settings.price,
        )  # fmt: skip


def read_run(directory: RunDirectory) -> RunSummary:
    """The summary of a run, whoever wrote it or its journal. Raises RunDirectoryError, OSError."""
    try:
        left = foreign.load(directory.summary_file, SUMMARY_BYTES_MAX)
        if left["version"] == _version() and left["stamp"] == stamp_of(directory):
            return RunSummary.from_json(left["run"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass
    return _replayed(directory)


def leave_summary(directory: RunDirectory) -> None:
    """Keep the summary of a run that has ended beside its journal, so that nobody has to read that again for
    a fleet. Raises RunDirectoryError, OSError."""
    stamp, run = stamp_of(directory), _replayed(directory)
    if run.past.ended:
        values = {"version": _version(), "stamp": stamp, "run": run.to_json()}
        write_json(directory.summary_file, values, durable=False)


@cache  # it is looked up among the metadata of all packages
def _version() -> str:
    return f"{VERSION}, jurymast {jurymast.__version__}"


def _replayed(directory: RunDirectory) -> RunSummary:
    reader = _RunReader(directory)
    for _ in reader.new():
        pass
    try:
        return reader.summary()
    except (ValueError, ArithmeticError, LookupError, TypeError) as error:
        raise RunDirectoryError(f"{directory.journal} makes no sense: {error}") from error


# ---- the JSON object


def fleet_view(fleet: Fleet, by: Sequence[str], since: float | None, now: float) -> View:
    """The object. Times are in seconds or ISO 8601 with zone, node- and GPU-time in seconds, ratios 0..1 or
    null (nothing was spent) or a range. `since`: from the day on (UTC) that this is in."""
    since = None if since is None else since // DAY_S * DAY_S
    (total,) = grouped(fleet.runs, (), since or 0.0) or [RunGroup()]
    slurm = [run.past for run in total.runs.values() if run.cluster == "slurm"]
    # Whether a node is excluded depends on whose run it would be: that is for `jurymast nodes`.
    nodes = [
        {name: row[name] for name in NODE_KEYS}
        for row in rows_of_nodes(slurm, now, 0.0, {}, {})
        if row["incidents"]
    ]
    return {
        "generated_at": iso(now), "since": iso(since), "by": list(by),
        "provisional": any(not run.past.ended for run in total.runs.values()),
        "warnings": _warnings(fleet, total),
        "unreadable": [{"run": name, "why": why} for name, why in fleet.unreadable],
        "total": _group_json(total, (), now),
        "groups": [_group_json(group, by, now) for group in grouped(fleet.runs, by, since or 0.0)],
        "nodes": nodes[:NODES_SHOWN],
        "definitions": DEFINITIONS,
    }  # fmt: skip


def _group_json(group: RunGroup, by: Sequence[str], now: float) -> View:
    runs = group.runs.values()
    failures = failures_of(group, now)
    return {
        **{name: value or None for name, value in zip(by, group.key, strict=True)},
        "runs": len(runs), "open_runs": sum(not run.past.ended for run in runs),
        "total_node_seconds": group.nodes.total() / 1e6,
        "allocated_node_seconds": group.allocated_us / 1e6, "gpu_seconds": group.gpus.total() / 1e6,
        "ratios": {name: _ratio(found) for name, found in group.ratios().items()},
        "productive": _spent(group, [STEP]),
        "unknown": {
            **_spent(group, DOUBTFUL),
            "share": group.doubt_us / group.allocated_us if group.allocated_us else None,
        },
        "waiting": _spent(group, WAITING),
        "lost": _by_cause(group.lost()),
        "asked_for": _by_cause(group.asked_for()),
        "mtbf": {
            f"{WEEK_DAYS}d": _mtbf_json(failures.week), f"{MONTH_DAYS}d": _mtbf_json(failures.month),
            "trend": failures.trend or None, "level": LEVEL,
        },
        "cost": {
            currency: {
                "total": cost.total, "counted": cost.counted, "doubtful": cost.doubtful,
                "else": cost.total - cost.counted - cost.doubtful, "gpu_seconds": cost.gpu_us / 1e6,
            }
            for currency, cost in sorted(group.costs.items())
        },
        "energy": energy_json(group.millijoules / 1e3, group.metered_us / 1e6),
        "spares": {"asked": sum(r.spares for r in runs), "used": sum(r.spares_used for r in runs)},
    }  # fmt: skip


def _spent(group: RunGroup, causes: Sequence[str] | frozenset[str]) -> dict[str, float]:
    return {
        "node_seconds": sum(group.nodes[cause] for cause in causes) / 1e6,
        "gpu_seconds": sum(group.gpus[cause] for cause in causes) / 1e6,
    }


def _by_cause(spent: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, float]]:
    """Others' runs may tell of ever so many causes: those of the least time are one."""
    told = list(spent.items())
    if rest := told[CAUSES_MAX:]:
        sums = sum(node_us for _, (node_us, _) in rest), sum(gpu_us for _, (_, gpu_us) in rest)
        told[CAUSES_MAX:] = [("others", sums)]
    return {
        cause: {"node_seconds": node_us / 1e6, "gpu_seconds": gpu_us / 1e6}
        for cause, (node_us, gpu_us) in told
    }


def _ratio(found: tuple[float, float] | None) -> float | dict[str, float] | None:
    if found is None or found[0] == found[1]:
        return found and found[0]
    return {"low": found[0], "high": found[1]}


def _mtbf_json(found: Mtbf) -> View:
    return {
        "node_seconds": found.mean_s, "low_node_seconds": found.low_s, "high_node_seconds": found.high_s,
        "failures": found.failures, "observed_node_seconds": found.observed_s,
    }  # fmt: skip


def _warnings(fleet: Fleet, total: RunGroup) -> list[str]:
    """What the figures do not hold, and what in them may change."""
    runs, found = total.runs.values(), []
    if fleet.unreadable:
        found.append(f"not in any figure: {count(len(fleet.unreadable), 'run')} that could not be read")
    if fleet.copies:
        more = f"{fleet.copies} more director{'y' if fleet.copies == 1 else 'ies'}"
        found.append(f"left out: a copy of a run in {more}")
    if gaps := sum(not run.whole for run in runs):
        found.append(f"parts of the journals of {count(gaps, 'run')} are missing")
    if still := sum(not run.past.ended for run in runs):
        found.append(
            f"provisional: no end of {count(still, 'run')} is recorded, counted up to the newest entry"
        )
    if total.doubt_us:
        found.append(
            f"of {percent(total.doubt_us / total.allocated_us)} of the allocated node-time it is not known "
            "whether it counted: goodput is a range"
        )
    unread = sum(run.gpus > 0 and not run.metered for run in runs if run.past.spans)
    if unread and total.millijoules:
        found.append(f"no energy counter of {count(unread, 'run')} with GPUs was read: no energy of theirs")
    no_gpus = sum(not run.gpus for run in runs if run.past.spans)
    if no_gpus and total.gpus.total():
        found.append(f"the nodes of {count(no_gpus, 'run')} told of no GPUs: no GPU-hours of theirs")
    return found


# ---- as text


def fleet_blocks(view: Mapping[str, Any]) -> list[Block]:
    """Lay out the object as text."""
    total, by = view["total"], view["by"]
    blocks: list[Block] = [Line(f"warning  {text}", "bold yellow") for text in view["warnings"]]
    blocks += [
        Line(f"  {one_line(each['run'])}: {one_line(each['why'])}", "dim")
        for each in view["unreadable"][:UNREADABLE_TOLD]
    ]
    columns = columns_of(total)
    headers = (*(name.upper() for name in by), *(name.lstrip(">") for name in columns))
    right = frozenset(len(by) + place for place, name in enumerate(columns) if name.startswith(">"))
    rows = [[*keys_of(group, by, NAME_CHARACTERS), *cells_of(group, columns)] for group in view["groups"]]
    if len(rows) != 1 and by:
        rows.append(["all", *[""] * (len(by) - 1), *cells_of(total, columns)])
    blocks += [Line(""), Table(headers, rows, right)] if rows else [Line("no runs")]
    told = cost_lines(total)
    told += [f"energy: {energy_text(total['energy'])}"] if total["energy"] else []
    blocks += [Line(""), *map(Line, told)] if told else []
    for title, key in (("LOST TO", "lost"), ("ASKED FOR", "asked_for")):
        causes = [
            [one_line(cause.replace("_", " "), NAME_CHARACTERS),
             hours(spent["node_seconds"]), hours(spent["gpu_seconds"]),
             percent(spent["node_seconds"] / total["allocated_node_seconds"]), meaning_of(cause)]
            for cause, spent in total[key].items()
        ]  # fmt: skip
        headers = (title, "NODE-H", "GPU-H", "SHARE", "MEANING")
        blocks += [Line(""), Table(headers, causes, frozenset({1, 2, 3}))] if causes else []
    if view["nodes"]:
        nodes = [[_node_cell(name, node[name]) for name in NODE_KEYS] for node in view["nodes"]]
        headers = tuple(name.replace("_", " ").upper() for name in NODE_KEYS)
        blocks += [Line(""), Table(headers, nodes, frozenset({1, 2, 3, 4}))]
    return blocks


def cost_lines(group: Mapping[str, Any]) -> list[str]:
    """One a currency. Runs whose policy has no price are in none."""
    return [
        f"cost: {money(cost['total'], currency)} for {hours(cost['gpu_seconds'])} of "
        f"{hours(group['gpu_seconds'])} GPU-hours: {money(cost['counted'], currency)} in steps that counted, "
        f"{money(cost['else'], currency)} in all else"
        + (f", {money(cost['doubtful'], currency)} unclear" if cost["doubtful"] else "")
        for currency, cost in group["cost"].items()
    ]


def _node_cell(name: str, value: Any) -> str:
    if name == "last_at" and value is not None:
        return str(value)[:16].replace("T", " ")
    return "-" if value is None else one_line(str(value), CELL_CHARACTERS)


COST, ENERGY = ">COST", ">ENERGY"  # if any run has a price; if any counter was read
# Those that begin with > have numbers.
COLUMNS = (
    ">RUNS", ">NODE-H", ">GPU-H", ">GOODPUT", ">ETTR", ">UNKNOWN", f">MTBF {WEEK_DAYS}D",
    f">MTBF {MONTH_DAYS}D", "TREND", ">SPARES", "MOST LOST TO",
)  # fmt: skip


def columns_of(total: Mapping[str, Any]) -> tuple[str, ...]:
    more = [column for column, told in ((COST, total["cost"]), (ENERGY, total["energy"])) if told]
    return (*COLUMNS[:-1], *more, COLUMNS[-1])


def keys_of(group: Mapping[str, Any], by: Sequence[str], most: int | None = None) -> list[str]:
    """The group's names, cut after `most` characters; - for what the journals do not tell."""
    return [one_line(group[name] or "-", most) for name in by]


def cells_of(group: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    """The group's cells below these columns."""
    asked, used = group["spares"]["asked"], group["spares"]["used"]
    mtbf = group["mtbf"]
    costs = " + ".join(money(cost["total"], name) for name, cost in group["cost"].items())
    return [
        f"{group['runs']}" + ("*" if group["open_runs"] else ""),
        hours(group["allocated_node_seconds"]), hours(group["gpu_seconds"]),
        ratio_text(group["ratios"]["allocation_goodput"]), ratio_text(group["ratios"]["ettr"]),
        percent(group["unknown"]["share"]), mtbf_text(mtbf[f"{WEEK_DAYS}d"]),
        mtbf_text(mtbf[f"{MONTH_DAYS}d"]), mtbf["trend"] or "-",
        f"{used} of {asked}" if asked or used else "-",
        *([costs or "-"] if COST in columns else []),
        *([kwh_text(group["energy"]) if group["energy"] else "-"] if ENERGY in columns else []),
        most_lost(group),
    ]  # fmt: skip


def hours(seconds: float) -> str:
    """Of a handful of short runs, too: never 0 for what is not nothing."""
    if not seconds:
        return "-"
    if seconds < 36:
        return "<0.01"
    return f"{seconds / 3600:,.{0 if seconds >= 360_000 else 1 if seconds >= 36_000 else 2}f}"


def ratio_text(ratio: float | Mapping[str, float] | None) -> str:
    return between(ratio["low"], ratio["high"]) if isinstance(ratio, Mapping) else percent(ratio)


def mtbf_text(found: Mapping[str, Any]) -> str:
    """An MTBF; after few failures the interval in which it lies, and without one what it is at least."""
    mean, low, high = found["node_seconds"], found["low_node_seconds"], found["high_node_seconds"]
    if mean is None or low is None or high is None:
        return f"> {_time(low)}" if low is not None else "-"
    return _time(mean) if found["failures"] >= FEW_FAILURES else f"{_time(low)} to {_time(high)}"


def _time(seconds: float | None) -> str:
    """Days alone, where there are many."""
    if seconds is None or seconds < DAYS_ALONE * DAY_S:
        return duration(seconds)
    return f"{seconds / DAY_S:,.0f} d"


def most_lost(group: Mapping[str, Any]) -> str:
    allocated = group["allocated_node_seconds"]
    told = [
        f"{one_line(cause.replace('_', ' '), NAME_CHARACTERS)} {percent(spent['node_seconds'] / allocated)}"
        for cause, spent in list(group["lost"].items())[:CAUSES_TOLD]
    ]
    return ", ".join(told) or "-"


def meaning_of(cause: str) -> str:
    return CAUSES[cause].meaning if cause in CAUSES else MEANINGS.get(cause, "")


# ---- as CSV


UNREAD = {"kwh": None, "gpu_watts": None}


def fleet_csv(view: Mapping[str, Any]) -> str:
    """One line a group, after a line with the names of the columns: the JSON's, joined by points. Ranges have
    two columns, which are alike where the ratio is known. What is not known is empty."""
    rows = [_flat(group) for group in view["groups"]]
    columns = dict.fromkeys(name for row in rows for name in row) or dict.fromkeys(view["by"])
    nothing = {name: 0 for name in columns if name.startswith(("lost.", "asked_for."))}
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**nothing, **row} for row in rows)
    return out.getvalue()


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if before == "ratios." and not isinstance(value, Mapping):
            value = {"low": value, "high": value}
        elif name == "energy" and value is None:
            value = UNREAD
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{before}{name}."))
        else:
            flat[before + name] = _cell(value) if isinstance(value, str) else value
    return flat


def _cell(text: str) -> str:
    """The text, which no spreadsheet takes for a formula."""
    text = one_line(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text


# ---- the page


_TABLES = (
    ("Lost, by cause", "what node-time was lost to", "lost", "c-rework"),
    ("Asked for", "node-time that was spent as somebody asked", "asked_for", "c-spare_idle"),
)


def fleet_page(view: Mapping[str, Any]) -> str:
    """Render the whole page."""
    total = view["total"]
    spent = _by_kind(total)
    month = total["mtbf"][f"{MONTH_DAYS}d"]
    cards = [
        Card(RATIO_NAMES[name], ratio_text(total["ratios"][name]), DEFINITIONS[name])
        for name in ("allocation_goodput", "ettr")
    ]
    cards.append(Card("MTBF of a node", mtbf_text(month), _mtbf_told(total["mtbf"])))
    cards.append(Card("Unknown", percent(total["unknown"]["share"]), DEFINITIONS["unknown"]))
    columns = columns_of(total)
    for told in cost_lines(total):
        cost = told.removeprefix("cost: ").partition(" for ")
        cards.append(Card("Cost", cost[0], f"for {cost[2]}"))
    if energy := total["energy"]:
        cards.append(Card("Energy", kwh_text(energy), energy_text(energy)))
    computed = {
        "title": f"Fleet: {count(total['runs'], 'run')}", "cards": cards,
        "slices": slices(spent, sum(spent.values())), "columns": columns,
        "groups": [(keys_of(group, view["by"]), cells_of(group, columns)) for group in view["groups"]],
        "all": cells_of(total, columns), "hours": hours, "meaning": meaning_of,
        "tables": [
            (title, about, look, total[key], max(each["node_seconds"] for each in total[key].values()))
            for title, about, key, look in _TABLES
            if total[key]
        ],
    }  # fmt: skip
    return render("fleet.html.j2", view, computed)


def _by_kind(total: Mapping[str, Any]) -> dict[str, float]:
    """Node-seconds by category; what incidents cost is one."""
    lost: defaultdict[str, float] = defaultdict(float)
    for key in ("lost", "asked_for"):
        for cause, each in total[key].items():
            lost[cause] += each["node_seconds"]
    spent = {name: seconds for name, seconds in lost.items() if name in MEANINGS and name not in CAUSES}
    spent["incidents"] = sum(lost.values()) - sum(spent.values())
    for category, name in ((STEP, "productive"), ("unknown", "unknown"), ("queue_wait", "waiting")):
        spent[category] = total[name]["node_seconds"]
    return {name: spent[name] for name in ordered(list(spent)) if spent[name] > 0}


def _mtbf_told(found: Mapping[str, Any]) -> str:
    month = found[f"{MONTH_DAYS}d"]
    told = f"{MONTH_DAYS} days, {count(month['failures'], 'failure')} of nodes"
    if month["low_node_seconds"] is not None:
        high = month["high_node_seconds"]
        most = "no upper end" if high is None else _time(high)
        told += f"; {100 * found['level']:.0f} %: {_time(month['low_node_seconds'])} to {most}"
    week = mtbf_text(found[f"{WEEK_DAYS}d"])
    return f"{told}; of {WEEK_DAYS} days: {week}, trend {found['trend'] or 'not known'}"
