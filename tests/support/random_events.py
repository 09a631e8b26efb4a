"""Random journals: any kind of event at any time, with attempts near the run's own."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from jurymast.core.state import events as ev
from jurymast.core.state.findings import KINDS as KINDS_OF_FINDINGS
from jurymast.core.state.run import RunState
from support.stories import START

NODES = ("n1", "n2", "n3", "n4")


def make_event(kind: str, t: float, node: str, attempt: int, number: int, flag: bool) -> ev.Event:
    allocation = tuple(NODES[: 2 + number % 3]) if flag else (*NODES[1:], "n5")
    made: dict[str, Callable[[], ev.Event]] = {
        "allocation": lambda: ev.AllocationStarted(
            t=t, slurm_job="7", restarts=number, nodes=allocation, host=allocation[0], eligible_at=t - 1
        ),
        "allocation_end": lambda: ev.AllocationEnded(t=t, slurm_job="7", why="over"),
        "supervisor": lambda: ev.SupervisorStarted(t=t, epoch=number + 1, node=node),
        "joined": lambda: ev.NodeJoined(
            t=t, node=node, address="10.0.0.1", incarnation=f"{number % 3}", gpus=number % 2
        ),
        "ready": lambda: ev.NodeReady(t=t, node=node, store_port=1),
        "lost": lambda: ev.NodeLost(t=t, node=node, how="silent" if flag else "closed", silent_s=number / 10),
        "started": lambda: ev.WorkersStarted(t=t, node=node, attempt=attempt, pids=(1,)),
        "failed": lambda: ev.WorkerFailed(
            t=t, node=node, attempt=attempt, rank=number % 2, exit_code=-9 if flag else 1, error="E"
        ),
        "hung": lambda: ev.RanksHung(
            t=t, attempt=attempt, ranks=(0,) if flag else (), node=node if flag else "", silent_s=number,
            limit_s=1.0, evidence="e",
        ),
        "stopped": lambda: ev.WorkersStopped(t=t, node=node, attempt=attempt, store_port=2),
        "finished": lambda: ev.NodeFinished(t=t, node=node, attempt=attempt),
        "progress": lambda: ev.Progress(
            t=t, attempt=attempt, step=number, stepped_at=t - number / 50, absolute=flag, step_s=0.1
        ),
        "saved": lambda: ev.Saved(
            t=t, attempt=attempt, step=number, tier="shared", ok=flag, stall_s=number / 20
        ),
        "restored": lambda: ev.Restored(
            t=t, attempt=attempt, step=number, tier="shared", seconds=number / 20
        ),
        "found": lambda: ev.HealthFound(
            t=t, node=node, probe="p", code=f"c{number % 3}", device=f"d{number % 2}", at=t - number,
            verdict=("bad", "suspect", "ok", "unknown")[number % 4], message="m",
            kind=KINDS_OF_FINDINGS[number % 6] if flag else "hardware",
        ),
        "asked": lambda: ev.Asked(t=t, what=("restart", "drain", "cancel")[number % 3], by="x", node=node),
        "signalled": lambda: ev.Signalled(t=t, signal="SIGTERM"),
        "tested": lambda: ev.NodeTested(
            t=t, node=node, verdict=("ok", "suspect", "bad", "unknown")[number % 4], slowness=1 + number / 10,
            message="m",
        ),
        "straggling": lambda: ev.Straggling(
            t=t, attempt=attempt, node=node, rank=number % 2, slowness=2.0, own_s=2.0, typical_s=1.0,
            since_s=30.0, evidence="slow", lost_s=number / 40, step_s=1.0,
        ),
        "stacks": lambda: ev.StacksTaken(
            t=t, node=node, attempt=attempt, ranks=(number % 2,), places=("in f at a.py:1",),
            kinds=("code" if flag else "backward",),
        ),
        "noted": lambda: ev.Noted(t=t, message="m"),
        "tick": lambda: ev.Tick(t=t),
    }  # fmt: skip
    return made[kind]()


KINDS = (
    "allocation", "allocation_end", "supervisor", "joined", "ready", "lost", "started", "failed", "hung",
    "stopped", "finished", "progress", "saved", "restored", "found", "asked", "signalled", "noted", "tested",
    "straggling", "stacks", "tick",
)  # fmt: skip
# Left to chance alone, few sequences would get as far as running.
LIKELY = (*KINDS, *("joined", "ready", "started", "stopped", "progress", "tick") * 4)
Moment = tuple[str, float, str, int, int, bool]
moments: st.SearchStrategy[Moment] = st.tuples(
    st.sampled_from(LIKELY), st.floats(-1.0, 12.0), st.sampled_from(NODES), st.integers(-1, 1),
    st.integers(0, 40), st.booleans(),
)  # fmt: skip


def next_event(state: RunState, t: float, moment: Moment) -> ev.Event:
    """The drawn event as it would come now: its attempt is relative to the state's."""
    kind, _, node, attempt, number, flag = moment
    return make_event(kind, t, node, state.attempt + attempt, number, flag)


__all__ = ["NODES", "START", "Moment", "moments", "next_event"]
