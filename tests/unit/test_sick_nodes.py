"""After a bad finding: the site is told, and Slurm gets the node back, once the run can do without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.settings import Settings
from jurymast.supervisor.sick_nodes import SickNodes
from support.stories import Story

SCONTROL = """
echo "$*" >> {log}
case "$*" in
*hostnames*) printf 'n1\\nn2\\nn3\\nn4\\n';;
*"show job"*) echo "JobId=17 NodeList=n[1-4]";;
*update*) {update};;
esac
"""


class Site:
    """A run that has lost `victim` to a bad finding, and a `scontrol` of the site."""

    def __init__(
        self, root: Path, *, bad: str = "drain", update: str = "exit 0", doubt_s: float = 0.0
    ) -> None:
        self.log = root / "log"
        (root / "scontrol").write_text("#!/bin/sh\n" + SCONTROL.format(log=self.log, update=update))
        (root / "scontrol").chmod(0o755)
        self.told: list[tuple[str, msg.ToAgent]] = []
        settings = Settings(bad_nodes=bad, together_s=doubt_s)
        self.story = Story(active=2, spares=2, settings=settings).running(40).saved(40)
        self.victim = self.story.state.placement[1]

    def break_gpu(self) -> None:
        self.story.t += 1.0
        self.story.feed(
            ev.HealthFound(
                t=self.story.t, node=self.victim, probe="nvidia", code="gpu-lost", verdict="bad",
                kind="hardware", message="it fell off the bus", device="gpu3", at=self.story.t,
            )
        )  # fmt: skip
        self.story.stopped()

    def nodes(self, tasks: list[asyncio.Task[None]]) -> SickNodes:
        return SickNodes(
            self.story.state,
            lambda node, message: self.told.append((node, message)),
            lambda event: self.story.events.append(event),
            lambda: self.story.t,
            lambda work: tasks.append(asyncio.get_running_loop().create_task(work)),
        )

    @property
    def notes(self) -> list[str]:
        return [event.message for event in self.story.events if isinstance(event, ev.Noted)]

    @property
    def updates(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith("update")]


def play(act: Callable[[list[asyncio.Task[None]]], Any]) -> None:
    async def played() -> None:
        tasks: list[asyncio.Task[None]] = []
        await asyncio.wait_for(act(tasks), 20.0)
        await asyncio.wait_for(asyncio.gather(*tasks), 20.0)

    asyncio.run(played())


def test_the_site_is_told_and_slurm_gets_the_node_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = Site(tmp_path)

    async def act(tasks: list[asyncio.Task[None]]) -> None:
        nodes = site.nodes(tasks)
        site.break_gpu()
        nodes.dismissed(site.victim)
        await asyncio.sleep(0)
        ((node, order),) = site.told
        assert isinstance(order, msg.LeaveVerdict)
        assert (node, order.job, order.finding.code) == (site.victim, "17", "gpu-lost")
        nodes.answered(site.victim, msg.VerdictLeft())
        while not site.notes:
            await asyncio.sleep(0)
        assert site.updates == [], "its memory may still be needed: the ranks are not back yet"
        site.story.recovered(40, 60)

    play(act)
    kept = ",".join(name for name in ("n1", "n2", "n3", "n4") if name != site.victim)
    assert site.updates == [f"update JobId=17 NodeList={kept}"]
    assert site.notes == [
        "the site was told in /var/spool/jurymast: gpu-lost",
        f"{site.victim} was given back to Slurm, the job goes on without it",
    ]


def test_a_site_that_takes_no_node_back_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = Site(tmp_path, bad="exclude", update="echo 'slurm_update error: Invalid node' >&2; exit 1")

    async def act(tasks: list[asyncio.Task[None]]) -> None:
        nodes = site.nodes(tasks)
        site.break_gpu()
        nodes.dismissed(site.victim)
        site.story.recovered(40, 60)
        while len(site.updates) < 1 or not site.notes:
            await asyncio.sleep(0.01)
        nodes.dismissed(site.victim)

    play(act)
    assert site.told == [], "nobody is told where bad nodes are only excluded"
    assert len(site.updates) == 1
    (note,) = site.notes
    assert note.startswith(f"Slurm does not take {site.victim} back from the running job: ")
    assert "Invalid node" in note


@pytest.mark.parametrize("why", ["report", "healthy", "local"])
def test_nothing_happens_to_a_node_that_is_not_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = Site(tmp_path)

    async def act(tasks: list[asyncio.Task[None]]) -> None:
        if why != "healthy":
            site.break_gpu()
        if why == "report":
            site.story.state.settings = Settings(bad_nodes="report")
        if why == "local":
            site.story.state.allocation = "local-17.0"
        site.nodes(tasks).dismissed(site.victim)
        assert tasks == []

    play(act)
    assert (site.told, site.updates, site.notes) == ([], [], [])


def test_a_node_that_was_cleared_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = Site(tmp_path, bad="exclude", doubt_s=0.2)

    async def act(tasks: list[asyncio.Task[None]]) -> None:
        nodes = site.nodes(tasks)
        site.break_gpu()
        nodes.dismissed(site.victim)
        site.story.recovered(40, 60)
        site.story.state.nodes[site.victim].bad = False  # many nodes had the same

    play(act)
    assert (site.updates, site.notes) == ([], [])


def test_an_agent_that_cannot_leave_word_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    site = Site(tmp_path)

    async def act(tasks: list[asyncio.Task[None]]) -> None:
        nodes = site.nodes(tasks)
        site.break_gpu()
        nodes.dismissed(site.victim)
        await asyncio.sleep(0)
        nodes.answered(site.victim, msg.VerdictLeft(why="munge is not installed here"))
        site.story.recovered(40, 60)

    play(act)
    assert (
        site.notes[0] == f"the site could not be told that {site.victim} is bad: munge is not installed here"
    )
