"""A rank that outlives the failure of another one: `Checkpointer.run`.

When the attempt ends, the agent's torchrun host tells the ranks to leave their step. A thread cuts the
connections of the process group, so that a collective ends, and signals the main thread, whose handler raises
LeaveStep in Python code or in a sleep. An update by an optimizer is never cut short by that: the rank leaves
at the end of its step. Then it waits for the next attempt, makes its process group anew, agrees with the
others on the newest step that is whole, and calls the script's function again.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jurymast.checkpoint import regroup, ward
from jurymast.checkpoint.live import LiveState
from jurymast.core.judges.rejoining import (
    GoBack,
    GoOn,
    OwnCosts,
    Rejoiner,
    are_alike,
    has_no_twin,
    newest_whole,
)
from jurymast.core.state import within
from jurymast.core.state.images import LIVE
from jurymast.errors import CheckpointError, RunDirectoryError
from jurymast.worker import link, sockets, stack_signal
from jurymast.worker import rank as rank_start
from jurymast.worker.sparing import JOINS_VARIABLE, OWN_BYTES_MAX, Pipes, RankSide

if TYPE_CHECKING:
    from jurymast.checkpoint.checkpointer import Checkpointer
    from jurymast.checkpoint.group import Group

log = logging.getLogger("jurymast.checkpoint")

# A real-time signal in the middle of the range: C libraries use the lower end, programs use both ends.
NUMBER = signal.SIGRTMIN + 18
AGAIN_S = 0.1  # between two tries to reach the main thread
RAISED_S = 1.0  # before the script, which may have stopped the exception, gets another
# A rank whose collective failed waits so long to hear that the attempt has ended, before it fails as well.
HOLD_LIMIT_S = 10.0

# Variables that not every attempt has.
OF_ONE_ATTEMPT = (JOINS_VARIABLE, "JURYMAST_SAVED_STEP", "JURYMAST_UNREADABLE", "JURYMAST_MTBF_S")

T = TypeVar("T")


class LeaveStep(BaseException):
    """The attempt has ended for all ranks. Scripts let it pass, as they do KeyboardInterrupt."""


def run(checkpointer: Checkpointer, train: Callable[[int], T]) -> T:
    """See `Checkpointer.run`."""
    pipes = Pipes.of(os.environ)
    if pipes is None or link.world_size() == 1:
        return train(checkpointer.restore())
    live = LiveState(checkpointer.objects)
    if why_not := _why_not() or live.why_not():  # the same on all ranks
        _say_that_all_restart(why_not)
        return train(checkpointer.restore())
    side, key, why_not = None, b"", ""
    try:
        key = ward.key_of_run()
        side = RankSide(pipes, link.local_rank())
    except (OSError, RunDirectoryError) as error:
        why_not = str(error)
    ports, found = _meet(checkpointer, why_not)
    if side is None or found:
        _say_that_all_restart(found)
        return train(checkpointer.restore())
    return Member(checkpointer, live, side, ports, key).run(train)


def _say_that_all_restart(why: str) -> None:
    if os.environ.get("RANK") == "0":
        log.warning("a failure will restart all ranks, and not only those that fail, because %s", why)


def _meet(checkpointer: Checkpointer, why_not: str = "") -> tuple[tuple[int, ...], str]:
    """Return the ports of all ranks, and why one of them cannot be spared, which this one says in `why_not`;
    "" if all can. Collective, and the first thing that ranks of an attempt say to each other."""
    told = checkpointer.group().gather((why_not, list(sockets.listening())))
    failed = [f"rank {rank} cannot be spared: {why}" for rank, (why, _) in enumerate(told) if why]
    return tuple({port for _, ports in told for port in ports}), "".join(failed[:1])


def _why_not() -> str:
    """Why this rank cannot go on in its process once others fail, "" if it can."""
    if threading.current_thread() is not threading.main_thread():
        return "`run` was not called in the main thread"
    if not dist.is_initialized():
        return "the process group is not made before `run`"
    kinds = {part.partition(":")[2] for part in dist.get_backend_config().split(",")}
    if kinds != {"gloo"}:
        return f"it is made for gloo so far, and the process group is {dist.get_backend_config()}"
    if distributed_c10d._default_pg_init_method not in (None, "env://"):
        return "the process group's `init_method` is not env://"
    return regroup.why_not()


class Member:
    """This rank, from `run` until that returns."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        live: LiveState,
        side: RankSide,
        ports: tuple[int, ...],
        key: bytes,
    ) -> None:
        """`ports`: see `_meet`; `key`: see `ward.key_of_run`."""
        self._checkpointer, self._live, self._side = checkpointer, live, side
        self._groups = regroup.GroupsBefore()
        self._given = frozenset(checkpointer.objects)  # what the script had given before `run`
        self._makes_state = False  # `train` makes parts of the state itself
        self._main = threading.main_thread().ident
        self._joins: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
        self._leaving = threading.Event()
        self._out = threading.Event()  # the main thread has left what it did
        self._inside = False  # the script's function, or what may be left at any point
        self._updating = False  # an optimizer has begun to, in a step that is not done
        self._guarded = False  # what follows a step is not to be cut short
        self._attempt = int(os.environ.get("JURYMAST_ATTEMPT", "0"))
        self._ports = ports
        self._step = -1  # the state is that after this step, unless it changed since
        self._versions: list[int] = []
        self._alike: bool | None = None  # None: not looked at in this attempt
        self._offered = False
        self._raised_at = -RAISED_S  # the last LeaveStep, which may take a while to come through
        self._keeps_own = True
        self._own_costs = OwnCosts()
        self._ward = ward.Ward(key)
        self._no_twin = False  # a rank has shards that no other rank has

    # ---- the script's function

    def run(self, train: Callable[[int], T]) -> T:
        signal.signal(NUMBER, self._signalled)

        def update_begins(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
            self._updating = True

        hook = register_optimizer_step_pre_hook(_disable_dynamo(update_begins, recursive=False))
        threading.Thread(
            target=self._side.listen, args=(self._told,), name="jurymast-sparing", daemon=True
        ).start()
        self._checkpointer.member = self
        try:
            start = self._recovering(self._begin)
            while True:
                left, result = self._trained(train, start)
                if not left:
                    return result  # type: ignore[return-value]  # what `train` returned
                start = self._recovering(self._rejoin)
        finally:
            self._checkpointer.member = None
            self._side.say("withdraws")
            hook.remove()
            self._out.set()
            signal.signal(NUMBER, signal.SIG_IGN)  # one may be on its way

    def _trained(self, train: Callable[[int], T], start: int) -> tuple[bool, T | None]:
        """Call the script's function; return whether the attempt has ended, and otherwise its result."""
        try:
            self._enter()
            result = train(start)
            self._inside = False
            return False, result
        except (Exception, LeaveStep) as error:
            self._leave(error)
            return True, None

    def _recovering(self, recover: Callable[[], int]) -> int:
        """Return the step from which to go on; a failure during that begins the recovery anew."""
        while True:
            try:
                return recover()
            except (Exception, LeaveStep) as error:
                self._leave(error)
                recover = self._rejoin

    def _enter(self) -> None:
        self._inside = True
        if self._leaving.is_set():
            raise LeaveStep

    def _leave(self, error: BaseException) -> None:
        """Handle what has ended this step: raise it, unless the attempt has ended."""
        self._inside = False
        lost = _is_communication(error)
        if not self._leaving.is_set() and not (lost and self._offered and self._leaving.wait(HOLD_LIMIT_S)):
            raise error
        self._out.set()
        # Frames of the function that was left hold the group, the DDP wrapper and iterators of loaders.
        error.__traceback__ = None
        error.__context__ = error.__cause__ = None

    def _signalled(self, _number: int, frame: FrameType | None) -> None:
        protected = self._guarded or self._updating or time.monotonic() < self._raised_at + RAISED_S
        if not (self._inside and self._leaving.is_set()) or protected:
            return
        while frame is not None:  # what a destructor raises is lost, and it would be cut short
            if frame.f_code.co_name == "__del__":
                return
            frame = frame.f_back
        self._raised_at = time.monotonic()
        raise LeaveStep

    def _told(self, order: Mapping[str, Any]) -> None:
        """In a thread of its own: take an order of the host."""
        if "join" in order:
            self._leaving.clear()
            self._attempt = int(order["join"]["JURYMAST_ATTEMPT"])
            self._joins.put(order["join"])
            return
        if order["leave"] != self._attempt:
            return
        self._out.clear()
        self._leaving.set()
        while not self._out.is_set() and self._main is not None:
            ports = {*self._ports, int(os.environ.get("MASTER_PORT") or 0)} - {0}
            sockets.cut(ports)
            signal.pthread_kill(self._main, NUMBER)
            self._out.wait(AGAIN_S)

    # ---- steps

    def step_begins(self, step: int) -> None:
        """All of `step` is done, and what follows is not to be cut short."""
        self._guarded, self._updating = True, False
        self._step = step
        if self._alike is None:
            self._check_that_restored()
            self._live.first_step_done()
        self._mark()
        own = self._record_own(step)
        if self._alike is None:
            self._look_whether_alike(own)
        self._ward.pass_on(step, own)

    def step_ends(self) -> None:
        self._guarded = False
        if self._leaving.is_set() and self._inside:
            raise LeaveStep

    def _check_that_restored(self) -> None:
        """Raise CheckpointError if the state has what `train` has made, and nobody has restored."""
        if made := sorted(self._live.made()):
            raise CheckpointError(
                f"`train` has made the entry {made[0]!r} of the state, which is restored before",
                hint="call restore() in `train` once it has made its part of the state, and go on from there",
            )

    def _mark(self) -> None:
        self._versions = self._live.versions()

    def _look_whether_alike(self, own: bytes) -> None:
        """Look once in an attempt, after its first step, whether ranks with the same part of the model have
        the same bits. If they have, this rank can be spared from then on. Collective."""
        mine = self._live.part(), self._live.digest(), list(sockets.listening()), len(own)
        group = self._checkpointer.group()
        told = group.gather((*mine, ward.why_not_passed(own)))
        self._ports = tuple({port for one in told for port in one[2]})  # also of groups made by `train`
        self._alike = are_alike([(part, digest) for part, digest, *_ in told])
        self._no_twin = has_no_twin([part for part, *_ in told])
        self._begin_passing(group.rank, [one[3] for one in told], [one[4] for one in told])
        if not self._alike and JOINS_VARIABLE in os.environ:
            raise CheckpointError("after a recovery in process the ranks' weights differ")
        if not self._alike:
            _say_that_all_restart("their weights differ")
        if self._alike and not self._offered:
            self._offered = True
            self._side.say("offers")

    def _begin_passing(self, rank: int, sizes: Sequence[int], why_not: Sequence[str]) -> None:
        """Begin to pass what is each rank's own on to a rank of another node, if that may be. `sizes` in
        bytes, by rank; `why_not`: why some may not."""
        each = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if any(why_not) and rank == 0:
            log.warning(
                "after the loss of a node all ranks will go back to the last save: what is each rank's own "
                "is not kept on another node, because %s", next(filter(None, why_not)),
            )  # fmt: skip
        if len(sizes) > each and any(sizes) and not any(why_not):
            self._ward.begin(rank, each, sizes)

    def _record_own(self, step: int, *, begins: bool = False) -> bytes:
        """Record what is this rank's own, if that is cheap; return it, or b"". `begins`: which buffers change
        is not known."""
        if not self._keeps_own or not self._live.has_own:
            return b""
        began = time.thread_time()
        why_not, data = "", b""
        try:
            data = self._live.own()
            if len(data) > OWN_BYTES_MAX:
                why_not = f"it has {len(data)} bytes"
            else:
                self._side.own.write(step, data)
        except Exception as error:
            why_not = f"{type(error).__name__}: {error}"
        why_not = why_not or self._own_costs.add(time.thread_time() - began, time.monotonic())
        if why_not and not begins:
            self._keeps_own = False
            self._side.own.clear()
            log.warning(
                "after the failure of another rank this one will go back to the last save: what is its own "
                "is not kept at each step, because %s", why_not,
            )  # fmt: skip
        return b"" if why_not else data

    def _is_whole(self) -> bool:
        """Whether the state is still that after the last step."""
        held = self._live.versions() == self._versions
        return held and not self._updating and self._live.constants_hold()

    # ---- from attempt to attempt

    def _begin(self) -> int:
        """Begin as a new process."""
        self._enter()
        if JOINS_VARIABLE in os.environ:
            return self._begun(self._go_on())
        return self._begun(self._checkpointer.go_back(""))

    def restore(self) -> int:
        """`train` asks for the state, parts of which it may have made itself. Collective if it has."""
        made = self._live.made()
        if not made:
            return self._step
        if twice := sorted(made & self._given):
            raise CheckpointError(
                f"the entry {twice[0]!r} of the state was there before `run`, and `train` has made another",
                hint="add it to the state only in `train`",
            )
        self._makes_state, self._keeps_own = True, False
        return self._begun(self._checkpointer.go_back(""), inside=True)

    def _begun(self, step: int, *, inside: bool = False) -> int:
        """Note that the state is that after `step`, from which the script's function is about to go on.
        `inside`: it has called this."""
        self._inside, self._guarded, self._updating = inside, False, False
        self._alike, self._step = None, step
        self._live.begin()
        self._mark()
        self._side.own.clear()
        self._record_own(step, begins=True)
        return step

    def _rejoin(self) -> int:
        """Wait for the next attempt, and go on in it."""
        if self._makes_state:
            self._drop_made()
        self._live.settle()
        step = self._step = self._step if self._step >= 0 and self._is_whole() else -1
        self._checkpointer.attempt_ends()
        # Where each rank has shards of its own, those that are gone take their step with them.
        self._side.say("left", -1 if self._no_twin else step)
        # Nobody waits for what follows: the next attempt is decided meanwhile.
        gc.collect()  # an old DDP wrapper would reduce gradients still
        self._ward.end()
        self._groups.leave()
        self._attempt_begins(self._joins.get())
        self._enter()
        self._groups.make()
        self._ports, why_not = _meet(self._checkpointer)
        if why_not:
            raise CheckpointError(why_not)
        return self._begun(self._go_on())

    def _drop_made(self) -> None:
        """Take what `train` has made out of the state, as it is about to make it anew."""
        objects = self._checkpointer.objects
        for key in objects.keys() - self._given:
            del objects[key]
        regroup.forget_meshes()
        self._live.begin()
        self._step = -1

    def _attempt_begins(self, environment: Mapping[str, str]) -> None:
        for name in OF_ONE_ATTEMPT:
            os.environ.pop(name, None)
        os.environ.update(environment)
        rank_start.redirect_output(os.environ)
        stack_signal.listen()
        link.current().attempt_begins()
        self._guarded = self._updating = False
        self._checkpointer.attempt_begins()

    def _go_on(self) -> int:
        """Agree with the others on the newest whole step, and bring this rank to it."""
        began = time.monotonic()
        group = self._checkpointer.group()
        own = tuple(self._side.own.steps())
        needs_own, kept = self._offered and self._live.has_own, self._ward.steps
        mine = self._step, own, needs_own, self._live.part(), self._ward.rank, kept, self._makes_state
        ranks = [Rejoiner(*told) for told in group.gather(mine)]
        found = newest_whole(ranks, int(os.environ[JOINS_VARIABLE]))
        if isinstance(found, GoBack):
            return self._go_back(found.why)
        size_bytes = self._bring_to(found, group)
        self._ward.keep_only(found.step)
        self._checkpointer.went_on_from(found.step)
        if group.rank == 0:
            link.current().emit(
                within.Restored(
                    step=found.step,
                    tier=LIVE,
                    seconds=round(time.monotonic() - began, 6),
                    size_bytes=size_bytes,
                )
            )
        return found.step

    def _go_back(self, why: str) -> int:
        """Go on from what was saved, because no newer step is whole: `why`."""
        survives, self._step = self._offered, -1
        self._ward.keep_only(-1)
        if os.environ.get("RANK") == "0":
            log.warning("going back to the last save: %s", why)
        step = self._checkpointer.go_back(why)
        if survives and not self._checkpointer.restored_something:
            raise CheckpointError("no step is whole on all ranks, and none was saved")
        return step

    def _bring_to(self, found: GoOn, group: Group) -> int:
        """Return the size in bytes of what this rank gave or took."""
        size_bytes = 0
        own = self._side.own.read(found.step)
        if takers := found.takers.get(group.rank, ()):
            size_bytes = self._live.give(takers, found.step, group.process_group)
        for giver, takers in found.takers.items():
            if group.rank in takers:
                self._step = -1  # until all of it is there
                size_bytes = self._live.take(giver, found.step, group.process_group)
        for owner, keeper in sorted(found.records.items()):
            if group.rank == keeper:
                self._ward.give(found.step)
            elif group.rank == owner:
                record = self._ward.take(owner, found.step, keeper)
                self._live.set_own(record, foreign=True)
        if own is not None:
            self._live.set_own(own)
        return size_bytes


def _is_communication(error: BaseException) -> bool:
    """Whether the exception, or one that it follows from, says that ranks have lost each other."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and "gloo" in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
