"""How much memory checkpoints may take, from recorded trees of /proc and /sys; and what a refusal says."""

from __future__ import annotations

import asyncio
import resource
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jurymast.core.keeper import effects as do
from jurymast.core.keeper.holding import ROUND_BYTES, SLOTS, Buffer, BufferPool, Claim
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, MEMORY
from jurymast.core.state.messages import Room
from jurymast.keeper import keeper as keeper_module
from jurymast.keeper import memory as node_memory
from jurymast.keeper.copies import StoredCopy
from jurymast.keeper.manifest import BadImage, Manifest, RestoreStatus, Word
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.transfer import ImageFetch, text_of
from support.keepers import (
    SIZE,
    FakeRank,
    keeper,
    plan,
    ready_rank,
    saved,
    settled,
    source,
    until,
)

GIB = 1 << 30
# A buffer of so many bytes has some thousand pages.
COUNTED_BYTES, FAULTS = 32 << 20, 50
MEMINFO = """MemTotal:       263998464 kB
MemFree:        18874368 kB
MemAvailable:   209715200 kB
Buffers:         1043208 kB
HugePages_Total:       0
"""
# slurmstepd's tree, as `job.memory` makes it
STEP = "system.slice/slurmstepd.scope/job_4711/step_0/user/task_0"


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """(/proc, /sys/fs/cgroup) with these files, by path from the root."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


def test_the_tightest_limit_above_the_agent_counts(tmp_path: Path) -> None:
    """Version 2, as Slurm sets it up: the job is limited, its step and tasks are not."""
    proc, mount = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"0::/{STEP}\n",
            f"cgroup/{STEP}/memory.max": "max\n",
            f"cgroup/{STEP}/memory.current": "12345\n",
            "cgroup/system.slice/slurmstepd.scope/job_4711/memory.max": f"{100 * GIB}\n",
            "cgroup/system.slice/slurmstepd.scope/job_4711/memory.high": "max\n",
            "cgroup/system.slice/slurmstepd.scope/job_4711/memory.current": f"{40 * GIB}\n",
            "cgroup/system.slice/slurmstepd.scope/job_4711/memory.stat": (
                f"anon {20 * GIB}\nfile {30 * GIB}\ninactive_file {8 * GIB}\nactive_file {2 * GIB}\n"
            ),
        },
    )
    room = node_memory.room(proc, mount)
    # 60 GiB, the half of the page cache that the kernel would give up, less 5 %
    assert room.free == (60 + 5 - 5) * GIB
    assert room.limit == str(mount / "system.slice/slurmstepd.scope/job_4711/memory.max")


def test_memory_high_is_a_limit_as_well(tmp_path: Path) -> None:
    proc, mount = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job\n",
            "cgroup/job/memory.max": f"{100 * GIB}",
            "cgroup/job/memory.high": f"{20 * GIB}",
            "cgroup/job/memory.current": f"{4 * GIB}",
        },
    )
    assert node_memory.room(proc, mount) == Room(15 * GIB, str(mount / "job/memory.high"))


def test_version_1(tmp_path: Path) -> None:
    path = "slurm/uid_1000/job_4711/step_0/task_0"
    proc, mount = tree(
        tmp_path,
        {
            "proc/self/cgroup": f"9:cpuset:/\n4:cpu,memory:/{path}\n1:name=systemd:/\n",
            f"cgroup/memory/{path}/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"cgroup/memory/{path}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"cgroup/memory/{path}/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "0\n",
        },
    )
    room = node_memory.room(proc, mount)
    assert room.free == 6 * GIB - node_memory.RESERVE_BYTES
    assert room.limit.endswith("task_0/memory.limit_in_bytes")


def test_both_versions_at_once_and_a_container(tmp_path: Path) -> None:
    """The path may be the host's, which is not mounted here: the mount itself is what limits us."""
    proc, mount = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../kubepods/pod7/abc\n",
            "cgroup/unified/memory.max": f"{4 * GIB}",
            "cgroup/unified/memory.current": f"{GIB}",
        },
    )
    assert node_memory.room(proc, mount) == Room(
        3 * GIB - node_memory.RESERVE_BYTES, str(mount / "unified/memory.max")
    )


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    proc, mount = tree(tmp_path, {})
    total, available = 263998464 * 1024, 209715200 * 1024
    assert node_memory.room(proc, mount) == Room(available - int(total * 0.05), str(proc / "meminfo"))


def test_what_cannot_be_read_is_not_trusted(tmp_path: Path) -> None:
    proc, mount = tree(
        tmp_path,
        {
            "proc/self/cgroup": "nonsense\n0::/job\n",
            "proc/meminfo": "",
            "cgroup/job/memory.max": "many",
            "cgroup/job/memory.current": "",
        },
    )
    assert node_memory.room(proc, mount).free == 0


def test_this_machine_has_some() -> None:
    room = node_memory.room()
    assert room.free > 0
    assert Path(room.limit).is_file()


async def test_a_rank_that_asks_for_too_much_is_refused_on_one_clear_line(tmp_path: Path) -> None:
    """Before anything is taken for any rank of the node."""
    proc, mount = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job_7\n",
            "cgroup/job_7/memory.max": f"{100 * GIB}",
            "cgroup/job_7/memory.current": f"{10 * GIB}",
        },
    )

    async with keeper("a", 2, room=lambda: node_memory.room(proc, mount)) as (one, told):
        one.launch(1, [0, 1], 2, None)
        ranks = [FakeRank(one, local) for local in (0, 1)]
        ranks[0].want(22 * GIB)
        one.look()
        await until("answer", lambda: ranks[0].record[Word.REFUSED])
        (message,) = told.of(msg.Refused)
        assert message.why == (
            "no memory for two slots of 22.0 GiB for each of 2 ranks: 85.0 GiB available "
            f"(limit: {mount}/job_7/memory.max); "
            "ask Slurm for more --mem, or set checkpoint.tiers.memory: off. "
            "Until then all ranks save to shared storage"
        )
        one.look()  # not again and again
        await settled(one)
        assert len(told.of(msg.Refused)) == 1
        assert ranks[0].writable() == []

        one.launch(2, [0, 1], 2, None)  # the next attempt may ask for less
        assert not ranks[0].record[Word.REFUSED]
        for rank in ranks:
            rank.want(SIZE)
        one.look()
        for rank in ranks:
            await until("slots", lambda rank=rank: len(rank.writable()) == SLOTS)  # type: ignore[misc]


async def test_a_replica_and_a_restore_that_do_not_fit_are_refused() -> None:
    async with keeper("a") as (a, _), keeper("b", room=lambda: Room(0, "/x/memory.max")) as (b, told):
        a.launch(1, [0], 1, None)
        await saved(a, await ready_rank(a), 10)
        order = msg.Replicate(step=10, attempt=1, rank=0, part="all", sources=(source(a, 0),))
        b.obey(order)
        await until("answer", lambda: told.of(msg.Unreplicated))
        assert "no memory for a replica of rank 0" in told.of(msg.Refused)[0].why
        b.launch(2, [0], 1, plan(10, 1, {0: [source(a, 0)]}))
        rank = FakeRank(b)
        await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
        assert rank.answer is RestoreStatus.FAILED
        assert "no memory for what rank 0 restores" in told.of(msg.Unrestorable)[0].why
        assert b.inventory() == ()


@dataclass
class Asking:
    got: list[Buffer] = field(default_factory=list)
    why: str = ""

    def on_memory_granted(self, buffers: list[Buffer]) -> None:
        self.got = buffers

    def on_memory_refused(self, why: str) -> None:
        self.why = why


def test_memory_granted_but_not_yet_taken_is_not_granted_twice() -> None:
    effects: list[do.Effect] = []
    memory = BufferPool(effects.append)

    def take(count: int, capacity: int) -> Asking:
        asking = Asking()
        memory.claim(Claim(asking, "somebody", count, capacity))
        while effects:
            match effects.pop(0):
                case do.Measure():
                    memory.on_memory_measured(Room(5 * ROUND_BYTES, "here"), {})
                case do.Make():
                    memory.on_buffers_made("")
        return asking

    first = take(2, ROUND_BYTES).got
    assert "6 MiB available" in take(2, 2 * ROUND_BYTES).why
    second = take(1, 2 * ROUND_BYTES).got
    for buffer in (*first, *second):
        memory.give_back(buffer, keep=10)
    # What waits unused is used before anything new, and goes before anybody is refused.
    (again,) = take(1, ROUND_BYTES).got
    assert again in first
    memory.touched(again, ROUND_BYTES)
    assert take(1, 6 * ROUND_BYTES).why
    assert list(memory.buffers.values()) == [again]
    (fresh,) = take(1, 2 * ROUND_BYTES).got
    assert fresh not in second


async def test_the_kernel_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: node_memory.MappedBuffer, start: int, end: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(node_memory.MappedBuffer, "reserve", no_memory)

    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = FakeRank(one)
        rank.want(SIZE)
        one.look()
        await until("answer", lambda: rank.record[Word.REFUSED])
        assert "No space left on device" in told.of(msg.Refused)[0].why
        assert rank.writable() == []


async def test_memory_is_freed_in_a_thread_before_it_is_measured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freeing some gigabytes takes the kernel a second, for which the event loop would stand still."""
    close, may_free = MappedBuffer.close, threading.Event()
    free = [1 << 40]

    def slow_close(buffer: MappedBuffer) -> None:
        assert threading.current_thread() is not threading.main_thread(), "in the event loop"
        assert may_free.wait(60)
        close(buffer)
        free[0] = 1 << 40

    async with keeper(room=lambda: Room(free[0], "a test")) as (one, _):
        loan = await one.borrow(1 << 20, "a small one")
        assert loan is not None
        one.give_back(loan)
        free[0] = 0  # it is unused, and takes everything
        with monkeypatch.context() as patch:
            patch.setattr(MappedBuffer, "close", slow_close)
            large = asyncio.ensure_future(one.borrow(64 << 20, "a large one"))
            await until("freeing", lambda: one._freeing)
            may_free.set()
            assert await large is not None


def test_an_image_that_goes_on_behind_its_slot_is_refused() -> None:
    """Also if all that there is of it is whole."""
    buffer = MappedBuffer(ROUND_BYTES)
    size = buffer.capacity - len(Manifest(5, 1, 0, 1, "", size_bytes=10**6, common_bytes=0).to_bytes())
    manifest = Manifest(5, 1, 0, 1, "", size_bytes=size, common_bytes=0).to_bytes()
    assert size + len(manifest) == buffer.capacity
    buffer.write(size, manifest)
    assert keeper_module._read_image(buffer, size, len(manifest), 5, 0).manifest.size_bytes == size
    with pytest.raises(BadImage, match="does not fit"):
        keeper_module._read_image(buffer, size, len(manifest) + 1, 5, 0)
    buffer.close()


def test_whoever_writes_to_reserved_memory_waits_for_no_page_of_it() -> None:
    """Also if it does not begin with a page, as the part of an image that is one rank's own."""

    def faults(start: int) -> int:
        buffer = MappedBuffer(COUNTED_BYTES)
        buffer.reserve(start, buffer.capacity)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        buffer[start : buffer.capacity][:] = blank[start:]
        after = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        buffer.close()
        return after - before

    blank = memoryview(b"1" * COUNTED_BYTES)
    if faults(0) > FAULTS:
        pytest.skip("this kernel makes no pages ready")
    assert faults(1000) <= FAULTS


@pytest.mark.parametrize("stopped", [False, True])
def test_an_image_is_taken_from_a_copy_on_its_node_unless_nobody_wants_it_any_more(stopped: bool) -> None:
    there, here = MappedBuffer(ROUND_BYTES), MappedBuffer(ROUND_BYTES)
    there.write(0, b"7" * 1000)
    manifest = Manifest(5, 1, 0, 1, "", size_bytes=1000, common_bytes=0).with_blocks(there)
    fetch = ImageFetch(manifest, here)
    if stopped:
        fetch.stop.set()
    assert fetch.from_copy("n1", StoredCopy(manifest, MEMORY, ALL, there), ALL, MEMORY) == ""
    assert (fetch.complete, bytes(here[0:1000])) == (not stopped, (b"\0" if stopped else b"7") * 1000)
    there.close()
    here.close()


def test_an_error_without_words_is_told_by_its_name() -> None:
    assert (text_of(EOFError()), text_of(EOFError("the end"))) == ("EOFError", "the end")
