"""Reservations that begin while a run has nodes in them: what Slurm says of them, and what the run does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from jurymast.cluster.reservations import JobOwner, found_in
from jurymast.core.run import refill, size
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import AskForNode, Effect, Journal, LookAtReservations
from jurymast.core.state.run import Phase
from jurymast.core.state.settings import Settings
from jurymast.core.supervision.ahead import LEAVE_S, LOOK_EVERY_S, Reservation
from jurymast.core.supervision.limit import LEAST_S, RENEW_S
from jurymast.jobs import utc_time
from jurymast.report.sentences import sentence
from support.stories import Story
from support.successor import Successor, image, written

DATA = Path(__file__).parent.parent / "data"
RELEASES = ["22.05", "24.11", "26.05"]
NOW = utc_time("2026-11-30T16:27:00")
NODES = [f"n{number}" for number in range(1, 7)]


# ---- what Slurm says


def told(release: str) -> str:
    """What `scontrol show reservation --oneliner` has printed: a maintenance of two nodes and one of all, one
    for another user, one for our own, and such as need no node of ours."""
    return (DATA / f"reservations-{release}.txt").read_text()


@pytest.mark.parametrize("release", RELEASES)
def test_reservations_that_others_have_of_our_nodes(release: str) -> None:
    found = {one.name: one for one in found_in(told(release), NODES, JobOwner(user="jurymast-test"), NOW)}
    wanted = {"ign": (("n1", "n2"), True), "ign2": (("n6",), False), "allmaint": (tuple(NODES), True)}
    assert {name: (one.nodes, one.maintenance) for name, one in found.items() if name in wanted} == wanted
    assert not found.keys() & {"flexy", "lic", "flo", "core", "mine"}, "these take nothing from us"
    line = next(line for line in told(release).splitlines() if line.startswith("ReservationName=ign "))
    assert found["ign"].starts_at == utc_time(line.split("StartTime=")[1].split()[0])


@pytest.mark.parametrize("release", RELEASES)
def test_only_nodes_of_ours_count_and_none_that_are_over(release: str) -> None:
    found = found_in(told(release), ["n3", "n2"], JobOwner(user="jurymast-test"), NOW)
    assert {one.name: one.nodes for one in found} == {"ign": ("n2",), "allmaint": ("n2", "n3")}
    assert found_in(told(release), NODES, JobOwner(), utc_time("2028-01-01T00:00:00")) == []
    assert found_in("No reservations in the system\n", NODES, JobOwner(), NOW) == []


def line(**fields: str) -> str:
    values = {
        "ReservationName": "july", "StartTime": "2026-11-30T17:00:00", "EndTime": "2026-11-30T18:00:00",
        "Duration": "01:00:00", "Nodes": "n[1-2]", "NodeCnt": "2", "Flags": "MAINT,IGNORE_JOBS,SPEC_NODES",
        "Users": "root", "Groups": "(null)", "Accounts": "(null)", **fields,
    }  # fmt: skip
    return " ".join(f"{key}={value}" for key, value in values.items()) + "\n"


ADA = JobOwner("ada", frozenset({"lab"}), "physics")


@pytest.mark.parametrize(
    ("fields", "own", "ours"),
    [
        ({}, ADA, True),
        ({}, JobOwner("ada", reservation="july"), False),
        ({"Users": "bob,ada"}, ADA, False),
        ({"Users": "bob,adam"}, ADA, True),
        ({"Users": "-bob"}, ADA, False),
        ({"Users": "-ada"}, ADA, True),
        ({"Users": "(null)", "Accounts": "physics"}, ADA, False),
        ({"Users": "ada", "Accounts": "chemistry"}, ADA, True),
        ({"Users": "root", "Accounts": "physics"}, ADA, True),
        ({"Users": "(null)", "Groups": "lab"}, ADA, False),
        ({"Users": "(null)"}, ADA, True),
        ({"Nodes": "(null)"}, ADA, False),
        ({"StartTime": "Unknown"}, ADA, False),
        ({"EndTime": "2026-11-30T16:00:00"}, ADA, False),
        ({"Flags": "MAINT,DAILY,IGNORE_JOBS"}, ADA, True),
        ({"MaxStartDelay": "(null) Comment=for Users=ada Nodes=n9"}, ADA, True),
    ],
)
def test_what_is_a_reason_to_leave(fields: dict[str, str], own: JobOwner, ours: bool) -> None:
    found = found_in(line(**fields), NODES, own, NOW)
    assert [one.nodes for one in found] == ([("n1", "n2")] if ours else [])


# ---- what the run does


class Run:
    """Two nodes and perhaps a spare, whose step 16 is in memory, and due on shared storage in hours."""

    def __init__(self, spares: int = 1, **settings: bool) -> None:
        wanted = Settings(shared_every_s=36_000.0, renews="renews" in settings, refill="refill" in settings)
        self.story = Story(active=2, spares=spares, settings=wanted).running()
        self.state = self.story.state
        self.after = Successor(self.story)
        self.events: list[ev.Event] = []
        self.looks = self.asked_for = 0
        self.steps: list[int] = []
        for rank, node in enumerate(self.state.placement):
            self.takes(self.after.joins(node, ranks="running", attempt=1, copies=(image(rank),)))
        for node in self.state.nodes.keys() - {*self.state.placement}:
            self.takes(self.after.joins(node))
        self.waits(1.0)

    def takes(self, effects: list[Effect]) -> None:
        self.events += [one.event for one in effects if isinstance(one, Journal)]
        self.looks += sum(isinstance(one, LookAtReservations) for one in effects)
        self.asked_for += sum(isinstance(one, AskForNode) for one in effects)
        self.steps += [order.step for order in list(written(effects).values())[:1]]

    def waits(self, seconds: float) -> None:
        self.takes(self.after.waits(seconds))

    def sees(self, *nodes: str, in_s: float = 200.0, name: str = "july") -> None:
        """Slurm shows that these nodes are reserved from then on."""
        made = Reservation(name, nodes, self.story.t + in_s, maintenance=True)
        self.takes(self.after.machine.on_reservations_seen([made] if nodes else [], self.story.t))

    def stopped(self) -> None:
        """All ranks are stopped."""
        for node in self.state.placement:
            self.takes(self.after.hears(node, msg.Stopped(attempt=1, store_port=29001)))

    @property
    def ahead(self) -> list[ev.ReservationAhead]:
        return [one for one in self.events if isinstance(one, ev.ReservationAhead)]

    @property
    def asked(self) -> list[ev.Asked]:
        return [one for one in self.events if isinstance(one, ev.Asked)]


def spare_of(run: Run) -> str:
    return next(name for name in run.state.nodes if name not in run.state.placement)


def test_slurm_is_asked_now_and_then() -> None:
    run = Run()
    looks = run.looks
    assert looks > 0
    run.waits(3 * LOOK_EVERY_S)
    assert run.looks == looks, "it has not answered"
    run.sees()
    run.waits(LOOK_EVERY_S)
    assert run.looks == looks + 1


def test_ranks_stay_until_a_reservation_is_near_and_then_move_to_a_spare_outside() -> None:
    run = Run()
    victim = run.state.placement[1]
    run.sees(victim, in_s=7200.0)
    run.waits(60.0)
    assert [(one.name, one.nodes, one.near) for one in run.ahead] == [("july", (victim,), False)]
    assert run.asked == []
    run.sees(victim, in_s=LEAVE_S + LEAST_S - 1.0)  # shifted
    run.waits(5.0)
    assert [one.near for one in run.ahead] == [False, False, True]
    save, drain = run.asked[0], next(one for one in run.asked if one.what == "drain")
    by = "jurymast, as maintenance july is ahead"
    assert (save.what, save.by, save.node) == ("save", by, victim)
    assert (drain.by, drain.node, drain.reserved) == (by, victim, True)
    run.stopped()
    incident = run.state.incidents[-1]
    assert (incident.cause, incident.charged, incident.action) == ("reservation_ahead", "nobody", "swap")
    assert victim not in run.state.placement
    assert run.state.nodes[victim].faultless, "a later life of the job may have it"
    run.sees(victim, in_s=100.0)
    assert run.ahead[-1].nodes == (), "the run has no node in it any more"


def test_ranks_stay_without_a_spare_outside() -> None:
    run = Run()
    run.sees(*run.state.placement[1:], spare_of(run))
    run.waits(5.0)
    assert [one.what for one in run.asked] == []
    assert run.state.nodes[spare_of(run)].going
    run.sees()
    run.waits(5.0)
    assert not any(node.going for node in run.state.nodes.values()), "it is deleted"


def test_a_spare_that_is_reserved_is_the_last_choice_and_another_is_asked_for() -> None:
    run = Run(refill=True)
    assert refill.lacking(run.state) == 0
    run.sees(spare_of(run), in_s=600.0)
    run.waits(5.0)
    assert refill.lacking(run.state) == 1
    assert not size._is_fit(run.state, run.state.nodes[spare_of(run)])
    assert run.asked == [], "until then it is better than none"


def test_the_newest_step_is_written_before_a_reservation_of_nodes_that_ranks_stay_on() -> None:
    run = Run(spares=0)
    for rank, node in enumerate(run.state.placement):
        run.takes(run.after.hears(node, msg.Held(copies=(structs.replace(image(rank), step=16),))))
    steps = [*run.steps]
    run.sees(run.state.placement[1], in_s=LEAST_S + 60.0)
    run.waits(5.0)
    assert run.steps == steps, "there is time"
    run.waits(60.0)
    machine = run.after.machine
    assert machine.foreseen.ahead.hurried_until > run.story.t
    notes = [one.message for one in run.events if isinstance(one, ev.Noted)]
    assert sum("maintenance july begins in" in text for text in notes) == 1


@pytest.mark.parametrize("moved", [False, True])
def test_each_beginning_is_prepared_for_once(moved: bool) -> None:
    run = Run(spares=0)
    run.sees(run.state.placement[1], in_s=60.0)
    run.waits(5.0)
    run.sees(run.state.placement[1], in_s=1000.0 if moved else 55.0)
    run.waits(1000.0 - LEAST_S if moved else 5.0)
    notes = [one.message for one in run.events if isinstance(one, ev.Noted)]
    assert sum("maintenance july begins in" in text for text in notes) == 1 + moved


def is_requeued(run: Run) -> bool:
    return any(one.what == ev.REQUEUE for one in run.asked)


@pytest.mark.parametrize(
    ("renews", "all_nodes"), [(True, True), (True, False), (False, True)],
    ids=["requeued", "a spare is outside", "not in the policy"],
)  # fmt: skip
def test_a_job_whose_nodes_are_all_reserved_is_requeued_if_it_is_at_its_limit(
    renews: bool, all_nodes: bool
) -> None:
    run = Run(**({"renews": True} if renews else {}))
    reserved = [*run.state.placement, *([spare_of(run)] if all_nodes else [])]
    run.sees(*reserved, in_s=RENEW_S + 120.0)
    run.waits(30.0)
    assert not is_requeued(run)
    for _ in range(30):  # the ranks answer in time
        if not is_requeued(run):
            run.waits(3.0)
    assert is_requeued(run) == (renews and all_nodes)
    if not is_requeued(run):
        return
    run.stopped()
    incident = run.state.incidents[-1]
    assert (incident.cause, incident.action) == ("reservation_ahead", "requeue")
    assert run.state.phase is Phase.REQUEUED
    assert run.state.excluded == {}
    run.story.allocated(restarts=1)
    assert run.state.reservations == {}
    assert run.state.restarts - run.state.ordered_restarts == 0, "no requeue of the policy's number"


def test_what_began_before_the_run_had_the_node_or_begins_after_its_end_is_no_reason() -> None:
    run = Run()
    run.sees(run.state.placement[1], in_s=-86_400.0)
    run.after.machine.on_time_limit(3600.0, run.story.t)
    run.sees(run.state.placement[1], in_s=3700.0)
    assert run.ahead == []
    run.after.machine.on_time_limit(86_400.0, run.story.t)
    run.sees(run.state.placement[1], in_s=3700.0)
    assert len(run.ahead) == 1, "the limit was moved"


def test_a_reservation_that_began_unseen_is_left_at_once() -> None:
    run = Run()
    run.sees(run.state.placement[1], in_s=-1.0)
    run.waits(5.0)
    assert any(one.what == "drain" for one in run.asked)


def test_slurm_that_says_nothing_and_a_policy_that_only_reports_move_nothing() -> None:
    run = Run()
    run.takes(run.after.machine.on_reservations_seen(None, run.story.t))
    assert run.ahead == []
    run.state.settings = replace(run.state.settings, bad_nodes="report")
    run.sees(run.state.placement[1])
    run.waits(5.0)
    assert run.asked == []
    assert len(run.ahead) == 2, "people are told"


def test_how_the_journal_tells_it() -> None:
    entry = {
        "event": "ReservationAhead", "t": 1_795_000_000.0, "name": "july", "nodes": ["n3", "n4"],
        "starts_at": 1_795_007_200.0, "maintenance": True, "near": False,
    }  # fmt: skip
    text = sentence(entry)
    assert text.startswith("maintenance july begins on n3, n4 at 2026-")
    assert text.endswith(", in 2 h 00 min")
    assert sentence({**entry, "near": True}).endswith(", in 2 h 00 min: ranks leave what they can")
    assert sentence({**entry, "maintenance": False, "nodes": []}).startswith("reservation july begins on no")
