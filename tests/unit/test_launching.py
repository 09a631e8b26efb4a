"""A decided launch: what it waits for until its nodes are told, and how earlier attempts are fenced off."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jurymast.cluster.allocation import Allocation
from jurymast.core.checkpoints.copies import Copies
from jurymast.core.judges.silence import rejoin_limit_s
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Fence, Launch, Send
from jurymast.core.state.images import ALL, MEMORY, Copy, StateId
from jurymast.core.state.run import Phase, Role
from jurymast.core.supervision import launching
from jurymast.core.supervision.launching import Launching
from jurymast.journal import JournalWriter
from jurymast.rundir import RunDirectory
from jurymast.supervisor.real_io import RealIo
from jurymast.supervisor.supervisor import Hold, Supervisor
from support.stories import Story
from support.successor import Successor, launches


def waits_for(
    nodes: list[str],
    here: list[str],
    away: list[str],
    copies: Copies,
    *,
    fenced: bool = True,
    attempt: int = 2,
) -> str:
    watch: Any = SimpleNamespace(here=set(here), away=lambda: away)
    checkpoints: Any = SimpleNamespace(copies=copies)
    one = Launching(Story().state, watch, checkpoints, "/runs/a")
    one._fenced = fenced
    placement = tuple(nodes)
    launch = Launch(attempt=attempt, placement=placement, master_address="", master_port=1, reason="")
    return one.waits_for(launch)


def test_what_a_launch_waits_for_is_said_in_words() -> None:
    nodes = [f"n{i}" for i in range(9)]
    none = Copies()
    assert waits_for(nodes, nodes, [], none) == ""
    assert waits_for(nodes, nodes, ["s1"], none) == "the agents of s1"
    assert waits_for(nodes, nodes, ["s1"], none, attempt=1) == ""  # nothing has been saved
    assert waits_for(nodes, ["n0", "n1"], [], none) == "the agents of n2, n3, n4, n5, n6 and 2 more"
    assert "/runs/a" in waits_for(nodes, [], [], none, fenced=False)


def test_who_is_not_needed_is_not_waited_for() -> None:
    """A spare that hung up a moment ago holds up no recovery, unless it may have what others lack."""
    held = Copies()
    for rank in range(2):
        held.hold(Copy(f"n{rank}", MEMORY, 8, 1, rank, 2, ALL, 9))
    assert waits_for(["n0", "n1"], ["n0", "n1"], ["s1"], held) == ""
    held.hold(Copy("n0", MEMORY, 9, 1, 0, 2, ALL, 9))
    assert waits_for(["n0", "n1"], ["n0", "n1"], ["s1"], held) == "the agents of s1"


def lost_one() -> tuple[Story, str]:
    """A supervisor died while it told its nodes of attempt 2: the story, and a spare that was not needed."""
    story = Story(active=2, spares=2).running()
    out = story.state.placement[1]
    story.lost(out)
    story.stopped()
    placed = story.last(Launch).placement
    return story, next(name for name in story.state.nodes if name not in (*placed, out))


def test_a_launch_that_was_half_told_is_not_told_again_but_replaced_by_the_next() -> None:
    """One node's ranks run, the other never heard of it: what the first restores is not known any more, and
    it would not hear another choice."""
    story, spare = lost_one()
    ran, waited = story.told().state.placement
    after = Successor(story)
    after.joins(spare)
    stop = msg.Stop(attempt=2)
    effects = after.joins(ran, attempt=2, ranks="running")
    assert (launches(effects), effects.count(Send(ran, stop))) == ({}, 0)
    effects = after.joins(waited, attempt=1, ranks="waiting")
    assert launches(effects) == {}
    assert Send(ran, stop) in effects
    assert Send(waited, stop) in effects
    assert after.fenced(2) == {}
    stopped = [after.hears(node, msg.Stopped(attempt=2, store_port=7)) for node in (ran, waited)]
    assert Fence(3) in [*stopped[-1], *after.waits(1.0)]
    assert {node: one.attempt for node, one in after.fenced(3).items()} == {ran: 3, waited: 3}
    incident = story.state.incidents[-1]
    assert (incident.cause, incident.charged, incident.node) == ("relaunch_asked", "nobody", "")


def test_a_launch_that_all_were_told_of_goes_on_under_the_next_supervisor() -> None:
    story, spare = lost_one()
    after = Successor(story)
    after.joins(spare)
    for node in story.told().state.placement:
        effects = after.joins(node, attempt=2, ranks="running")
        assert Send(node, msg.Stop(attempt=2)) not in effects
    assert (story.state.phase, story.state.attempt) == (Phase.RUNNING, 2)


def test_the_next_supervisor_knows_who_failed_before_it_hears_that_the_ranks_are_gone() -> None:
    """The one that failed is heard last; its peers have lost it."""
    story = Story(active=2, spares=0).running(40)
    first, last = story.state.placement
    after = Successor(story)
    lost = msg.Failed(
        attempt=1, rank=0, exit_code=1, error="RuntimeError", message="Connection closed by peer"
    )
    killed = msg.Failed(attempt=1, rank=1, exit_code=-9)
    for node, failed in ((first, lost), (last, killed)):
        after.joins(node, attempt=1, ranks="waiting", store_port=7, ended=(failed,))
        after.hears(node, failed)  # it is kept, and comes after the hello
    incident = story.state.incidents[-1]
    assert (incident.cause, incident.rank) == ("worker_killed", 1)


def test_the_next_supervisor_knows_whose_end_made_others_fail() -> None:
    """The ranks caught a signal; one left with exit code 0, its peer lost it, and the supervisor died."""
    story = Story(active=2, spares=0).running(40)
    left, lost = story.state.placement
    story.feed(ev.Signalled(t=story.t, signal=ev.CAUGHT))
    story.feed(ev.RanksEnded(t=story.t, attempt=1, ranks=(0,)))
    after = Successor(story)
    after.joins(left, attempt=1, ranks="finished")
    closed = msg.Failed(
        attempt=1, rank=1, exit_code=1, error="RuntimeError", message="Connection closed by peer"
    )
    after.joins(lost, attempt=1, ranks="waiting", store_port=7, ended=(closed,))
    for node in (left, lost):
        after.hears(node, msg.Stopped(attempt=1, store_port=7))
    incident = story.state.incidents[-1]
    assert (incident.cause, incident.rank) == ("worker_exit", 0)


def test_a_supervisor_that_takes_over_a_launch_waits_for_what_agents_hold() -> None:
    """Planned without them, the ranks would start afresh, and agents would give up images that are good. The
    node that is out held rank 1's image, whose only copy is a spare's now."""
    story, spare = lost_one()
    placed = story.state.placement
    after = Successor(story)
    for rank, node in enumerate(placed):
        copy = msg.CopyReport(step=8, attempt=1, rank=0, world=2, tier="memory", part="all", size_bytes=9)
        after.joins(node, copies=() if rank else (copy,), attempt=1)
        after.hears(node, msg.Stopped(attempt=2, store_port=7))
    after.waits(1.0)
    assert after.fenced(3) == {}
    copy = msg.CopyReport(step=8, attempt=1, rank=1, world=2, tier="peer", part="all", size_bytes=9)
    told = launches(after.joins(spare, copies=(copy,)))
    restored = {node: one.restore and one.restore.step for node, one in told.items()}
    assert restored == dict.fromkeys(placed, 8)


def test_a_launch_waits_for_the_run_directory_and_says_so() -> None:
    story = Story(active=2, spares=1).running()
    left, out = story.state.placement
    story.lost(out)
    after = Successor(story)
    after.joins(next(name for name in story.state.nodes if name not in (left, out)))
    after.joins(left, attempt=1)
    after.waits(2.1 * launching.WAIT_TOLD_S)
    (alert,) = story.state.alerts
    assert alert.message.startswith("the launch of attempt 2 waits for the run directory /runs/a")
    assert after.fenced(1) == {}, "that was another attempt's"
    assert set(after.fenced(2)) == set(story.state.placement)


def test_ranks_are_told_of_a_checkpoint_that_only_storage_knows_of() -> None:
    """The supervisor that had it written died before it heard that. Where storage is not mounted, ranks would
    start from 0."""
    story = Story(active=2, spares=1).running()
    left, out = story.state.placement
    story.lost(out)
    after = Successor(story)
    after.machine.on_storage_read({StateId(5, 1): 100}, [], story.t)
    after.joins(next(name for name in story.state.nodes if name not in (left, out)))
    after.joins(left, attempt=1)
    told = after.fenced(2)
    assert [(one.restore, one.saved) for one in told.values()] == [(None, 5)] * 2


def test_nodes_that_are_to_stop_have_time_to_find_the_supervisor_that_took_over() -> None:
    """However late it took over: no healthy node is one whose ranks could not be stopped."""
    story = Story(active=2, spares=1).running()
    story.failed(0)
    story.t += 60.0
    placed = story.state.placement
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node="n3"))
    after = Successor(story)
    after.waits(rejoin_limit_s(3))
    for node in placed:
        assert Send(node, msg.Stop(attempt=1)) in after.joins(node, attempt=1, ranks="running")
    after.waits(story.state.settings.stop_grace_s)
    for node in placed:
        after.hears(node, msg.Stopped(attempt=1, store_port=7))
    incident = story.state.incidents[0]
    assert (incident.cause, incident.action) == ("worker_exception", "restart"), incident
    assert {story.state.nodes[node].role for node in placed} == {Role.ACTIVE}


def test_an_older_attempt_s_number_never_replaces_a_newer_one_s(tmp_path: Path) -> None:
    """Storage hangs while a launch is fenced off, another launch follows, and then storage is back."""
    story = Story(active=2, spares=1).running()
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    io = RealIo(directory, Allocation("17", 0, (), "n1", 0.0), lambda: story.state)

    async def work() -> None:
        supervisor = Supervisor(io, story.state, JournalWriter(directory.journal, 9), Hold(io, 9))
        for attempt in (3, 2):
            await io.on_disk(partial(supervisor.write_attempt, attempt))

    asyncio.run(work())
    assert directory.newest_attempt() == 3


def test_the_number_of_an_attempt_that_only_agents_know_is_not_used_again() -> None:
    """The supervisor before died while storage hung, after it had told some to stop that attempt."""
    story = Story(active=2, spares=1).running()
    one, other = story.state.placement
    after = Successor(story)
    for node in (one, other):
        after.joins(node, ranks="running", attempt=1)
    after.hears(one, msg.Stopped(attempt=2, store_port=1))
    assert (story.state.attempt, story.state.phase) == (2, Phase.STOPPING)
    after.hears(other, msg.Stopped(attempt=2, store_port=1))
    assert (story.state.attempt, story.state.phase) == (3, Phase.LAUNCHING)
