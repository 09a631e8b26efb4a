"""No error of a task in the background vanishes: it is logged, ends its process, or answers whoever waits."""

from __future__ import annotations

import ast
import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from jurymast import background
from jurymast.agent.keeping import Keeping
from jurymast.agent.storage_processes import NodeStorage
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.settings import RunPlan
from jurymast.keeper import keeper as keepers
from jurymast.keeper import real_io
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.keeper.manifest import Word
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.real_io import RealKeeperIo
from jurymast.rundir import RunDirectory
from jurymast.wire.protocol import Access
from support.keepers import FakeRank, keeper, plenty, ready_rank, run, until

PACKAGE = Path(__file__).resolve().parents[2] / "launcher" / "jurymast"
PROCESSES = ("agent", "supervisor", "keeper", "wire", "health", "storage")
STARTS = {"ensure_future", "create_task", "run_coroutine_threadsafe"}


def starts_of_tasks(text: str) -> list[int]:
    """The lines that start a task in any way but `background.start`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in STARTS
    ]


def test_agents_and_supervisors_start_tasks_only_in_one_way() -> None:
    files = [PACKAGE / "child.py", *(path for name in PROCESSES for path in (PACKAGE / name).rglob("*.py"))]
    assert len(files) > 40
    found = {str(path): lines for path in files if (lines := starts_of_tasks(path.read_text()))}
    assert found == {}, "use jurymast.background.start"


def test_another_way_is_found() -> None:
    planted = "import asyncio\nasyncio.ensure_future(f())\nloop.create_task(f())\nbackground.start(f())"
    assert starts_of_tasks(planted) == [2, 3]


def test_an_error_reaches_who_is_to_hear_of_it(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[BaseException] = []

    async def fail() -> None:
        raise MemoryError("no room")

    async def hang() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        tasks = [background.start(fail()), background.start(fail(), heard.append), background.start(hang())]
        await asyncio.wait(tasks[:2])
        tasks[2].cancel()
        await asyncio.wait(tasks)

    with caplog.at_level(logging.ERROR, "jurymast.background"):
        run(work())
    assert [str(error) for error in heard] == ["no room"]
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "MemoryError: no room" in caplog.text


# ---- a slot is free again after any failure


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OverflowError("too long"), KeyError("blocks"), RuntimeError("no thread")],
    ids=repr,
)
async def test_a_slot_whose_image_cannot_be_hashed_is_free_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    whole = keepers._read_image

    def fail(*_: Any) -> Any:
        monkeypatch.setattr(keepers, "_read_image", whole)
        raise error

    async with keeper() as (one, told):
        one.launch(1, [0], 1, None)
        rank = await ready_rank(one)
        monkeypatch.setattr(keepers, "_read_image", fail)
        slot = rank.save(10)
        one.look()
        await until("free slot", lambda: slot in rank.writable())
        assert any((str(error) or type(error).__name__) in str(message) for message in told)
        assert rank.save(20) in (0, 1)
        one.look()
        await until("image", lambda: told.of(msg.Held))


@pytest.mark.parametrize("name", ["room", "MappedBuffer", "reserve"])
async def test_a_rank_is_refused_memory_that_cannot_be_had_for_any_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def broken(*_: Any) -> Any:
        raise OverflowError("cannot fit")

    async with keeper(room=broken if name == "room" else plenty) as (one, _):
        if name == "MappedBuffer":
            monkeypatch.setattr(real_io, name, broken)
        if name == "reserve":
            monkeypatch.setattr(MappedBuffer, name, broken)
        one.launch(1, [0], 1, None)
        rank = FakeRank(one)
        rank.want(100_000)
        one.look()
        await until("refusal", lambda: rank.record[Word.REFUSED])


# ---- a write ends, whatever happens


@pytest.mark.parametrize("broken", ["lend", "order", "carry_out"])
def test_a_write_that_fails_in_an_unforeseen_way_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    plan = RunPlan(
        run="r", name="n", directory="/d", cluster="local", active=1, spares=0, ranks_per_node=1, script="t"
    )
    told: list[Any] = []
    ended: list[str] = []

    async def work() -> None:
        directory = RunDirectory(tmp_path / "run")
        directory.create()
        mine = Keeper(RealKeeperIo(Access(b"s" * 32, encrypt=False), "a", 1), told.append)
        storage = NodeStorage(directory, plan, mine, None)
        keeping = Keeping(mine, storage, told.append, lambda id, phase: None, ended.append)
        place = {"lend": mine, "order": storage, "carry_out": storage._processes}[broken]

        def fail(*_: Any) -> Any:
            raise AttributeError("a slip of the pen")

        async def lends(*_: Any) -> Any:
            return Loan("/p", None, b"", lambda: None, lambda: None)  # type: ignore[arg-type]

        monkeypatch.setattr(mine, "lend", lends)
        monkeypatch.setattr(storage, "order", lambda *_: None)
        monkeypatch.setattr(place, broken, fail)
        keeping.write(msg.Write(id="7", tier=im.SHARED, step=1, attempt=1, ranks=(0,), world=1))
        await until("end", lambda: ended)
        await keeping.close()
        await mine.close()

    run(work())
    (written,) = [message for message in told if isinstance(message, msg.Written)]
    assert (written.id, written.ok) == ("7", False)
    assert "AttributeError: a slip of the pen" in written.why
    assert ended == ["7"]
