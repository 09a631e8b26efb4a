"""Which state is committed: the newest of which every rank's whole image is in its own node's memory. Also
which checkpoints of a directory may be removed."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from jurymast.core.checkpoints.copies import Copies
from jurymast.core.state import events as ev
from jurymast.core.state import images as im
from jurymast.core.state.effects import Effect, Record
from jurymast.core.state.images import Copy, StateId
from jurymast.core.state.run import RunState


def superfluous(
    complete: Sequence[int], keep: int, pinned: Set[int], bad: Set[int], latest: Sequence[int] = ()
) -> list[int]:
    """Return, from the steps of complete checkpoints, newest first, those that may be removed: all but the
    newest `keep`. Steps in `bad` neither count nor are removed, because they are evidence; `pinned` ones
    count and stay. So do the first `keep` of `latest`, what the run has saved, last saved first: a run that
    had to go on from an older step than there is must not lose what it saves from then on."""
    good = [step for step in complete if step not in bad]
    keep = max(1, keep)
    kept = {*[step for step in latest if step not in bad][:keep], *pinned}
    return [step for step in good[keep:] if step not in kept]


@dataclass(frozen=True)
class Rollback:
    """Every state newer than `step` that attempts up to `attempt` of the run `run` saved is void. `others`:
    newer states of other runs that were there as well, each as (step, attempt, run). `at`: Unix time."""

    step: int
    attempt: int
    at: float
    run: str = ""
    others: tuple[tuple[int, int, str], ...] = ()

    def voids(self, step: int, attempt: int) -> bool:
        """Whether it voids this state of its own run."""
        return step > self.step and attempt <= self.attempt

    def voids_of(self, run: str, step: int, attempt: int) -> bool:
        """Whether it voids this state of any run."""
        return (run == self.run and self.voids(step, attempt)) or (step, attempt, run) in self.others


class Commit:
    """`key` is the committed state. `broken`: part of it is lost, as announced. `damaged`: why an image in
    its own node's memory is unusable and cannot be restored there; else ""."""

    def __init__(self, state: RunState, copies: Copies) -> None:
        self._state, self._copies = state, copies
        self.key: StateId | None = None
        self.broken, self.damaged = False, ""
        self._stalls: dict[StateId, float] = {}  # by state that may yet be committed

    def on_image_held(self, key: StateId, stall_s: float) -> None:
        """The training stood still this long for one of the state's images."""
        if self.is_newer(key):
            self._stalls[key] = max(self._stalls.get(key, 0.0), stall_s)

    def on_time(self, now: float) -> list[Effect]:
        """Commit the state that has just become complete, if any."""
        for key in self._copies.newest_first():
            if not self.is_newer(key):
                break
            if self._counts(key) and self._copies.in_memory(key):
                return [self._commit(key, now)]
        return []

    def _commit(self, key: StateId, now: float) -> Record:
        saved = ev.Saved(
            t=now, attempt=key.attempt, step=key.step, tier=im.MEMORY, ok=True,
            stall_s=self._stalls.get(key, 0.0), size_bytes=self._copies.size_bytes(key),
        )  # fmt: skip
        self.go_on_from(key)
        self.broken = False
        return Record(saved)

    def go_on_from(self, key: StateId | None) -> None:
        """Let this state count from now on (None: none). It is whole once all ranks hold it again."""
        self.key, self.broken, self.damaged = key, True, ""
        held = {one for one in self._copies.newest_first() if self.is_newer(one)}
        self._stalls = {one: stall_s for one, stall_s in self._stalls.items() if one in held}

    def on_copy_corrupt(self, copy: Copy, why: str) -> None:
        if copy.key == self.key and copy.tier == im.MEMORY:
            self.damaged = self.damaged or why

    def whole(self) -> bool:
        """Whether the state is complete in memory, or as complete as it will be."""
        if self.key is None or self.useless():
            return False
        return bool(self.damaged) or self._copies.in_memory(self.key)

    def useless(self) -> bool:
        """Whether it blocks newer states and is no reason to drop older ones."""
        return self.key is not None and bool(self.damaged) and not self._copies.restorable(self.key)

    def void(self, key: StateId) -> None:
        self._stalls.pop(key, None)

    def _counts(self, key: StateId) -> bool:
        """Whether a state may be committed. A state of an earlier attempt may not if this attempt continued
        from another one: agents would then give up what the ranks restore."""
        restore, attempt = self._state.restore, self._state.attempt
        if key.attempt == attempt or restore is None or restore.attempt != attempt:
            return True
        return restore.tier == im.MEMORY and key.step == restore.step

    def is_newer(self, key: StateId) -> bool:
        return self.key is None or im.age(key) > im.age(self.key)

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        if self.key is not None and not self.broken:
            assert self._copies.in_memory(self.key), f"{self.key} is committed, and some of it is nowhere"
        assert all(map(self.is_newer, self._stalls)), "times are kept of saves that are over"
