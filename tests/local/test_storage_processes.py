"""The storage process: what it stores can be read by anybody, whole or not at all, whatever ends it."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jurymast.agent.io import Phases
from jurymast.agent.storage_processes import NEVER, StorageProcesses
from jurymast.checkpoint.directory import CheckpointDirectory, remove_trees
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import WritePhase
from jurymast.keeper.copies import local_copies, remove_local_copies
from jurymast.keeper.manifest import Manifest
from jurymast.storage import __main__ as storage_process
from jurymast.storage import shared
from jurymast.storage.local import LocalDirectory
from jurymast.storage.orders import (
    Answer,
    AnyOrder,
    Continue,
    Done,
    ImageAt,
    Job,
    StorageFailed,
    StorageFailure,
    Warm,
    WriteShared,
)
from support.checkpoints import flip
from support.images import (
    StorageProcess,
    WriteTogether,
    make_image,
    put_image,
    simple_images,
    to_local,
    to_shared,
)
from support.ranks import run_ranks, stop_server
from support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
Order = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _end_rank_server() -> Iterator[None]:
    yield
    stop_server()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[StorageProcess]]:
    """Two nodes' storage processes; the first leads, and has torch: on a busy machine that takes a minute."""
    with ExitStack() as stack:
        both = [stack.enter_context(StorageProcess()) for _ in range(2)]
        both[0].done(Warm())
        yield both


def niceness(process: StorageProcess) -> set[int]:
    pid = process.process.pid
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # it has ended by now
            found.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    return found


def test_torch_is_loaded_as_fast_as_ranks_run_and_only_writes_stand_back(tmp_path: Path) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    with StorageProcess() as process:
        process.done(Warm())
        assert niceness(process) == {here}
        process.done(to_local(tmp_path / "run", simple_images(tmp_path / "images")))
        assert niceness(process) == {here, min(here + 10, 19)}


def test_a_node_that_has_to_lead_loads_torch_as_fast_as_ranks_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the node that had it loaded was lost; or on a busy node a job waits for minutes for its last
    write."""
    loaded: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(shared, "preload", lambda: loaded.put(os.getpriority(os.PRIO_PROCESS, 0)))
    for lead in (False, True):
        storage_process.load_ahead(to_shared(tmp_path / "run", (), world=2, lead=lead))
    assert loaded.get(timeout=60.0) == os.getpriority(os.PRIO_PROCESS, 0)
    assert loaded.empty(), "a node that does not lead needs no torch"


def shared_orders(root: Path, images: Sequence[ImageAt], **more: Any) -> list[WriteShared]:
    """One order for each of two nodes, with half of the images each."""
    half = (len(images) + 1) // 2
    step = json.loads(images[0].manifest.partition("\n")[2])["step"]
    common: dict[str, Any] = {"step": step, "world": len(images), **more}
    parts = ((images[:half], True), (images[half:], False))
    return [to_shared(root, part, lead=lead, **common) for part, lead in parts]


def together(processes: list[StorageProcess], orders: Sequence[WriteShared]) -> list[Answer]:
    return WriteTogether(processes, orders).carry_out()


def done_together(processes: list[StorageProcess], orders: Sequence[WriteShared]) -> list[Done]:
    answers = together(processes, orders)
    done = [answer for answer in answers if isinstance(answer, Done)]
    assert len(done) == len(orders), answers
    return done


CANCELLED = "it was cancelled"


def failed_together(processes: list[StorageProcess], orders: Sequence[WriteShared]) -> list[str]:
    """Why each failed; who did not is cancelled."""
    answers = together(processes, orders)
    whys = [answer.why for answer in answers if isinstance(answer, StorageFailed)]
    assert len(whys) == len(orders), answers
    return whys


def names(root: Path) -> set[str]:
    return set(os.listdir(root)) if root.exists() else set()


# ---- what others read


def load_stock(directory: Path, size: int) -> list[dict[str, Any]]:
    ranks = (
        [[str(rank), str(size), f"file://{directory}.store"] for rank in range(size)] if size > 1 else [[]]
    )
    command = [sys.executable, str(SCRIPTS / "load_stock.py"), str(directory)]
    running = [subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True) for words in ranks]
    outputs = [process.communicate(timeout=100)[0] for process in running]
    assert [process.returncode for process in running] == [0] * len(running)
    return [json.loads(output) for output in outputs]


@pytest.mark.parametrize("size", [1, 3])
def test_stock_torch_reads_what_two_nodes_stored(
    tmp_path: Path, processes: list[StorageProcess], size: int
) -> None:
    root = tmp_path / "checkpoints"
    orders = shared_orders(root, simple_images(tmp_path / "i", world=2))
    assert [done.published for done in done_together(processes, orders)] == [True, False]
    assert names(root) == {"step-00000010"}
    assert names(root / "step-00000010") == {".metadata", "jurymast.json", "__0_0.distcp", "__1_0.distcp"}
    modes = {oct(path.stat().st_mode & 0o777) for path in (root / "step-00000010").iterdir()}
    assert (modes, oct(root.stat().st_mode & 0o777)) == ({"0o600"}, "0o700")
    for loaded in load_stock(root / "step-00000010", size):
        assert loaded == {
            "weight": [10.0, 10.0],
            "bias": [11.0] * 7,
            "table": [[10.0] * 3, [10.0] * 3, [11.0] * 3, [11.0] * 3],
            "data": {"rank-00000": {"position": 10}, "rank-00001": {"position": 110}},
            "epoch": 10,
            "jurymast": False,
        }
    directory = CheckpointDirectory(root)
    assert directory.check_files(10, directory.manifest(10).files) == []


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpointer_restores_what_storage_processes_wrote(
    tmp_path: Path, processes: list[StorageProcess], sharded: bool
) -> None:
    saved = run_ranks(
        SCRIPTS / "image_ranks.py",
        "train_and_leave",
        2,
        tmp_path,
        place=str(tmp_path),
        steps=3,
        sharded=sharded,
    )
    root = tmp_path / "checkpoints"
    done_together(processes, shared_orders(root, [ImageAt(**one["image"]) for one in saved]))
    for size in (2, 1, 3):
        restored = run_ranks(
            SCRIPTS / "checkpoint_ranks.py", "restore", size, tmp_path, directory=str(root), sharded=sharded
        )
        for rank, values in enumerate(restored):
            assert values["step"] == 3
            assert (values["weights"], values["moments"]) == (saved[0]["weights"], saved[0]["moments"])
            assert values["counter"] == saved[rank % 2]["counter"]
            assert values["buffers"] == saved[0]["buffers"]


def test_replicated_tensors_are_written_once_and_spread(
    tmp_path: Path, processes: list[StorageProcess]
) -> None:
    root = tmp_path / "checkpoints"
    together(processes, shared_orders(root, simple_images(tmp_path / "i", world=2, size=100_000)))
    files = {file.name: file.size_bytes for file in CheckpointDirectory(root).manifest(10).files}
    assert 400_000 < files["__0_0.distcp"] + files["__1_0.distcp"] < 440_000


def test_a_step_that_is_there_stays_as_it_is(tmp_path: Path, processes: list[StorageProcess]) -> None:
    root = tmp_path / "checkpoints"
    images = simple_images(tmp_path / "i", world=2)
    together(processes, shared_orders(root, images))
    inode = (root / "step-00000010").stat().st_ino
    lead, follower = together(processes, shared_orders(root, images, nonce="00ac"))
    assert lead == Done(id=lead.id, existing=True, published=True)
    assert follower == StorageFailed(id=follower.id, why=CANCELLED), "nothing is left to do"
    assert (root / "step-00000010").stat().st_ino == inode
    # a damaged one is set aside, and replaced
    (root / "step-00000010" / "__1_0.distcp").unlink()
    done_together(processes, shared_orders(root, images, nonce="00ad"))
    assert CheckpointDirectory(root).complete() == [10]
    assert len(list(root.glob("step-00000010.damaged-*"))) == 1


def test_what_a_restore_found_damaged_is_replaced_and_does_not_count(
    tmp_path: Path, processes: list[StorageProcess]
) -> None:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        together(processes, shared_orders(directory.root, simple_images(tmp_path / "i", step=step, world=2)))
    for step in (20, 30):
        flip(directory.path(step) / "__0_0.distcp")
        directory.mark(step, "__0_0.distcp is corrupt")
    # the run goes on from 10
    for step in (15, 20):
        images = simple_images(tmp_path / "i", step=step, attempt=2, world=2)
        answers = done_together(processes, shared_orders(directory.root, images, attempt=2, keep=2))
        assert [answer.existing for answer in answers] == [False, False]
        assert directory.complete()[:2] == [step, 10 if step == 15 else 15]
    assert directory.check_files(20, directory.manifest(20).files) == []
    assert directory.steps() == [30, 20, 15]
    assert len(list(directory.root.glob("step-00000020.damaged-*"))) == 1


def test_old_steps_go_and_pinned_ones_stay(tmp_path: Path, processes: list[StorageProcess]) -> None:
    root = tmp_path / "checkpoints"
    directory = CheckpointDirectory(root)
    for step in (10, 20, 30, 40):
        images = simple_images(tmp_path / "i", step=step, world=2)
        done_together(processes, shared_orders(root, images, keep=2))
        if step == 10:
            directory.pin(10)
    assert directory.steps() == [40, 30, 10]


# ---- refused


def test_corrupt_memory_is_never_stored(tmp_path: Path, processes: list[StorageProcess]) -> None:
    images = simple_images(tmp_path / "i", world=2)
    flip(Path(images[1].path))
    root = tmp_path / "checkpoints"
    lead, follower = failed_together(processes, shared_orders(root, images))
    assert lead == CANCELLED
    assert "image of rank 1 in " in follower
    assert "is corrupt: block 0 of its " in follower
    assert names(root) == set()
    failed = processes[0].carry_out(to_local(tmp_path / "local", images))
    assert isinstance(failed, StorageFailed)
    assert ("is corrupt" in failed.why, failed.damaged) == (True, 1)
    assert names(tmp_path / "local") == set()
    Path(images[1].path).unlink()
    failed = processes[0].carry_out(to_local(tmp_path / "local", images))
    assert isinstance(failed, StorageFailed)
    assert failed.damaged == -1, "what is absent is not damaged"


def test_states_are_never_mixed(tmp_path: Path, processes: list[StorageProcess]) -> None:
    first = simple_images(tmp_path / "i", world=2)
    other = simple_images(tmp_path / "i", world=2, attempt=2)
    lead, follower = failed_together(processes, shared_orders(tmp_path / "checkpoints", [first[0], other[1]]))
    assert "attempt 2, rank 1, not of step 10, attempt 1" in follower
    assert lead == CANCELLED
    assert names(tmp_path / "checkpoints") == set()
    # nor if a node takes another state for this one
    orders = shared_orders(tmp_path / "checkpoints", [first[0], other[1]])
    orders[1] = msgspec.structs.replace(orders[1], attempt=2)
    place, theirs = (CheckpointDirectory(tmp_path / "checkpoints").writing(10, n, "00ab") for n in (1, 2))
    work = WriteTogether(processes, orders)
    assert work.end(WritePhase.OPEN)
    theirs.symlink_to(place)
    work.begin(WritePhase.ANNOUNCE)
    assert work.end(WritePhase.ANNOUNCE)
    work.begin(WritePhase.SHARE_OUT)
    assert not work.end(WritePhase.SHARE_OUT)
    theirs.unlink()
    lead_says, _ = work.cancel()
    assert isinstance(lead_says, StorageFailed)
    assert lead_says.why == "rank 1 has an image of another state, step 10"
    assert names(tmp_path / "checkpoints") == set()


def test_ranks_that_do_not_fit_together(tmp_path: Path, processes: list[StorageProcess]) -> None:
    images = simple_images(tmp_path / "i", world=2)
    import torch

    data, manifest = make_image({("model", "weight"): torch.zeros(5)}, {}, {"model": {}}, rank=1, world=2)
    images[1] = put_image(tmp_path / "i", data, manifest)
    lead, _ = failed_together(processes, shared_orders(tmp_path / "checkpoints", images))
    assert "ranks 0 and 1 do not agree on model.weight: it is float32[1000] and float32[5]" in lead


def test_a_rolled_back_state_is_not_stored_again(tmp_path: Path, processes: list[StorageProcess]) -> None:
    root = tmp_path / "checkpoints"
    together(processes, shared_orders(root, simple_images(tmp_path / "i", step=10, world=2)))
    CheckpointDirectory(root).rollback(10, 1)
    orders = shared_orders(root, simple_images(tmp_path / "i", step=20, world=2))
    why = "step 20 of attempt 1 was rolled back, so it is not written"
    assert failed_together(processes, orders) == [why, CANCELLED]


# ---- local disk


def test_local_images_are_the_images(tmp_path: Path, processes: list[StorageProcess]) -> None:
    root = tmp_path / "run"
    images = simple_images(tmp_path / "i", world=2)
    processes[0].done(to_local(root, images))
    held = local_copies(root)  # as agents find them
    assert [copy.image for copy in held] == [(10, 1, 0), (10, 1, 1)]
    for copy, given in zip(held, images, strict=True):
        assert isinstance(copy.place, Path)
        assert copy.manifest == Manifest.from_bytes(given.manifest.encode())
        assert copy.manifest.with_blocks(memoryview(copy.place.read_bytes())) == copy.manifest
        assert oct(copy.place.stat().st_mode & 0o777) == "0o600"
    # once more: nothing to do
    assert processes[0].done(to_local(root, images)).bytes == 0


@pytest.mark.parametrize("theirs", ["mode", "owner", "link"])
def test_a_directory_that_others_were_first_to_make_is_not_used(
    tmp_path: Path, processes: list[StorageProcess], theirs: str
) -> None:
    place, elsewhere = tmp_path / "scratch" / "jurymast-0", tmp_path / "elsewhere"
    images = simple_images(tmp_path / "i")
    processes[0].done(to_local(place / "run", images))
    assert oct(place.stat().st_mode & 0o777) == "0o700"
    assert len(local_copies(place / "run")) == 1
    if theirs == "mode":
        place.chmod(0o770)
    elif theirs == "owner":
        _give_away(place)
    else:
        place.rename(elsewhere)
        place.symlink_to(elsewhere)
    assert local_copies(place / "run") == []
    again = to_local(place / "run", simple_images(tmp_path / "j", step=20), step=20)
    assert f"{place} is not private to this user" in processes[0].failure(again)
    remove_local_copies(place / "run")
    assert LocalDirectory(place / "run").states() == [(10, 1)]


@pytest.mark.parametrize("name", ["rank-00000.image", "rank-00000.manifest"])
def test_files_of_another_user_are_no_images(
    tmp_path: Path, processes: list[StorageProcess], name: str
) -> None:
    root = tmp_path / "run"
    processes[0].done(to_local(root, simple_images(tmp_path / "i")))
    assert len(local_copies(root)) == 1
    _give_away(LocalDirectory(root).path(10, 1) / name)
    assert local_copies(root) == []


def _give_away(path: Path) -> None:
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("only root can make another user's file")


def test_local_disk_keeps_the_newest_attempts_steps(tmp_path: Path, processes: list[StorageProcess]) -> None:
    root = tmp_path / "run"
    directory = LocalDirectory(root)
    for step, attempt in ((40, 1), (50, 1), (20, 2), (30, 2)):
        images = simple_images(tmp_path / "i", step=step, attempt=attempt)
        processes[0].done(to_local(root, images, step=step, attempt=attempt))
    assert directory.states() == [(30, 2), (20, 2)]
    # what a process that was killed leaves is swept
    (directory.path(30, 2) / "rank-00001.image").write_bytes(b"x")
    (directory.path(30, 2) / "rank-00002.writing").write_bytes(b"x")
    directory.path(99, 2).mkdir()
    processes[0].done(to_local(root, simple_images(tmp_path / "i", step=40, attempt=2), step=40, attempt=2))
    assert names(root) == {"step-00000030.a0002", "step-00000040.a0002"}
    assert names(directory.path(30, 2)) == {"rank-00000.image", "rank-00000.manifest"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk(tmp_path: Path, small_disk: Path, processes: list[StorageProcess]) -> None:
    images = simple_images(tmp_path / "i", world=2, size=60_000)
    root = small_disk / "checkpoints"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(900_000))
    whys = failed_together(processes, shared_orders(root, images))
    assert any(f"no space left at {root}" in why for why in whys)
    assert names(root) == set()
    why = processes[0].failure(to_local(small_disk / "local", images))
    assert f"no space left at {small_disk / 'local'}: " in why
    assert names(small_disk / "local") == set()
    filler.unlink()
    done_together(processes, shared_orders(root, images, nonce="00ac"))


def test_old_local_images_make_room_for_new_ones(
    tmp_path: Path, small_disk: Path, processes: list[StorageProcess]
) -> None:
    for step in (10, 20, 30):
        images = simple_images(tmp_path / "i", step=step, size=100_000)
        processes[0].done(to_local(small_disk / "run", images, step=step))
    assert LocalDirectory(small_disk / "run").states() == [(30, 1), (20, 1)]


def test_a_read_only_disk(tmp_path: Path, small_disk: Path, processes: list[StorageProcess]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    images = simple_images(tmp_path / "i")
    order = shared_orders(small_disk / "checkpoints", images)[0]
    assert "read-only file system: remount it" in processes[0].failure(order)
    why = processes[0].failure(to_local(small_disk / "run", images))
    assert f"{small_disk / 'run'} is on a read-only file system" in why


# ---- killed


POINTS = {
    "opening": (WritePhase.OPEN, set()),
    "announcing": (WritePhase.ANNOUNCE, {"layout-r0000{victim}"}),
    "writing": (WritePhase.WRITE, {"__{victim}_0.distcp"}),
    "written": (WritePhase.WRITE, {"done-r00000.json", "done-r00001.json"}),
    "sealing": (WritePhase.SEAL, {"done-r00000.json"}),  # it imports torch
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_leaves_nothing_that_looks_complete(
    tmp_path: Path, processes: list[StorageProcess], point: str, victim: int
) -> None:
    root = tmp_path / "checkpoints"
    images = simple_images(tmp_path / "i", world=2, size=2_000_000)
    place = root / ".writing-00000010.a0001.00ab"
    phase, files = POINTS[point]
    seen = {name.format(victim=victim) for name in files}
    with StorageProcess() as lead, StorageProcess() as follower:
        both = [lead, follower]
        work = WriteTogether(both, shared_orders(root, images))
        work.go(phase)
        wait_until(f"{point} of the write", lambda: seen <= names(place) or "step-00000010" in names(root))
        work.kill(victim)
        answers = work.cancel()
    if CheckpointDirectory(root).complete():
        assert point == "sealing"
        assert CheckpointDirectory(root).check_files(10, CheckpointDirectory(root).manifest(10).files) == []
        return
    assert not any(name.startswith("step-") for name in names(root))
    if victim == 1:
        assert isinstance(answers[0], StorageFailed)
        assert names(root) == set()
    done_together(processes, shared_orders(root, images, nonce="00ac"))
    assert names(root) == {"step-00000010"}


@pytest.mark.parametrize("phase", [phase for phase in WritePhase if phase > WritePhase.HOLD])
def test_a_cancelled_write_leaves_nothing(
    tmp_path: Path, processes: list[StorageProcess], phase: WritePhase
) -> None:
    """While a node waits for its turn, or does what is to be done."""
    root = tmp_path / "checkpoints"
    orders = shared_orders(root, simple_images(tmp_path / "i", world=2))
    work = WriteTogether(processes, orders)
    work.go(phase)
    if phase < WritePhase.SEAL:
        assert work.end(phase)
    for answer in work.cancel():
        assert isinstance(answer, Done) or answer.why == CANCELLED
    assert names(root) in (set(), {"step-00000010"} if phase is WritePhase.SEAL else set())
    done_together(processes, shared_orders(root, simple_images(tmp_path / "i", world=2), nonce="00ac"))


def test_an_order_that_is_late_or_out_of_turn_is_passed_over(
    tmp_path: Path, processes: list[StorageProcess]
) -> None:
    orders = shared_orders(tmp_path / "checkpoints", simple_images(tmp_path / "i", world=2))
    work = WriteTogether(processes, orders)
    for phase in (WritePhase.ANNOUNCE, WritePhase.SHARE_OUT, WritePhase.WRITE):
        work.go(phase) if phase is WritePhase.ANNOUNCE else work.begin(phase)
        work.begin(WritePhase.ANNOUNCE)
        work.begin(WritePhase.OPEN)
        assert work.end(phase)
    work.begin(WritePhase.SEAL)
    assert not work.end(WritePhase.SEAL)
    assert isinstance(work.answers[0], Done)
    assert names(tmp_path / "checkpoints") == {"step-00000010"}


def test_who_finds_nothing_any_more_lets_the_lead_say_why_first(tmp_path: Path) -> None:
    """The supervisor tells what it hears first, and cancels the others then."""
    root = tmp_path / "checkpoints"
    order = shared_orders(root, simple_images(tmp_path / "i", world=2))[1]
    place = root / ".writing-00000010.a0001.00ab"
    place.mkdir(parents=True)
    announced, waits = threading.Event(), threading.Event()
    job = Job(order.limit_s, reached=lambda phase: announced.set() if phase is WritePhase.ANNOUNCE else None)

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(60.0)

    job.cancelled = Waited()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(shared.write, order, job)
        job.go_on(Continue(id=0, phase=WritePhase.ANNOUNCE))
        assert announced.wait(60.0)
        assert names(place) == {"layout-r00001"}
        remove_trees([place])
        job.go_on(Continue(id=0, phase=WritePhase.WRITE))
        assert waits.wait(60.0)
        assert not answer.done()
        job.cancel()
        with pytest.raises(StorageFailure, match="gave up"):
            answer.result(60.0)


def test_storage_that_one_node_does_not_see_is_told_by_that_node(tmp_path: Path) -> None:
    order = shared_orders(tmp_path / "nowhere", simple_images(tmp_path / "i", world=2))[1]
    job = Job(order.limit_s)
    job.go_on(Continue(id=0, phase=WritePhase.ANNOUNCE))
    with pytest.raises(StorageFailure, match="nowhere is not visible on this node"):
        shared.write(order, job)


def test_it_ends_with_its_stdin() -> None:
    with StorageProcess() as process:
        assert process.process.stdin is not None
        process.process.stdin.close()
        assert process.process.wait(timeout=120) == 0


# ---- the agent's side


def alone() -> Phases:
    """Of a node that has nobody to wait for."""

    def reached(phase: WritePhase) -> None:
        following = WritePhase(phase + 1)
        phases.turns.put_nowait(msg.ContinueWrite(id="", phase=following, parts=(0,)))

    phases = Phases(reached)
    return phases


def test_orders_that_wait_for_the_same_process_have_numbers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer to one would end another."""
    numbers: list[int] = []

    async def carry_out(tier: object, order: AnyOrder, phases: Phases) -> Done:
        numbers.append(order.id)
        await asyncio.sleep(0)  # others come meanwhile
        return Done()

    async def work() -> None:
        storage = StorageProcesses()
        await asyncio.gather(*(storage.carry_out(Warm()) for _ in range(4)))

    monkeypatch.setattr("jurymast.agent.storage_processes._Tier.carry_out", carry_out)
    asyncio.run(work())
    assert len(set(numbers)) == 4, numbers


def test_the_agents_side(tmp_path: Path) -> None:
    images = simple_images(tmp_path / "i")
    hang = tmp_path / "hang"
    os.mkfifo(hang)

    async def hanging() -> None:
        storage = StorageProcesses(grace_s=0.5)
        try:
            done = await storage.carry_out(to_local(tmp_path / "run", images))
            assert isinstance(done, Done)
            assert done.bytes > 0
            # storage that hangs: opening this image never ends
            unread = msgspec.structs.replace(images[0], path=str(hang))
            failed = await storage.carry_out(to_local(tmp_path / "run", [unread], limit_s=0.5))
            assert isinstance(failed, StorageFailed)
            assert f"local storage hangs at {tmp_path / 'run'}" in failed.why
            killed = storage._tiers["local"]._child
            assert killed is not None
            assert await killed.gone(60.0)
            assert isinstance(await storage.carry_out(to_local(tmp_path / "again", images)), Done)
        finally:
            await storage.close()

    async def work() -> None:
        storage = StorageProcesses()  # on a busy machine a process needs its grace to answer
        try:
            # cancelled, and the process is there for the next order
            half = simple_images(tmp_path / "two", world=2)[:1]
            waiting = to_shared(tmp_path / "c", half, world=2, lead=True)
            opened = asyncio.Event()
            task = asyncio.ensure_future(storage.carry_out(waiting, Phases(lambda phase: opened.set())))
            await asyncio.wait_for(opened.wait(), 60.0)
            assert len(names(tmp_path / "c")) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert names(tmp_path / "c") == set()
            # killed by somebody
            opened.clear()
            task = asyncio.ensure_future(storage.carry_out(waiting, Phases(lambda phase: opened.set())))
            await asyncio.wait_for(opened.wait(), 60.0)
            child = storage._tiers["shared"]._child
            assert child is not None
            os.kill(child.pid, signal.SIGKILL)
            assert await task == StorageFailed(why="the storage process was killed by SIGKILL")
            phases = alone()
            done = await storage.carry_out(to_shared(tmp_path / "c", images, world=1, lead=True), phases)
            assert isinstance(done, Done), done
            # nobody says how to go on: that is no hang of the storage
            late = to_shared(tmp_path / "d", images, world=1, lead=True, limit_s=0.5)
            opened.clear()
            task = asyncio.ensure_future(storage.carry_out(late, Phases(lambda phase: opened.set())))
            await asyncio.wait_for(opened.wait(), 60.0)
            assert storage._tiers["shared"]._late_at == NEVER
            given_up, _ = await asyncio.wait([task], timeout=2 * late.limit_s)
            assert not given_up
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        finally:
            await storage.close()

    asyncio.run(hanging())
    asyncio.run(work())
