"""What to change for the next run: each piece of advice is an option, its value, and what it would have
gained in this run, by the simulation of its own journal (see `sim.replay`).

Advice is given only where the simulation says as much as it may be wrong: what it foretells for the run as it
was is held against what happened, and a gain that is smaller than this error is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jurymast.core.goodput import Account, Ledger
from jurymast.core.judges.cadence import Cadence, best_interval_s
from jurymast.core.judges.forecast import REPLACE_S, REPLICATE_GUESS_S, STALL_GUESS_S, Saving, size_spares
from jurymast.core.judges.rejoining import AMID_STEP, MADE_IN_TRAIN, OWN_GONE, SHARDS_GONE
from jurymast.core.judges.silence import steady_limit_s
from jurymast.core.state.failure_rate import FEW_FAILURES, MERGE_S, mtbf, prior
from jurymast.core.state.run import RunState, failure_rate
from jurymast.report.text import Block, Line, count, duration, percent, points
from jurymast.sim.bounds import StandsStill
from jurymast.sim.replay import Foretold, NotReplayed, Replay, replay_of

# Below half a point nobody changes anything.
LEAST_GAIN = 0.005
MOST_ERROR = 0.1
MORE_SPARES = (1, 2, 4)
# A shorter run says nothing of how many spares are too many.
SPARES_S = 3600.0
MOST_TOLD = 3
RUNTIME, ALLOCATION = "runtime goodput", "allocation goodput"

# Those who ask for these get new processes.
NEW_PROCESSES = frozenset({"restart_asked", "grow_asked"})
# Why ranks went back to a save (`core.judges.rejoining`), what to change in the script, and how. Once may be
# by chance, as each rank is in its update now and then.
MENDABLE = (
    (AMID_STEP, "Checkpointer.step", "right after the update; evaluate and log after it"),
    (OWN_GONE, "what is each rank's own", "64 KiB at most, tensors, arrays and plain values"),
    (MADE_IN_TRAIN, "model and optimizer", "made before Checkpointer.run, not in its function"),
    (SHARDS_GONE, "shards", "each on two nodes (HSDP), whose own cost is not in the forecast"),
)
LEAST_BACK = 2

GUESS = f"taking {duration(STALL_GUESS_S)} for a save"

NONE_FORETOLD = ("foretold", "error", "foretold_allocation", "error_allocation", "part", "why_none")


@dataclass(frozen=True)
class Advice:
    """`option` is a key of the policy, or an option of `jurymast submit`, or of the script. With it, the
    goodput of this kind (`of`) is foretold as `after` instead of `before`, 0..1."""

    option: str
    value: str
    why: str
    of: str
    before: float
    after: float

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class _Change:
    option: str
    value: str
    why: str
    replay: Replay


def advice_view(ledger: Ledger, account: Account, now: float) -> dict[str, Any]:
    """The key `advice` of the report: `changes`, the best first; `foretold`, the runtime goodput that the
    simulation says for the run as it was, and `error`, by how much that is wrong, with the same of allocation
    goodput; `part`: only the run's end was simulated; `why_none` if there is no forecast."""
    found: dict[str, Any] = dict.fromkeys(NONE_FORETOLD)
    state, worth = ledger.state, list[Advice]()
    try:
        replay = replay_of(state, account, ledger.steps, ledger.saves)
        was = replay.run()
        errors = {RUNTIME: was.goodput - replay.goodput, ALLOCATION: was.allocated - replay.allocated}
        found.update(
            foretold=was.goodput, error=errors[RUNTIME], foretold_allocation=was.allocated,
            error_allocation=errors[ALLOCATION], part=replay.part,
        )  # fmt: skip
        if abs(errors[RUNTIME]) > MOST_ERROR:
            raise NotReplayed("a simulation of the run is too far from what happened")
        advice = [*_changes(replay, was, ledger), *_spares(replay, was, state, now)]
        worth = [one for one in advice if one.gain >= max(LEAST_GAIN, abs(errors[one.of]))]
    except (NotReplayed, StandsStill) as problem:
        found["why_none"] = str(problem)
    worth.sort(key=lambda one: -one.gain)
    return {"changes": [{**asdict(one), "gain": one.gain} for one in worth[:MOST_TOLD]], **found}


def _changes(replay: Replay, was: Foretold, ledger: Ledger) -> Iterator[Advice]:
    for change in (*_possible(replay), *_in_process(replay, ledger)):
        with_it = change.replay.run()
        yield Advice(change.option, change.value, change.why, RUNTIME, was.goodput, with_it.goodput)


def _possible(replay: Replay) -> Iterator[_Change]:
    """Settings that are not as jurymast chooses them by itself, each changed back alone."""
    settings, durations = replay.setup.settings, replay.setup.durations
    if replay.cadence == Cadence():
        yield from _oftener(replay)
    elif replay.unsaved and replay.faults:
        why = f"nothing was saved, so each failure led back to step 0; {GUESS}"
        yield _Change("jurymast.Checkpointer", "in the script", why, replace(replay, cadence=Cadence()))
    if replay.unsaved:
        return
    if replay.cadence != Cadence():
        automatic = replace(settings, cadence_steps=None, cadence_s=None)
        option = "the script's cadence" if settings == automatic else "checkpoint.cadence"
        why = "saves as often as loses least at this failure rate"
        changed = replace(replay.with_setup(settings=automatic), cadence=Cadence())
        yield _Change(option, "auto", why, changed)
    if not settings.memory:
        stored_s = durations.copy_s
        copy_s = min(stored_s, REPLICATE_GUESS_S)
        faster = replace(durations, copy_s=copy_s, write_s=stored_s, read_s=durations.restore_s)
        why = "saves would be complete sooner, and restored from memory"
        in_memory = replace(settings, memory=True, replicas=1)
        changed = replay.with_setup(settings=in_memory, durations=faster)
        yield _Change("checkpoint.tiers.memory", "on", why, changed)
    elif not settings.replicas:
        why = "the loss of a node would not have led back to what was on storage"
        changed = replay.with_setup(settings=replace(settings, replicas=1))
        yield _Change("checkpoint.tiers.peer", "on", why, changed)
    if settings.hang_s is not None:
        why = "hangs would have been noticed after the time of a few steps"
        changed = replay.with_setup(settings=replace(settings, hang_s=None))
        yield _Change("detect.hang", "auto", why, changed)
    if settings.node_lost_after_s is not None:
        limit_s = steady_limit_s(settings.heartbeat_s, None)
        sooner = replace(durations, detection_s=min(durations.detection_s, limit_s))
        why = f"a silent node would have been noticed after {duration(limit_s)}"
        usual = replace(settings, node_lost_after_s=None)
        yield _Change(
            "detect.node_lost_after", "auto", why, replay.with_setup(settings=usual, durations=sooner)
        )


def _oftener(replay: Replay) -> Iterator[_Change]:
    """Saves by this run's own failures, where it had many: the failure rate counts those that come close to
    each other once. By the lower end of the rate, and not by this run's luck alone."""
    setup, of = replay.setup, replay.setup.durations
    seen = mtbf(len(replay.faults), setup.seconds)
    if seen.failures < FEW_FAILURES or seen.high_s is None or setup.seconds > seen.failures * MERGE_S:
        return
    saving = Saving(of.stall_s, of.copy_s, of.slowdown)
    every_s = max(1, round(best_interval_s(saving, seen.high_s, setup.settings.max_loss_s)))
    guess = f"; {GUESS}" if replay.unsaved else ""
    why = (
        f"{count(seen.failures, 'failure')} in {duration(setup.seconds)}: the automatic cadence counts those "
        f"within {MERGE_S / 60:.0f} min once, and saved too seldom{guess}; a script whose Checkpointer has "
        "`every` has it there instead"
    )
    changed = replay.with_setup(settings=replace(setup.settings, cadence_s=float(every_s)))
    cadence = Cadence(seconds=float(every_s))
    yield _Change("checkpoint.cadence", f"{every_s}s", why, replace(changed, cadence=cadence))


def _in_process(replay: Replay, ledger: Ledger) -> Iterator[_Change]:
    """Recovery in process: none of the run's failures had it, or none kept its steps, for a reason that the
    script can mend. On GPUs it is not made yet."""
    failures = [one for one in ledger.state.incidents if one.launched_at is not None and one.steps_done]
    chosen = any(one.cause in NEW_PROCESSES for one in failures)
    if not failures or chosen or ledger.gpus or replay.unsaved or replay.setup.in_process:
        return
    changed = replay.with_setup(in_process=True)
    if not any(one.in_process for one in failures):
        why = (
            "ranks that live would have kept the steps since the last save, if their process group is of "
            "gloo, and every part of the model on two nodes"
        )
        yield _Change("Checkpointer.run", "in the script", why, changed)
        return
    back = [one.went_back for one in failures if one.went_back]
    for said, option, value in MENDABLE:
        if len(back) >= LEAST_BACK and all(said in why for why in back):
            why = f"after {count(len(back), 'failure')} ranks went back to a save, at last because {back[-1]}"
            yield _Change(option, value, why, changed)
            return


def _spares(replay: Replay, was: Foretold, state: RunState, now: float) -> Iterator[Advice]:
    """More, if failures waited for nodes and that cost more than the spares would have; or fewer, if by the
    upper end of the failure rate, and not by this run's luck alone, fewer do."""
    spares = replay.setup.spares
    more = [(n, replay.with_setup(spares=spares + n).run()) for n in MORE_SPARES if _lost(replay)]
    best = max(more, key=lambda one: one[1].productive, default=None)
    if best is not None and best[1].productive > was.productive:
        why = "fewer failures would have waited for nodes from the queue"
        yield Advice("--spares", str(spares + best[0]), why, RUNTIME, was.goodput, best[1].goodput)
        return
    if replay.setup.seconds < SPARES_S:
        return
    _, high = (failure_rate(state, now) or prior(state.settings.rate)).interval()
    wanted = size_spares(state.active, high, REPLACE_S, replay.setup.seconds).count
    less = replay.with_setup(spares=wanted).run() if wanted < spares else was
    if less.productive > was.productive and less.goodput > was.goodput - LEAST_GAIN:
        queue = f"if a requeue waits {duration(replay.setup.durations.requeue_s)}"
        why = (
            f"{count(state.active, 'node')} need no more, even at the upper end of the failure rate, {queue}"
        )
        yield Advice("--spares", str(wanted), why, ALLOCATION, was.allocated, less.allocated)


def _lost(replay: Replay) -> bool:
    return any(fault.nodes for fault in replay.faults)


def advice_blocks(advice: Mapping[str, Any]) -> list[Block]:
    lines = [Line(f"  {text}", indent=4) for text in sentences(advice)]
    return [Line("what to change", "bold"), *lines, Line(f"  {trust(advice)}", "dim", 3)]


def sentences(advice: Mapping[str, Any]) -> list[str]:
    """Each change as a sentence; or one that says why there is none."""
    if advice["why_none"] is not None:
        return [f"not known: {advice['why_none']}"]
    if not advice["changes"]:
        return ["nothing: no other setting would have gained more than the forecast may be wrong"]
    return [
        f"{one['option']}: {one['value']}. {one['of'].capitalize()} {percent(one['before'])} -> "
        f"{percent(one['after'])} ({points(one['gain'])} points): {one['why']}"
        for one in advice["changes"]
    ]


def trust(advice: Mapping[str, Any]) -> str:
    """How far the forecast can be trusted."""
    if advice["foretold"] is None:
        return "(advice comes from a simulation of the run's own journal)"
    alone = ", each change alone" if len(advice["changes"]) > 1 else ""
    of = "this run's newest failures" if advice["part"] else "this run's failures"
    told = [
        f"{percent(advice[f'foretold{key}'])} {name} goodput, {points(advice[f'error{key}'])} points"
        for name, key in (("runtime", ""), ("allocation", "_allocation"))
    ]
    return (
        f"(by a simulation of {of}{alone}; for the run as it was it says {told[0]} from what happened, and "
        f"{told[1]})"
    )
