"""A run's status, as one JSON object and as text, from its journal and from what Slurm says of its job."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jurymast.core.checkpoints.writes import durable_every_s
from jurymast.core.goodput import Account
from jurymast.core.judges.cadence import cost_if, next_save_step
from jurymast.core.judges.forecast import IDLE_SHARE, Saving
from jurymast.core.run import refill, size
from jurymast.core.run.ladder import without_spare
from jurymast.core.run.recording import pause_s
from jurymast.core.state.failure_rate import LEVEL, failure_times
from jurymast.core.state.images import MEMORY, PEER, SHARED
from jurymast.core.state.run import Phase, Role, RunState, failure_rate
from jurymast.core.state.schedule import NEVER, Schedule
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import on
from jurymast.core.state.within import NONE
from jurymast.errors import RunCancelledError, RunFailedError
from jurymast.journal import Entry
from jurymast.report.incidents import MORE, at_least, incident_json, lost_step
from jurymast.report.liveness import JournalTail, Liveness, hear, look, slurm_jobs
from jurymast.report.next_steps import INDENT, traceback_blocks, trouble_blocks
from jurymast.report.reservations import foretold
from jurymast.report.sentences import short_reason
from jurymast.report.text import (
    STYLES,
    Block,
    Line,
    Table,
    count,
    duration,
    iso,
    one_line,
    rates,
    some,
    step_told,
    throughput,
)
from jurymast.rundir import RunDirectory
from jurymast.wire.endpoint import find

if TYPE_CHECKING:
    from jurymast.core.state.messages import Condition

# While steps are done, a supervisor writes every two seconds, later in a run less often, but then it is
# asked. If no step is heard of for much longer, a warning is shown.
QUIET_S = 30.0
# A run without any checkpoint is warned of after this long with nodes.
NO_CHECKPOINT_S = 600.0
POLL_S = 0.05
LOOK_EVERY_S = 5.0

# If there are more nodes than this, those that work normally are counted instead of listed.
NODES_LISTED_MAX = 32
INCIDENTS_LISTED = 10
ALERTS_LISTED = 3
TEXT_CHARACTERS = 200

View = Mapping[str, Any]


class StatusWatcher(JournalTail):
    """Reads a run's journal once, then only what is new. `view` is the status as of the last `poll`."""

    def __init__(self, directory: RunDirectory) -> None:
        super().__init__(directory)
        self.started: Entry | None = None
        self.restored: Entry | None = None
        self.not_saved: Entry | None = None  # the last save, if it failed
        self._gone, self._look_at = False, 0.0

    def new(self) -> Iterator[Entry]:
        for entry in super().new():
            kind = entry.get("event")
            if kind == "RunStarted":
                self.started = entry
            elif kind == "Restored":
                self.restored = entry
            elif kind == "Saved" and not entry.get("copied"):
                self.not_saved = None if entry["ok"] else entry
            yield entry

    def new_for(self, limit_s: float) -> Iterator[Entry]:
        """The new entries, until the run has ended or `limit_s` seconds have passed."""
        end = time.monotonic() + limit_s
        while True:
            yield from self.new()
            if self.state.ended or time.monotonic() >= end:
                return
            time.sleep(POLL_S)

    def gone(self) -> bool:
        """Whether the job has ended but not the journal; looked up every `LOOK_EVERY_S` seconds."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            self._gone = look(self.directory, self.state).kind == "gone"
        return self._gone

    def account(self, life: Liveness, now: float) -> Account:
        """The run's account until `now`; if the run died without a last entry, until its last event."""
        return self.ledger.account(None if life.kind == "gone" else now)

    def view(
        self, life: Liveness | None = None, now: float | None = None, told: Condition | None = None
    ) -> dict[str, Any]:
        """The status object. `life` is looked up if it is not given, and then the supervisor is asked if
        necessary: `told` is its answer (see `report.liveness.hear`). `now`: seconds since the epoch."""
        now = time.time() if now is None else now
        if life is None:
            life = look(self.directory, self.state)
            told = hear(self.directory, self.state, now - (self.last_t or 0.0))
        state, plan = self.state, self.plan
        word, why = public_state(state, life)
        following = _next(state, life, now) if word not in ("failed", "cancelled", "succeeded") else ""
        step, alerts, exit_code = shown_step(state), state.alerts, exit_code_of(state, life)
        if told is not None:
            word, step, alerts = told.state, told.step, list(told.alerts)
            if told.waits:  # the journal may show the run's end already
                following, exit_code = f"{told.waits} (jurymast cancel ends this wait)", None
        place = None if state.ended or life.kind == "gone" else find(self.directory.epochs)
        ended_at = state.ended_at
        nodes_gone = without_nodes(state, life) and not (told is not None and told.waits)
        return {
            "run": state.run or plan.run, "name": state.name or plan.name, "state": word,
            "attempt": state.attempt, "step": step, "step_known": step_known(state),
            "step_seconds": round(state.step_s, 6) or None,
            "a_second": throughput(state.samples_s, state.tokens_s),
            "stepped_at": iso(state.stepped_at) if state.first_step_at is not None else None,
            "saved_step": newest_kept(state, nodes_gone=nodes_gone), "next_save_step": next_save(state),
            "tiers": tiers_json(state, nodes_gone=nodes_gone),
            "cadence": cadence_json(state, plan, now),
            "next": following, "silent": told.silent if told is not None else "",
            "restart_at": iso(told.restart_at or None) if told is not None else None,
            "late_ranks": list(told.late) if told is not None else [],
            "slurm_jobs": [job for job, _ in slurm_jobs(self.directory, state)],
            "cluster": plan.cluster, "active": state.active, "spares": state.spares,
            "ranks_per_node": state.ranks_per_node, "restarts": restarts(state),
            "requeues": state.restarts,
            "nodes": [
                {"name": node.name, "role": node.role.value, "reason": node.reason, "since": iso(node.since)}
                for node in state.nodes.values()
            ],
            "excluded": {name: told.reason for name, told in state.excluded.items()},
            "reservations": [
                {
                    "name": one.name, "nodes": list(one.nodes), "starts_at": iso(one.starts_at),
                    "maintenance": one.maintenance,
                }
                for one in state.reservations.values()
            ],
            "alerts": [
                {"at": iso(a.at), "until": iso(a.until), "message": a.message, "nodes": list(a.nodes)}
                for a in alerts
            ],
            "incidents": [incident_json(incident) for incident in state.incidents],
            "directory": str(self.directory.root.absolute()),
            "supervisor": {**asdict(place), "hosts": list(place.hosts)} if place else None,
            "notes": [{"at": iso(t), "message": message} for t, message in state.notes],
            "warnings": warnings(self, life, now, told),
            "job": {"id": life.id, "kind": life.kind, "detail": life.detail},
            "submitted_at": iso(state.submitted_at or plan.submitted_at),
            "updated_at": iso(self.last_t), "ended_at": iso(ended_at),
            "exit_code": exit_code, "end_reason": why,
        }  # fmt: skip


def read_status(directory: RunDirectory) -> StatusWatcher:
    """A watcher that has read the whole journal. Raises RunDirectoryError if the plan cannot be read."""
    watcher = StatusWatcher(directory)
    for _ in watcher.new():
        pass
    return watcher


def public_state(state: RunState, life: Liveness) -> tuple[str, str]:
    """(state, why) as shown: by the journal, unless the job has died or waits and the journal does not show
    it."""
    if life.kind == "gone" and not state.ended:
        word = "cancelled" if life.detail == "CANCELLED" else "failed"
        return word, f"{_job(life)} ended ({life.detail}), and its supervisor recorded no reason"
    if life.kind == "pending" and state.phase not in (Phase.QUEUED, Phase.REQUEUED):
        return Phase.REQUEUED.value, f"{_job(life)} waits again: {life.detail}"
    return state.public_state, state.end_reason


def without_nodes(state: RunState, life: Liveness) -> bool:
    """Whether the run has given its nodes back, or lost all of them."""
    waits = state.phase in (Phase.QUEUED, Phase.REQUEUED) or life.kind == "pending"
    return state.ended or waits or life.kind == "gone"


def exit_code_of(state: RunState, life: Liveness) -> int | None:
    """The run's exit code; None while it runs."""
    if state.ended:
        return state.exit_code
    if life.kind != "gone":
        return None
    return RunCancelledError.exit_code if life.detail == "CANCELLED" else RunFailedError.exit_code


def _job(life: Liveness) -> str:
    return f"Slurm job {life.job}" if life.job else f"the local run ({life.id})"


def restarts(state: RunState) -> int:
    """How often the ranks were started again, wherever and for whatever reason."""
    return max(0, state.attempt - 1)


def shown_step(state: RunState) -> int:
    """The newest step done; until an attempt has done a step, the newest of the earlier attempts."""
    return state.step if state.first_step_at is not None else state.best_step


def step_known(state: RunState) -> bool:
    """Whether `shown_step` counts from the training's beginning. Else it counts from that of the attempt."""
    return state.attempt <= 1 or state.first_step_at is None or state.absolute


def kept_steps(state: RunState, *, nodes_gone: bool) -> dict[str, int]:
    """The newest complete step of each tier that can still be read: memory ends with the nodes."""
    lost = (MEMORY, PEER) if nodes_gone else ()
    return {n: tier.step for n, tier in state.saved.items() if tier.step is not None and n not in lost}


def newest_kept(state: RunState, *, nodes_gone: bool) -> int | None:
    """The newest step that can still be restored, as far as is known; None for none."""
    return max(kept_steps(state, nodes_gone=True).values(), default=None) if nodes_gone else state.saved_step


def tiers_json(state: RunState, *, nodes_gone: bool) -> dict[str, Any]:
    """The newest complete step of each tier, and what has failed since."""
    kept = kept_steps(state, nodes_gone=nodes_gone)
    return {
        name: {
            "step": kept.get(name), "at": iso(tier.at) if name in kept else None,
            "size_bytes": tier.size_bytes, "seconds": round(tier.seconds, 3), "failures": tier.failures,
            "error": tier.error or None,
        }
        for name, tier in state.saved.items()
    }  # fmt: skip


def _next(state: RunState, life: Liveness, now: float) -> str:
    """What the run does or waits for, in words."""
    if state.phase in (Phase.QUEUED, Phase.REQUEUED) or life.kind == "pending":
        return f"waits for nodes: {life.detail}" if life.kind == "pending" else "waits for its nodes to start"
    if state.phase is Phase.STARTING:
        ready = len(state.spare_nodes())
        return f"waits for nodes: {ready} of {state.active} ready, {len(state.nodes)} allocated"
    if state.phase is Phase.LAUNCHING:
        return f"ranks start: up on {len(state.started)} of {count(len(state.placement), 'node')}"
    if state.phase is Phase.STOPPING:
        alive = [name for name in state.placement if state.nodes[name].role is not Role.FAILED]
        left = [name for name in alive if name not in state.stopped]
        return f"ranks are being stopped on {some(left) or 'no node'}"
    if state.phase is Phase.WAITING:
        if state.not_before == math.inf:
            return "waits until Slurm ends the job"
        if state.not_before > now:
            return f"tries again in {duration(state.not_before - now)}"
        if state.may_refill and (state.refills or refill.lacking(state) > state.spares):
            return _holds(state, now)
        return "waits until every node of the next attempt is ready"
    if state.first_step_at is None:
        return f"first step of attempt {state.attempt}"
    save = next_save(state)
    saves = f"saves after step {save}" if save else ""
    if not size.missing(state):
        return saves
    fewer = f"goes on with {len(state.placement)} of {count(state.active, 'node')}"
    return f"{fewer}, {saves}" if saves else fewer


def _holds(state: RunState, now: float) -> str:
    """What a run without spares waits for."""
    jobs = [f"small job {one.job} is to bring it" for one in refill.coming(state) if one.job]
    asked = jobs[0] if jobs else "Slurm is asked for it"
    starting = [one.node for one in state.refills.values() if one.node and one.node not in state.places]
    if starting:
        return f"holds its nodes while {some(starting)} gets ready"
    left_s = max(0.0, refill.hold_until(state) - now)
    lost = sum(state.nodes[name].role is not Role.ACTIVE for name in state.placement)
    left = len(state.placement) - max(0, lost - len(state.spare_nodes()))
    then = {
        size.SHRINK: f"goes on with {left} of {count(state.active, 'node')}", "requeue": "is requeued",
        "stop": "stops",
    }[without_spare(state, left)]  # fmt: skip
    return f"holds its nodes for another ({asked}), for up to {duration(left_s)}, then {then}"


def data_gaps(watcher: StatusWatcher, *, waits: bool = False) -> list[str]:
    """The gaps that a report must not leave out: missing parts of the journal, and steps that no checkpoint
    has. `waits`: the run waits for its last checkpoint, so its steps are not lost yet."""
    state, found = watcher.state, list(watcher.unread)
    kept = list(kept_steps(state, nodes_gone=True).values())
    unsaved = state.step - max(kept, default=0)
    # Only a Checkpointer reports a restore, and counts steps as the training does.
    ended = state.phase is Phase.SUCCEEDED and not waits
    if ended and watcher.restored and state.absolute and unsaved > 0:
        newest = f"the newest is step {max(kept)}" if kept else "there is none"
        last = "the last step is" if unsaved == 1 else f"the last {unsaved} steps are"
        found.append(f"{last} in no checkpoint ({newest}): {_why_unsaved(state)}")
    return found + doubts(state)


def _why_unsaved(state: RunState) -> str:
    """Why the steps of a run that succeeded are in no checkpoint."""
    if state.saved_step is None or state.saved_step < state.step:
        return f"checkpoint.save({state.step}) at the end of the script would have kept the final state"
    written = state.saved.get(SHARED)
    why = f" ({written.error})" if written is not None and written.error else ""
    told = f"step {state.step} was saved in memory, but did not reach storage before the nodes were released"
    return told + why


def doubts(state: RunState) -> list[str]:
    """What may be wrong with a training that seems to go well, as far as the journal shows."""
    found, unprotected = [], state.saved_step is None and not state.checkpoints
    if (loss := state.loss) is not None and loss.loss == NONE:
        found.append(
            f"the optimizer had no gradients by step {loss.step} (rank {loss.rank}), so its steps train "
            "nothing: was backward called, and has it the parameters of this model?"
        )
    elif loss is not None:
        found.append(
            f"the {loss.of} was {loss.loss} at step {loss.step} (rank {loss.rank}): what was trained since "
            "is likely worthless" + "; `jurymast checkpoints` lists steps before it" * (not unprotected)
        )
    if (differs := state.batch_differs) is not None and differs.attempt == state.attempt:
        found.append(
            f"with {differs.ranks} of {differs.wanted} ranks the batch of a step is not what it was: "
            f"{differs.why}"
        )
    if state.phase is Phase.SUCCEEDED and not state.stepped_first and not state.alone:
        found.append(
            "no rank did a training step (of an optimizer of torch, or by jurymast.step): was this the right "
            "script, and was anything left to train?"
        )
    if unprotected and state.stepped_first:
        if state.attempt > 1 and state.first_step_at is not None and state.base == state.origin is not None:
            found.append(
                "no checkpoint: each failure costs all steps, because the script reads nothing it saved"
            )
        elif state.phase is Phase.SUCCEEDED or (
            not state.ended and state.now - state.began_at > NO_CHECKPOINT_S
        ):
            found.append(
                "no checkpoint through jurymast: unless the script saves and resumes by itself, a failure "
                "costs all steps"
            )
    if not step_known(state):
        found.append(
            f"where the script resumed in attempt {state.attempt} is not known, so goodput is a range: call "
            "jurymast.step(n) after each step"
        )
    return found


def warnings(watcher: StatusWatcher, life: Liveness, now: float, told: Condition | None) -> list[str]:
    """What needs attention, most urgent first. `told`: see `report.liveness.hear`."""
    state, found = watcher.state, data_gaps(watcher, waits=told is not None and bool(told.waits))
    unwritten = told.journal if told is not None else ""
    if life.kind == "gone" and not state.ended:
        found.append(public_state(state, life)[1])
    entry = watcher.not_saved
    if state.save_failures and entry is not None:
        kept = "there is none yet" if state.saved_step is None else f"the newest is step {state.saved_step}"
        found.append(
            f"{count(state.save_failures, 'failed save')} in a row ({kept}): step {entry['step']}, "
            f"{entry['tier']} tier: {entry.get('error') or 'no reason given'}"
        )
    for name, tier in state.saved.items():
        if tier.failures and name != MEMORY and (entry is None or entry["tier"] != name):
            newest = "nothing is there yet" if tier.step is None else f"the newest there is step {tier.step}"
            found.append(
                f"copying to the {name} tier failed, {count(tier.failures, 'time')} in a row ({newest}): "
                f"step {tier.failed_step}: {tier.error}"
            )
    if life.kind == "unknown":
        found.append(f"whether {life.id or 'the run'} still runs is not known: {life.detail}")
    last = watcher.last_t
    if unwritten:
        age = f"its newest entry is {duration(now - last)} old" if last else "it has no entries"
        where = watcher.directory.journal
        found.append(f"the journal in {where} cannot be written ({unwritten}): {age}; the run goes on")
    elif last is not None and life.kind == "alive" and now - last > _quiet_limit_s(state, now, told):
        age = duration(now - last)
        found.append(f"the journal's newest entry is {age} old: no step since, or the journal is behind")
    if not (state.ended or without_nodes(state, life)):
        found += [foretold(state, one, now) for one in state.reservations.values()]
    usable = [
        node
        for node in state.nodes.values()
        if node.usable and not node.going and node.name not in state.placement
    ]
    if state.spares and state.placement and not usable and not state.ended:
        found.append(f"no spare is left: {_next_loss(state)}")
    return found


def _next_loss(state: RunState) -> str:
    """What follows from the next lost node of a run that has no spare left."""
    left = len(state.placement) - 1
    then = {
        size.SHRINK: f"leaves {left} of {count(state.active, 'node')}, with which the run goes on",
        "requeue": "costs a requeue",
        "stop": "ends the run, as its job cannot be requeued",
    }[without_spare(state, left)]  # fmt: skip
    if not refill.would_hold(state):
        return f"the next lost node {then}"
    hold = duration(state.settings.hold_s)
    return f"with the next lost node the run waits for another, for up to {hold}; if none comes, that {then}"


def _quiet_limit_s(state: RunState, now: float, told: Condition | None) -> float:
    """The age of the journal, in seconds, from which on a step is missing."""
    if state.phase is not Phase.RUNNING or (told is not None and told.step > shown_step(state)):
        return math.inf
    if told is not None and told.silent:
        return math.inf  # said already, and better
    return QUIET_S if told is not None else max(QUIET_S, 2 * pause_s(state, now))


def next_save(state: RunState) -> int | None:
    """The step that is saved next; None if it is not known."""
    if state.phase is not Phase.RUNNING or state.first_step_at is None:
        return None
    agreed, every = state.cadence, state.settings.cadence_steps
    own = None if every is None else next_save_step(state.step, every)
    if agreed is None:
        return own
    schedule = Schedule(agreed.number, agreed.from_step, agreed.first_step, agreed.every_steps)
    due = schedule.due_after(state.step)
    return own if due == NEVER else min(due, own or due)


def cadence_json(state: RunState, plan: RunPlan, now: float) -> dict[str, Any]:
    """The key `cadence` of the status. Values that are not agreed or measured yet are null."""
    agreed = state.cadence
    shared = state.settings.shared_every_s
    if shared is None and (written := state.saved.get(SHARED)):
        best_s = durable_every_s(state, written.seconds, state.now)
        shared = None if best_s is None else max(best_s, (1.0 + IDLE_SHARE) * written.seconds)
    values: dict[str, Any] = {
        "every_steps": state.settings.cadence_steps, "every_seconds": state.settings.cadence_s,
        "from_step": None, "next_save_step": next_save(state), "reason": None, "asked_by": None,
        "stall_seconds": None, "cost_seconds": None, "durable_every_seconds": shared, "mtbf_seconds": None,
        "cost_if_rate_twice": None, "rate": _rate(state, plan, now),
    }  # fmt: skip
    if agreed is None:
        return values
    saving = Saving(agreed.stall_s, agreed.copy_s, agreed.slowdown)
    every_s = agreed.every_steps * agreed.step_s or None
    if shared is not None and every_s is not None:  # only what was saved can be copied
        values["durable_every_seconds"] = max(shared, every_s)
    known = bool(agreed.stall_s and agreed.mtbf_s and every_s)
    values.update(
        every_steps=agreed.every_steps or values["every_steps"], every_seconds=every_s,
        from_step=agreed.from_step, reason=agreed.reason, asked_by=agreed.by or None,
        stall_seconds=agreed.stall_s or None, cost_seconds=saving.cost_s if agreed.stall_s else None,
        mtbf_seconds=agreed.mtbf_s or None,
        cost_if_rate_twice=cost_if(every_s, saving, agreed.mtbf_s) if known and every_s else None,
    )  # fmt: skip
    return values


def _rate(state: RunState, plan: RunPlan, now: float) -> dict[str, Any] | None:
    """Failures per 1,000 node-days with the interval of its posterior, and its basis."""
    found = failure_rate(state, state.now if state.ended else max(now, state.now))
    if found is None:
        return None
    low, high = found.interval()
    return {
        "mean": found.rate, "low": low, "high": high, "level": LEVEL,
        "failures": len(failure_times(state.incidents)), "earlier": plan.earlier_text or None,
        "node_days": found.exposure_node_days,
    }  # fmt: skip


def cadence_lines(view: Mapping[str, Any]) -> list[str]:
    """The cadence and then the rate, as lines for people."""
    found = view["cadence"]
    rate = found["rate"]
    if rate is None:
        return []
    lines = [f"saves      {told}"] if (told := _saves(found)) else []
    earlier = f", {rate['earlier']}" if rate["earlier"] else ""
    lines.append(
        f"failures   {_number(rate['mean'])} per 1,000 node-days expected "
        f"({100 * rate['level']:.0f} %: {_number(rate['low'])} to {_number(rate['high'])}), "
        f"after {count(rate['failures'], 'failure')} of the infrastructure here{earlier}"
    )
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.2g}"


def _saves(found: Mapping[str, Any]) -> str:
    parts = []
    if found["every_steps"]:
        time = f" ({duration(found['every_seconds'])})" if found["every_seconds"] else ""
        parts.append(f"every {count(found['every_steps'], 'step')}{time}")
    elif found["every_seconds"]:
        parts.append(f"every {duration(found['every_seconds'])}")
    if found["next_save_step"] is not None:
        parts.append(f"next at step {found['next_save_step']}")
    if found["durable_every_seconds"]:
        parts.append(f"durable every {duration(found['durable_every_seconds'])}")
    if found["reason"]:
        parts.append(str(found["reason"]))
    if found["cost_seconds"]:
        parts.append(f"a save costs {duration(found['cost_seconds'])}")
    if found["cost_if_rate_twice"] is not None:
        parts.append(
            f"twice the failure rate would cost {100 * found['cost_if_rate_twice']:.1g} points of goodput"
        )
    return ", ".join(parts)


# ---- as text


def status_blocks(view: View, *, now: float, everything: bool = False) -> list[Block]:
    """The output of `jurymast status`. `now`: seconds since the epoch."""
    word = view["state"]
    blocks: list[Block] = [
        Line(f"run        {view['run']}", "bold"),
        Line(f"state      {word}{_state_detail(view, now)}", STYLES.get(word, ""), INDENT),
        *([Line(f"stalled    {_stalled(view)}", "bold yellow", INDENT)] if view["silent"] else []),
        *trouble_blocks(view),
        Line(f"training   {_training(view, now)}", indent=INDENT),
    ]
    blocks += [Line(text, indent=INDENT) for text in cadence_lines(view)]
    jobs = ", ".join(view["slurm_jobs"]) or ("none yet" if view["cluster"] == "slurm" else view["job"]["id"])
    if jobs:
        blocks.append(Line(f"{'job' if len(view['slurm_jobs']) < 2 else 'jobs':<10} {jobs}"))
    blocks.append(Line(f"directory  {view['directory']}"))
    blocks += [Line(f"warning    {text}", "bold yellow", INDENT) for text in view["warnings"]]
    alerts = view["alerts"] if everything else view["alerts"][-ALERTS_LISTED:]
    blocks += [
        Line(f"alert      {_clock(a['at'])}{on(a['nodes'])}: {a['message']}", "bold yellow", INDENT)
        for a in alerts
    ]
    blocks += traceback_blocks(view)
    blocks += _node_blocks(view, everything)
    blocks += _incident_blocks(view, everything, now)
    notes = view["notes"] if everything else view["notes"][-3:]
    blocks += [Line("")] if notes else []
    blocks += [Line(f"note {_clock(note['at'])}  {_cut(note['message'])}") for note in notes]
    return blocks


def _state_detail(view: View, now: float) -> str:
    if view["ended_at"] and not view["next"]:
        spent = _seconds(view["ended_at"]) - _seconds(view["submitted_at"])
        code = f"exit code {view['exit_code']}"
        return f", {duration(spent)} after its submission, {code}: {_ended_by(view)}"
    if view["exit_code"] is not None and not view["next"]:
        return f": {_ended_by(view)}"
    text = f", attempt {view['attempt']}" if view["attempt"] else ""
    if view["requeues"]:
        text += f", {count(view['requeues'], 'requeue')}"
    text += f", submitted {duration(max(0.0, now - _seconds(view['submitted_at'])))} ago"
    return f"{text}; {view['next']}" if view["next"] else text


def _stalled(view: View) -> str:
    if view["restart_at"] is None:
        return str(view["silent"])
    return f"{view['silent']}; restart at {_clock(view['restart_at'])} unless one of them moves"


def _ended_by(view: View) -> str:
    """Why the run ended, without what the block on the cause shows."""
    last = view["incidents"][-1] if view["state"] == "failed" and view["incidents"] else None
    stopped = last is not None and last["action"] == "stop"
    return _cut(last["why"] if last is not None and stopped else view["end_reason"])


def _training(view: View, now: float) -> str:
    text = step_told(view["step"], view["attempt"], known=view["step_known"])
    yet = "" if view["ended_at"] and not view["next"] else " yet"
    text = text if view["step"] else f"no step done{yet}"
    if view["step_seconds"]:
        text += f", {duration(view['step_seconds'])} a step"
    text = ", ".join([text, *rates(view["a_second"])])
    saved = view["saved_step"]
    if saved is None:
        return f"{text}, no checkpoint{yet}"
    tiers = view["tiers"]
    where = [f"{name} {tier['step']}" for name, tier in tiers.items() if tier["step"] is not None]
    return f"{text}, newest checkpoint step {saved}" + (f" ({', '.join(where)})" if len(tiers) > 1 else "")


def _node_blocks(view: View, everything: bool) -> list[Block]:
    nodes = view["nodes"]
    if not nodes:
        return []
    shown = nodes
    if len(nodes) > NODES_LISTED_MAX and not everything:
        shown = [node for node in nodes if node["role"] not in ("active", "spare")]
    blocks: list[Block] = [Line("")]
    if shown:
        rows = [[n["name"], n["role"], _clock(n["since"]), _cut(n["reason"])] for n in shown]
        blocks.append(Table(("NODE", "ROLE", "SINCE", "REASON"), rows))
    if len(shown) < len(nodes):
        roles = [node["role"] for node in nodes]
        told = ", ".join(f"{roles.count(r)} {r}" for r in ("active", "spare") if r in roles)
        blocks.append(Line(f"and {told} (--all lists every node)"))
    return blocks


def _incident_blocks(view: View, everything: bool, now: float) -> list[Block]:
    incidents = view["incidents"] if everything else view["incidents"][-INCIDENTS_LISTED:]
    if not incidents:
        return []
    earlier = len(view["incidents"]) - len(incidents)
    lives = view["state"] not in ("succeeded", "failed", "cancelled")
    rows = [
        [
            str(i["id"]), _clock(i["at"]), _cause(i), i["node"] or "-",
            i["action"] or "-", _steps(i), _took(i, now if lives else None),
            short_reason(i["evidence"], i["why"], TEXT_CHARACTERS),
        ]
        for i in incidents
    ]  # fmt: skip
    headers = ("#", "AT", "CAUSE", "NODE", "ACTION", "STEPS", "TOOK", "WHY")
    blocks: list[Block] = [Line(""), Table(headers, rows, right=frozenset({0}))]
    if not all(i["rework_known"] for i in incidents):
        blocks.append(Line(MORE))
    return [*blocks, Line(f"and {count(earlier, 'earlier incident')} (--all)")] if earlier else blocks


def _cut(text: str) -> str:
    """A text cut to a length that fits; `--json` and the report have all of it."""
    return one_line(text, TEXT_CHARACTERS)


def _cause(incident: View) -> str:
    return incident["cause"] or ("(being diagnosed)" if incident["open"] else "-")


def _took(incident: View, now: float | None) -> str:
    """How long it took. `now`: the run still lives, so that what is not over, lost steps that are done again
    among it, has taken until now."""
    told: float = sum(incident["seconds"].values())
    if not incident["open"]:
        return at_least(duration(told), incident)
    return duration(told if now is None else max(told, now - _seconds(incident["at"]))) + " so far"


def _steps(incident: View) -> str:
    """The steps that were lost: from which step back to which."""
    lost_from = lost_step(incident)
    return lost_from if incident["step_restored"] is None else f"{lost_from} -> {incident['step_restored']}"


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _clock(text: str | None) -> str:
    """HH:MM:SS, with the date if it is not today's."""
    if text is None:
        return "-"
    at = datetime.fromisoformat(text)
    return at.strftime("%H:%M:%S" if at.date() == datetime.now(at.tzinfo).date() else "%m-%d %H:%M:%S")
