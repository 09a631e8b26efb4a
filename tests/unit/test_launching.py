"""A decided launch: what it waits for until its nodes are told, and how earlier attempts are fenced off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jurymast.core import messages as msg
from jurymast.core.copies import ALL, MEMORY, Copies, Copy
from jurymast.core.effects import Effect, Fence, Send
from jurymast.core.instructions import Launch
from jurymast.core.nodes.watch import WATCH_INTERVAL_S
from jurymast.core.supervision import launching
from jurymast.core.supervision.machine import Supervision
from jurymast.journal import JournalWriter
from jurymast.rundir import RunDirectory
from jurymast.supervisor.hold import Hold
from jurymast.supervisor.supervisor import Supervisor
from support.reports import hello
from support.stories import Story


def test_what_a_launch_waits_for_is_said_in_words() -> None:
    nodes = [f"n{i}" for i in range(9)]
    none = Copies()
    assert launching.waits_for(nodes, nodes, [], none, "") == ""
    assert launching.waits_for(nodes, nodes, ["s1"], none, "") == "the agents of s1"
    more = launching.waits_for(nodes, ["n0", "n1"], [], none, "")
    assert more == "the agents of n2, n3, n4, n5, n6 and 2 more"
    assert "/runs/a" in launching.waits_for(nodes, [], [], none, "/runs/a")


def test_who_is_not_needed_is_not_waited_for() -> None:
    """A spare that hung up a moment ago holds up no recovery, unless it may have what others lack."""
    held = Copies()
    for rank in range(2):
        held.hold(Copy(f"n{rank}", MEMORY, 8, 1, rank, 2, ALL, 9))
    assert launching.waits_for(["n0", "n1"], ["n0", "n1"], ["s1"], held, "") == ""
    held.hold(Copy("n0", MEMORY, 9, 1, 0, 2, ALL, 9))
    assert launching.waits_for(["n0", "n1"], ["n0", "n1"], ["s1"], held, "") == "the agents of s1"


def launches(effects: Sequence[Effect]) -> dict[str, msg.Launch]:
    """Who is told of a launch."""
    sent = [effect for effect in effects if isinstance(effect, Send)]
    return {one.node: one.message for one in sent if isinstance(one.message, msg.Launch)}


def told(supervision: Supervision, now: float) -> dict[str, msg.Launch]:
    """After all work that is to be done at once."""
    effects: list[Effect] = []
    while supervision.has_work:
        effects += supervision.work(now)
    return launches(effects)


def test_a_supervisor_that_takes_over_a_launch_waits_for_what_agents_hold() -> None:
    """Planned without them, the ranks would start afresh, and agents would give up images that are good. The
    node that is out held rank 1's image, whose only copy is a spare's now."""
    story = Story(active=2, spares=2).running()
    out = story.state.placement[1]
    story.lost(out)
    story.stopped()
    launch = story.last(Launch)
    spare = next(name for name in story.state.nodes if name not in (*launch.placement, out))
    supervision = Supervision(story.state, "/runs/a", story.t)
    assert Fence(launch.attempt) in supervision.start(story.t)
    supervision.fenced(launch.attempt, "", story.t)
    come = (*launch.placement, spare)
    for number, node in enumerate(come, 1):
        assert told(supervision, story.t) == {}
        rank = 1 if node == spare else launch.placement.index(node)
        tier = "peer" if node == spare else "memory"
        copy = msg.CopyReport(step=8, attempt=1, rank=rank, world=2, tier=tier, part="all", size_bytes=9)
        held = () if rank == 1 and node != spare else (copy,)
        known = story.state.nodes[node].incarnation
        said = hello(node, copies=held, attempt=1, ranks="waiting", incarnation=known)
        assert launches(supervision.joined(node, number, said, story.t)) == {}
        supervision.check()
    everyone = told(supervision, story.t)
    assert {node: one.restore and one.restore.step for node, one in everyone.items()} == dict.fromkeys(
        launch.placement, 8
    )


def test_a_launch_waits_for_the_run_directory_and_says_so() -> None:
    story = Story(active=2, spares=1).running()
    story.lost(story.state.placement[1])
    story.stopped()
    placed = story.last(Launch).placement
    supervision = Supervision(story.state, "/runs/a", story.t)
    supervision.start(story.t)
    for number, node in enumerate(placed, 1):
        known = story.state.nodes[node].incarnation
        supervision.joined(node, number, hello(node, ranks="waiting", incarnation=known), story.t)
    for _ in range(round(2.1 * launching.WAIT_TOLD_S / WATCH_INTERVAL_S)):
        story.t += WATCH_INTERVAL_S
        for number, node in enumerate(placed, 1):
            supervision.heard(node, number, msg.Beat(1, []), story.t)
        supervision.tick(story.t)
    assert not supervision.has_work
    (alert,) = story.state.alerts
    assert alert.message.startswith("the launch of attempt 2 waits for the run directory /runs/a")
    supervision.fenced(1, "", story.t)
    assert not supervision.has_work, "that was another attempt's"
    supervision.fenced(2, "", story.t)
    assert set(told(supervision, story.t)) == set(placed)


def test_an_older_attempt_s_number_never_replaces_a_newer_one_s(tmp_path: Path) -> None:
    """Storage hangs while a launch is fenced off, another launch follows, and then storage is back."""
    story = Story(active=2, spares=1).running()
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    supervisor = Supervisor(
        directory, story.state, JournalWriter(directory.journal, 9), lambda: "", Hold(directory.epochs, 9)
    )
    supervisor._write_attempt(3)
    supervisor._write_attempt(2)
    assert directory.newest_attempt() == 3
