"""`Checkpointer`, the interface to checkpoints for training scripts. It also reports that a restore waits for
storage that hangs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jurymast import foreign
from jurymast.checkpoint.batch import RankBatch, batch, is_kept, wanted_ranks
from jurymast.checkpoint.directory import one_line
from jurymast.checkpoint.group import Candidate, Group, RankUnable, SaveResult
from jurymast.checkpoint.image import foreseen_bytes
from jurymast.checkpoint.memory_tier import MemoryTier
from jurymast.checkpoint.shared_tier import SharedTier
from jurymast.checkpoint.state import ScriptState
from jurymast.core.judges.cadence import Cadence, Due, SaveTimes, memory_of, parse_cadence
from jurymast.core.state import within
from jurymast.core.state.failure_rate import default_mtbf_s
from jurymast.errors import CheckpointError, RunDirectoryError
from jurymast.rundir import RunDirectory
from jurymast.worker import link
from jurymast.worker.link import Link, ScheduleFollower

if TYPE_CHECKING:
    from jurymast.checkpoint.inprocess import Member

log = logging.getLogger("jurymast.checkpoint")

T = TypeVar("T")

LOOK_EVERY_S = 0.5
# An event must fit into a pipe's atomic write.
PATH_CHARACTERS = 1000


@contextmanager
def telling_of_waits(link: Link) -> Iterator[None]:
    """Within this block, report long waits of this process to the agent and in the rank's log."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(over, link), name="jurymast-waiting", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event, link: Link) -> None:
    told, told_s = "", 0.0
    while not over.wait(LOOK_EVERY_S):
        path, waited_s = foreign.unanswered()
        if path != told or waited_s < told_s:  # another call
            told, told_s = path, 0.0
        if waited_s >= told_s + within.RESTORE_TOLD_S:
            told_s = waited_s
            log.warning("%s: its storage has not answered for %.0f s; waiting for it", path, waited_s)
            link.emit(within.RestoreWaits(path=_short(path, PATH_CHARACTERS), seconds=round(waited_s, 3)))


# An event, which may have a few texts of this length, must fit into a pipe's atomic write.
ERROR_CHARACTERS = 300
# How long the first save waits for the agent to have memory; later ones do not wait.
FIRST_MEMORY_S = 30.0
# A few of the agent's heartbeats: at one of them it sees that all ranks continue, and drops an older image.
FIRST_FREE_S = 2.0
# How long a save that the script asked for waits for earlier ones to be safe.
FREE_MEMORY_S = 30.0
OWN_BATCH = "each rank's batch stays as it is, as the script does not ask Checkpointer.batch for its part"
# How long a rank that cannot restore waits for the supervisor to end it.
ENDED_WITHIN_S = 60.0


class Checkpointer:
    """Saves and restores a training, and reports its progress to jurymast's agent.

        checkpoint = jurymast.Checkpointer({"model": model, "optimizer": optimizer, "data": loader})
        for step in range(checkpoint.restore(), total_steps):
            train_one_step()
            checkpoint.step(step + 1)

    `state` maps names to modules, optimizers, anything with `state_dict` and `load_state_dict` (learning rate
    schedules, data loaders), generators, tensors, or plain values in nested dicts and lists. Tensors and
    plain values are restored in place where possible. The mapping is read anew at every save. An entry that
    differs between ranks is saved once per rank, and must not have sharded tensors. Every rank must call all
    methods, with the same step. With several ranks, call `torch.distributed.init_process_group` before the
    first of them; otherwise it raises CheckpointError.

    Options, each with a default from the environment that jurymast sets:
    `directory` of the checkpoints, the same on all ranks; a relative one is below the working directory
    ($JURYMAST_RUN_DIR/checkpoints, $JURYMAST_CHECKPOINTS, ./checkpoints);
    `every`: "200 steps" or 200, a time such as "90s" or "10m", or "auto" ($JURYMAST_CADENCE_STEPS,
    $JURYMAST_CADENCE_S, auto). "auto" loses the least time: the run's supervisor sets the interval; without
    one it follows from the measured stall and $JURYMAST_MTBF_S (seconds between failures of all nodes);
    `keep`: how many checkpoints to keep, at least 1 ($JURYMAST_KEEP, 3).

    Raises CheckpointError for an entry of `state` that cannot be saved, and for an invalid option or
    variable.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        directory: str | os.PathLike[str] | None = None,
        every: str | int | None = None,
        keep: int | None = None,
    ) -> None:
        self._state = ScriptState(state)
        self._directory = _directory(directory)
        self._cadence = _cadence(every)
        self._keep = _keep(keep)
        self._link = link.current()
        self.member: Member | None = None  # while `run` runs
        self._memory: MemoryTier | None = None
        self._memory_before: MemoryTier | None = None  # that of an earlier attempt in this process
        self.attempt_begins()

    def attempt_ends(self) -> None:
        """Wait until no copy of the state is under way any more."""
        if self._memory is not None:
            self._memory.wait_published()

    def attempt_begins(self) -> None:
        """Begin an attempt, perhaps not the first of this process."""
        self._save_times = SaveTimes(self._cadence, _mtbf_s())
        self._attempt = int(os.environ.get("JURYMAST_ATTEMPT", "0"))
        # Opened at the first use, because the process group may not exist yet.
        self._group: Group | None = None
        self._shared: SharedTier
        self._memory_before, self._memory = self._memory or self._memory_before, None
        # Whether this attempt saves to memory; None until the ranks agree on it at their first save.
        self._in_memory: bool | None = None
        self._waited_for_memory = False
        self._tried_to_claim = False
        # Why a step's batch is not kept with fewer ranks; "" once somebody sees to it, or where it was said.
        self._batch_differs = OWN_BATCH
        self._saved_step = -1
        # How long training stood still for the newest save, until that is accounted for.
        self._stall_s: float | None = None
        # Under agents, they say when to save.
        self._follower: ScheduleFollower | None = None
        self.restored_something = False

    # ---- what scripts call

    def restore(self) -> int:
        """Restore the newest complete, verified step and return it: the number of steps done. If there is
        none, return 0 and change nothing.

        Damaged checkpoints are skipped with a warning. One that merely cannot be read is tried for a while;
        then this raises CheckpointError, and under agents another attempt follows, maybe on another node.
        Raises CheckpointError also if there are checkpoints but none can be restored, or if an earlier
        attempt of the run saved some that no longer exist: only a person can decide to start from the
        beginning. While storage does not answer, this waits for it.

        Within `run`, whose function has made a part of `state` itself: call this once it is made.
        """
        return self.go_back("") if self.member is None else self.member.restore()

    def run(self, train: Callable[[int], T]) -> T:
        """Restore, call `train(step)` with the number of steps done, and return what it returns.

        Once another rank fails, this process goes on: `train` is left by an exception, and called again with
        the step from which all go on, with the process group made anew and `state` as after that step. Ranks
        whose process is gone are started anew. So `train` makes what uses the process group, such as
        DistributedDataParallel, by itself, and what it changes is in `state` or made by it; device meshes and
        `fully_shard` come before, or `train` makes the sharded model, adds it to `state`, and calls
        `restore`. It calls `step` after each step, and lets exceptions pass that are no `Exception`.

        Where that is not possible, as without agents, this is `train(self.restore())`; then failures restart
        all ranks. Raises what `restore` and `train` raise.
        """
        from jurymast.checkpoint import inprocess

        return inprocess.run(self, train)

    def step(self, step: int, *, samples: float = 0, tokens: float = 0) -> None:
        """Report that `step` steps are done since the beginning of the training, not of the attempt: a
        heartbeat, and a save if one is due.

        `samples`, `tokens`: how many all ranks together trained on since the last call; people are shown how
        many these are a second.

        The first call claims the directory. Raises CheckpointError if another training that has not ended
        saves there, or if the state cannot be captured, so that no save can succeed. If storage fails, this
        logs a warning and training continues without that checkpoint.
        """
        if self.member is not None:
            self.member.step_begins(step)
        self._claim()
        self._tell_of_batch()
        if samples or tokens:
            self._link.trained(float(samples), float(tokens))
        # Not before the first call: a script that only restores and saves shows its progress by its
        # optimizer's steps.
        self._link.number_given(step)
        self._link.beat(step)
        told = self._follower is not None and self._follower.due(step)
        if not self._save_times.begun:  # restore() was not called: the first step is the start
            self._begin_cadence(step - 1)
        while (due := self._save_times.due(step, told=told)) is not Due.NOTHING:
            self._do(due, step)
            if due is Due.SAVE:
                break
        if self.member is not None:
            self.member.step_ends()
        self._stay(step)

    def batch(
        self, samples: int, *, micro: int | None = None, rank: int | None = None, ranks: int | None = None
    ) -> RankBatch:
        """Return this rank's part of a step's batch of `samples`, of which all ranks together have as many
        also while the run goes on with fewer nodes, unless the policy's `nodes.batch` is local.

        `micro`: how many samples a rank takes at once, one more where shares differ; by default its share
        when all nodes are there. A rank with more takes several micro-batches before an update. `rank` and
        `ranks` are those of the group over which the batch is shared out, by default all. Raises
        CheckpointError if `samples` are too few.
        """
        group = self._open()
        self._batch_differs = ""
        own = group.rank if rank is None else rank
        return batch(samples, own, group.size if ranks is None else ranks, micro=micro)

    def batch_is_kept(self, why_not: str = "") -> None:
        """For adapters of frameworks: they see to the batch of a step in a run with fewer nodes, or
        `why_not`, which is said at the next step."""
        self._batch_differs = why_not

    def save(self, step: int) -> bool:
        """Save `step` (as for the method `step`) now, unless it is saved already.

        Return True once this rank's image is in the node's memory, from which the agent copies it to shared
        storage, or, without the memory tier, once the checkpoint is complete on shared storage; False if the
        save failed. Unlike `step`, this waits up to 30 s until the node's memory has room for one more image.
        Raises what `step` raises.
        """
        self._claim()
        if not self._save_times.begun:
            self._begin_cadence(step)
        if self._saved_step == step:
            return True
        if self._memory is not None and self._in_memory:
            self._memory.wait_free(FREE_MEMORY_S)
        ok = self._save(step)
        self._schedule(step)
        return ok

    def _stay(self, step: int) -> None:
        """Wait after a save if the ranks are about to be placed anew."""
        if self._follower is not None and self._follower.stays(step):
            self._link.enter(link.SAVING)
            self._follower.stay(step)
            self._link.resume_at(step)

    # ---- saving

    def _claim(self) -> None:
        """Claim the directory before the first step counts, so that no training goes on that cannot save. If
        its storage fails at the moment, each save tries again."""
        if self._tried_to_claim:
            return
        self._tried_to_claim = True
        group = self._open()
        why = self._shared.claim()
        if why and group.rank == 0:
            log.warning("%s cannot be claimed yet: %s", self._directory, why)
        if group.rank == 0:
            self._link.emit(within.SavesTo(directory=_short(str(self._directory), PATH_CHARACTERS)))
        # The agent writes images in memory to storage.
        self._link.emit(within.CheckpointsKept(directory=str(self._directory), keep=self._keep))

    def _save(self, step: int) -> bool:
        self._link.enter(link.SAVING)
        started = time.monotonic()
        self._open()
        if self._memory is not None and self._in_memory is not False:
            if not self._shared.claimed:  # refused by now, perhaps
                self._shared.claim()
            outcome = self._save_to_memory(self._memory, step, started)
            if outcome is not None:
                if outcome.ok:
                    self._saved_step = step
                    self._stall_s = time.monotonic() - started
                else:
                    level = logging.INFO if self._open().rank else logging.WARNING
                    log.log(level, "step %d was not saved (memory tier): %s", step, outcome.error)
                self._link.resume_at(step)
                return outcome.ok
            started = time.monotonic()
        saved = self._shared.save(step, self._capture())
        stall_s = time.monotonic() - started
        if saved.ok:
            self._saved_step = step
        if saved.ok and not saved.existing:
            self._stall_s = stall_s
        self._link.resume_at(step)
        self._report_saved(step, saved, stall_s)
        return saved.ok

    def _save_to_memory(self, memory: MemoryTier, step: int, started: float) -> SaveResult | None:
        """Save this rank's image without talking to other ranks; None if there is no memory for it."""
        try:
            trees = self._state.trees()
            if self._in_memory is None:
                memory.request(trees)
                if why := self._agree_on_memory(memory):
                    return SaveResult(ok=False, error=why)
                if not self._in_memory:
                    return None
                started = time.monotonic()
            return memory.save(step, trees, started)
        except Exception as error:
            log.exception("cannot capture the state")
            text = f"rank {self._open().rank}: {type(error).__name__}: {error}"
            raise CheckpointError(f"cannot capture the state: {text}") from error

    def _agree_on_memory(self, memory: MemoryTier) -> str:
        """Decide with all ranks, once, whether this attempt saves to memory. Return why that must wait, or
        ""."""
        if not self._waited_for_memory and memory.wait_ready(FIRST_MEMORY_S):
            memory.wait_free(FIRST_FREE_S)
        self._waited_for_memory = True
        found = memory_of(self._open().gather((memory.refused, memory.ready)))
        self._in_memory, ranks = found.used, list(found.ranks)
        if found.used is None:
            return f"memory is not ready yet on ranks {ranks}"[:ERROR_CHARACTERS]
        if not found.used and self._open().rank == 0:
            log.warning("the nodes of ranks %s have no memory for checkpoints: saving to storage", ranks)
        return ""

    def _capture(self) -> Any:
        """Capture this rank's state. Raises CheckpointError on all ranks if one of them cannot."""
        group = self._open()
        trees: dict[str, Any] = {}
        digests: dict[str, str] = {}
        error = ""
        try:
            trees = self._state.trees()
            digests = self._state.digests(trees)
        except Exception as raised:
            error = f"rank {group.rank}: {type(raised).__name__}: {raised}"
            log.exception("cannot capture the state")
        gathered = group.gather((error, digests))
        for text, _ in gathered:
            if text:
                raise CheckpointError(f"cannot capture the state: {text}")
        return self._state.captured(trees, [theirs for _, theirs in gathered], group.rank)

    def _report_saved(self, step: int, saved: SaveResult, stall_s: float) -> None:
        if self._open().rank != 0:
            return
        if not saved.ok:
            log.warning("step %d was not saved (%s tier): %s", step, self._shared.name, saved.error)
        self._link.emit(
            within.Saved(
                step=step, tier=self._shared.name, ok=saved.ok, stall_s=round(stall_s, 6),
                size_bytes=saved.size_bytes, error=_short(saved.error),
            )
        )  # fmt: skip

    def _tell_of_batch(self) -> None:
        if not self._batch_differs:
            return
        why, self._batch_differs = self._batch_differs, ""
        group = self._open()
        if group.rank == 0 and is_kept(group.size):
            wanted = wanted_ranks(group.size)
            log.warning(
                "with %d of %d ranks the batch of a step is not what it was: %s", group.size, wanted, why
            )
            self._link.emit(within.BatchDiffers(ranks=group.size, wanted=wanted, why=_short(why)))

    # ---- restoring

    def _restore_newest(self) -> tuple[Candidate, str, dict[int, str]]:
        """Load the newest step that is whole in some tier. Return it, its tier, and why each newer step was
        skipped; step 0 and no tier if nothing was saved."""
        skipped: dict[int, str] = {}
        # The agent brings the newest image there is, so that nothing waits for storage that hangs.
        tiers: list[MemoryTier | SharedTier] = [self._shared]
        if self._memory is not None:
            tiers.insert(0, self._memory)
        for tier in tiers:
            try:
                candidates, bad = tier.candidates()
            except OSError as error:
                raise self._unable(Candidate(_saved_before(), 0, 0), error) from error
            skipped.update(bad)
            for candidate in candidates:
                try:
                    why = tier.load(candidate, self._state)
                except OSError as error:
                    if candidate.step not in _passed_over() or candidate is candidates[-1]:
                        raise self._unable(candidate, error) from error
                    why = f"it cannot be read: {error}"
                if not why:
                    return candidate, tier.name, skipped
                skipped[candidate.step] = why
        if skipped:
            reasons = "; ".join(f"step {step}: {why}" for step, why in sorted(skipped.items(), reverse=True))
            raise CheckpointError(
                f"there are checkpoints in {self._directory} but none can be restored: {reasons}",
                hint="to start from the beginning, move them away",
            )
        return Candidate(0, 0, 0), "", skipped

    def _unable(self, candidate: Candidate, error: OSError) -> CheckpointError:
        """Return the error for a checkpoint that cannot be read now, although it may be good. Under agents,
        this waits to be ended: the supervisor has another attempt try it, and if necessary another node."""
        group, why = self._open(), one_line(error)
        if group.rank == (error.rank if isinstance(error, RankUnable) else 0):
            self._link.emit(within.Unrestored(step=candidate.step, of=candidate.attempt, why=_short(why)))
        if link.PAGE_VARIABLE in os.environ:
            time.sleep(ENDED_WITHIN_S)
        return CheckpointError(
            f"step {candidate.step} cannot be read: {why}",
            hint=f"look at the storage of {self._directory}, and start again; to go on from an older step, "
            "move this one away",
        )

    def _check_nothing_was_saved(self) -> None:
        """Raise CheckpointError if a step was saved: a file system that is not mounted looks like one without
        checkpoints."""
        saved = _saved_before()
        if saved:
            raise CheckpointError(
                f"step {saved} of this run was saved, but {self._directory} has no checkpoint",
                hint="is its file system mounted? To start from the beginning, submit a new run",
            )

    def _report_restored(
        self, restored: Candidate, tier: str, skipped: dict[int, str], seconds: float, why: str
    ) -> None:
        passed_over = [_short(f"step {step}: {why}") for step, why in sorted(skipped.items())]
        if passed_over:
            log.warning("restored step %d, skipping %s", restored.step, "; ".join(passed_over))
        self._link.emit(
            within.Restored(
                step=restored.step, tier=tier, seconds=round(seconds, 6), size_bytes=restored.size_bytes,
                skipped=tuple(passed_over[-4:]), why=_short(why),
            )
        )  # fmt: skip

    # ---- memory

    def _ask_for_memory(self, memory: MemoryTier, step: int) -> None:
        """Ask the agent for memory long before the first save: now, or after the first step if optimizers
        have no state yet; then the agent gets an estimate until that step. All ranks ask at the same step,
        because taking the state may be a collective."""
        if all(self._open().gather(self._state.settled)):
            self._request(memory)
        else:
            image_bytes, own_bytes = foreseen_bytes(self._state.objects)
            self._link.emit(within.Foreseen(image_bytes=image_bytes, own_bytes=own_bytes))
            self._save_times.measure_after(step)

    def _request(self, memory: MemoryTier) -> None:
        try:
            memory.request(self._state.trees())
        except Exception as error:
            raise CheckpointError(f"cannot capture the state: {type(error).__name__}: {error}") from error

    # ---- for `run`

    @property
    def objects(self) -> MutableMapping[str, Any]:
        return self._state.objects

    def group(self) -> Group:
        """The group of all ranks. Collective at the first call of an attempt."""
        return self._open()

    def went_on_from(self, step: int) -> None:
        """Note that all ranks go on from `step`. Collective."""
        self._link.resume_at(step)
        self._open()
        self._begin_cadence(step)
        if self._memory is not None:
            self._ask_for_memory(self._memory, step)

    def go_back(self, why: str) -> int:
        """See `restore`. `why` ranks that live do not go on from what they have; "" if none lives."""
        self._link.enter(link.RESTORING)
        started = time.monotonic()
        group = self._open()
        with telling_of_waits(self._link):
            restored, tier_name, skipped = self._restore_newest()
        if not tier_name:
            self._check_nothing_was_saved()
        step = restored.step
        self._saved_step = step if tier_name else -1
        self.restored_something = bool(tier_name)
        if group.rank == 0:
            self._report_restored(restored, tier_name, skipped, time.monotonic() - started, why)
        self.went_on_from(step)
        return step

    # ---- when to save

    def _begin_cadence(self, step: int) -> None:
        self._open()
        self._save_times.follows = self._follower is not None
        if self._follower is not None:
            self._follower.passed(step)
        self._save_times.begin(step, time.monotonic())
        if self._follower is not None:
            self._link.emit(within.Cadence(steps=self._cadence.steps, seconds=self._cadence.seconds))

    def _schedule(self, step: int) -> None:
        if self._follower is not None:
            self._follower.passed(step)
        stall_s, self._stall_s = self._stall_s, None
        again = self._waited_for_memory and self._in_memory is None
        self._save_times.saved(step, time.monotonic(), stall_s=stall_s, again=again)

    def _do(self, due: Due, step: int) -> None:
        match due:
            case Due.MEASURE:
                if self._memory is not None:
                    self._request(self._memory)
                self._save_times.measured(step)
            case Due.AGREE:
                following = self._open().broadcast_step(self._save_times.proposal(step, time.monotonic()))
                self._save_times.agreed(step, following, time.monotonic())
            case Due.SAVE:
                if self._saved_step != step:
                    self._make_room(step)
                    self._save(step)
                self._schedule(step)

    def _make_room(self, step: int) -> None:
        """Wait for memory if the ranks are to be placed anew after this save: they would stand still anyway,
        and a save that is skipped costs steps."""
        moves = self._follower is not None and self._follower.stays(step)
        if moves and self._memory is not None and self._in_memory:
            self._memory.wait_free(FREE_MEMORY_S)

    # ---- set-up

    def _open(self) -> Group:
        """Return the group of all ranks, which all of them make at the first use."""
        if self._group is None:
            self._group = Group()
            self._shared = SharedTier(
                self._directory, self._group, keep=self._keep, attempt=self._attempt, stale=self._stale
            )
            self._follower = self._follow(self._group)
            self._memory = MemoryTier.open(self._state, self._group, self._attempt)
            self._end_memory_before()
        return self._group

    def _end_memory_before(self) -> None:
        before, self._memory_before = self._memory_before, None
        if before is None:
            return
        if self._memory is not None:
            self._memory.take_slots(before)
        before.close()

    def _follow(self, group: Group) -> ScheduleFollower | None:
        """Return this rank's follower of the agent's schedule. Collective among ranks of agents; None if some
        rank does not hear its agent."""
        if link.PAGE_VARIABLE not in os.environ:
            return None
        schedule = self._link.schedule
        heard = all(group.gather(schedule is not None))
        if schedule is None or not heard:
            return None
        return ScheduleFollower(schedule, self._link.settled, repeat=self._cadence.steps is None)

    def _stale(self) -> str:
        """Return why this attempt may no longer publish checkpoints, or "". It may not either while that is
        unknown; the next save asks again."""
        root = os.environ.get("JURYMAST_RUN_DIR")
        try:
            newest = RunDirectory(root).newest_attempt() if root else 0
        except RunDirectoryError as error:
            return f"cannot find out whether a newer attempt has started: {error}"
        if newest > self._attempt:
            return f"attempt {self._attempt} is stale: attempt {newest} has started"
        return ""


def _saved_before() -> int:
    """Return the newest step that the run has saved to storage; 0 for none."""
    return int(os.environ.get("JURYMAST_SAVED_STEP") or 0)


def _passed_over() -> frozenset[int]:
    """Return the steps for which an older one may be taken if they still cannot be read: several attempts
    could not."""
    return frozenset(map(int, os.environ.get("JURYMAST_UNREADABLE", "").split()))


def _short(text: str, characters: int = ERROR_CHARACTERS) -> str:
    return text[:characters].encode("ascii", "replace").decode()


def _directory(given: str | os.PathLike[str] | None) -> Path:
    if given is not None:
        return Path(given).absolute()
    if root := os.environ.get("JURYMAST_RUN_DIR"):
        return RunDirectory(root).checkpoints.absolute()
    return Path(os.environ.get("JURYMAST_CHECKPOINTS") or "checkpoints").absolute()


def _keep(given: int | None) -> int:
    """Return how many checkpoints to keep. Raises CheckpointError."""
    text = os.environ.get("JURYMAST_KEEP", "3") if given is None else str(given)
    if not text.isdecimal() or int(text) < 1:
        raise CheckpointError(f"the number of checkpoints to keep must be 1 or more, not {text}")
    return int(text)


def _mtbf_s() -> float:
    """Return the mean seconds between failures of all nodes together. Raises CheckpointError."""
    text = os.environ.get("JURYMAST_MTBF_S")
    if not text:
        # torchrun says how many agents, normally nodes, there are
        return default_mtbf_s(int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    try:
        return float(text)
    except ValueError as error:
        raise CheckpointError(f"JURYMAST_MTBF_S={text} is not a number of seconds") from error


def _cadence(every: str | int | None) -> Cadence:
    """Return the cadence that the script or the environment gives. Raises CheckpointError."""
    try:
        if every is not None:
            return parse_cadence(every)
        if steps := os.environ.get("JURYMAST_CADENCE_STEPS"):
            return Cadence(steps=int(steps))
        if seconds := os.environ.get("JURYMAST_CADENCE_S"):
            return Cadence(seconds=float(seconds))
    except ValueError as error:
        raise CheckpointError(f"the save interval is invalid: {error}") from error
    return Cadence()
