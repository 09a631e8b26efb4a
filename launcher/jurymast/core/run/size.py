"""On how many nodes a run goes on: on fewer than it wants if the policy allows it (`nodes.min`) and none is
there in place of a lost one; on more again once some are ready."""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.core.judges.tests import limit_s as whole_s
from jurymast.core.state.findings import Verdict
from jurymast.core.state.images import SHARED
from jurymast.core.state.run import Fewer, Node, Phase, Role, RunState
from jurymast.core.state.texts import count

SHRINK, GROW = "shrink", "grow"  # the actions
STAYED_S = 10.0


def may_shrink_to(state: RunState, nodes: int) -> bool:
    """Whether the run may go on with so many nodes. Ranks of another number restore from shared storage, to
    which the newest state is brought first; nothing is, before anything was saved, or while Slurm ends the
    job."""
    ends = state.end_order is not None
    return 0 < state.nodes_min <= nodes < state.active and not (ends or state.alone or state.unnamed)


def told(state: RunState, nodes: int) -> str:
    return f"the run goes on with {nodes} of {count(state.active, 'node')}"


def missing(state: RunState) -> int:
    """How many nodes fewer than it wants the run has ranks on."""
    return state.active - len(state.placement) if state.placement and state.nodes_min else 0


def growers(state: RunState, spares: Sequence[Node], open_places: int = 0) -> list[Node]:
    """Which of the usable `spares` the placement grows by, besides those for `open_places`. Nothing, while
    shared storage fails: the newest state could not be brought to ranks of another number."""
    shared = state.saved.get(SHARED)
    if state.alone or state.end_order is not None or (shared is not None and shared.failures):
        return []
    fit = [node for node in spares if _is_fit(state, node)]
    return fit[open_places : open_places + missing(state)]


def _is_fit(state: RunState, node: Node) -> bool:
    """Whether others would not soon take its place: a node that has proved itself. One that was lost and came
    back has, where no tests are made, when it has stayed a while."""
    if not node.ready or node.going or node.marked or node.tested == Verdict.SUSPECT.value:
        return False
    if node.role is Role.SPARE:
        return True
    blamed = any(blame.node == node.name for blame in state.blames)
    tested = whole_s(state.settings, node.gpus) > 0
    return node.role is Role.SUSPECT and not (blamed or tested) and state.now >= node.since + STAYED_S


def can_grow(state: RunState) -> bool:
    """Whether a running attempt should end at its next save, as nodes are ready that it lacks, and no other
    is about to be."""
    steady = state.phase is Phase.RUNNING and state.incident is None and state.end_order is None
    if not steady or not missing(state) or state.warned == state.attempt:
        return False
    return bool(growers(state, state.spare_nodes())) and not any(n.coming for n in state.nodes.values())


def note(state: RunState) -> None:
    """The ranks of an attempt are up, or those of the last one are stopped: note since when there are fewer
    nodes than wanted."""
    runs = state.phase is Phase.RUNNING and missing(state) > 0
    newest = state.fewer[-1] if state.fewer else None
    open_one = newest if newest is not None and newest.until is None else None
    if open_one is not None and (not runs or open_one.nodes != len(state.placement)):
        state.fewer[-1] = Fewer(open_one.nodes, open_one.since, state.now)
        open_one = None
    if runs and open_one is None:
        state.fewer.append(Fewer(len(state.placement), state.now))
