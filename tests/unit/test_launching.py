"""A decided launch: what it waits for until its nodes are told, and how earlier attempts are fenced off."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from jurymast.core import launching
from jurymast.core import messages as msg
from jurymast.core.copies import ALL, MEMORY, Copies, Copy
from jurymast.core.instructions import Launch
from jurymast.core.nodes.watch import WATCH_INTERVAL_S
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


class Line:
    """A node's connection; keeps the launches that it is told of."""

    def __init__(self) -> None:
        self.launches: list[msg.Launch] = []

    def send(self, message: msg.ToAgent) -> None:
        if isinstance(message, msg.Launch):
            self.launches.append(message)


def test_a_supervisor_that_takes_over_a_launch_waits_for_what_agents_hold(tmp_path: Path) -> None:
    """Planned without them, the ranks would start afresh, and agents would give up images that are good. The
    node that is out held rank 1's image, whose only copy is a spare's now."""
    story = Story(active=2, spares=2).running()
    out = story.state.placement[1]
    story.lost(out)
    story.stopped()
    launch = story.last(Launch)
    spare = next(name for name in story.state.nodes if name not in (*launch.placement, out))
    directory = RunDirectory(tmp_path / "run")
    directory.create()

    async def work() -> None:
        supervisor = Supervisor(
            directory, story.state, JournalWriter(directory.journal, 9), lambda: "", Hold(directory.epochs, 9)
        )
        lines: dict[str, Any] = supervisor._channels
        come = (*launch.placement, spare)
        for node in come:
            supervisor._watch.expect(node)
        launching = asyncio.ensure_future(supervisor._launching.carry_out(launch))
        for node in come:
            assert [line.launches for line in lines.values()] == [[]] * len(lines)
            rank = 1 if node == spare else launch.placement.index(node)
            tier = "peer" if node == spare else "memory"
            copy = msg.CopyReport(step=8, attempt=1, rank=rank, world=2, tier=tier, part="all", size_bytes=9)
            held = () if rank == 1 and node != spare else (copy,)
            supervisor._checkpoints.joined(node, hello(node, copies=held), story.t)
            supervisor._watch.joined(node, 1)
            lines[node] = Line()
            if node in launch.placement:
                supervisor._send_again(node, 1)  # as when the agent says hello
            await asyncio.sleep(3 * WATCH_INTERVAL_S)
        await asyncio.wait_for(launching, 10)
        for node in launch.placement:
            assert [one.restore and one.restore.step for one in lines[node].launches] == [8]

    asyncio.run(work())


def test_an_older_attempt_s_number_never_replaces_a_newer_one_s(tmp_path: Path) -> None:
    """Storage hangs while a launch is fenced off, another launch follows, and then storage is back."""
    story = Story(active=2, spares=1).running()
    story.lost("n2")
    story.stopped()
    launch = story.last(Launch)
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    supervisor = Supervisor(
        directory, story.state, JournalWriter(directory.journal, 9), lambda: "", Hold(directory.epochs, 9)
    )
    supervisor._launching._fence(replace(launch, attempt=launch.attempt + 1))
    supervisor._launching._fence(launch)
    assert directory.newest_attempt() == launch.attempt + 1
