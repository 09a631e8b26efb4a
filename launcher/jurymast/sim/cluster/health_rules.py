"""What must hold of nodes that are ill in a simulated cluster, of those that are not, and of a run's end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from jurymast.core.run import tasks
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Finish, Instruction, Launch, Requeue, StopWorkers
from jurymast.core.state.findings import HARDWARE, Verdict
from jurymast.core.state.incident import APPLICATION, INFRASTRUCTURE
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.errors import RunCancelledError, RunFailedError
from jurymast.sim.cluster import health

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

NO_BLAME = "7: nobody healthy is blamed"
OUT = "22: a node that is known to be ill has no ranks while a healthy one is free"
TESTED = "23: tests before use find who is ill"
BUDGET = "24: once a budget is spent no attempt begins"
ENDS = "25: a run ends with the code of its ranks, or with ours"

BLAME_S = 30.0
FINDS_ILL = Verdict.BAD.value, Verdict.SUSPECT.value


class HealthRules:
    """Watches who is ill, what is found, and what follows."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._cluster = oracle, oracle.cluster
        self._ill: set[str] = set()  # nodes that ever were
        self._found: set[str] = set()  # of which the journal says so now
        self._owed: dict[str, float] = {}  # since when a node that is ill has ranks, and another is free

    def falls_ill(self, site: SimSite, how: str) -> None:
        if not site.up or site.ill:
            return
        site.ill = how
        self._ill.add(site.name)
        self._owed[site.name] = self._cluster.world.now
        if how in health.FOUND:
            health.tell(site, health.FOUND[how])

    def allocated(self) -> None:
        """The job is started again, on nodes that were mended meanwhile."""
        self._found.clear()
        self._owed.clear()
        for site in self._cluster.sites.values():
            site.mended()

    def recorded(self, supervisor: SimSupervisor, event: ev.Event, decided: tuple[Instruction, ...]) -> None:
        match event:
            case ev.NodeTested():
                self._tested(supervisor, event)
            case ev.HealthFound() if event.verdict in FINDS_ILL and event.kind == HARDWARE:
                self._found.add(event.node)
            case ev.Straggling():
                moved = any(isinstance(one, StopWorkers) for one in decided)
                uneven = self._cluster.slow_place is not None and not moved
                if self._cluster.sites[event.node].ill != health.SLOW and not uneven:
                    self._oracle.fail(NO_BLAME, f"{event.node} is no slower than others: {event.evidence}")
        for one in decided:
            match one:
                case Launch():
                    self._launches(supervisor, one)
                case Requeue():
                    self._requeues(supervisor.state, one)
                case Finish() if not self._cluster.wanted.tasks:
                    self._ends(supervisor.state)

    def _tested(self, supervisor: SimSupervisor, event: ev.NodeTested) -> None:
        ill = event.verdict in FINDS_ILL
        (self._found.add if ill else self._found.discard)(event.node)
        sites = self._cluster.sites
        if not all(self._oracle.untouched(event.node, BLAME_S, seen_from=name) for name in sites):
            return  # perhaps it could not reach who tested it, or its partner
        if ill and event.node not in self._ill:
            self._oracle.fail(NO_BLAME, f"{event.node} is {event.verdict} by its tests: {event.message}")
        fails, seen_from = sites[event.node].ill in (health.WRONG, health.FAILS), supervisor.site.name
        others = all(self._oracle.untouched(name, BLAME_S, seen_from=seen_from) for name in sites)
        stood_still = self._cluster.stalled_until > self._cluster.world.now - BLAME_S
        if (
            fails and not ill and others and not stood_still and len(self._ill) == 1
        ):  # of several that fail none may be to blame
            self._oracle.fail(TESTED, f"{event.node} fails them, and is {event.verdict}: {event.message}")

    def _free(self, supervisor: SimSupervisor) -> list[str]:
        """Healthy nodes that could have ranks at once, as a supervisor sees them. Of several that are ill
        some may have to stay."""
        ready = [n for n in supervisor.state.nodes.values() if n.role is Role.SPARE and n.ready]
        spares = [n.name for n in ready if supervisor.connected(n.name)]
        return [] if len(self._ill) > 1 else [name for name in spares if name not in self._ill]

    def _launches(self, supervisor: SimSupervisor, launch: Launch) -> None:
        state = supervisor.state
        ill, free = self._found & {*launch.placement}, {*self._free(supervisor)} - {*launch.placement}
        if ill and free:
            self._oracle.fail(
                OUT, f"attempt {launch.attempt} is on {sorted(ill)}, and {sorted(free)} are free"
            )
        if self.spent(state):
            self._oracle.fail(BUDGET, f"attempt {launch.attempt} begins, and a budget is spent")

    def spent(self, state: RunState) -> bool:
        """Whether there were more failures of a kind than the policy allows."""
        settings = state.settings
        budgets = {APPLICATION: settings.application, INFRASTRUCTURE: settings.infrastructure}
        paid = Counter(one.charged for one in state.incidents)
        return any(one.count is not None and paid[kind] > one.count for kind, one in budgets.items())

    def _requeues(self, state: RunState, requeue: Requeue) -> None:
        may_fail = self._oracle.calm.may_show_on
        healthy = {name for name in requeue.exclude if not may_fail(name)} - self._ill
        if healthy:
            self._oracle.fail(NO_BLAME, f"{sorted(healthy)} are excluded: {requeue.reason}")
        # What is found between the decision and the job's end still counts for the next job.
        bad = {blame.node for blame in state.blames if blame.bad}
        found = {name for name in self._found if self._cluster.sites[name].ill == health.LOST}
        bad = (bad | found if len(found) == 1 else bad) - {*state.excluded}
        if bad:
            self._oracle.fail(OUT, f"{sorted(bad)} are not excluded: {requeue.reason}")

    def _ends(self, state: RunState) -> None:
        ours = {Phase.SUCCEEDED: 0, Phase.CANCELLED: RunCancelledError.exit_code}
        codes = {code if code >= 0 else 128 - code for code in self._oracle.codes}
        right = {ours[state.phase]} if state.phase in ours else {RunFailedError.exit_code, *codes}
        if state.exit_code not in right:
            self._oracle.fail(ENDS, f"{state.phase.value} with {state.exit_code}, not one of {sorted(right)}")

    def look(self, supervisor: SimSupervisor) -> None:
        state, now = supervisor.state, self._cluster.world.now
        running = state.phase is Phase.RUNNING and not supervisor.machine.departure.begun
        for blame in state.blames:
            if blame.node not in self._ill:
                self._oracle.fail(NO_BLAME, f"{blame.node} is out for a finding: {blame.evidence}")
        for name, since in [*self._owed.items()]:
            site = self._cluster.sites.get(name)
            kind = site.ill if site is not None else ""
            here = kind in health.LEAVES_S and name in state.places and supervisor.connected(name)
            here = here and not tasks.none_left(state, name)
            if kind == health.SLOW:
                here = here and self._is_slow(state, name)
            if not here or not running or not self._free(supervisor) or not self._calm(supervisor, since):
                del self._owed[name]
                if kind == health.SLOW:
                    self._owed[name] = now
            elif now > since + health.LEAVES_S[kind]:
                self._oracle.fail(
                    OUT, f"{name} has had ranks since {since:.1f} s, although it is ill: {kind}"
                )

    def _is_slow(self, state: RunState, name: str) -> bool:
        """Whether it is not by design that these ranks are slow: others have a place like theirs. Once ranks
        leave after a signal, the others do no step that could be compared."""
        between = 0 < state.places[name] < state.active - 1 and not state.may_leave(state.now)
        return between and self._cluster.slow_place is None and len(self._ill) == 1

    def _calm(self, supervisor: SimSupervisor, since: float) -> bool:
        """Whether nothing else has happened since then."""
        oracle = self._oracle
        touched = max(oracle.storage_touched, oracle.calm.over_at, oracle.touched_until)
        return touched <= since and supervisor.state.up_at - supervisor.now + self._cluster.world.now < since
