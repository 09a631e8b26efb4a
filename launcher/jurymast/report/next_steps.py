"""What is wrong with a run and which command leads on, for who is on call: the first screen of `status`, and
the end of `submit --follow`. A view is the status as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.core.judges.stacks import ranks_told
from jurymast.core.state.incident import CAUSES, INFRASTRUCTURE
from jurymast.report.sentences import decision
from jurymast.report.text import Block, Line, one_line

View = Mapping[str, Any]
EVIDENCE_CHARACTERS = 600
INDENT = 11  # where the text of a line with a label begins

# Causes of which the rank's own log says more.
_IN_LOGS = frozenset({
    "worker_exception", "worker_exit", "worker_crash", "import_failed", "out_of_memory", "gpu_out_of_memory",
    "gpu_exception", "script_fault",
})  # fmt: skip
_WAITED = frozenset({"hang", "collective_timeout", "rank_frozen"})


def trouble_blocks(view: View) -> list[Block]:
    """The incident that ended the run, or from which it recovers now, and the next commands; [] if there is
    no trouble."""
    incident = _present(view)
    ways = next_commands(view)
    blocks = [] if incident is None else _cause_blocks(incident)
    for number, way in enumerate(ways):
        blocks.append(Line(f"{'' if number else 'next':<{INDENT}}{way}", "bold"))
    return blocks


def traceback_blocks(view: View) -> list[Block]:
    """The traceback of a run that failed, which may be longer than a screen."""
    incident = _present(view)
    if view["state"] != "failed" or incident is None or not incident["traceback"]:
        return []
    lines = incident["traceback"].rstrip().splitlines()
    return [Line(""), *(Line(one_line(f"  {line}", EVIDENCE_CHARACTERS)) for line in lines)]


def next_commands(view: View) -> list[str]:
    """The commands that lead on, each with when to use it, the first one first; [] if none is needed."""
    run, incident = view["run"], _present(view)
    if view["state"] == "failed":
        return after_failure(run, incident) if incident is not None else []
    if view["silent"]:
        late = view["late_ranks"]
        log = [f"jurymast logs {run} --rank {late[0]}"] if late else []
        return [*log, f"jurymast restart {run}, to wait no longer"]
    if incident is None:
        return []
    if view["state"] == "requeued":
        jobs = view["slurm_jobs"][-1:]
        start = [f"squeue --start --jobs {job}: when Slurm expects to go on" for job in jobs]
        return [*start, f"jurymast events {run}: what was seen of the node"]
    if incident["cause"] in _IN_LOGS:
        return [_log(run, incident)]
    return [f"jurymast status {run} --watch, until it runs again"]


def _present(view: View) -> View | None:
    """The incident that matters now: the one that ended the run, or that is not over."""
    last = view["incidents"][-1] if view["incidents"] else None
    return last if last is not None and (last["open"] or view["state"] == "failed") else None


def after_failure(run: str, incident: View) -> list[str]:
    """The commands that lead on from a run that this incident ended."""
    again, cause = f"jurymast resubmit {run}", incident["cause"]
    repaired = f"when it is repaired: {again}"
    if cause == "import_failed" and incident["rank"] is None:
        return [f"jurymast logs {run} --job", repaired]
    if cause in _IN_LOGS:
        return [_log(run, incident), repaired]
    if cause in _WAITED:
        return [f"jurymast events {run}: where the ranks waited", repaired]
    if incident["charged"] == INFRASTRUCTURE and "spare" in incident["why"]:
        return [f"{again} --set spares=1"]
    return [again]


def _names_rank(incident: View) -> bool:
    """Whether it is one of a rank; -1 is the torchrun host of a node's."""
    return incident["rank"] is not None and incident["rank"] >= 0


def _log(run: str, incident: View) -> str:
    return f"jurymast logs {run}{' --rank ' + str(incident['rank']) if _names_rank(incident) else ''}"


def _cause_blocks(incident: View) -> list[Block]:
    """Why the ranks do not train: cause, node, rank, evidence and decision."""
    where = [ranks_told([incident["rank"]])] if _names_rank(incident) else []
    where += [f"node {incident['node']}"] if incident["node"] else []
    told = CAUSES.get(incident["cause"])
    cause = incident["cause"] or "being diagnosed"
    lines = [
        Line(f"cause      {cause}" + (f" ({', '.join(where)})" if where else ""), "bold red", INDENT),
        *([_labelled("meaning", told.meaning + (f"; {told.todo}" if told.todo else ""))] if told else []),
    ]
    if incident["evidence"]:
        lines.append(_labelled("evidence", one_line(incident["evidence"], EVIDENCE_CHARACTERS)))
    return [*lines, _labelled("decision", decision(incident))] if incident["action"] else [*lines]


def _labelled(label: str, text: str) -> Line:
    return Line(f"{label:<{INDENT}}{text}", indent=INDENT)
