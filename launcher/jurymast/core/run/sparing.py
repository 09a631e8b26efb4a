"""Recovery in process: whether the next attempt goes on in the processes of the ranks that live.

Ranks that call `Checkpointer.run` leave their step when the attempt ends, and wait. That costs nothing, so
their hosts do it unasked. Here it is decided whether the next attempt is theirs; otherwise they end, and all
ranks start anew.
"""

from __future__ import annotations

from dataclasses import replace

from jurymast.core.run.decision import Decision
from jurymast.core.state.events import GROW, RELAUNCH
from jurymast.core.state.run import RunState
from jurymast.core.state.texts import count

IN_PROCESS = "in process"  # the action
# The first failure, and two during the recovery from it.
IN_A_ROW_MAX = 3
# Who asks for these wants new processes, or a state that is older than theirs.
ANEW = frozenset({"restart", "rollback", RELAUNCH, GROW})


def considered(state: RunState, decision: Decision) -> Decision:
    """Return the decision, which starts another attempt, with whether ranks are spared for it."""
    spared = sum(len(state.spared.get(name, ())) for name in state.placement if name not in decision.bad)
    if not spared or decision.action not in ("restart", "swap"):
        return decision
    if why_not := _refusal(state):
        return replace(decision, why=f"{decision.why}; not in process, because {why_not}")
    action = IN_PROCESS if decision.action == "restart" else decision.action
    told = (
        f"{spared} of {count(len(state.placement) * state.ranks_per_node, 'rank')} go on in their processes"
    )
    why = decision.why.removeprefix("restarted in place, ")
    return replace(decision, action=action, why=f"{why}; {told}", spare=True)


def _refusal(state: RunState) -> str:
    """Why the ranks that are spared have to end; "" if they may go on."""
    asked = state.findings.asked
    if asked is not None and asked.what in ANEW:
        return "new processes were asked for"
    if state.without_progress > IN_A_ROW_MAX:
        return f"that has failed {IN_A_ROW_MAX} times without a new step"
    steps = [rank.step for ranks in state.spared.values() for rank in ranks]
    if max(steps) < 0 and state.saved_step is None:
        return "no step of theirs is whole, and none was saved"
    return ""
