"""Every simulation ends: its loops have bounds, and what asks for too much is refused."""

from __future__ import annotations

import heapq
import random
from pathlib import Path

import pytest

from jurymast.cli.main import main
from jurymast.core.judges.cadence import Cadence
from jurymast.core.state.effects import Effect
from jurymast.core.state.settings import Settings
from jurymast.keeper.keeper import Keeper
from jurymast.report.simulation import simulate
from jurymast.sim.bounds import AT_ONCE_MAX, EVENTS_MAX, Bounds, StandsStill
from jurymast.sim.checkpoints import START, Durations
from jurymast.sim.cluster.cluster import Cluster, run
from jurymast.sim.cluster.plans import Plan
from jurymast.sim.cluster.world import Steps, World
from jurymast.sim.faults import FaultModel, TraceFault
from jurymast.sim.simulation import Setup, SimOutcome, Simulation
from jurymast.supervisor.supervisor import Supervisor

DAY_S = 86_400.0


def ran(faults: list[TraceFault], *, cadence: Cadence, spares: int = 0, **durations: float) -> SimOutcome:
    setup = Setup(
        nodes=4, spares=spares, seconds=DAY_S, durations=Durations(**durations),  # type: ignore[arg-type]
        settings=Settings(
            cadence_s=cadence.seconds, cadence_steps=cadence.steps,
            attempts_without_step=None,  # as a policy may say: the simulation's own bounds are what ends it
        ),
    )  # fmt: skip
    return Simulation(setup, faults, cadence).run()


def test_a_write_that_failed_a_moment_before_the_nodes_go_is_tried_again() -> None:
    """A node is lost while a save is written to storage; the next save is to be written before the requeue,
    and nothing else happens until that may be tried again."""
    often = Cadence(seconds=10.0)
    for struck in (400, 403, 406, 463, 466):
        losses = [TraceFault(float(struck), (1,)), TraceFault(float(struck) + 40.0, (2,))]
        outcome = ran(losses, cadence=often, write_s=60.0, read_s=60.0, step_s=1.0)
        assert outcome.requeues == len(outcome.incidents) > 0


def test_simulate_ends_without_spares_and_with_frequent_saves(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("checkpoint: {cadence: 2m}\n")
    words = ["--nodes", "400", "--days", "3", "--seeds", "1", "--rate", "20", "--spares", "0"]
    assert main(["simulate", *words, "--policy", str(policy), "--json"]) == 0


@pytest.mark.parametrize("cadence", [Cadence(steps=1), Cadence(seconds=60.0), Cadence(seconds=2 * DAY_S)])
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("write_s", [0.0, 1.0, 10_000.0])
def test_it_ends_where_everything_takes_no_time_and_everything_fails(
    cadence: Cadence, spares: int, write_s: float
) -> None:
    """Also with a cadence longer than the run, and writes that take longer than nodes live."""
    at_once = [TraceFault(t, (node,)) for t in (1000.0, 1000.0, 2000.0, 2000.0) for node in range(4 + spares)]
    drawn = FaultModel(rate=50_000.0, hang_rate=2000.0, multi=1.0).draw(4 + spares, DAY_S, random.Random(1))
    outcome = ran(
        sorted(at_once + drawn, key=lambda fault: fault.t), cadence=cadence, spares=spares, detection_s=0.0,
        stop_s=0.0, launch_s=0.0, restore_s=0.0, step_s=30.0, stall_s=0.0, repair_s=0.0, requeue_s=0.0,
        write_s=write_s,
    )  # fmt: skip
    assert len(outcome.incidents) > 50
    assert sum(outcome.categories.values()) == outcome.total_us


# ---- a loop that does not end is an error that says so


def test_time_that_stands_still_is_told_with_what_happens_and_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def again(self: Simulation) -> None:
        self._at(self.now, lambda: again(self))

    monkeypatch.setattr(Simulation, "_tick", again)
    monkeypatch.setattr(Simulation, "_look", again)
    setup = Setup(nodes=4, spares=0, seconds=DAY_S)
    with pytest.raises(StandsStill, match=f"of seed 0 stands still at .* {AT_ONCE_MAX} events .*again"):
        simulate(setup, lambda rng: [], Cadence(), 1)


def test_time_that_crawls_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if somebody looked every microsecond."""

    def often(self: Simulation) -> None:
        heapq.heappush(self._heap, (self.now + 1e-6, 0, "", 0, often, (self,)))

    monkeypatch.setattr(Simulation, "_look", often)
    with pytest.raises(StandsStill, match=rf"crawls at {START:.0f}\.\d+ s|crawls at .* {EVENTS_MAX} events"):
        ran([], cadence=Cadence(seconds=60.0))


def test_a_write_before_a_requeue_that_orders_nothing_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(self: object, now: float) -> list[Effect]:
        return []

    monkeypatch.setattr("jurymast.core.checkpoints.checkpoints.FinalWrite.secure", nothing)
    outcome = ran([TraceFault(1000.0, (1,))], cadence=Cadence(seconds=60.0), write_s=60.0, step_s=1.0)
    assert outcome.requeues == 1


def test_what_goes_on_may_go_on_for_ever() -> None:
    bounds = Bounds()
    for number in range(3 * EVENTS_MAX):
        if number % 1000 == 0:
            bounds.goes_on()
        bounds.event(float(number // 1000), "nothing")


# ---- the simulated cluster


def test_a_process_that_yields_the_present_for_ever_is_told() -> None:
    world = World(17)

    def steps() -> Steps[None]:
        while True:
            yield world.now

    world.at(1.0, None, lambda: world.go(None, steps()))
    with pytest.raises(StandsStill, match="of seed 17 stands still at 1.000 s"):
        world.run(10.0)


def test_a_process_that_yields_ever_shorter_times_is_told() -> None:
    world = World(17)

    def steps() -> Steps[None]:
        while True:
            yield world.now + 1e-7

    world.at(1.0, None, lambda: world.go(None, steps()))
    with pytest.raises(StandsStill, match="of seed 17 crawls at 1"):
        world.run(10.0)


@pytest.mark.parametrize(("which", "what"), [(Supervisor, "_carry_out"), (Keeper, "_one")])
def test_effects_that_have_effects_for_ever_are_told(
    which: type, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = {Supervisor: "_todo", Keeper: "_due"}[which]

    def again(self: object, effect: object) -> None:
        getattr(self, todo).append(effect)

    monkeypatch.setattr(which, what, again)
    result = run(Plan(3, 2, 0, 1, 5, 8, ()))
    assert "StandsStill" in result.how
    assert "of seed 3 stands still" in result.how


def test_a_plan_that_lasts_for_ages_is_refused() -> None:
    text = Plan(0, 2, 0, 1, 5, 8, ()).to_json()
    for fault in ('{"at": 1, "kind": "freeze", "seconds": 1e12}', '{"at": 1e300, "kind": "power"}'):
        with pytest.raises(ValueError, match="at most 3600 s"):
            Plan.from_json(text.replace('"faults": []', f'"faults": [{fault}]'))


def test_a_whole_plan_stays_far_below_the_bounds() -> None:
    cluster = Cluster(Plan(5, 4, 2, 2, 5, 8, ()))
    cluster.run()
    assert cluster.world.events < EVENTS_MAX / 2


# ---- what cannot end is refused


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--days", "inf"], "--days"),
        (["--days", "nan"], "--days"),
        (["--days", "1e-9"], "from a second to a hundred years"),
        (["--days", "1e9"], "from a second to a hundred years"),
        (["--rate", "inf"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "1e12"], "more than 1,000,000 faults"),
        (["--hang-rate", "1e12"], "more than 1,000,000 faults"),
        (["--script-rate", "inf"], "--script-rate"),
        (["--prior", "inf"], "--prior"),
        (["--faults", "weibull:0.001"], "'0.001' is not a number"),
        (["--step", "0.0000000001s"], "a step takes at least"),
        (["--spares", "1000000000"], "--spares 1000000000: at most"),
    ],
)
def test_requests_without_end_are_refused(
    words: list[str], complaint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--nodes", "16", "--seeds", "1", *words]) == 64
    assert complaint in capfd.readouterr().err


def test_a_trace_whose_faults_are_all_at_one_moment_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jurymast.sim.faults.FAULTS_MAX", 1000)
    trace = tmp_path / "trace.csv"
    trace.write_text("node,start_day,end_day\na,0,0\nb,1e-12,1e-12\n")
    assert main(["simulate", "--nodes", "16", "--seeds", "1", "--trace", str(trace)]) == 64
    assert "more than 1,000 faults" in capfd.readouterr().err


def test_a_fleet_that_fails_all_the_time_gets_no_more_spares_than_it_has_nodes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["--nodes", "64", "--days", "0.0001", "--rate", "1e9", "--spares", "auto", "--seeds", "1"]
    assert main(["simulate", *words, "--json"]) == 0
    assert '"spares"' in capfd.readouterr().out
