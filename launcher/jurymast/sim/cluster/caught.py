"""Signals that simulated ranks catch: each node's ranks save, for a time of their own, and then train on, or
leave, with exit code 0 or that of a signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast.core.state import within

if TYPE_CHECKING:
    from jurymast.sim.cluster.training import SimGroup, SimMember

GOES_ON, LEAVES, LEAVES_BY_SIGNAL, LOSES, STAYS = HOW = (
    "goes on",
    "leaves",
    "leaves by signal",
    "loses",  # one node's ranks leave, those of the next lose their connection to them, the others save on
    "stays",  # one node's ranks leave, the others never do
)
BY_SIGNAL = 143
TOLD_S = 0.0, 0.2
# A script takes so long to leave at the least: longer than a signal takes to reach all processes.
LEAST_S = 0.3
LOST_S = 0.02, 0.5
CLOSED = "Connection closed by peer"


def catch(group: SimGroup, how: str, seconds: float, *, told: bool = True) -> None:
    """The ranks of this group catch a signal, of which their agents tell (`told`; at a SIGTERM they do
    not). They save for at most so many seconds."""
    world = group.cluster.world
    if group.over or group.phase != "training" or group.caught:
        return
    group.caught, group.caught_at, group.told = how, world.now, told
    members = [*group.members.values()]
    for member in members:
        if told:
            agent = member.agent
            world.after(world.between(*TOLD_S), agent.process, agent.rank_said, within.Warned())
        member.saves_until = world.now + LEAST_S + world.chance.random() * seconds
    if how == GOES_ON:
        world.at(max(member.saves_until for member in members), None, _go_on, group)
        return
    group.over = True
    group.cluster.oracle.ranks_leave(group)
    if how in (LOSES, STAYS):
        members.sort(key=lambda member: member.saves_until)
    for number, member in enumerate(members):
        if how == STAYS and number:
            member.hung = True
        else:
            world.at(member.saves_until, member.host.process, _leave, group, member)


def _go_on(group: SimGroup) -> None:
    group.caught = ""
    if any(member.gone for member in group.members.values()):
        group.fail_all(CLOSED)  # they learn it now


def _leave(group: SimGroup, member: SimMember) -> None:
    if member.hung:
        return
    if group.caught == LEAVES_BY_SIGNAL:
        member.host.fail(group, BY_SIGNAL, "")
        return
    first = not any(one.left for one in group.members.values())
    member.host.finish(group)
    others = [one for one in group.members.values() if not one.gone]
    if group.caught == LOSES and first and others:
        world, loses = group.cluster.world, others[0]
        world.after(world.between(*LOST_S), loses.host.process, loses.host.fail, group, 1, CLOSED)
