"""The rank's side of the memory tier, with a stand-in for the agent's keeper."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import jurymast
from jurymast.checkpoint import checkpointer, gpu_copies
from jurymast.checkpoint.contents import Contents
from jurymast.checkpoint.directory import final_name
from jurymast.checkpoint.image import Window
from jurymast.core.keeper.holding import SLOTS
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import RestoreStatus, SlotWord, Word
from jurymast.worker import link
from support.checkpoints import Holder, same
from support.keeper import Keeper
from support.ranks import run_ranks, stop_server
from support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
RANKS = SCRIPTS / "memory_ranks.py"
NEVER = 10**6


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that finds no room gives up at once."""
    monkeypatch.setattr(checkpointer, "FREE_MEMORY_S", 0.0)


@pytest.fixture(scope="module", autouse=True)
def _end_rank_server() -> Iterator[None]:
    yield
    stop_server()


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    with Keeper() as made:
        enter(made, monkeypatch)
        yield made


@pytest.fixture
def stingy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    with Keeper(stingy=True) as made:
        enter(made, monkeypatch)
        yield made


def enter(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process is a rank of `keeper`, just started."""
    for name, value in keeper.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(link, "_current", None)


def read(keeper: Keeper, number: int, name: str, rank: int = 0) -> Any:
    manifest, image = keeper.image(number, rank)
    contents = Contents.from_bytes(image[manifest.contents_at :])
    (item,) = (item for item in contents.items if item.name == name)
    return torch.load(io.BytesIO(image[item.at : item.at + item.length]), weights_only=False)


def events(keeper: Keeper, kind: str) -> list[dict[str, Any]]:
    return [event for event in keeper.heard() if event["event"] == kind]


# ---- saving


def test_saves_are_published_and_nothing_is_written(keeper: Keeper, tmp_path: Path) -> None:
    tensor = torch.zeros(5)
    checkpoint = jurymast.Checkpointer({"t": tensor, "n": 1}, directory=tmp_path / "c", every=2)
    assert checkpoint.restore() == 0
    for step in range(1, 5):
        tensor.fill_(step)
        checkpoint.step(step)
    tensor.fill_(99)
    assert same(read(keeper, 0, "t"), torch.full((5,), 2.0))
    assert same(read(keeper, 1, "t"), torch.full((5,), 4.0))
    manifest, _ = keeper.image(1)
    assert (manifest.step, manifest.attempt, manifest.rank, manifest.world) == (4, 3, 0, 1)
    assert [(e["slot"], e["step"]) for e in events(keeper, "Image")] == [(0, 2), (1, 4)]
    assert all(0 < e["stall_s"] < 10 for e in events(keeper, "Image"))
    assert events(keeper, "Saved") == []
    assert os.listdir(tmp_path / "c") == ["owner.json"]


def test_with_both_slots_busy_a_save_is_skipped_and_nothing_lost(keeper: Keeper, tmp_path: Path) -> None:
    tensor = torch.zeros(5)
    checkpoint = jurymast.Checkpointer({"t": tensor}, directory=tmp_path, every=NEVER)
    checkpoint.restore()
    for step in (1, 2, 3):
        tensor.fill_(step)
        assert checkpoint.save(step) == (step < 3)
    assert [float(read(keeper, number, "t")[0]) for number in (0, 1)] == [1.0, 2.0]
    skipped = [(event["step"], event["why"]) for event in events(keeper, "Skipped")]
    assert skipped == [(3, "both memory slots are busy")]
    keeper.free(0)
    tensor.fill_(4)
    assert checkpoint.save(4)
    assert [float(read(keeper, number, "t")[0]) for number in (0, 1)] == [4.0, 2.0]


def test_state_that_outgrows_its_slots_is_saved_when_there_are_larger_ones(
    keeper: Keeper, tmp_path: Path
) -> None:
    holder = Holder(torch.zeros(10))
    checkpoint = jurymast.Checkpointer({"it": holder}, directory=tmp_path, every=NEVER)
    checkpoint.restore()
    assert checkpoint.save(1)
    keeper.free(0)
    holder.value = torch.arange(1 << 20)
    assert not checkpoint.save(2)
    assert events(keeper, "Skipped")[0]["why"] == "memory is not ready yet"
    memory = checkpoint._memory
    assert memory is not None
    assert memory.wait_ready(20.0)
    assert checkpoint.save(3)
    assert same(read(keeper, 0, "it.value"), holder.value)
    holder.value = "small"
    assert checkpoint.save(4)
    assert read(keeper, 1, "it.value") == "small"


def test_memory_is_asked_for_once_its_size_is_known(keeper: Keeper, tmp_path: Path) -> None:
    net = nn.Linear(300, 300)
    optimizer = torch.optim.Adam(net.parameters())
    state = {"net": net, "optimizer": optimizer}
    checkpoint = jurymast.Checkpointer(state, directory=tmp_path, every=3)
    checkpoint.restore()
    assert keeper.records[0][Word.WANT] == 0
    for step in range(1, 7):
        net(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        checkpoint.step(step)
        assert keeper.records[0][Word.WANT] > 3 * 300 * 300 * 4
    assert [event["step"] for event in events(keeper, "Image")] == [3, 6]


class FakeCopies:
    """In the place of those from a GPU; `pinned`: what is, by address."""

    pinned: ClassVar[dict[int, torch.Tensor]] = {}

    def register(self, buffer: torch.Tensor) -> None:
        self.pinned[buffer.data_ptr()] = buffer

    def unregister(self, buffer: torch.Tensor) -> None:
        del self.pinned[buffer.data_ptr()]

    def start(self, places: Any, tensors: Any, _objects: Any, done: Any) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        done(None)

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.pinned.clear()


@pytest.fixture
def on_gpu(keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jurymast.Checkpointer:
    """It has saved ones, and its slots are pinned."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(gpu_copies, "GpuCopies", FakeCopies)
    monkeypatch.setattr(FakeCopies, "pinned", {})
    checkpoint = jurymast.Checkpointer({"t": torch.ones(5)}, directory=tmp_path, every=NEVER)
    checkpoint.restore()
    assert checkpoint.save(1)
    assert checkpoint._memory is not None
    assert checkpoint._memory.wait_ready(20.0)
    assert len(FakeCopies.pinned) == SLOTS
    return checkpoint


def twos_are_saved(checkpoint: jurymast.Checkpointer, keeper: Keeper, number: int) -> bool:
    checkpoint.objects["t"].fill_(2.0)
    assert checkpoint.save(2)
    return same(read(keeper, number, "t"), torch.full((5,), 2.0))


def test_slots_stay_pinned_from_attempt_to_attempt(on_gpu: jurymast.Checkpointer, keeper: Keeper) -> None:
    pinned = set(FakeCopies.pinned)
    on_gpu.attempt_ends()
    on_gpu.attempt_begins()
    on_gpu.attempt_begins()  # one that failed before its ranks had met
    on_gpu.restore()
    assert set(FakeCopies.pinned) == pinned
    assert twos_are_saved(on_gpu, keeper, 1)
    assert set(FakeCopies.pinned) == pinned


def test_slots_that_were_replaced_between_attempts_are_unpinned(
    on_gpu: jurymast.Checkpointer, keeper: Keeper
) -> None:
    before = list(FakeCopies.pinned.values())  # CUDA would copy to these pages still
    on_gpu.attempt_begins()
    for number in range(SLOTS):
        keeper.give(0, number, keeper.records[0][Word.WANT])
    on_gpu.restore()
    assert twos_are_saved(on_gpu, keeper, 0)
    assert on_gpu._memory is not None
    assert on_gpu._memory.wait_ready(20.0)
    assert not [one for one in FakeCopies.pinned.values() if any(one is old for old in before)]


def test_slots_are_unpinned_with_their_checkpointer(
    on_gpu: jurymast.Checkpointer, keeper: Keeper, tmp_path: Path
) -> None:
    pinned = dict(FakeCopies.pinned)
    state = dict(on_gpu.objects)
    another = jurymast.Checkpointer(state, directory=tmp_path, every=NEVER)
    on_gpu.attempt_begins()
    on_gpu._memory_before = None
    gc.collect()
    assert not pinned.keys() & FakeCopies.pinned.keys()
    another.restore()
    assert twos_are_saved(another, keeper, 1)


def test_a_save_that_fails_leaves_its_slot_free(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Holder(1)
    checkpoint = jurymast.Checkpointer({"t": torch.ones(3), "it": holder}, directory=tmp_path, every=NEVER)
    checkpoint.restore()
    assert checkpoint.save(1)
    holder.value = (lambda: 0,)
    with pytest.raises(CheckpointError, match="rank 0: .*lambda"):
        checkpoint.save(2)
    holder.value = 2
    with monkeypatch.context() as patched:
        patched.setattr(Window, "stage", lambda *_: 1 // 0)
        with pytest.raises(CheckpointError, match="rank 0: ZeroDivisionError"):
            checkpoint.save(3)
    assert keeper.slot(0, 1).writable
    assert checkpoint.save(4)
    assert [read(keeper, number, "it.value") for number in (0, 1)] == [1, 2]


def test_killed_while_copying_leaves_the_other_image(keeper: Keeper, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPTS / "memory_one.py"), "48"]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path)
    try:
        slots = [keeper.slot(0, number) for number in (0, 1)]
        wait_until("an image in each slot", lambda: all(slot[SlotWord.SEQ] == 2 for slot in slots))
        while slots[0][SlotWord.SEQ] % 2 == 0:
            assert process.poll() is None
            keeper.free(0)
            for _ in range(100_000):
                if slots[0][SlotWord.SEQ] % 2:
                    os.kill(process.pid, signal.SIGSTOP)
                    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED)
                    break
            if slots[0][SlotWord.SEQ] % 2 == 0:
                os.kill(process.pid, signal.SIGCONT)
    finally:
        process.kill()
        process.wait()
    assert slots[0][SlotWord.SEQ] != slots[0][SlotWord.FREED]
    manifest, _ = keeper.image(1)
    tensor = read(keeper, 1, "tensor")
    assert manifest.step > 0
    assert same(tensor, torch.full_like(tensor, manifest.step))


def test_the_next_process_writes_over_what_was_left_half_done(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 1):
        keeper.slot(0, number)[SlotWord.SEQ] = 7
        keeper.free(number)
    checkpoint = jurymast.Checkpointer({"n": 5}, directory=tmp_path, every=NEVER)
    checkpoint.restore()
    assert checkpoint.save(1)
    assert keeper.slot(0, 0)[SlotWord.SEQ] == 10
    assert read(keeper, 0, "n") == 5


# ---- when there is no memory


def test_refused_memory_means_saving_to_storage(
    stingy: Keeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stingy.records[0][Word.REFUSED] = 1
    checkpoint = jurymast.Checkpointer({"n": 5}, directory=tmp_path, every=NEVER)
    assert checkpoint.restore() == 0
    assert checkpoint.save(1)
    assert (tmp_path / final_name(1)).exists()
    assert "ranks [0]" in caplog.text
    assert [event["tier"] for event in events(stingy, "Saved")] == ["shared"]
    assert checkpoint.save(2)


def test_memory_that_is_late_is_waited_for_once(
    stingy: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "FIRST_MEMORY_S", 0.1)
    checkpoint = jurymast.Checkpointer({"n": 5}, directory=tmp_path, every=5)
    checkpoint.restore()
    for step in range(1, 8):
        checkpoint.step(step)
    assert os.listdir(tmp_path) == ["owner.json"]
    for number in (0, 1):
        stingy.give(0, number, stingy.records[0][Word.WANT])
    memory = checkpoint._memory
    assert memory is not None
    wait_until("mapped slots", lambda: all(memory._fitting()))
    for step in range(8, 12):
        checkpoint.step(step)
    assert [event["step"] for event in events(stingy, "Image")] == [8, 10], "at once, then as always"


def test_without_a_keeper_nothing_changes(
    tmp_path: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JURYMAST_KEEPER", f"/proc/{os.getpid()}/fd/99999")
    checkpoint = jurymast.Checkpointer({"n": 5}, directory=tmp_path)
    assert checkpoint.restore() == 0
    assert checkpoint.save(1)
    assert (tmp_path / final_name(1)).exists()


# ---- restoring


def saved(keeper: Keeper, directory: Path, state: dict[str, Any], step: int) -> tuple[Any, bytes]:
    """What a rank's save of `state` leaves in slot 0."""
    checkpoint = jurymast.Checkpointer(state, directory=directory, every=NEVER)
    checkpoint.restore()
    assert checkpoint.save(step)
    return keeper.image(0)


def test_what_is_in_memory_is_restored_and_does_not_alias_it(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"t": torch.arange(4), "it": Holder({"x": torch.ones(2)}), "n": 3}
    manifest, image = saved(keeper, tmp_path / "c", state, 6)
    keeper.offer(manifest, image)
    enter(keeper, monkeypatch)
    tensor = torch.zeros(4, dtype=torch.int64)
    fresh: dict[str, Any] = {"t": tensor, "it": Holder(), "n": 0}
    assert jurymast.Checkpointer(fresh, directory=tmp_path / "c").restore() == 6
    keeper.buffer(0, 0)[:] = b"\x5a" * len(keeper.buffer(0, 0))
    assert same(tensor, torch.arange(4))
    assert same(fresh["it"].value, {"x": torch.ones(2)})
    assert fresh["n"] == 3
    restored = events(keeper, "Restored")[-1]
    assert (restored["tier"], restored["step"], restored["size_bytes"]) == ("memory", 6, len(image))


def test_what_was_restored_keeps_its_slot_until_it_is_freed(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when that slot is too small for what is saved now."""
    manifest, image = saved(keeper, tmp_path, {"it": Holder(torch.ones(3))}, 6)
    keeper.records[0][Word.WANT] = 0
    keeper.offer(manifest, image)
    keeper.slot(0, 0)[SlotWord.FREED] -= 2
    enter(keeper, monkeypatch)
    holder = Holder()
    checkpoint = jurymast.Checkpointer({"it": holder}, directory=tmp_path)
    keeper.growing = {(0, 1)}
    assert checkpoint.restore() == 6
    holder.value = torch.zeros(1 << 19)
    assert checkpoint.save(7)
    assert keeper.buffer(0, 0)[: len(image)] == image
    assert same(read(keeper, 1, "it.value"), holder.value)
    assert not checkpoint.save(8)
    keeper.growing = {(0, 0), (0, 1)}
    wait_until("the other slot", lambda: all(checkpoint._memory._fitting()))  # type: ignore[union-attr]
    assert checkpoint.save(9)
    assert keeper.image(0)[0].step == 9


def test_restore_waits_for_the_agent(keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, image = saved(keeper, tmp_path / "c", {"n": 3}, 6)
    keeper.records[0][Word.RESTORE] = RestoreStatus.PENDING
    enter(keeper, monkeypatch)
    fresh: dict[str, Any] = {"n": 0}
    checkpoint = jurymast.Checkpointer(fresh, directory=tmp_path / "c")
    timer = threading.Timer(0.2, keeper.offer, (manifest, image))
    timer.start()
    assert checkpoint.restore() == 6
    timer.join()
    assert fresh["n"] == 3


def on_storage(directory: Path, step: int, monkeypatch: pytest.MonkeyPatch, value: int) -> None:
    with monkeypatch.context() as patched:
        patched.delenv("JURYMAST_KEEPER")
        assert jurymast.Checkpointer({"n": value}, directory=directory).save(step)


def test_a_save_that_the_script_asks_for_waits_for_room(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "FREE_MEMORY_S", 20.0)
    checkpoint = jurymast.Checkpointer({"n": 1}, directory=tmp_path, every=NEVER)
    checkpoint.restore()
    assert checkpoint.save(1)
    assert checkpoint.save(2)
    timer = threading.Timer(0.1, keeper.free, args=(0,))
    timer.start()
    assert checkpoint.save(3)
    timer.join()
    assert events(keeper, "Skipped") == []


def test_what_the_agent_has_brought_is_restored_without_a_look_at_storage(
    keeper: Keeper, tmp_path: Path
) -> None:
    """Which may hang. The supervisor knew what is there when it chose."""
    keeper.offer(*saved(keeper, tmp_path, {"n": 3}, 6))
    unusable = tmp_path / "file"
    unusable.write_text("no directory")
    fresh = {"n": 0}
    assert jurymast.Checkpointer(fresh, directory=unusable / "checkpoints").restore() == 6
    assert fresh["n"] == 3


def test_what_cannot_be_loaded_is_passed_over(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, image = saved(keeper, tmp_path, {"other": 3}, 6)
    keeper.offer(manifest, image)
    with pytest.raises(CheckpointError, match="step 6: rank 0: .*no entry 'n'"):
        jurymast.Checkpointer({"n": 0}, directory=tmp_path).restore()
    on_storage(tmp_path, 2, monkeypatch, 70)
    fresh = {"n": 0}
    assert jurymast.Checkpointer(fresh, directory=tmp_path).restore() == 2
    assert fresh["n"] == 70


def test_an_image_of_another_attempt_or_world_is_refused(keeper: Keeper, tmp_path: Path) -> None:
    manifest, image = saved(keeper, tmp_path, {"n": 3}, 6)
    keeper.offer(manifest, image)
    keeper.records[0][Word.RESTORE_ATTEMPT] = 2
    with pytest.raises(CheckpointError, match="step 6: rank 0: "):
        jurymast.Checkpointer({"n": 0}, directory=tmp_path).restore()


# ---- several ranks


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_ranks_save_and_restore(tmp_path: Path, sharded: bool) -> None:
    directory = str(tmp_path / "c")
    with Keeper(2) as keeper:
        environment = keeper.environment
        results = run_ranks(
            RANKS, "train", 2, tmp_path, environment=environment, directory=directory, steps=6, every=2,
            sharded=sharded,
        )  # fmt: skip
        assert [result["saved"] for result in results] == [[2, 4]] * 2, "then both slots are busy"
        images = [keeper.image(1, rank) for rank in (0, 1)]
        one, two = (manifest for manifest, _ in images)
        contents = [Contents.from_bytes(image[manifest.contents_at :]) for manifest, image in images]
        common = {item.name for item in contents[0].items if item.at < one.common_bytes}
        assert all(name.endswith(".step") for name in common) == sharded
        assert one.common_id == two.common_id
        assert len({theirs.entries["counter"]["digest"] for theirs in contents}) == 2
        for rank, (manifest, image) in enumerate(images):
            keeper.offer(manifest, image, rank)
        restored = run_ranks(
            RANKS, "restore", 2, tmp_path, environment=environment, directory=directory, sharded=sharded
        )
    for was, now in zip(results, restored, strict=True):
        assert now == {"step": 4, **was["seen"]["4"]}
    assert results[0]["seen"]["4"]["counter"] != results[1]["seen"]["4"]["counter"]


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_another_number_of_ranks_restores_what_ranks_saved(tmp_path: Path, sharded: bool) -> None:
    directory = str(tmp_path / "c")
    with Keeper(2) as keeper:
        results = run_ranks(
            RANKS, "train", 2, tmp_path, environment=keeper.environment, directory=directory, steps=4,
            every=2, sharded=sharded,
        )  # fmt: skip
        images = [keeper.image(1, rank) for rank in (0, 1)]
    saved = [result["seen"]["4"] for result in results]
    assert saved[0]["counter"] != saved[1]["counter"]
    for size in (1, 3):
        with Keeper(size) as keeper:
            keeper.show(images)
            restored = run_ranks(
                RANKS, "restore", size, tmp_path, environment=keeper.environment, directory=directory,
                sharded=sharded,
            )  # fmt: skip
            told = events(keeper, "Restored")
        for rank, got in enumerate(restored):
            assert (got["step"], got["weights"]) == (4, saved[0]["weights"])
            assert (got["moments"], got["buffers"]) == (saved[0]["moments"], saved[0]["buffers"])
            assert got["counter"] == saved[rank % 2]["counter"], "in turns"
        assert [(one["step"], one["tier"]) for one in told] == [(4, "memory")]
        assert told[0]["size_bytes"] == sum(len(image) for _, image in images)
    assert _in(directory) == [], "nothing was written"


def _in(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != "owner.json")


def test_images_that_do_not_fit_together_are_not_restored(tmp_path: Path) -> None:
    directory = str(tmp_path / "c")
    with Keeper(2) as keeper:
        run_ranks(
            RANKS, "train", 2, tmp_path, environment=keeper.environment, directory=directory, steps=4, every=2
        )
        newer, older = keeper.image(1, 0), keeper.image(0, 1)
    with Keeper() as keeper:
        keeper.show([newer, older])
        (restored,) = run_ranks(
            RANKS, "restore", 1, tmp_path, environment=keeper.environment, directory=directory
        )
    assert "(step, attempt, rank, world) in memory are (2, 3, 1, 2), not (4, 3, 1, 2)" in restored["error"]


def test_ranks_that_have_different_steps_restore_neither_and_do_not_start_over(tmp_path: Path) -> None:
    directory = str(tmp_path / "c")
    with Keeper(2) as keeper:
        run_ranks(
            RANKS, "train", 2, tmp_path, environment=keeper.environment, directory=directory, steps=4, every=2
        )
        for rank in (0, 1):
            keeper.offer(*keeper.image(rank, rank), rank, 1 - rank)
        restored = run_ranks(
            RANKS, "restore", 2, tmp_path, environment=keeper.environment, directory=directory
        )
        assert [rank["error"].partition(":")[0] for rank in restored] == [
            "images in memory are not all of one step and attempt"
        ] * 2


def test_memory_refused_on_one_rank_is_not_used_on_any(tmp_path: Path) -> None:
    directory = str(tmp_path / "c")
    with Keeper(2) as keeper:
        keeper.records[1][Word.REFUSED] = 1
        results = run_ranks(
            RANKS, "train", 2, tmp_path, environment=keeper.environment, directory=directory, steps=4, every=2
        )
        assert [rank["directory"] for rank in results] == [[final_name(2), final_name(4)]] * 2
        assert events(keeper, "Image") == []


def test_a_state_that_cannot_be_taken_is_an_error_where_it_is(tmp_path: Path) -> None:
    with Keeper(2) as keeper:
        environment, directory = keeper.environment, str(tmp_path / "c")
        results = run_ranks(
            RANKS, "fails_on_rank_1", 2, tmp_path, environment=environment, directory=directory
        )
    assert results == [True, "cannot capture the state: rank 1: KeyError: 'position'"]
