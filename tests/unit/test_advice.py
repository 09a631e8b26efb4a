"""What the report advises to change, by a simulation of the run's own failures: held against what following
the advice gives. The runs are simulated, and accounted for as real ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import STALL_GUESS_S
from jurymast.core.state.events import NodeLost
from jurymast.core.state.incident import CAUSES, Incident
from jurymast.core.state.run import Phase
from jurymast.core.state.schedule import NEVER
from jurymast.core.state.settings import Budget, Settings
from jurymast.report.advice import advice_blocks, advice_view, sentences
from jurymast.report.text import Line
from jurymast.sim.checkpoints import HANG, POWER_LOSS, RANK_STOP, SCRIPT, WORKER_KILL, Durations
from jurymast.sim.faults import FaultModel, TraceFault
from jurymast.sim.replay import NotReplayed, kind_of, replay_of
from jurymast.sim.simulation import Setup, Simulation

DAY_S = 86_400.0
USUAL = Durations(
    step_s=5.0, stall_s=1.0, copy_s=5.0, write_s=60.0, read_s=60.0, warm_up_s=30.0, requeue_s=1200.0
)


@dataclass(frozen=True)
class Past:
    """A run as it went."""

    faults: tuple[TraceFault, ...] = ()
    cadence: Cadence = field(default_factory=Cadence)
    settings: Settings = field(default_factory=Settings)
    nodes: int = 8
    spares: int = 1
    seconds: float = 2 * DAY_S
    durations: Durations = USUAL
    kind: type[Simulation] = Simulation
    in_process: bool = False

    def run(self) -> Simulation:
        setup = Setup(
            nodes=self.nodes, spares=self.spares, seconds=self.seconds, durations=self.durations,
            settings=self.settings, named=self.nodes, in_process=self.in_process,
        )  # fmt: skip
        simulation = self.kind(setup, self.faults, self.cadence)
        simulation.run()
        return simulation

    def advice(self) -> dict[str, Any]:
        ran = self.run()
        return advice_view(ran.ledger, ran.ledger.account(ran.now), ran.now)

    def ratio(self, name: str) -> float:
        ran = self.run()
        found = ran.ledger.account(ran.now).ratios()[name]
        assert found is not None
        return found


class Held(Simulation):
    """One whose nodes are held for as long as those of a real cluster, though no rank runs on them: until all
    agents have joined, and until Slurm has ended a job."""

    def _join(self, name: str) -> None:
        self._at(self.now + 250.0, super()._join, name)

    def _allocation_ended(self, why: str) -> None:
        self._at(self.now + (150.0 if why == "requeue" else 0.0), super()._allocation_ended, why)


def often(kind: str, every_s: float, nodes: int = 8) -> tuple[TraceFault, ...]:
    lost = kind == POWER_LOSS
    return tuple(
        TraceFault(number * every_s + 1000.0, (number % nodes,) if lost else (), kind)
        for number in range(int(2 * DAY_S / every_s) - 1)
    )


def bursts(every_s: float, seconds: float, durations: Durations = USUAL) -> Past:
    times = range(1, int(seconds / every_s))
    faults = tuple(TraceFault(number * every_s, (), WORKER_KILL) for number in times)
    return Past(faults, spares=0, seconds=seconds, durations=durations)


CASES = {
    "nothing is saved": (
        Past(often(WORKER_KILL, 7200.0), Cadence(steps=NEVER)),
        ("jurymast.Checkpointer", "runtime_goodput"),
        Past(often(WORKER_KILL, 7200.0)),
    ),
    "the script saves too seldom": (
        Past(often(WORKER_KILL, 7200.0), Cadence(seconds=5400.0)),
        ("the script's cadence", "runtime_goodput"),
        Past(often(WORKER_KILL, 7200.0)),
    ),
    "failures come too soon one after another": (
        bursts(400.0, 7200.0),
        ("checkpoint.cadence", "runtime_goodput"),
        None,
    ),
    "and before the first save": (
        bursts(120.0, 1200.0, replace(USUAL, step_s=0.5, stall_s=STALL_GUESS_S)),
        ("checkpoint.cadence", "runtime_goodput"),
        None,
    ),
    "the policy saves too often": (
        Past((), Cadence(seconds=10.0), Settings(cadence_s=10.0), seconds=DAY_S / 4),
        ("checkpoint.cadence", "runtime_goodput"),
        Past(seconds=DAY_S / 4),
    ),
    "hangs are noticed late": (
        Past(often(HANG, 14400.0), settings=Settings(hang_s=3600.0)),
        ("detect.hang", "runtime_goodput"),
        Past(often(HANG, 14400.0)),
    ),
    "silence is noticed late": (
        Past(
            often(POWER_LOSS, 7200.0),
            settings=Settings(node_lost_after_s=600.0),
            spares=7,
            durations=replace(USUAL, detection_s=600.0, repair_s=3600.0),
        ),
        ("detect.node_lost_after", "runtime_goodput"),
        Past(
            often(POWER_LOSS, 7200.0),
            spares=7,
            durations=replace(USUAL, detection_s=2.5, repair_s=3600.0),
        ),
    ),
    "ranks that live restart": (
        Past(often(WORKER_KILL, 3600.0), Cadence(seconds=600.0)),
        ("Checkpointer.run", "runtime_goodput"),
        Past(often(WORKER_KILL, 3600.0), Cadence(seconds=600.0), in_process=True),
    ),
    "all restart where nodes are lost": (
        Past(often(POWER_LOSS, 5000.0), spares=3, durations=replace(USUAL, repair_s=3600.0)),
        ("Checkpointer.run", "runtime_goodput"),
        Past(often(POWER_LOSS, 5000.0), spares=3, durations=replace(USUAL, repair_s=3600.0), in_process=True),
    ),
    "failures wait for nodes": (
        Past(often(POWER_LOSS, 7200.0), nodes=24, spares=0),
        ("--spares", "runtime_goodput"),
        None,
    ),
    "spares have nothing to do": (
        Past(nodes=8, spares=6),
        ("--spares", "allocation_goodput"),
        Past(nodes=8, spares=0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_advised_gains_what_is_foretold(case: str) -> None:
    past, (option, of), followed = CASES[case]
    advice = past.advice()
    assert abs(advice["error"]) < 0.01
    first = next(one for one in advice["changes"] if one["option"] == option)
    assert first["of"].replace(" ", "_") == of
    if followed is None and option == "--spares":
        followed = replace(past, spares=int(first["value"]))
    elif followed is None:
        every_s = float(first["value"].removesuffix("s"))
        followed = replace(past, cadence=Cadence(seconds=every_s), settings=Settings(cadence_s=every_s))
    assert first["gain"] == pytest.approx(followed.ratio(of) - past.ratio(of), abs=0.02)
    assert first["gain"] > 0.005


@pytest.mark.parametrize("apart_s", [3600.0, 7200.0])
def test_failures_far_apart_are_not_said_to_have_come_close_to_each_other(apart_s: float) -> None:
    changes = bursts(apart_s, 2 * DAY_S).advice()["changes"]
    assert "checkpoint.cadence" not in [one["option"] for one in changes]


@pytest.mark.parametrize("seed", range(12))
def test_the_forecast_for_a_run_as_it_was_is_within_two_points(seed: int) -> None:
    chance = random.Random(seed)
    nodes, spares = chance.choice([(4, 1), (12, 0), (16, 2)])
    model = FaultModel(rate=chance.choice([5.0, 50.0, 200.0]), application_rate=20.0, hang_rate=10.0)
    seconds = chance.choice([0.2, 1.0, 6.0]) * DAY_S
    cadence = chance.choice([Cadence(), Cadence(seconds=900.0), Cadence(steps=NEVER)])
    faults = tuple(model.draw(nodes + spares, seconds, chance))
    step_s, stall_s = chance.choice([0.5, 20.0]), chance.choice([0.1, 5.0])
    durations = replace(USUAL, step_s=step_s, stall_s=stall_s)
    ran = Past(faults, cadence, nodes=nodes, spares=spares, seconds=seconds, durations=durations).run()
    account = ran.ledger.account(ran.now)
    replay = replay_of(ran.state, account, ran.ledger.steps, ran.ledger.saves)
    assert replay.goodput == pytest.approx(account.ratios()["runtime_goodput"])
    foretold = replay.run()
    assert foretold.goodput == pytest.approx(replay.goodput, abs=0.02)
    assert foretold.allocated == pytest.approx(replay.allocated, abs=0.02)


KINDS_OF_RUNS = {
    "nothing fails": Past(nodes=8, spares=2, seconds=4000.0),
    "restarts alone": Past(often(WORKER_KILL, 3600.0), seconds=DAY_S),
    "requeues without spares": Past(often(POWER_LOSS, 7200.0), spares=0),
    "the spares are spent": Past(often(POWER_LOSS, 5000.0), spares=3, nodes=6),
    "lost nodes come back": Past(
        tuple(replace(fault, down_s=900.0) for fault in often(POWER_LOSS, 5000.0)), spares=1
    ),
    "lost nodes come back late": Past(
        tuple(replace(fault, down_s=14400.0) for fault in often(POWER_LOSS, 5000.0)), spares=2
    ),
    "requeues and restarts": Past(
        tuple(sorted((*often(POWER_LOSS, 9000.0), *often(SCRIPT, 20000.0)), key=lambda fault: fault.t)),
        Cadence(steps=100),
        spares=1,
    ),
    "hangs": Past(often(HANG, 14400.0), Cadence(seconds=600.0)),
    "recovery in process": Past(
        tuple(sorted((*often(POWER_LOSS, 9000.0), *often(SCRIPT, 7000.0)), key=lambda fault: fault.t)),
        spares=3,
        in_process=True,
    ),
    "slow storage": Past(often(POWER_LOSS, 7200.0), spares=0, durations=replace(USUAL, write_s=300.0)),
}


@pytest.mark.parametrize("kind", [Simulation, Held])
@pytest.mark.parametrize("past", KINDS_OF_RUNS)
def test_both_forecasts_are_within_two_points(past: str, kind: type[Simulation]) -> None:
    """Also where nodes are held while nothing runs on them."""
    ran = replace(KINDS_OF_RUNS[past], kind=kind).run()
    account = ran.ledger.account(ran.now)
    replay = replay_of(ran.state, account, ran.ledger.steps, ran.ledger.saves)
    ratios, foretold = account.ratios(), replay.run()
    assert replay.goodput == pytest.approx(ratios["runtime_goodput"])
    assert replay.allocated == pytest.approx(ratios["allocation_goodput"])
    assert foretold.goodput == pytest.approx(replay.goodput, abs=0.02)
    assert foretold.allocated == pytest.approx(replay.allocated, abs=0.02)
    assert (replay.outside_s > 200.0) is (kind is Held)
    requeued = any(one.action == "requeue" for one in ran.state.incidents)
    assert (replay.held_s > 300.0) is (kind is Held and requeued)


def test_what_spares_cost_while_nodes_wait_is_foretold() -> None:
    """Fewer of them also wait for the others."""
    past = replace(KINDS_OF_RUNS["the spares are spent"], kind=Held)
    ran, fewer = past.run(), replace(past, spares=1)
    replay = replay_of(ran.state, ran.ledger.account(ran.now), ran.ledger.steps, ran.ledger.saves)
    foretold = replay.with_setup(spares=1).run()
    assert foretold.allocated == pytest.approx(fewer.ratio("allocation_goodput"), abs=0.02)


@pytest.mark.parametrize("asked", [Cadence(steps=40), Cadence(seconds=300.0), Cadence()])
def test_how_often_the_script_saved_is_found_out(asked: Cadence) -> None:
    ran = Past(often(WORKER_KILL, 14400.0), asked).run()
    replay = replay_of(ran.state, ran.ledger.account(ran.now), ran.ledger.steps, ran.ledger.saves)
    assert replay.cadence == asked


def test_what_the_script_asks_for_comes_before_the_policy() -> None:
    ran = Past(often(WORKER_KILL, 14400.0), settings=Settings(cadence_steps=4000)).run()
    replay = replay_of(ran.state, ran.ledger.account(ran.now), ran.ledger.steps, ran.ledger.saves)
    assert replay.cadence == Cadence()
    assert replay.setup.settings.cadence_steps is None


def test_a_run_as_jurymast_chooses_it_is_told_to_change_nothing() -> None:
    advice = Past(often(WORKER_KILL, 14400.0), spares=0, in_process=True).advice()
    assert (advice["changes"], advice["why_none"]) == ([], None)
    assert sentences(advice) == [
        "nothing: no other setting would have gained more than the forecast may be wrong"
    ]


def test_what_gains_less_than_the_forecast_may_be_wrong_is_not_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    past, (option, _), _ = CASES["hangs are noticed late"]
    gain = next(one["gain"] for one in past.advice()["changes"] if one["option"] == option)
    was = replay_of

    def optimistic(*arguments: Any) -> Any:
        replay = was(*arguments)
        return replace(replay, goodput=replay.goodput - gain - 0.01)

    monkeypatch.setattr("jurymast.report.advice.replay_of", optimistic)
    assert option not in [one["option"] for one in past.advice()["changes"]]


def test_a_simulation_that_does_not_fit_gives_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    was = replay_of
    monkeypatch.setattr("jurymast.report.advice.replay_of", lambda *given: replace(was(*given), goodput=0.5))
    advice = CASES["nothing is saved"][0].advice()
    assert advice["changes"] == []
    assert sentences(advice) == ["not known: a simulation of the run is too far from what happened"]


def test_of_very_many_incidents_the_newest_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jurymast.sim.replay.INCIDENTS_MAX", 30)
    faults = tuple(TraceFault(number * 2000.0, (), WORKER_KILL) for number in range(1, 86))
    past = Past(faults, nodes=2, spares=0)
    ran = past.run()
    assert len(ran.state.incidents) == 85
    account = ran.ledger.account(ran.now)
    replay = replay_of(ran.state, account, ran.ledger.steps, ran.ledger.saves)
    assert replay.part
    assert replay.setup.seconds == pytest.approx(30 * 2000.0, rel=0.1)
    assert replay.run().goodput == pytest.approx(replay.goodput, abs=0.02)
    told = advice_blocks(past.advice())[-1]
    assert isinstance(told, Line)
    assert "newest failures" in told.text


@pytest.mark.parametrize("how", ["no step", "not numbered", "preempted", "tasks"])
def test_without_a_forecast_there_is_a_reason_and_no_advice(how: str) -> None:
    ran = Past(often(WORKER_KILL, 14400.0), Cadence(seconds=3600.0)).run()
    if how == "no step":
        ran.ledger.steps.done = 0
    elif how == "not numbered":
        ran.ledger.steps.maybe_again = 3
    elif how == "preempted":
        ran.state.incidents[-1].cause = "preempted"
    else:
        ran.state.alone = True
    account = ran.ledger.account(ran.now)
    with pytest.raises(NotReplayed):
        replay_of(ran.state, account, ran.ledger.steps, ran.ledger.saves)
    advice = advice_view(ran.ledger, account, ran.now)
    assert advice["changes"] == []
    assert advice["foretold"] is None
    (told,) = sentences(advice)
    assert told.startswith("not known: ")


def test_a_run_whose_ranks_live_for_three_minutes_saves_in_them_and_gets_on() -> None:
    unlimited = Settings(application=Budget(count=None))
    past = replace(bursts(200.0, 6 * 3600.0), settings=unlimited)
    ran = past.run()
    assert ran.state.phase is Phase.RUNNING
    assert past.ratio("runtime_goodput") > 0.5


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("restart_asked", WORKER_KILL),
        ("communication", WORKER_KILL),
        ("worker_exception", SCRIPT),
        ("hang", HANG),
    ],
)
def test_only_failures_of_the_script_spend_its_budget_once_more(cause: str, kind: str) -> None:
    charged = CAUSES[cause].charged
    incident = Incident(1, 0.0, 0.0, 1, 10, cause=cause, charged=charged, action="restart")
    assert kind_of(incident) == kind


def test_nodes_that_were_heard_again_were_not_missing() -> None:
    silent = NodeLost(t=1.0, node="n1", how="silent", silent_s=2.0, limit_s=1.5)
    incident = Incident(1, 0.0, 0.0, 1, 10, cause="node_lost", lost=(silent,), action="restart")
    assert kind_of(incident) == RANK_STOP
    incident.action = "swap"
    assert kind_of(incident) == POWER_LOSS


def test_advice_leaves_the_account_as_it_is() -> None:
    ran = Past(often(POWER_LOSS, 14400.0)).run()
    before = ran.ledger.account(ran.now)
    advice_view(ran.ledger, before, ran.now)
    assert ran.ledger.account(ran.now) == before
