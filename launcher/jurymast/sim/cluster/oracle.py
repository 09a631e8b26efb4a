"""What must hold in a simulated cluster, whatever happens: each rule by its name. The oracle sees everything;
nothing in the cluster sees the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.state import effects as do
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Finish, Requeue, StopWorkers
from jurymast.core.state.images import MEMORY, StateId, age
from jurymast.core.state.incident import AHEAD, INFRASTRUCTURE
from jurymast.core.state.run import LEAVE_S, Phase, Role
from jurymast.core.supervision.ahead import Reservation
from jurymast.sim.cluster.account_rules import AccountRules, MissedRules
from jurymast.sim.cluster.calm_rules import CalmRules
from jurymast.sim.cluster.health_rules import BLAME_S, NO_BLAME, HealthRules
from jurymast.sim.cluster.incident_rules import IncidentRules
from jurymast.sim.cluster.keeper import SimImage, SimKeeper, whole
from jurymast.sim.cluster.members import PoolRules
from jurymast.sim.cluster.refill import RefillRules
from jurymast.sim.cluster.size_rules import SizeRules
from jurymast.sim.cluster.sparing_rules import SparingRules
from jurymast.sim.cluster.task_rules import TaskRules
from jurymast.sim.cluster.told_rules import ToldRules
from jurymast.sim.cluster.withdrawal_rules import WithdrawalRules
from jurymast.sim.cluster.world import KEEP

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite
    from jurymast.sim.cluster.cluster import Cluster
    from jurymast.sim.cluster.supervisor import SimSupervisor
    from jurymast.sim.cluster.training import SimGroup, SimMember
    from jurymast.sim.cluster.world import Token

NOTHING_LOST = "1: no committed step is lost while it can be reached"
ONE_STATE = "2: all ranks of an attempt restore the same state"
ONE_WORLD = "3: never two worlds that train"
NOT_FROM_0 = "4: a restart from 0 only if nothing was saved"
SLOTS_FREE = "5: memory for images comes free again"
# The last word may be that Slurm ends the job: ranks then have all the time that it leaves them.
NO_SILENCE = "6: no run stands still without a word"
AGREES = "8: journal and reality agree"
NO_GROWTH = "9: state does not grow with time"
NOT_BACK = "10: what was rolled back is neither restored nor gone on with"
BOUNDED = "11: attempts without a new step are bounded"
COUNTED = "21: the account of a run counts all time once, and all steps"
KEPT_TWICE = "12: no node alone has what was saved"
BY_THE_NEWEST = "52: what nobody can take back only the newest supervisor does"
ENDS_WITH_STEP = "62: a run whose step Slurm ends is over, says so, and no node is blamed"
MAY_SAVE = "15: ranks that leave after a signal are not ended by those that left before"

# A fault this long ago no longer affects a node.
STEADY_S = 12.0
FOR_EVER_S = 1e9
# The supervisor knows it by then, if nothing is wrong.
TOLD_S = 2.0
# An agent that can read the run directory has found out by then that its ranks were replaced, and ended them.
REPLACED_S = 4.0
STANDSTILL_S = 40.0
OUTCOME_S = 6.0  # a supervisor writes an outcome in this time
SLOTS_LIMIT_S = 25.0
SEEN_S = 0.5  # between a look at who is the newest supervisor and what is done after it
AGREE_LIMIT_S = 12.0
BACK_LIMIT_S = 15.0
# A write that fails on one node begins again after this long, without that node.
AGAIN_S = 8.0
# The policy's bound; and twice as many, if only lost nodes end them, besides those that somebody ended.
ATTEMPTS_WITHOUT_STEP = 6
FRUITLESS_MAX = 2 * ATTEMPTS_WITHOUT_STEP + 6
CALM_S, KEPT_LIMIT_S = 5.0, 8.0
KEYS_MAX, IMAGES_PER_RANK_MAX, LINES_A_SECOND = 8, 4, 8.0


class Violation(AssertionError):
    """A rule was broken. `args`: the rule, and how."""

    def __str__(self) -> str:
        return ": ".join(self.args)


class Oracle:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.touched: dict[str, float] = {}  # node, or pair of nodes: until when
        self._gone_at = -1e9  # the last node that stays away
        self.storage_touched = -1e9
        self.unwritable_until = -1e9  # on some node
        self.cut_at = -1e9  # a write, because a node was lost in it
        self.supervisor: SimSupervisor | None = None  # the newest that listens
        self.lines = 0
        self.restores_from: list[str] = []
        self.given_up = False  # somebody had the run cancelled
        self._step_ended_at = math.inf  # in a calm moment
        self._shadow: dict[SimKeeper, list[SimImage]] = {}  # images that no order may rightly remove
        self._complete: dict[StateId, int] = {}  # of how many ranks
        self._planned: dict[int, int] = {}
        self._newest: SimGroup | None = None
        self._newest_since = 0.0
        self._unfound: set[int] = set()  # attempts whose ranks saw no checkpoint, and knew of one
        self._rollbacks: list[Rollback] = []
        self._on_storage: list[Rollback] = []
        self._word_at = self.step_at = self._supervised_at = self._supervises_since = 0.0
        self._held_up_at = self._ordered_at = 0.0
        self._saved_at: dict[str, float] = {}
        self._differ_since: dict[str, float] = {}
        self._best_step = self._stepped_in = 0  # the newest step of all, and the attempt that did it first
        self._kept_at = 0.0
        self._leave: dict[int, SimGroup] = {}  # groups whose ranks leave after a signal, by attempt
        self.tasks, self.calm, self.health = TaskRules(self), CalmRules(self), HealthRules(self)
        self.refill, self.withdrawals = RefillRules(self), WithdrawalRules(self)
        self.sparing, self.size, self.pool = SparingRules(self), SizeRules(self), PoolRules(self)
        self.missed, self.told = MissedRules(self), ToldRules(self)
        self.incidents = IncidentRules(self)
        self.codes: set[int] = set()  # that ranks have failed with
        self.steps = 0

    def fail(self, rule: str, how: str) -> None:
        raise Violation(rule, f"{how} (at {self.cluster.world.now:.3f} s)")

    @property
    def _ending(self) -> bool:
        return bool(self.cluster.ending) or self.given_up

    # ---- faults

    def touch(self, name: str, until: float) -> None:
        if until >= FOR_EVER_S:
            self._gone_at = self.cluster.world.now
        self.touched[name] = max(until, self.touched.get(name, -1e9))

    @property
    def touched_until(self) -> float:
        """Until when faults affect some node. One that stays away is missed from then on, and no more."""
        return max(self._gone_at, *(until for until in self.touched.values() if until < FOR_EVER_S), -1e9)

    @property
    def misses_nodes(self) -> bool:
        """Whether some node stays away."""
        return self._gone_at > 0.0

    def pair(self, one: str, other: str) -> str:
        return "|".join(sorted((one, other)))

    def untouched(self, node: str, seconds: float, *, seen_from: str = "") -> bool:
        names = [node, self.pair(node, seen_from)] if seen_from else [node]
        return all(self.touched.get(name, -1e9) < self.cluster.world.now - seconds for name in names)

    def storage_fine(self, seconds: float) -> bool:
        return self.storage_touched < self.cluster.world.now - seconds

    # ---- images

    def held(self, keeper: SimKeeper, image: SimImage) -> None:
        self._shadow.setdefault(keeper, []).append(image)
        if image.tier == MEMORY and image.key not in self._complete:
            held = (one for other in self.cluster.keepers.values() for one in other.held)
            mine = [one for one in held if one.key == image.key and one.tier == MEMORY and one.part == "all"]
            if len({one.rank for one in mine}) == image.world:
                self._complete[image.key] = image.world

    def lost(self, keeper: SimKeeper) -> None:
        self._shadow.pop(keeper, None)

    def may_go(self, keeper: SimKeeper, committed: tuple[int, int]) -> None:
        mine = self._shadow.get(keeper, [])
        self._shadow[keeper] = [image for image in mine if age(image.key) >= committed]

    def best(self, seen_from: str, failed: Iterable[StateId] = (), told_s: float = TOLD_S) -> StateId | None:
        """Return the newest complete state that can certainly be reached, of which agents have told since
        `told_s`."""
        told_by = self.cluster.world.now - told_s
        images = [
            image
            for keeper, mine in self._shadow.items()
            if keeper.agent.process.alive
            and self.untouched(keeper.agent.site.name, STEADY_S, seen_from=seen_from)
            for image in mine
            if image.held_at < told_by
        ]
        known = {key for key in self._complete if not self.cluster.disk.is_void(key)}
        there = (key for key in known - set(failed) if whole(images, key, self._complete[key]))
        return max(there, default=None)

    # ---- what a supervisor does

    def begins(self, one: Reservation, known_s: float) -> None:
        """A reservation begins, which Slurm has shown for so long."""
        if self.supervisor is not None and self.supervisor.listens and not self._ending:
            self.withdrawals.begins(self.supervisor, one, known_s, self._supervises_since)

    def supervises(self, supervisor: SimSupervisor) -> None:
        if self.supervisor is None or supervisor.epoch > self.supervisor.epoch:
            self.supervisor, self._supervises_since = supervisor, self.cluster.world.now

    def recorded(self, supervisor: SimSupervisor, entry: do.Journal) -> None:
        self.lines += 1
        event = entry.event
        if not isinstance(event, ev.Progress | ev.Saved | ev.Tick | ev.CadenceSet):
            self._word_at = self.cluster.world.now
        if self.supervisor is not None and supervisor.epoch < self.supervisor.epoch:
            return
        self.cluster.in_phase(supervisor.state.phase.value)
        self.tasks.recorded(supervisor, event, entry.decided)
        self.health.recorded(supervisor, event, entry.decided)
        self.refill.recorded(supervisor, event, entry.decided)
        self.size.recorded(supervisor, event, entry.decided, self._supervises_since)
        self.told.recorded(supervisor, event)
        self.incidents.recorded(supervisor, event, entry.decided)
        for decided in entry.decided:
            if isinstance(decided, Requeue | Finish):
                self._gives_up(supervisor, decided)
            elif isinstance(decided, StopWorkers) and isinstance(event, ev.WorkerFailed) and event.rank >= 0:
                self._cuts_short(supervisor.state.attempt)  # and no torchrun host has died
        match event:
            case ev.RestorePlanned():
                self._choice(supervisor, event)
            case ev.NodeLost():
                self._blamed(supervisor, event)
            case ev.Tick() if any(isinstance(one, StopWorkers) for one in entry.decided):
                hung = supervisor.state.findings.hung
                if hung is not None and not self.storage_fine(60.0):
                    self.fail(NO_BLAME, f"ranks are said to hang while storage does: {hung.evidence}")

    def ranks_leave(self, group: SimGroup) -> None:
        self._leave[group.attempt] = group

    def _left_as_ordered(self, group: SimGroup) -> bool:
        """Whether ranks have left because Slurm ends the job: that is no end of their training."""
        ordered = bool(self.cluster.ending) and group.caught_at >= self._ordered_at
        return ordered and not group.finished

    def _cuts_short(self, attempt: int) -> None:
        """Ranks are stopped because one has failed. A SIGTERM may have been for its node alone, so agents
        do not tell of one."""
        group, now = self._leave.get(attempt), self.cluster.world.now
        if group is None or not group.told or self.touched_until > now - BLAME_S:
            return
        saving = [
            one.agent.site.name for one in group.members.values() if not one.gone and one.saves_until > now
        ]
        if saving and any(member.left for member in group.members.values()):
            self.fail(MAY_SAVE, f"others have left, and ranks on {saving} are stopped while they save")

    def _choice(self, supervisor: SimSupervisor, event: ev.RestorePlanned) -> None:
        # A supervisor that was not asked yet may choose what ranks, who read storage, will pass over.
        backs = [back.step for back in self._on_storage if event.attempt == back.attempt + 1]
        self._planned[event.attempt] = min([event.step, *backs])
        if not self.storage_fine(STEADY_S):
            return
        best = self.best(supervisor.site.name, supervisor.state.failed_to_restore())
        if best is not None and event.step < best[0]:
            self.fail(NOTHING_LOST, f"attempt {event.attempt} restores {event.step}, {best} is there")

    def _blamed(self, supervisor: SimSupervisor, event: ev.NodeLost) -> None:
        """Check a lost node. An agent that has ended took its ranks along, however long ago and for whatever
        reason. Once the run has ended, or is to be requeued, the loss of a node is no incident and strikes
        nobody."""
        if supervisor.state.ended or supervisor.state.phase is Phase.REQUEUED:
            return
        agent = self.cluster.sites[event.node].agent
        known = supervisor.state.nodes.get(event.node)
        lives = agent is not None and known is not None and agent.incarnation == known.incarnation
        if lives and self.untouched(event.node, BLAME_S, seen_from=supervisor.site.name):
            self.fail(NO_BLAME, f"{event.node} is lost ({event.how}, {event.evidence})")

    def _gives_up(self, supervisor: SimSupervisor, decided: Requeue | Finish) -> None:
        """Check a requeue or an end when it is decided: nodes may return until it is carried out, and it is
        right all the same."""
        state, node = supervisor.state, supervisor.site.name
        if self.calm.over_at == self._step_ended_at:  # and nothing has struck since
            if state.phase is not Phase.CANCELLED or state.excluded or not state.step_alone:
                how = f"the run is {state.public_state}, without {[*state.excluded]}: {decided.reason}"
                self.fail(ENDS_WITH_STEP, how)
            return
        if state.phase is Phase.SUCCEEDED:
            if self.cluster.wanted.tasks:
                self.tasks.succeeds()
            elif self._newest is None or not self._newest.has_ended or self._left_as_ordered(self._newest):
                self.fail(AGREES, f"the run has succeeded in attempt {state.attempt}, which has not ended")
            return
        if isinstance(decided, Requeue) and state.incidents[-1].cause == AHEAD:
            reserved = {name for one in self.cluster.reserved.values() for name in one.nodes}
            left = {*state.nodes} - reserved  # some may have come since that was decided
            if not self.cluster.wanted.renews or len(left) >= self.cluster.wanted.active:
                self.fail(AGREES, "the run is requeued for a reservation that leaves it nodes")
            return
        if isinstance(decided, Requeue) and state.incidents[-1].cause == "requeue_asked":
            near = self.cluster.ending or not math.isinf(self.cluster.ends_in_s or 0.0)
            if not (self.cluster.wanted.renews and near):
                self.fail(AGREES, "the run is requeued for a time limit that is not there")
            return
        fine = [
            site.name
            for site in self.cluster.sites.values()
            if not site.ill
            and self._is_known(site)
            and self.untouched(site.name, STANDSTILL_S, seen_from=node)
        ]
        if state.incidents and state.incidents[-1].attempt in self._unfound or self._ending:
            return  # people would be told to mount it; and no node has ended the job
        if state.attempt in self._leave:
            return  # it ends as under srun
        if self.cluster.wanted.tasks and state.phase is Phase.FAILED and self.tasks.fails(state.exit_code):
            return
        # Nodes may also fail before an attempt begins.
        since = sum(incident.attempt >= self._stepped_in for incident in state.incidents)
        fruitless = since >= ATTEMPTS_WITHOUT_STEP
        if state.phase is Phase.FAILED and (fruitless or self.health.spent(state)):
            return
        if state.phase is Phase.FAILED or len(fine) >= self.cluster.plan.active:
            self.fail(NO_BLAME, f"the run is {state.public_state}, {fine} are fine: {decided.reason}")

    def cuts_write(self) -> None:
        """A supervisor gives up a write, which begins again. Only the loss of a node is a reason."""
        if self.touched_until > self.cluster.world.now - AGAIN_S:
            self.cut_at = self.cluster.world.now

    def sends_home(self, supervisor: SimSupervisor) -> None:
        if supervisor is self.supervisor:
            self._goes(supervisor, "the nodes go")
            self.tasks.sends_home(supervisor)

    def _goes(self, supervisor: SimSupervisor, how: str) -> None:
        if supervisor.machine.departure.given_up_by:
            return  # somebody did not want to wait for the last checkpoint of a run that is over
        # If Slurm ends the job, a state has to wait until the one before it is written, and ranks go on
        # saving until the nodes go.
        copy_s = self.cluster.wanted.copy_s if self.cluster.ending else 0.0
        slow_s = 2 * copy_s + 1.0 if copy_s else 0.0
        best, disk = self.best(supervisor.site.name, told_s=TOLD_S + slow_s), self.cluster.disk
        if best is None or not self.storage_fine(STEADY_S):
            return
        if copy_s and self.unwritable_until > self.cluster.world.now - AGAIN_S - copy_s:
            return  # there may have been no time to write it all once more
        if copy_s and self.cut_at > self.cluster.world.now - AGAIN_S - 2 * copy_s:
            return  # nor for what was saved meanwhile, which has to wait for that
        if best[0] > max((step for step, _ in disk.shared), default=-1):
            self.fail(NOTHING_LOST, f"{how}, and {best} is on none of {[*disk.shared]}")

    # ---- the job's end, and its next life

    def acts_for_good(self, supervisor: SimSupervisor) -> None:
        """A supervisor asks Slurm for what nobody can take back, or writes the attempt's number."""
        cluster, epoch = self.cluster, supervisor.epoch
        awake = cluster.world.now - max(supervisor.site.stopped_until, cluster.stalled_until)
        newer = [t for t, _ in (cluster.disk.claims[one] for one in cluster.disk.claims if one > epoch)]
        known_s = min(cluster.world.now - max(newer, default=math.inf), awake)
        if known_s > SEEN_S:
            self.fail(BY_THE_NEWEST, f"epoch {epoch} does, {known_s:.1f} s after a newer one began")

    def ends(self, supervisor: SimSupervisor) -> None:
        """A supervisor says that the job ends. Only Slurm knows what follows."""
        phase, why = supervisor.state.phase, self.cluster.ending
        if supervisor is not self.supervisor and self.cluster.storage.sees_all(supervisor.site.name):
            self.fail(AGREES, f"epoch {supervisor.epoch} ends the job, and a newer one rules")
        departure = supervisor.machine.departure
        if not supervisor.state.ended and not departure.requeues:
            self.fail(AGREES, f"the job ends ({why or 'by itself'}), and the run goes on nowhere")
        if why in ("cancelled", "timeout") and not supervisor.state.ended and phase is not Phase.REQUEUED:
            self.fail(AGREES, f"the job was ended: {why}; the run is {phase.value}")

    def killed(self) -> None:
        """Slurm kills the job, some time after a SIGTERM."""
        supervisor, since = self.supervisor, self.cluster.world.now - self._ordered_at + STEADY_S
        if supervisor is None or not supervisor.listens:
            return
        self._goes(supervisor, "Slurm kills the job")
        knew = self._supervises_since < self._ordered_at > self.cluster.slurm_silent_until
        fine = self.storage_fine(since) and self.untouched(supervisor.site.name, since)
        if knew and fine and supervisor.process.until <= self.cluster.world.now - OUTCOME_S:
            self.fail(AGREES, "Slurm kills the job before its supervisor has written an outcome")

    def ordered(self) -> None:
        """Slurm ends the job."""
        self._ordered_at = self.cluster.world.now

    def step_ends(self) -> None:
        """Slurm ends the step of all agents, and not the job."""
        now, supervisor = self.cluster.world.now, self.supervisor
        steady = self.touched_until < now - STEADY_S and self.storage_fine(STEADY_S)
        calm = steady and self.calm.over_at == now and not self._ending
        if calm and supervisor is not None and supervisor.listens and supervisor.state.incident is None:
            self._step_ended_at = now

    def allocated(self) -> None:
        self._word_at = self.step_at = self._supervised_at = self.cluster.world.now
        self.supervisor = None
        self._differ_since.clear()
        self.health.allocated()

    def started_again(self, supervisor: SimSupervisor) -> None:
        """Slurm ended the job before, as the journal or its accounting says, and starts it again."""
        newest = supervisor.state.incidents[-1]
        if newest.charged == INFRASTRUCTURE:
            self.fail(NO_BLAME, f"a job that Slurm ended has failed: {newest.evidence}")

    def rolled_back(self, back: Rollback) -> None:
        """A rollback is on storage; the supervisor is about to be asked."""
        self._planned = {attempt: min(step, back.step) for attempt, step in self._planned.items()}
        self._on_storage.append(back)

    def ordered_back(self, back: Rollback) -> None:
        self._rollbacks.append(back)

    def _is_known(self, site: SimSite) -> bool:
        """Whether the supervisor knows the present agent. One that follows an agent that has ended, with its
        ranks, is known once it was heard."""
        return site.agent is not None and (site.agent.met or site.agents == 1)

    # ---- the ranks

    def group_started(self, group: SimGroup) -> None:
        if self._newest is None or group.attempt >= self._newest.attempt:
            self._newest, self._newest_since = group, self.cluster.world.now
        if group.attempt > self._stepped_in + FRUITLESS_MAX:
            self.fail(BOUNDED, f"attempt {group.attempt} starts; the last new step is of {self._stepped_in}")

    def unfound(self, group: SimGroup) -> None:
        self._unfound.add(group.attempt)

    def restores(self, group: SimGroup, found: list[tuple[StateId, Token]]) -> None:
        if len({key for key, _ in found}) > 1 or len({token.history for _, token in found}) > 1:
            self.fail(ONE_STATE, f"attempt {group.attempt} restores {found}")

    @property
    def fruitless(self) -> int:
        """Attempts after the one that did the newest step first."""
        newest = self._newest.attempt if self._newest is not None else 0
        return max(0, newest - self._stepped_in)

    def went_on(self, group: SimGroup, key: StateId) -> None:
        """Its ranks go on from a state that nobody saved."""
        planned = self._planned.get(group.attempt, 0)
        if key.step < planned:
            self.fail(NOTHING_LOST, f"attempt {group.attempt} goes on from {key.step}, {planned} was chosen")
        if any(back.voids(*key) for back in self._rollbacks if back.attempt < group.attempt):
            self.fail(NOT_BACK, f"attempt {group.attempt} goes on from {key}: {self._rollbacks}")
        self._give_up_newer(group, planned)  # of later ones the nodes at hand had not every image

    def restored(self, group: SimGroup, key: StateId | None) -> None:
        step, planned = key.step if key is not None else 0, self._planned.get(group.attempt, 0)
        self.restores_from.append(f"{group.attempt}:{key}")
        if step < planned:
            self.fail(NOTHING_LOST, f"attempt {group.attempt} restores {step}, {planned} was chosen")
        self.withdrawals.restored(group, step, self._best_step)
        back_since = [back for back in self._rollbacks if back.attempt < group.attempt]
        if key is not None and any(back.voids(*key) for back in back_since):
            self.fail(NOT_BACK, f"attempt {group.attempt} restores {key}: {self._rollbacks}")
        if key is None and self.cluster.disk.shared:
            self.fail(
                NOT_FROM_0, f"attempt {group.attempt}, shared storage has {[*self.cluster.disk.shared]}"
            )
        self._give_up_newer(group, step, key)

    def _give_up_newer(self, group: SimGroup, step: int, key: StateId | None = None) -> None:
        """What earlier attempts saved after this step is of no use any more, and its memory is wanted."""
        for keeper, images in self._shadow.items():
            self._shadow[keeper] = [
                one
                for one in images
                if one.key == key or one.key.step <= step or one.key.attempt >= group.attempt
            ]

    def stepped(self, group: SimGroup) -> None:
        self.steps += 1
        self.step_at = self.cluster.world.now
        if group.step > self._best_step:
            self._best_step, self._stepped_in = group.step, group.attempt
        self._goes_back(group)
        newest = self._newest
        if newest is None or newest is group or newest.over:
            return
        node = self.supervisor.site.name if self.supervisor is not None else ""
        cut_off = not all(self.untouched(name, STEADY_S, seen_from=node) for name in group.nodes)
        fenced = group.attempt < self.cluster.disk.attempt or not self.storage_fine(STEADY_S)
        if not (cut_off and fenced):
            self.fail(ONE_WORLD, f"attempt {group.attempt} steps, and attempt {newest.attempt} has started")
        since = max(self._newest_since, *(self._reads_since(member) for member in group.members.values()))
        beside_s = self.cluster.world.now - since
        if beside_s > REPLACED_S and self.storage_fine(REPLACED_S):
            self.fail(ONE_WORLD, f"attempt {group.attempt} steps {beside_s:.1f} s beside {newest.attempt}")

    def _reads_since(self, member: SimMember) -> float:
        """Since when this node's agent can read the run directory."""
        agent, faults = member.agent, self.cluster.storage.faults
        kinds = "storage hangs here", "stale handles"
        return max(agent.process.until, *(faults.get((kind, agent.site.name), 0.0) for kind in kinds))

    @property
    def newest(self) -> SimGroup | None:
        """The ranks of the newest attempt that met."""
        return self._newest

    @property
    def best_step(self) -> int:
        """The newest step that ranks of any attempt have done."""
        return self._best_step

    @property
    def trains(self) -> bool:
        """Whether ranks are up that save to memory, and do not leave after a signal."""
        newest = self._newest
        return newest is not None and not newest.over and not newest.caught and not newest.refused

    def unsaved_s(self) -> tuple[float, float]:
        """Return how long ranks would have to do the steps again that no complete state has, and those that
        storage does not have."""
        step = self._newest.step if self._newest is not None else 0
        states = [key for key in self._complete if not self.cluster.disk.is_void(key)]
        newest = (max((key.step for key in of), default=0) for of in (states, self.cluster.disk.shared))
        unsaved, unwritten = (self.cluster.step_s * (step - saved) for saved in newest)
        return unsaved, unwritten

    def _goes_back(self, group: SimGroup) -> None:
        """Check that ranks go back: what they do instead would be lost at the next fault."""
        supervisor, before = self.supervisor, self.cluster.world.now - BACK_LIMIT_S
        if supervisor is None or not supervisor.listens or self._supervises_since > before:
            return
        seen_from = supervisor.site.name
        told = all(self.untouched(name, BACK_LIMIT_S, seen_from=seen_from) for name in group.nodes)
        backs = [back for back in self.cluster.disk.rollbacks if back.at < before]
        if told and self.storage_fine(BACK_LIMIT_S) and any(group.attempt <= b.attempt for b in backs):
            self.fail(NOT_BACK, f"attempt {group.attempt} goes on: {backs}")

    def saved(self, node: str) -> None:
        self._saved_at[node] = self.cluster.world.now

    def skipped(self, group: SimGroup, node: str) -> None:
        self.withdrawals.skipped.add(group.attempt)
        if self._ending:
            return  # memory is being written to storage; nothing newer is waited for
        now, supervisor = self.cluster.world.now, self.supervisor
        if supervisor is None or not supervisor.listens:
            return
        cut_off = not all(supervisor.connected(name) for name in group.nodes)
        if not self.storage_fine(STEADY_S) and (cut_off or self.cluster.wanted.room == 1):
            # Only there they can find it, and tell it what they have; a hanging write has one of two slots.
            self._held_up_at = now
        known_since = max(self._supervises_since, self._held_up_at)
        since = max(self._saved_at.get(node, 0.0), group.stepping_since, known_since)
        if now > since + SLOTS_LIMIT_S:
            self.fail(SLOTS_FREE, f"{node} could not save since {since:.1f} s")

    # ---- now and then

    def look(self) -> None:
        now = self.cluster.world.now
        supervisor, in_grace = self.supervisor, self._hang_in_grace()
        # Agents that were told to leave look for no other, and wait for their ranks as long as Slurm does.
        listens = supervisor is not None and supervisor.listens
        if listens or in_grace or not self.storage_fine(10.0):
            self._supervised_at = now
        if not any(site.agent is not None and site.agent.met for site in self.cluster.sites.values()):
            return  # none is left that has met a supervisor, and Slurm ends the job
        backs_off = (
            supervisor is not None and supervisor.listens and supervisor.state.not_before > supervisor.now
        )
        if self.tasks.going_on or self._leaving() or in_grace or backs_off:
            self.step_at = now
        if now > max(self._word_at, self.step_at) + STANDSTILL_S and self.storage_fine(STANDSTILL_S):
            self.fail(NO_SILENCE, f"no step since {self.step_at:.1f} s, no word since {self._word_at:.1f} s")
        if now > self._supervised_at + STANDSTILL_S:
            self.fail(NO_SILENCE, f"no supervisor since {self._supervised_at:.1f} s")
        if supervisor is not None and supervisor.listens and not self._ending:
            self._compare(supervisor)
            self._look_at_replicas(supervisor)
            self.calm.look(supervisor, self._supervises_since)
            self.incidents.look(supervisor, self._supervises_since)
            self.told.look(supervisor, self._supervises_since)
            self.health.look(supervisor)
            self.refill.look(supervisor, self._supervises_since)
            self.size.look(supervisor, self._supervises_since)
            self.pool.look(supervisor, self._supervises_since)
            self.withdrawals.look(supervisor, self._supervises_since)

    def _leaving(self) -> bool:
        """Whether ranks may yet leave that have caught a signal."""
        newest, now = self._newest, self.cluster.world.now
        # A supervisor that has just taken over hears of it then.
        told_at = max(newest.caught_at, self._supervises_since) if newest is not None else 0.0
        return newest is not None and newest.caught != "" and now < told_at + LEAVE_S

    def _hang_in_grace(self) -> bool:
        """Whether Slurm ends the job, as the journal says, and ranks hang that were told to end: they may be
        saving, and so they have as long as Slurm leaves them."""
        supervisor, group = self.supervisor, self._newest
        told = supervisor is not None and supervisor.machine.departure.leaving
        if group is None or not (told and self.cluster.ending):
            return False
        return any(member.hung and not member.gone for member in group.members.values())

    def _look_at_replicas(self, supervisor: SimSupervisor) -> None:
        """Check that all others together have some state, whichever node is lost, once all has been calm. A
        pair of nodes that could not reach each other is left alone for long. Ranks that stand still save
        nothing, and a run of one node has nobody for its replicas."""
        now, state, newest = self.cluster.world.now, supervisor.state, self._newest
        up_at = state.up_at - supervisor.now + now
        backs = (back.at + BACK_LIMIT_S for back in self.cluster.disk.rollbacks)
        calm_since = max([self._supervises_since, up_at, self.touched_until, *backs])
        calm = state.phase is Phase.RUNNING and state.incident is None and now > calm_since + CALM_S
        room = self.cluster.wanted.room > 1 and not supervisor.machine.departure.begun
        calm = calm and not self.cluster.network.any_cut and all(map(supervisor.connected, state.placement))
        calm = calm and newest is not None and now < newest.beat_at + CALM_S
        calm = calm and sum(node.role is not Role.FAILED for node in state.nodes.values()) > 1
        if not (calm and room and self._complete) or self._kept_twice():
            self._kept_at = now
        elif now > self._kept_at + KEPT_LIMIT_S:
            self.fail(KEPT_TWICE, f"without replicas since {self._kept_at:.1f} s")

    def _kept_twice(self) -> bool:
        keepers = [*self.cluster.keepers.values()]
        if any(image.corrupt for keeper in keepers for image in keeper.held):
            return True  # nobody knows until it is read
        return any(
            all(
                whole(
                    [image for keeper in keepers if keeper is not gone for image in keeper.held], key, world
                )
                for gone in keepers
            )
            for key, world in sorted(self._complete.items())[-4:]
        )

    def _compare(self, supervisor: SimSupervisor) -> None:
        now = self.cluster.world.now
        for site in self.cluster.sites.values():
            differ = self._difference(supervisor, site)
            if not differ or not self.untouched(site.name, 0.0, seen_from=supervisor.site.name):
                self._differ_since.pop(site.name, None)
            elif now > self._differ_since.setdefault(site.name, now) + AGREE_LIMIT_S:
                self.fail(AGREES, f"{site.name} {differ}")

    def _difference(self, supervisor: SimSupervisor, site: SimSite) -> str:
        """Return the difference between what a supervisor believes about the node's ranks and the truth."""
        state, agent = supervisor.state, site.agent
        if agent is None or not supervisor.connected(site.name):
            return ""
        ranks = agent.machine.ranks
        if ranks.attempt > state.attempt:
            return f"has attempt {ranks.attempt}, the journal {state.attempt}"
        runs = state.phase is Phase.RUNNING and site.name in {*state.places} - state.finished
        if runs and (ranks.attempt != state.attempt or ranks.state in ("waiting", "warming")):
            return f"{ranks.state} in attempt {ranks.attempt}, running is {state.attempt}"
        host = agent.host
        member = host.member if host is not None and ranks.state == "finished" else None
        if host is not None and host.group is not None and member is not None and host.group.runs(member):
            return f"takes all its ranks of attempt {ranks.attempt} for finished"
        unknown = [
            id for id in agent.machine.writes.phased() if not supervisor.machine.checkpoints.writes.knows(id)
        ]
        return f"keeps {unknown} for a write that nobody waits for" if unknown else ""

    def at_the_end(self) -> None:
        supervisor, now = self.supervisor, self.cluster.world.now
        if self.lines > 100 + LINES_A_SECOND * now:
            self.fail(NO_GROWTH, f"{self.lines} lines in the journal after {now:.0f} s")
        if supervisor is not None and supervisor.listens:
            keys = supervisor.machine.checkpoints.copies.newest_first()
            if len(keys) > KEYS_MAX:
                self.fail(NO_GROWTH, f"{len(keys)} states are kept in mind: {keys}")
            self.missed.look(supervisor)
        self.missed.at_the_end()
        if len(self.cluster.disk.shared) > 2 * KEEP:
            self.fail(NO_GROWTH, f"checkpoints of {[*self.cluster.disk.shared]} are on storage")
        if wrong := "" if self.cluster.wanted.tasks else AccountRules(self.cluster.disk).wrong():
            self.fail(COUNTED, wrong)
        ranks = self.cluster.plan.active * self.cluster.ranks_per_node
        for keeper in self.cluster.keepers.values():
            if len(keeper.held) > IMAGES_PER_RANK_MAX * ranks:
                self.fail(NO_GROWTH, f"{keeper.agent.site.name} holds {len(keeper.held)} images")
