"""A training whose checkpoint cannot be read now: it waits a while, fails, and is not set back."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import jurymast
from jurymast import reading
from jurymast.checkpoint import memory_tier
from jurymast.checkpoint.directory import CheckpointDirectory
from jurymast.checkpoint.group import Candidate, Group
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import PAGE_VARIABLE, RankRecord, RestoreStatus, Word, create_page
from support.checkpoints import flip
from support.storage_faults import failing
from support.waiting import wait_until

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PAUSES_S", (0.01,))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"weight": torch.zeros(1000)}
    checkpoint = jurymast.Checkpointer(state, directory=tmp_path, every=10**6)
    for step in (100, 2000):
        state["weight"].fill_(float(step))
        assert checkpoint.save(step)
    return tmp_path


def restored(directory: Path) -> tuple[int, float]:
    state = {"weight": torch.zeros(1000)}
    step = jurymast.Checkpointer(state, directory=directory, every=10**6).restore()
    return step, float(state["weight"][0])


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOMEM, errno.EMFILE])
@pytest.mark.parametrize("name", ["__0_0.distcp", "jurymast.json", ".metadata", "rollback.json"])
def test_one_read_that_fails_once_costs_nothing(saved: Path, number: int, name: str) -> None:
    place = name if name == "rollback.json" else f"step-00002000/{name}"
    with failing(place, number, times=1) as hit:
        assert restored(saved) == (2000, 2000.0)
    assert hit
    assert CheckpointDirectory(saved).marked(2000)[1] == ""


@pytest.mark.parametrize("name", ["__0_0.distcp", "jurymast.json"])
def test_a_step_that_stays_unreadable_is_an_error_and_is_not_marked(
    saved: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointDirectory.__init__, "__defaults__", ("", 0.05))
    with failing(f"step-00002000/{name}", errno.EIO), pytest.raises(CheckpointError, match="cannot be read"):
        restored(saved)
    assert CheckpointDirectory(saved).marked(2000)[1] == ""
    assert restored(saved) == (2000, 2000.0)


def test_an_older_step_is_taken_once_several_attempts_could_not_read_the_newest(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CheckpointDirectory.__init__, "__defaults__", ("", 0.05))
    monkeypatch.setenv("JURYMAST_UNREADABLE", "2000")
    with failing("step-00002000/__0_0.distcp", errno.EIO), caplog.at_level(logging.WARNING):
        assert restored(saved) == (100, 100.0)
    assert "restored step 100, skipping step 2000: it cannot be read" in caplog.text
    assert CheckpointDirectory(saved).marked(2000)[1] == ""
    assert restored(saved) == (2000, 2000.0), "now it can be read"


def test_damage_is_still_damage(saved: Path) -> None:
    flip(saved / "step-00002000" / "__0_0.distcp")
    assert restored(saved) == (100, 100.0)
    assert "corrupt" in CheckpointDirectory(saved).marked(2000)[1]


class Image:
    """What the agent has brought into memory, which this process cannot map."""

    name = "memory"

    def candidates(self) -> tuple[list[Any], dict[int, str]]:
        return [Candidate(3000, 10, 1, attempt=4)], {}

    def load(self, candidate: Any, state: Any) -> str:
        group = Group()
        group.on_all(self._map)
        return ""

    def _map(self) -> None:
        """Out of address space, as the kernel says it."""
        mmap.mmap(-1, 1 << 40)


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 38, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
def test_an_image_that_does_not_fit_into_memory_now_is_no_reason_for_older_storage(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(memory_tier.MemoryTier, "open", lambda *_: Image())
    state = {"weight": torch.zeros(1000)}
    checkpoint = jurymast.Checkpointer(state, directory=saved, every=10**6)
    monkeypatch.setattr(checkpoint._link, "emit", told.append)
    with pytest.raises(CheckpointError, match="step 3000 cannot be read: .*Cannot allocate memory"):
        checkpoint.restore()
    assert float(state["weight"][0]) == 0.0
    (unrestored,) = told
    assert (unrestored.step, unrestored.of) == (3000, 4)


def test_an_image_that_the_agent_cannot_bring_is_no_reason_for_older_storage_either(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank waits until its supervisor has decided: it ends the attempt."""
    monkeypatch.setattr(memory_tier, "SAY_SO_S", 0.01)
    descriptor, page = create_page(1)
    monkeypatch.setenv(PAGE_VARIABLE, f"/proc/{os.getpid()}/fd/{descriptor}")
    record = RankRecord(page, 0)
    record[Word.REFUSED] = 1
    record[Word.RESTORE] = RestoreStatus.FAILED
    found: list[tuple[int, float]] = []
    rank = threading.Thread(target=lambda: found.append(restored(saved)))
    rank.start()
    wait_until("its wait", lambda: "still fetches" in caplog.text or not rank.is_alive())
    assert found == []
    record[Word.RESTORE] = RestoreStatus.ELSEWHERE
    rank.join()
    assert found == [(2000, 2000.0)]
    os.close(descriptor)
