"""Journal entries as sentences: what happened, what was decided, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jurymast.core.judges.attribution import describe_exit
from jurymast.core.state.findings import APPLICATION, SYMPATHETIC
from jurymast.core.state.images import LIVE, MEMORY
from jurymast.core.state.incident import because
from jurymast.core.state.texts import on, request, reservation
from jurymast.core.state.within import NONE
from jurymast.journal import single
from jurymast.report.text import amounts, begins, count, duration, one_line, size, some

Entry = Mapping[str, Any]

# Entries for each node and attempt, or for the passing of time.
ROUTINE = frozenset({"NodeReady", "WorkersStarted", "WorkersStopped", "NodeFinished", "Tick"})


def is_routine(entry: Entry) -> bool:
    """Whether an entry is shown only on request: routine, or a probe that could not see something."""
    unseen = entry.get("verdict") == "unknown" and entry.get("kind") not in (APPLICATION, SYMPATHETIC)
    return entry.get("event") in ROUTINE or (entry.get("event") == "HealthFound" and unseen)


def sentence(entry: Entry) -> str:
    """A journal entry as a sentence; if several nodes report the same, that of the first. Of an unknown kind,
    only the name is shown."""
    if "each" in entry:
        first, *more = single(dict(entry))
        return f"{sentence(first)} (and {len(more)} more nodes)"
    if "decision" in entry:
        tell = _DECISIONS.get(entry["decision"])
        told = tell(entry) if tell else str(entry["decision"])
        return f"=> {told}: {entry['reason']}" if entry.get("reason") else f"=> {told}"
    say = _EVENTS.get(str(entry.get("event")))
    return say(entry) if say else f"({entry.get('event')}, written by a newer version of jurymast)"


def short_reason(evidence: str, why: str, most: int) -> str:
    """A decision's reason on one line of about `most` characters, with as much of the evidence as fits."""
    return one_line(because(one_line(evidence, max(most // 2, most - len(why) - 2)), why))


def decision(incident: Entry) -> str:
    """What was decided and why, for places that show the evidence as well."""
    action = str(incident["action"] or "none yet")
    return f"{action}: {incident['why']}" if incident["why"] else action


def _unfindable(e: Entry) -> str:
    if not e["who"]:
        return "nodes that are to return can look up the supervisor again: their time begins now"
    return (
        f"the run directory does not answer, so {e['who']} cannot look up the supervisor there; their time "
        "to reconnect starts when it answers"
    )


def _run_started(e: Entry) -> str:
    spare = f" + {e['spares']} spare" if e["spares"] else ""
    nodes = "node" if e["active"] + e["spares"] == 1 else "nodes"
    return (
        f"run {e['run']}: {e['active']} active{spare} {nodes}, {count(e['ranks_per_node'], 'rank')} each, "
        f"script {e['script']}"
    )


def _allocation_started(e: Entry) -> str:
    nodes = list(e["nodes"])
    job = e["slurm_job"]
    what = f"{job} started" if job.startswith("local") else f"Slurm job {job} started"
    again = f" (restart {e['restarts']})" if e["restarts"] else ""
    return f"{what}{again} on {count(len(nodes), 'node')}: {some(nodes)}"


def _node_joined(e: Entry) -> str:
    gpus = f", {count(e['gpus'], 'GPU')}" if e.get("gpus") else ""
    return f"node {e['node']} joined ({e['address']}{gpus})"


def _node_lost(e: Entry) -> str:
    how = {
        "silent": f"silent for {e['silent_s']:.1f} s (limit {e.get('limit_s', 0.0):.1f} s)",
        "closed": "its agent's connection was reset",
        "left": "its agent left",
        "environment": "the run's Python cannot load torch there",
        "taken": "its agent got a SIGTERM",
    }.get(e["how"], e["how"])
    return f"node {e['node']} lost: {how}" + (f", {e['evidence']}" if e.get("evidence") else "")


def _worker_failed(e: Entry) -> str:
    told = describe_exit(e["exit_code"])
    if e.get("error"):
        told = f"{e['error']}: {e['message']}" if e.get("message") else e["error"]
    who = f"rank {e['rank']} on {e['node']}" if e["rank"] >= 0 else f"the torchrun host of {e['node']}"
    return f"{who} failed: {told}"


def _ranks_hung(e: Entry) -> str:
    where = f" on {e['node']}" if e["node"] else ""
    ranks = f" (rank {some([str(r) for r in e['ranks']])}{where})" if e["ranks"] else ""
    return f"the run hangs{ranks}: {e['evidence']}"


def _progress(e: Entry) -> str:
    pace = f", {duration(e['step_s'])} a step" if e.get("step_s") else ""
    counted = "" if e.get("absolute", True) else " of this attempt"
    saves = f", {count(e['saves'], 'save')} to step {e['saved_step']}" if e.get("saves") else ""
    return f"step {e['step']}{counted} done{pace}{saves}"


def _saved(e: Entry) -> str:
    if not e["ok"]:
        return f"step {e['step']} was NOT saved ({e['tier']} tier): {e.get('error') or 'no reason given'}"
    if e.get("copied"):
        amount = f"{size(e['size_bytes'])} " if e.get("size_bytes") else ""
        return f"step {e['step']} copied to the {e['tier']} tier ({amount}in {duration(e['seconds'])})"
    amount = f"{size(e['size_bytes'])}, " if e.get("size_bytes") else ""
    return f"step {e['step']} saved in the {e['tier']} tier ({amount}stall {duration(e['stall_s'])})"


def _restore_planned(e: Entry) -> str:
    if not e["tier"]:
        return f"attempt {e['attempt']} starts without a checkpoint of this run: {e['reason']}"
    return f"attempt {e['attempt']} restores step {e['step']}: {amounts(e['tiers'])}; {e['reason']}"


def _fetched(e: Entry) -> str:
    return f"rank {e['rank']} on {e['node']} got {amounts(e['tiers'])}, because {'; '.join(e['why'])}"


def _restored(e: Entry) -> str:
    skipped = f"; skipped {'; '.join(e['skipped'])}" if e.get("skipped") else ""
    if e.get("why"):
        skipped += f"; {e['why']}"
    if not e["step"]:
        return f"no checkpoint: training starts from the beginning{skipped}"
    if e["tier"] == MEMORY:  # from any tier: the plan says how much from which
        return f"step {e['step']} restored in {duration(e['seconds'])}{skipped}"
    if e["tier"] == LIVE:
        given = f", {size(e['size_bytes'])} of it given by ranks that live" if e.get("size_bytes") else ""
        return f"all ranks go on after step {e['step']}{given}, in {duration(e['seconds'])}{skipped}"
    amount = f"{size(e['size_bytes'])} " if e.get("size_bytes") else ""
    return (
        f"step {e['step']} restored, {amount}from the {e['tier']} tier in {duration(e['seconds'])}{skipped}"
    )


def _began_at(e: Entry) -> str:
    if e.get("given"):
        return f"the script says that it began after step {e['step']}"
    if e["step"] is not None:
        return f"the script goes on after step {e['step']}, by its optimizer's own count"
    if e.get("reads"):
        return f"where the script resumed is not known: it read {e['reads']}, which the run may have written"
    return "the script begins where the first attempt began: it read nothing that the run has written"


def _cold_start(e: Entry) -> str:
    takes = f", which adds {duration(e['seconds'])} to a start" if e["seconds"] else ""
    return (
        f"from now on ranks start cold and load everything themselves{takes} (rank {e['rank']}): {e['why']}"
    )


def _asked(e: Entry) -> str:
    return f"{request(e['what'], e.get('node', ''))} requested by {e['by'] or 'an unknown user'}"


def _cadence_set(e: Entry) -> str:
    if e.get("by"):
        then = ", and wait there to be placed anew" if e.get("stays") else ""
        return f"all ranks save at step {e['first_step']}, requested by {e['by']}{then}"
    if not e["every_steps"]:
        return f"all ranks save at step {e['first_step']}: {e['reason']}"
    every_s = e["every_steps"] * e["step_s"]
    return (
        f"all ranks save every {count(e['every_steps'], 'step')} ({duration(every_s)}) from step "
        f"{e['from_step']} on, next at step {e['first_step']}: {e['reason']}"
    )


def _node_tested(e: Entry) -> str:
    told = {
        "ok": "passed its tests",
        "suspect": "is suspect after its tests",
        "bad": "FAILED its tests",
        "unknown": "had tests without a clear result",
    }.get(e["verdict"], e["verdict"])
    partner = f", paired with {e['partner']} last" if e.get("partner") else ""
    return f"node {e['node']} {told}: {e['message']} ({duration(e.get('seconds'))}{partner})"


def _health_found(e: Entry) -> str:
    what = f"{e['code']}{' on ' + e['device'] if e.get('device') else ''}"
    if e["verdict"] == "ok":
        return f"node {e['node']}: {what} is over"
    word = {"bad": "BAD", "suspect": "suspect", "unknown": "seen"}.get(e["verdict"], e["verdict"])
    return f"node {e['node']}: {word}, {what}: {e['message']} ({e['kind']}, {e['probe']} probe)"


def _straggling(e: Entry) -> str:
    return f"node {e['node']} is {e['slowness']:.1f} times as slow as the others: {e['evidence']}"


def _loss_not_finite(e: Entry) -> str:
    if e["loss"] == NONE:
        return f"rank {e['rank']} says that its optimizer has no gradients at step {e['step']}"
    return f"rank {e['rank']} says that its {e.get('of', 'loss')} at step {e['step']} is {e['loss']}"


def _stacks_taken(e: Entry) -> str:
    stood = [f"rank {rank} {place}" for rank, place in zip(e["ranks"], e["places"], strict=False)]
    return f"before the stop on {e['node']}: {some(stood, 4)}"


def _signalled(e: Entry) -> str:
    if e["signal"] == "running":
        return "Slurm does not end the job: the signal was somebody else's"
    if e["signal"] == "caught":
        return "the ranks got a signal that they catch: they may leave, some before others"
    sent = e["signal"].startswith("SIG")
    return f"Slurm sent {e['signal']}" if sent else f"Slurm ends the job: {e['signal']}"


def _ranks_ended(e: Entry) -> str:
    unknown = e.get("unknown", ())
    without = f"; of these stopped before the exit code was known: {', '.join(map(str, unknown))}"
    return f"ranks that had ended before: {', '.join(map(str, e['ranks']))}" + without * bool(unknown)


def _node_draining(e: Entry) -> str:
    if not e["why"]:
        return f"node {e['node']} is not drained any more"
    return f"an administrator drains node {e['node']}: {e['why']}"


def _reservation_ahead(e: Entry) -> str:
    what, nodes = reservation(e["name"], maintenance=e.get("maintenance", False)), list(e["nodes"])
    if not nodes:
        return f"{what} begins on no node of the run any more"
    told = begins(what, nodes, e["starts_at"], e["t"])
    return f"{told}: ranks leave what they can" if e.get("near") else told


def _refill_expected(e: Entry) -> str:
    starts_at = e.get("starts_at")
    when = f", expected to start in {max(0.0, starts_at - e['t']):.0f} s" if starts_at is not None else ""
    return f"Slurm has taken small job {e['number']} as job {e['job']}{when}"


_EVENTS: dict[str, Callable[[Entry], str]] = {
    "RunStarted": _run_started,
    "AllocationStarted": _allocation_started,
    "AllocationEnded": lambda e: f"job {e['slurm_job']} gave its nodes back: {e['why']}",
    "RefillAsked": lambda e: f"small job {e['number']} is submitted, to bring another node",
    "RefillRefused": lambda e: f"small job {e['number']} could not be submitted: {e['why']}",
    "RefillExpected": _refill_expected,
    "RefillStarted": lambda e: f"small job {e['number']} has started, and brings {e['node']}",
    "RefillEnded": lambda e: f"small job {e['number']} is over: {e['why']}",
    "SupervisorStarted": lambda e: f"supervisor {e['epoch']} runs on {e['node']}",
    "NodeJoined": _node_joined,
    "NodeDraining": _node_draining,
    "ReservationAhead": _reservation_ahead,
    "NodeReady": lambda e: f"node {e['node']} is ready",
    "NodeLost": _node_lost,
    "WorkersStarted": lambda e: f"attempt {e['attempt']}: {count(len(e['pids']), 'rank')} up on {e['node']}",
    "WorkerFailed": _worker_failed,
    "RanksHung": _ranks_hung,
    "WorkersStopped": lambda e: f"attempt {e['attempt']}: all ranks of {e['node']} are stopped",
    "NodeFinished": lambda e: f"attempt {e['attempt']}: all ranks of {e['node']} ended with exit code 0",
    "Progress": _progress,
    "Saved": _saved,
    "RestorePlanned": _restore_planned,
    "RestoreFailed": lambda e: f"rank {e['rank']} on {e['node']} cannot restore step {e['step']}: {e['why']}",
    "RestoreWaits": lambda e: (
        f"rank {e['rank']} on {e['node']} waits for its restore: the storage of {e['path']} has not answered "
        f"for {duration(e['seconds'])}"
    ),
    "Fetched": _fetched,
    "Restored": _restored,
    "BeganAt": _began_at,
    "TimeOutSet": lambda e: f"rank {e['rank']} gives a process group a time-out of {duration(e['seconds'])}",
    "GroupMade": lambda e: f"rank {e['rank']} makes a process group: the tasks are one training",
    "ColdStart": _cold_start,
    "SavesTo": lambda e: f"checkpoints are saved to {e['directory']}",
    "Asked": _asked,
    "Signalled": _signalled,
    "CadenceSet": _cadence_set,
    "HealthFound": _health_found,
    "NodeTested": _node_tested,
    "Straggling": _straggling,
    "StacksTaken": _stacks_taken,
    "LossNotFinite": _loss_not_finite,
    "BatchDiffers": lambda e: (
        f"the batch of a step differs while there are {e['ranks']} of {e['wanted']} ranks: {e['why']}"
    ),
    "RanksEnded": _ranks_ended,
    "AttemptFound": lambda e: (
        f"{e['node'] or 'the run directory'} has attempt {e['attempt']}, which is not in the journal"
    ),
    "Unfindable": _unfindable,
    "LaunchWaits": lambda e: (
        f"attempt {e['attempt']} has waited {duration(e['seconds'])} for {e['what']}, and still waits"
    ),
    "Noted": lambda e: f"note{' on ' + e['node'] if e.get('node') else ''}: {e['message']}",
    "Tick": lambda e: "time passed",
}

_DECISIONS: dict[str, Callable[[Entry], str]] = {
    "Launch": lambda e: f"launch attempt {e['attempt']} on {some(list(e['placement']))}",
    "StopWorkers": lambda e: f"stop attempt {e['attempt']} on {some(list(e['nodes'])) or 'no node'}",
    "TestNodes": lambda e: (
        f"test {some(list(e['nodes']))}"
        + (f" with {some(list(e['partners']))}" if e.get("partners") else "")
        + f", for {duration(e['limit_s'])} at most"
    ),
    "Dismiss": lambda e: f"dismiss node {e['node']}",
    "RaiseAlert": lambda e: f"ALERT{on(e['nodes'])}",
    "Requeue": lambda e: f"requeue, excluding {some(list(e['exclude'])) or 'no node'}",
    "Finish": lambda e: (
        f"the run {e['state']} with exit code {e['exit_code']}"
        if e["state"] != "cancelled"
        else "the run is cancelled"
    ),
}
