"""What must hold of independent tasks in a simulated cluster: srun's rules, and nothing is done twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Instruction, Launch

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

ONCE = "13: a task that has ended with 0 is not run again"
AS_SRUN = "14: a run of independent tasks ends once all have ended, with srun's exit code"

# A supervisor has heard by then of a task that has ended, if nothing is wrong.
TOLD_S = 3.0
TERMINATED = 143  # the exit code of what gets a SIGTERM
# What it has heard is in the journal by then.
WRITTEN_S = 5.0


class TaskRules:
    """Watches the tasks of a run, if it has such."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._cluster = oracle, oracle.cluster
        self._codes: dict[int, tuple[int, int]] = {}  # by rank: the attempt that it ended in last, and how
        self._done: dict[int, tuple[float, int]] = {}  # of which some supervisor knows: since when, and who
        self._left_out: dict[int, tuple[int, ...]] = {}  # by attempt: the tasks that nobody is to start

    def started(self, rank: int, attempt: int) -> None:
        if rank in self._left_out.get(attempt, ()):
            self._oracle.fail(ONCE, f"task {rank} starts in attempt {attempt}, which leaves it out")

    def ended(self, rank: int, attempt: int, code: int, agent: SimAgent) -> None:
        if attempt >= self._codes.get(rank, (0, 0))[0]:
            self._codes[rank] = attempt, code
        supervisor = self._oracle.supervisor
        if supervisor is not None and (code == 0 or self._cluster.wanted.kill_on_bad_exit):
            self._cluster.world.after(TOLD_S, None, self._is_told, rank, attempt, agent, supervisor, code)

    def _is_told(
        self, rank: int, attempt: int, agent: SimAgent, supervisor: SimSupervisor, code: int
    ) -> None:
        name, state = agent.site.name, supervisor.state
        calm = self._oracle.untouched(name, 2 * TOLD_S, seen_from=supervisor.site.name)
        here = supervisor is self._oracle.supervisor and supervisor.listens and supervisor.connected(name)
        awake = supervisor.process.until <= self._cluster.world.now - TOLD_S and agent.process.alive
        if calm and here and awake and self._oracle.storage_fine(2 * TOLD_S) and state.attempt == attempt:
            if code == 0:
                self._knows(rank, supervisor)
            elif not state.ended:
                self._oracle.fail(AS_SRUN, f"task {rank} has failed, which ends the others, and they go on")

    def _knows(self, rank: int, supervisor: SimSupervisor) -> None:
        self._done[rank] = self._done.get(rank, (self._cluster.world.now, supervisor.epoch))

    def recorded(self, supervisor: SimSupervisor, event: ev.Event, decided: tuple[Instruction, ...]) -> None:
        state = supervisor.state
        if isinstance(event, ev.RanksEnded) and state.alone and event.attempt == state.attempt:
            for rank in event.ranks:
                self._knows(rank, supervisor)
        for launch in decided:
            if isinstance(launch, Launch):
                self._launches(supervisor, launch)

    def _launches(self, supervisor: SimSupervisor, launch: Launch) -> None:
        self._left_out[launch.attempt] = launch.ended
        written = self._cluster.world.now - WRITTEN_S
        by_agents = self._told_by_agents(supervisor)
        for rank, (since, epoch) in self._done.items():
            read = since < written and self._oracle.storage_fine(WRITTEN_S) and self._is_written(rank)
            known = epoch == supervisor.epoch or rank in by_agents or read
            if known and rank not in launch.ended:
                self._oracle.fail(
                    ONCE, f"task {rank} has ended, and attempt {launch.attempt} starts it again"
                )

    def _told_by_agents(self, supervisor: SimSupervisor, since: int = 0) -> set[int]:
        """The tasks that are done, in attempts `since` this one, as agents know that have been heard."""
        sites = self._cluster.sites.values()
        agents = [site.agent for site in sites if site.agent is not None and supervisor.connected(site.name)]
        said = [one for agent in agents for one in agent.machine.ranks.ended.values()]
        done = (one for one in said if isinstance(one, msg.Finished) and one.attempt >= since)
        return {rank for one in done for rank in one.ranks}

    def _is_written(self, rank: int) -> bool:
        """Whether every later supervisor knows that it has ended."""
        entries = self._cluster.disk.entries()
        return any(one.get("event") == ev.RanksEnded.__name__ and rank in one["ranks"] for one in entries)

    def sends_home(self, supervisor: SimSupervisor) -> None:
        """Agents are sent home. What the journal lacks would be known to nobody; unless somebody is about to
        kill them, there is time to write it."""
        hurried = self._cluster.ending or supervisor.machine.departure.given_up_by
        # Ranks of a training begin anew; so has what an agent could not tell before the newest launch.
        done = supervisor.state.done if supervisor.state.alone else ()
        known = {*done, *self._told_by_agents(supervisor, supervisor.state.launched)}
        lost = [rank for rank in sorted(known) if not self._is_written(rank)]
        if lost and not hurried:
            self._oracle.fail(ONCE, f"the nodes go, and the journal lacks that tasks {lost} have ended")

    @property
    def going_on(self) -> bool:
        """Whether some task runs: then nothing need happen, for however long."""
        return any(group.any_runs for group in self._cluster.tasks)

    @property
    def all_ended(self) -> bool:
        return len(self._codes) == self._cluster.plan.active * self._cluster.ranks_per_node

    def succeeds(self) -> None:
        if not self.all_ended or any(code for _, code in self._codes.values()):
            self._oracle.fail(AS_SRUN, f"the run has succeeded, and its tasks ended so: {self._codes}")

    def fails(self, code: int) -> bool:
        """Check the exit code of a run that fails because its tasks have ended; return whether they have."""
        codes = [code if code >= 0 else 128 - code for _, code in self._codes.values()]
        if not self.all_ended and self._cluster.wanted.kill_on_bad_exit:
            return any(codes) and code >= TERMINATED
        if not self.all_ended or not any(codes):
            return False
        if code != max(codes):
            self._oracle.fail(AS_SRUN, f"the run ends with {code}, and its tasks ended so: {self._codes}")
        return True
