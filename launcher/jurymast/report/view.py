"""The status of a run as one JSON object: a fold of its journal, and what Slurm says of its job."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jurymast.core.checkpoints.copies import MEMORY, PEER
from jurymast.core.run.causes import meaning
from jurymast.core.run.incident import Incident
from jurymast.core.run.state import Phase, Role, RunState
from jurymast.core.run.telling import pause_s
from jurymast.errors import RunCancelledError, RunFailedError
from jurymast.journal import Entry
from jurymast.report.cadence import cadence_json, next_save
from jurymast.report.first_hand import hear
from jurymast.report.liveness import Liveness, look, slurm_jobs
from jurymast.report.tail import JournalTail
from jurymast.report.words import count, duration, iso, some
from jurymast.rundir import RunDirectory
from jurymast.wire.endpoint import find

if TYPE_CHECKING:
    from jurymast.core.messages import Condition

# While steps are done a supervisor writes every two seconds, of a run that is no longer young less often, but
# then it is asked. Steps that nobody has heard of for much longer are worth a word.
QUIET_S = 30.0


@dataclass
class Facts:
    """What status tells beyond the run's state: the newest entry of some kinds."""

    started: Entry | None = None
    saved: Entry | None = None
    not_saved: Entry | None = None
    restored: Entry | None = None

    def take(self, entry: Entry) -> None:
        if entry.get("event") == "RunStarted":
            self.started = entry
        elif entry.get("event") == "Saved":
            if entry.get("copied"):
                pass
            elif entry["ok"]:
                self.saved, self.not_saved = entry, None
            else:
                self.not_saved = entry
        elif entry.get("event") == "Restored":
            self.restored = entry


class Watcher:
    """Reads a run's journal once, then only what is new; `view` is the status as of the last `poll`."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.plan = directory.plan()
        self.tail = JournalTail(directory)
        self.facts = Facts()

    @property
    def state(self) -> RunState:
        return self.tail.state

    def poll(self) -> list[Entry]:
        return list(self.new())

    def new(self) -> Iterator[Entry]:
        """As `poll`, one by one: of thousands of nodes all would take much memory."""
        for entry in self.tail.new():
            self.facts.take(entry)
            yield entry

    def view(self, life: Liveness | None = None, now: float | None = None) -> dict[str, Any]:
        """The status object; unless `life` is given it is looked up, and the supervisor asked if need be.
        `now`: seconds since the epoch."""
        now, told = time.time() if now is None else now, None
        if life is None:
            life = look(self.directory, self.state)
            told = hear(self.directory, self.state, now - (self.tail.last_t or 0.0))
        return status_view(self, life, now, told)


def read_status(directory: RunDirectory) -> Watcher:
    """A watcher that has read the whole journal. Raises RunDirectoryError: the plan cannot be read."""
    watcher = Watcher(directory)
    for _ in watcher.new():
        pass
    return watcher


def public_state(state: RunState, life: Liveness) -> tuple[str, str]:
    """(state, why) as shown: the journal's word, unless the job died or waits without the journal knowing."""
    if life.kind == "gone" and not state.ended:
        word = "cancelled" if life.detail == "CANCELLED" else "failed"
        return word, f"{_job(life)} ended ({life.detail}) and its supervisor left no word"
    if life.kind == "pending" and state.phase not in (Phase.QUEUED, Phase.REQUEUED):
        return Phase.REQUEUED.value, f"{_job(life)} waits again: {life.detail}"
    return state.public_state, state.end_reason


def exit_code_of(state: RunState, life: Liveness) -> int | None:
    """The run's exit code; None while it runs."""
    if state.ended:
        return state.exit_code
    if life.kind != "gone":
        return None
    return RunCancelledError.exit_code if life.detail == "CANCELLED" else RunFailedError.exit_code


def _job(life: Liveness) -> str:
    return f"Slurm job {life.job}" if life.job.isdigit() else f"the local run ({life.job})"


def shown_step(state: RunState) -> int:
    """The newest step done; while an attempt has not stepped yet, the newest of the earlier ones."""
    return state.step if state.first_step_at is not None else state.best_step


def status_view(watcher: Watcher, life: Liveness, now: float, told: Condition | None) -> dict[str, Any]:
    """`told`: see `report.first_hand`."""
    state, plan = watcher.state, watcher.plan
    word, why = public_state(state, life)
    following = _next(state, life, now) if word not in ("failed", "cancelled", "succeeded") else ""
    step, alerts = shown_step(state), state.alerts
    if told is not None:
        word, step, alerts = told.state, told.step, list(told.alerts)
        following = f"{told.waits} (jurymast cancel gives it up)" if told.waits else following
    place = None if state.ended or life.kind == "gone" else find(watcher.directory.epochs)
    ended_at = state.ended_at
    return {
        "run": state.run or plan.run, "name": state.name or plan.name, "state": word,
        "attempt": state.attempt, "step": step,
        "step_seconds": round(state.step_s, 6) or None,
        "stepped_at": iso(state.stepped_at) if state.first_step_at is not None else None,
        "saved_step": state.saved_step, "next_save_step": next_save(state), "tiers": _tiers(state),
        "cadence": cadence_json(state, plan, now),
        "next": following,
        "slurm_jobs": [job for job, _ in slurm_jobs(watcher.directory, state)],
        "cluster": plan.cluster, "active": state.active, "spares": state.spares,
        "ranks_per_node": state.ranks_per_node, "restarts": state.restarts,
        "nodes": [
            {"name": node.name, "role": node.role.value, "reason": node.reason, "since": iso(node.since)}
            for node in state.nodes.values()
        ],
        "excluded": {name: told.reason for name, told in state.excluded.items()},
        "alerts": [
            {"at": iso(a.at), "until": iso(a.until), "message": a.message, "nodes": list(a.nodes)}
            for a in alerts
        ],
        "incidents": [incident_json(incident) for incident in state.incidents],
        "directory": str(watcher.directory.root.absolute()),
        "supervisor": {**asdict(place), "hosts": list(place.hosts)} if place else None,
        "notes": [{"at": iso(t), "message": message} for t, message in state.notes],
        "warnings": warnings(watcher, life, now, told),
        "job": {"id": life.job, "kind": life.kind, "detail": life.detail},
        "submitted_at": iso(state.submitted_at or plan.submitted_at),
        "updated_at": iso(watcher.tail.last_t), "ended_at": iso(ended_at),
        "exit_code": exit_code_of(state, life), "end_reason": why,
    }  # fmt: skip


def incident_json(incident: Incident) -> dict[str, Any]:
    """The incident's own JSON, its times as ISO 8601."""
    values = incident.to_json()
    values["at"], values["recovered_at"] = iso(values["at"]), iso(values["recovered_at"])
    values["meaning"] = meaning(incident.cause) or None
    return values


def _tiers(state: RunState) -> dict[str, Any]:
    """By tier: the newest complete step there, and what failed since."""
    return {
        name: {
            "step": tier.step, "at": iso(tier.at) if tier.step is not None else None,
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
        if state.not_before > now:
            return f"tries again in {duration(state.not_before - now)}"
        return "waits until every node of the next attempt is ready"
    if state.first_step_at is None:
        return f"first step of attempt {state.attempt}"
    save = next_save(state)
    return f"saves after step {save}" if save else ""


def data_gaps(watcher: Watcher) -> list[str]:
    """What a report must not leave out: what of the journal is missing, and steps that no checkpoint has."""
    state, found = watcher.state, list(watcher.tail.unread)
    kept = [t.step for name, t in state.saved.items() if name not in (MEMORY, PEER) and t.step is not None]
    unsaved = state.step - max(kept, default=0)
    # Only a Checkpointer tells of a restore, and counts steps as the training does.
    if (
        state.phase is Phase.SUCCEEDED
        and watcher.facts.restored is not None
        and state.absolute
        and unsaved > 0
    ):
        newest = f"the newest is step {max(kept)}" if kept else "there is none"
        found.append(
            f"the last {count(unsaved, 'step')} are in no checkpoint ({newest}): "
            f"checkpoint.save({state.step}) at the end of the script would have saved them"
        )
    return found


def warnings(watcher: Watcher, life: Liveness, now: float, told: Condition | None) -> list[str]:
    """What somebody should look at, most urgent first. `told`: see `report.first_hand`."""
    state, found = watcher.state, data_gaps(watcher)
    unwritten = told.journal if told is not None else ""
    if life.kind == "gone" and not state.ended:
        found.append(public_state(state, life)[1])
    entry = watcher.facts.not_saved
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
        found.append(f"whether {life.job or 'the run'} still runs is not known: {life.detail}")
    last = watcher.tail.last_t
    if unwritten:
        age = f"what is shown here is {duration(now - last)} old" if last else "nothing can be shown here"
        where = watcher.directory.journal
        found.append(f"the journal in {where} cannot be written ({unwritten}): {age}; the run goes on")
    elif last is not None and life.kind == "alive" and now - last > _quiet_limit_s(state, now, told):
        found.append(f"the journal is {duration(now - last)} old: no step since, or the journal is behind")
    usable = [node for node in state.nodes.values() if node.usable and node.name not in state.placement]
    if state.spares and state.placement and not usable and not state.ended:
        found.append("no spare is left: the next lost node costs a requeue")
    return found


def _quiet_limit_s(state: RunState, now: float, told: Condition | None) -> float:
    """From a journal that is older than this a step is missing."""
    if state.phase is not Phase.RUNNING or (told is not None and told.step > shown_step(state)):
        return math.inf
    return QUIET_S if told is not None else max(QUIET_S, 2 * pause_s(state, now))
