"""After a bad finding: the site is told, and Slurm gets the node back, once the run can do without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.cluster.control import give_back
from jurymast.core.nodes.health import ANSWER_LIMIT_S, SickNodes
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, GiveBack, Record, Send
from jurymast.core.state.findings import HARDWARE, Finding, Verdict
from jurymast.core.state.settings import Settings
from jurymast.errors import ClusterUnavailableError
from support.stories import Story
from support.successor import Successor

DOUBT_S = 60.0
SCONTROL = """
echo "$*" >> {log}
case "$*" in
*hostnames*) printf 'n1\\nn2\\nn3\\nn4\\n';;
*"show job"*) echo "JobId=17 NodeList=n[1-4]";;
*update*) {update};;
esac
"""


class Site:
    """A run of two nodes and two spares that has saved. Of the effects, `gives` are the nodes that Slurm is
    asked to take."""

    def __init__(self, bad: str = "drain") -> None:
        settings = Settings(bad_nodes=bad, together_s=DOUBT_S, excluded_fraction=1.0)
        self.story = Story(active=2, spares=2, settings=settings).running(40).saved(40)
        self.nodes = SickNodes(self.story.state)
        self.told: list[tuple[str, msg.ToAgent]] = []
        self.gives: list[str] = []
        self.notes: list[str] = []

    def does(self, effects: list[Effect]) -> None:
        self.nodes.check()
        for effect in effects:
            match effect:
                case Send():
                    self.told.append((effect.node, effect.message))
                case GiveBack():
                    assert effect.job == "17"
                    self.gives.append(effect.node)
                case Record(event=ev.Noted() as event):
                    self.notes.append(event.message)
                case _:
                    raise AssertionError(effect)

    def break_gpu(self) -> str:
        """Of an active node, which is out then."""
        victim = next(name for name in self.story.state.placement if name != self.story.state.host)
        self.find(victim)
        self.does(self.nodes.on_node_dismissed(victim, self.story.t))
        return victim

    def find(self, victim: str) -> None:
        self.story.t += 1.0
        self.story.feed(
            ev.HealthFound(
                t=self.story.t, node=victim, probe="nvidia", code="gpu-lost", verdict="bad",
                kind="hardware", message="it fell off the bus", device="gpu3", at=self.story.t,
            )
        )  # fmt: skip
        self.story.stopped()

    def answered(self, node: str, why: str = "") -> None:
        self.does(self.nodes.on_verdict_left(node, msg.VerdictLeft(why=why), self.story.t))

    def passes(self, seconds: float) -> None:
        self.story.t += seconds
        self.does(self.nodes.on_time(self.story.t))

    def given_back(self, node: str, gone: bool = True, why: str = "") -> None:
        self.does(self.nodes.on_node_given_back(node, gone, why, self.story.t))


def test_the_site_is_told_and_slurm_gets_the_node_back() -> None:
    site = Site()
    victim = site.break_gpu()
    ((node, order),) = site.told
    assert isinstance(order, msg.LeaveVerdict)
    assert (node, order.job, order.finding.code) == (victim, "17", "gpu-lost")
    site.answered(victim)
    site.passes(2 * DOUBT_S)
    assert site.gives == [], "its memory may still be needed: the ranks are not back yet"
    site.story.recovered(40, 60)
    site.passes(0.1)
    site.passes(DOUBT_S)
    assert site.gives == [victim]
    site.given_back(victim)
    assert site.notes == [
        f"{victim} is reported to the site's health check in /var/spool/jurymast: gpu-lost",
        f"{victim} was returned to Slurm, and the job continues without it",
    ]


def test_many_nodes_may_turn_out_to_have_the_same_first() -> None:
    site = Site("exclude")
    site.break_gpu()
    site.story.recovered(40, 60)
    waited_s = site.story.t
    site.passes(0.1)
    assert site.gives == []
    site.passes(DOUBT_S - (site.story.t - waited_s))
    assert len(site.gives) == 1


def test_a_site_that_takes_no_node_back_is_asked_once() -> None:
    site = Site("exclude")
    first = site.break_gpu()
    site.story.recovered(40, 60)
    second = site.break_gpu()
    site.story.recovered(60, 80)
    site.passes(2 * DOUBT_S)
    assert site.gives == [first]
    site.passes(DOUBT_S)
    assert site.gives == [first], "one at a time: each asks what is left, then says what is to stay"
    site.given_back(first, gone=False, why="slurm_update error: Invalid node")
    site.does(site.nodes.on_node_dismissed(second, site.story.t))
    site.passes(2 * DOUBT_S)
    assert site.gives == [first]
    assert site.told == [], "nobody is told where bad nodes are only excluded"
    (note,) = site.notes
    assert note == (f"Slurm refused to take {first} out of the running job: slurm_update error: Invalid node")


def test_one_node_after_another_is_given_back() -> None:
    site = Site("exclude")
    first = site.break_gpu()
    site.story.recovered(40, 60)
    second = site.break_gpu()
    site.story.recovered(60, 80)
    site.passes(2 * DOUBT_S)
    site.given_back(first, gone=False)  # the job no longer has it
    site.passes(0.1)
    assert site.gives == [first, second]
    assert site.notes == []


@pytest.mark.parametrize("why", ["report", "healthy", "local"])
def test_nothing_happens_to_a_node_that_is_not_bad(why: str) -> None:
    site = Site()
    victim = site.story.state.placement[1]
    if why == "local":
        site.story.state.allocation = "local-17.0"
    if why != "healthy":
        site.find(victim)
    if why == "report":
        site.story.state.settings = Settings(bad_nodes="report")
    site.does(site.nodes.on_node_dismissed(victim, site.story.t))
    if why != "healthy":
        site.story.recovered(40, 60)
    for _ in range(3):
        site.passes(DOUBT_S)
    assert (site.told, site.gives, site.notes) == ([], [], [])


def test_a_node_that_was_cleared_meanwhile_stays() -> None:
    site = Site("exclude")
    victim = site.break_gpu()
    site.story.recovered(40, 60)
    site.story.state.nodes[victim].bad = False  # many nodes had the same
    site.passes(2 * DOUBT_S)
    assert (site.gives, site.notes) == ([], [])


def test_a_run_that_has_ended_gives_nothing_back() -> None:
    site = Site("exclude")
    site.break_gpu()
    site.story.feed(ev.Asked(t=site.story.t, what="cancel", by="ada"))
    assert site.story.state.ended
    site.passes(2 * DOUBT_S)
    assert site.gives == []


@pytest.mark.parametrize("answers", [True, False])
def test_an_agent_that_cannot_leave_word_is_quoted(answers: bool) -> None:
    site = Site()
    victim = site.break_gpu()
    if answers:
        site.answered(victim, "munge is not installed on this machine")
    why = "munge is not installed on this machine" if answers else "its agent did not answer within 30 s"
    site.passes(ANSWER_LIMIT_S)
    site.answered(victim)  # too late to be news
    assert site.notes == [f"{victim} could not be reported to the site's health check: {why}"]
    site.story.recovered(40, 60)
    site.passes(DOUBT_S)
    assert site.gives == [victim]


@pytest.mark.parametrize("refuses", [False, True])
def test_slurm_is_told_what_is_to_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    update = "echo 'slurm_update error: Invalid node' >&2; exit 1" if refuses else "exit 0"
    (tmp_path / "scontrol").write_text("#!/bin/sh\n" + SCONTROL.format(log=tmp_path / "log", update=update))
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert not give_back("17", "n5"), "the job does not have it"
    if refuses:
        with pytest.raises(ClusterUnavailableError, match="Invalid node"):
            give_back("17", "n3")
    else:
        assert give_back("17", "n3")
    updates = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("update")]
    assert updates == ["update JobId=17 NodeList=n1,n2,n4"]


@pytest.mark.parametrize("wrong_s", [-7200.0, 7200.0])
def test_a_node_with_a_broken_gpu_leaves_whatever_its_clock_shows(wrong_s: float) -> None:
    story = Story(active=2, spares=1).running()
    after, (bad, other) = Successor(story), story.state.placement
    (spare,) = story.state.nodes.keys() - {bad, other}
    for node in (bad, other):
        after.joins(node, attempt=1, ranks="running", pids=(1,))
    after.joins(spare)
    clock = story.t + wrong_s
    lost = Finding(
        probe="nvidia", code="xid-79", verdict=Verdict.BAD, kind=HARDWARE, message="gone", device="gpu0",
        at=clock - 1.0, once=True,
    )  # fmt: skip
    after.hears(bad, msg.HealthFound(finding=lost, clock=clock))
    for node in (bad, other):
        after.hears(node, msg.Stopped(attempt=1, store_port=29001))
    assert (story.incident.cause, story.incident.node) == ("gpu_bad", bad)
    assert set(story.state.placement) == {other, spare}
    assert story.t - 2.0 < story.incident.fault_at <= story.t
