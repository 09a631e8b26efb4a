"""Where hanging ranks stand: real processes asked for their stacks, and what is read from those."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

from jurymast.agent.stacks import StackTaker, loader_workers
from jurymast.core.judges import stacks
from jurymast.core.judges.stacks import (
    BACKWARD,
    BLOCKED,
    CODE,
    COLLECTIVE,
    LOADER,
    UNKNOWN,
    Frame,
    LoaderWorker,
    Place,
    absent,
    behind,
    describe,
    frames,
    place,
    stand,
)
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import RankPlace
from jurymast.core.state.settings import RunPlan
from jurymast.processes import process_state
from jurymast.rundir import RunDirectory, make_folder, ranks_folder
from jurymast.worker import stack_signal
from support.stories import Story
from support.waiting import wait_until

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
ALL_REDUCE = [
    f"{TORCH}/distributed/distributed_c10d.py:3001 all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 wrapper",
    "/home/ada/train.py:57 step",
    "/home/ada/train.py:80 main",
]
DDP_BACKWARD = [
    f"{TORCH}/autograd/graph.py:829 _engine_run_backward",
    f"{TORCH}/autograd/__init__.py:347 backward",
    f"{TORCH}/_tensor.py:648 backward",
    "/home/ada/train.py:58 step",
]
DDP_BUFFERS = [
    f"{TORCH}/nn/parallel/distributed.py:2266 _default_broadcast_coalesced",
    f"{TORCH}/nn/parallel/distributed.py:2191 _sync_buffers",
    "/opt/jurymast/worker/hooks.py:120 timed",
    f"{TORCH}/nn/parallel/distributed.py:1690 forward",
    "/home/ada/train.py:56 step",
]
DATA_LOADER = [
    "/usr/lib/python3.11/queue.py:180 get",
    f"{TORCH}/utils/data/dataloader.py:1275 _try_get_data",
    "/home/ada/train.py:40 main",
]
OWN_CODE = [
    "/usr/lib/python3.11/threading.py:324 wait",
    "/home/ada/data.py:9 fetch",
    "/home/ada/train.py:40 main",
]


def dump(calls: list[str], *others: list[str]) -> str:
    """As faulthandler writes it: the thread that took the signal is the last one."""
    text = ""
    for number, stack in enumerate([*others, calls]):
        head = "Current thread" if stack is calls else "Thread"
        text += f"{head} 0x{number:016x} (most recent call first):\n"
        for call in stack:
            file, _, rest = call.rpartition(":")
            line, _, function = rest.partition(" ")
            text += f'  File "{file}", line {line} in {function}\n'
        text += "\n"
    return text


@pytest.mark.parametrize(
    ("calls", "kind", "text"),
    [
        (ALL_REDUCE, COLLECTIVE, "in all_reduce at train.py:57"),
        (DDP_BACKWARD, BACKWARD, "in backward at train.py:58"),
        (DDP_BUFFERS, COLLECTIVE, "in DDP's forward at train.py:56"),
        (DATA_LOADER, LOADER, "in the data loader at train.py:40"),
        (OWN_CODE, CODE, "in fetch at data.py:9"),
        ([f"{TORCH}/nn/modules/linear.py:125 forward", *OWN_CODE[1:]], CODE, "in fetch at data.py:9"),
        (
            [f"{TORCH}/distributed/checkpoint/filesystem.py:300 write", *ALL_REDUCE],
            CODE,
            "in step at train.py:57",
        ),
        (["/usr/lib/python3.11/runpy.py:88 _run_code"], CODE, "in _run_code at runpy.py:88"),
    ],
)
def test_the_innermost_telling_frame_says_where_a_rank_stands(calls: list[str], kind: str, text: str) -> None:
    assert place(frames(dump(calls, ALL_REDUCE, OWN_CODE))) == Place(kind, text)


def standing(calls: list[str]) -> RankPlace:
    stack = frames(dump(calls))
    return stand(stack, place(stack))


def test_a_rank_that_polls_within_a_collective_stands_and_one_that_works_moves() -> None:
    polling = [f"{TORCH}/distributed/distributed_c10d.py:4001 _wait", *ALL_REDUCE]
    assert standing(ALL_REDUCE) == standing(polling)
    assert standing(DDP_BACKWARD).kind == BACKWARD
    compiling = [f"{TORCH}/_inductor/graph.py:700 run", *DDP_BACKWARD]
    assert standing(compiling).kind == CODE
    assert standing(compiling) != standing([f"{TORCH}/_inductor/graph.py:701 run", *DDP_BACKWARD])
    assert standing(OWN_CODE) == standing(OWN_CODE) != standing(OWN_CODE[1:])
    assert stand([], place([], "state D")) == RankPlace(UNKNOWN, "without a stack (state D)")


def test_a_dump_of_py_spy_is_read_too() -> None:
    text = (
        'Thread 812 (idle): "pt_autograd_0"\n    step (/home/ada/other.py:1)\n'
        'Thread 811 (active): "MainThread"\n    fetch (/home/ada/data.py:9)\n    main (/home/train.py:4)\n'
    )
    assert place(frames(text)) == Place(CODE, "in fetch at data.py:9")


def test_no_stack_is_said_to_be_none() -> None:
    assert frames("") == []
    assert place([], "state D, in nfs_wait") == Place(UNKNOWN, "without a stack (state D, in nfs_wait)")


WAITS, GRADIENTS = Place(COLLECTIVE, "in all_reduce at a.py:1"), Place(BACKWARD, "in backward at a.py:2")
WORKS, READS, NOTHING = (
    Place(CODE, "in f at a.py:3"),
    Place(LOADER, "in the data loader at a.py:4"),
    Place(UNKNOWN, ""),
)


HELD_UP = Place(BLOCKED, "waiting at a.py:5 for its DataLoader worker 0")


@pytest.mark.parametrize(
    ("places", "missing"),
    [
        ([WAITS, WAITS, WORKS, WAITS], (2,)),
        ([GRADIENTS, WAITS, READS], (2,)),
        ([WORKS, READS, WAITS], (0, 1)),
        ([WAITS, NOTHING], (1,)),
        ([NOTHING, WORKS, WAITS], (1,)),  # the first was too slow to answer
        ([WAITS, WAITS], ()),
        ([WORKS, WORKS, READS, WORKS], (2,)),  # on GPUs: the others wait at a line of their own
        ([WORKS, READS], ()),
        ([NOTHING, NOTHING], ()),
        ([HELD_UP, WAITS], (0,)),
        ([HELD_UP], (0,)),  # nobody else answered in time
        ([NOTHING, HELD_UP], (1,)),
        ([HELD_UP, WORKS, HELD_UP, WAITS, READS], (0, 2)),
        ([HELD_UP, HELD_UP], ()),  # by the storage that all read from, say
        ([], ()),
    ],
)
def test_who_never_came_to_where_the_others_wait(places: list[Place], missing: tuple[int, ...]) -> None:
    assert absent(dict(enumerate(places))) == missing


def test_those_that_are_alone_are_told_first() -> None:
    assert (
        describe(dict(enumerate([GRADIENTS] * 9 + [WORKS])))
        == "rank 9 in f at a.py:3, 9 ranks in backward at a.py:2"
    )


# The state machine.


def stopped_with(story: Story, places: dict[int, Place], **values: Any) -> None:
    from jurymast.core.state import events as ev

    for rank, at in places.items():
        node = story.state.placement[rank]
        story.feed(
            ev.StacksTaken(
                t=story.t, node=node, attempt=story.state.attempt, ranks=(rank,), kinds=(at.kind,),
                places=(at.text,), folder="evidence/attempt-0001", **values,
            )
        )  # fmt: skip
    story.stopped()


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("at", [WORKS, READS, Place(UNKNOWN, "without a stack")])
def test_a_hang_names_the_rank_that_is_elsewhere_and_the_second_time_who_is_at_fault(
    at: Place, by_torch: bool
) -> None:
    """The script, if the rank stands at the same line of it again; otherwise the node. Whoever ends it:
    torch's time-out may come first, in a rank that is not at fault."""
    story = Story(active=3).running()
    culprit = story.state.placement[1]
    message = "Timed out waiting 1800000ms for recv operation to complete"
    for again in (False, True):
        (stop,) = story.failed(2, error="RuntimeError", message=message) if by_torch else story.hung()
        assert getattr(stop, "stacks", None) is not by_torch
        stopped_with(story, {0: WAITS, 1: at, 2: WAITS})
        incident = story.incident
        of_script = again and at.kind != UNKNOWN
        cause = ("script_fault", "application") if of_script else ("hang", "infrastructure")
        assert (incident.cause, incident.charged) == cause
        assert (incident.node, incident.rank) == (culprit, 1)
        assert incident.evidence.endswith(
            f"rank 1 {at.text}, ranks 0, 2 in all_reduce at a.py:1; "
            "rank 1 never reached the place where the others wait; stacks in evidence/attempt-0001"
        )
        assert incident.action == ("swap" if again and not of_script else "restart")
        story.recovered(10, 20)
    if at.kind != UNKNOWN:
        assert f"hang 2 times in a row at the same place ({at.text})" in story.incident.evidence
        assert story.state.incidents[0].charged == "application", "so was the first"


def test_where_all_ranks_hang_at_one_line_of_the_script_twice_that_is_at_fault() -> None:
    story = Story(active=3).running()
    for cause in ("hang", "script_fault"):
        story.hung()
        stopped_with(story, dict.fromkeys(range(3), WORKS))
        assert (story.incident.cause, story.incident.node, story.incident.rank) == (cause, "", None)
        story.recovered(10, 20)
    assert f"hang 2 times in a row at the same place ({WORKS.text})" in story.incident.evidence


def test_a_hang_without_stacks_or_without_a_difference_names_nobody() -> None:
    for places in ({}, {0: WAITS, 1: WAITS}, {0: WORKS, 1: READS}):
        story = Story().running()
        story.hung()
        stopped_with(story, places)
        assert (story.incident.cause, story.incident.node, story.incident.rank) == ("hang", "", None)


def test_a_missing_flight_record_is_told() -> None:
    story = Story().running()
    story.hung()
    stopped_with(story, {0: WAITS, 1: WAITS}, recorded=True, records=(0,))
    assert "no flight record from rank 1" in story.incident.evidence


def test_flight_records_name_the_rank_where_stacks_do_not() -> None:
    """On a GPU all ranks may stand at the same line, which waits for what runs behind it."""
    story = Story().running()
    story.hung()
    culprit = story.state.placement[1]
    flights = [
        [0, "0", 57, "all_reduce", True],
        [1, "0", 56, "all_reduce", False],
    ]
    stopped_with(story, {0: WORKS, 1: WORKS}, recorded=True, records=(0, 1), flights=tuple(flights))
    incident = story.incident
    assert (incident.cause, incident.node, incident.rank) == ("hang", culprit, 1)
    assert "rank 1 never entered all_reduce number 57 of group 0, where rank 0 waits" in incident.evidence


def test_other_failures_do_not_wait_for_stacks() -> None:
    story = Story().running()
    (stop,) = story.failed(0)
    assert getattr(stop, "stacks", None) is False


def test_a_compilation_under_ddp_is_no_wait_for_others() -> None:
    """Its innermost frames wait for the compiler's program."""
    stack = (
        Frame("/usr/lib/python3.11/selectors.py", 415, "select"),
        Frame("/usr/lib/python3.11/subprocess.py", 1209, "communicate"),
        Frame(f"{TORCH}/_inductor/cpp_builder.py", 40, "run"),
        Frame(f"{TORCH}/nn/parallel/distributed.py", 1690, "forward"),
        Frame("/home/ada/train.py", 56, "step"),
    )
    assert place(stack) == Place(CODE, "in step at train.py:56")


IN_LOADER = Place(LOADER, "in the data loader at train.py:20", "train.py:20")
IDLE = (
    Frame("/usr/lib/python3.11/multiprocessing/connection.py", 5, "poll"),
    Frame("/x/site-packages/torch/utils/data/_utils/worker.py", 320, "_worker_loop"),
    Frame("/home/me/train.py", 20, "main"),
)
IMPORTS = (Frame("<frozen importlib._bootstrap>", 1027, "acquire"), *IDLE[1:])
NOT_BEGUN = (
    Frame("/usr/lib/python3.11/multiprocessing/util.py", 170, "_run_after_forkers"),
    Frame("/usr/lib/python3.11/multiprocessing/popen_fork.py", 71, "_launch"),
    Frame("/home/me/train.py", 20, "main"),
)
STUCK = (
    Frame("/usr/lib/python3.11/threading.py", 5, "wait"),
    Frame("/home/me/data.py", 7, "__getitem__"),
    *IDLE[1:],
)


def test_torchdatas_loader_is_a_loader() -> None:
    stack = (
        Frame("/usr/lib/python3.11/selectors.py", 415, "select"),
        Frame("/x/site-packages/torchdata/stateful_dataloader/stateful_dataloader.py", 1215, "_try_get_data"),
        Frame("/x/site-packages/lightning/pytorch/trainer/trainer.py", 560, "fit"),
        Frame("/home/me/train.py", 20, "main"),
    )
    assert place(stack) == IN_LOADER


@pytest.mark.parametrize(
    ("workers", "kind", "text"),
    [
        ((), LOADER, IN_LOADER.text),
        ((LoaderWorker(0, "S", IDLE),), LOADER, IN_LOADER.text),
        (
            (LoaderWorker(0, "S", IDLE), LoaderWorker(1, "S", STUCK)),
            LOADER,
            "waiting at train.py:20 for its DataLoader worker 1, which is in __getitem__ at data.py:7",
        ),
        (
            (LoaderWorker(0, "S", IMPORTS),),
            LOADER,
            "waiting at train.py:20 for its DataLoader worker 0, which is in acquire at "
            "<frozen importlib._bootstrap>:1027",
        ),
        (
            (LoaderWorker(0, "S", NOT_BEGUN),),
            LOADER,
            "waiting at train.py:20 for its DataLoader worker 0, which has not begun: "
            "in _run_after_forkers at util.py:170",
        ),
        (
            (LoaderWorker(0, "T"), LoaderWorker(1, "S", STUCK)),
            BLOCKED,
            "waiting at train.py:20 for its DataLoader worker 0, which is stopped (state T)",
        ),
        (
            (LoaderWorker(0, "Z"),),
            BLOCKED,
            "waiting at train.py:20 for its DataLoader worker 0, which has ended",
        ),
        (
            (LoaderWorker(0, "D"),),
            LOADER,
            "waiting at train.py:20 for its DataLoader worker 0, which gave no stack (state D)",
        ),
    ],
)
def test_the_loader_worker_that_holds_a_rank_up_is_named(
    workers: tuple[LoaderWorker, ...], kind: str, text: str
) -> None:
    assert behind(IN_LOADER, workers) == Place(kind, text)


def test_a_rank_without_a_stack_may_wait_for_a_loader_worker_that_is_stopped() -> None:
    silent = Place(UNKNOWN, "without a stack (state S)")
    told = "without a stack (state S), may wait for its DataLoader worker 0, which is stopped (state T)"
    assert behind(silent, (LoaderWorker(0, "T"), LoaderWorker(1, "S", STUCK))) == Place(UNKNOWN, told)
    assert behind(silent, (LoaderWorker(0, "S", STUCK),)) == silent


def test_only_a_rank_that_waits_for_its_loader_looks_at_its_workers() -> None:
    elsewhere = Place(CODE, "in main at train.py:3")
    assert behind(elsewhere, (LoaderWorker(0, "T"),)) == elsewhere


# Real processes.

RANK = f"""
import sys
sys.path[:0] = {sys.path!r}
from jurymast.worker import stack_signal
stack_signal.listen()
def stand_here():
    print("ready", flush=True)
    {{wait}}
stand_here()
"""
SLEEPS = "import time; time.sleep(600)"
# Blocks the signal until it was sent; another thread would take it meanwhile if it were sent to the process.
BLOCKS = """import signal, threading, time
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [stack_signal.NUMBER])
    while stack_signal.NUMBER not in signal.sigpending():
        time.sleep(0.01)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [stack_signal.NUMBER])
    time.sleep(600)"""
# Holds the interpreter's lock in C code for minutes.
COUNTS = "sum(range(10 ** 11))"


@contextmanager
def rank_process(folder: Path, local_rank: int, wait: str, *, listens: bool = True) -> Iterator[int]:
    path = folder / stack_signal.file_name(1, local_rank)
    environment = {**os.environ, stack_signal.PATH_VARIABLE: str(path)} if listens else dict(os.environ)
    with subprocess.Popen(
        [sys.executable, "-c", RANK.format(wait=wait)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def order(attempt: int, rank: int) -> msg.Launch:
    return msg.Launch(attempt=attempt, rank=rank, world=2, master_address="", master_port=0)


@pytest.fixture
def taken(tmp_path: Path) -> tuple[StackTaker, list[Any], RunDirectory]:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    plan = RunPlan(
        run="r", name="r", directory=str(directory.root), cluster="local", active=1, spares=0,
        ranks_per_node=2, script="train.py",
    )  # fmt: skip
    said: list[Any] = []
    looking = StackTaker(directory, plan, tmp_path, said.append)
    looking.launch(order(1, 1))
    return looking, said, directory


Taken = tuple[StackTaker, list[Any], RunDirectory]


def test_ranks_tell_where_they_stand_even_with_the_interpreters_lock_held(
    taken: Taken, tmp_path: Path
) -> None:
    looking, said, directory = taken
    with rank_process(tmp_path, 0, SLEEPS) as first, rank_process(tmp_path, 1, COUNTS) as second:
        asyncio.run(looking.take([first, second]))
        os.kill(first, 0)
        (message,) = said
        assert (message.attempt, message.ranks, message.kinds) == (1, (2, 3), (CODE, CODE))
        assert all(at.startswith("in stand_here at <string>:") for at in message.places)
        assert (message.recorded, message.records) == (False, ())
        folder = directory.root / message.folder
        file = folder / "stacks-00002-00003.txt"
        wait_until("the file", file.exists)
    _, *parts = re.split(r"^rank \d+, ", file.read_text(), flags=re.M)
    for part, pid in zip(parts, (first, second), strict=True):
        assert f"process {pid}" in part
        assert "in stand_here" in part
        assert "SigCgt:" in part
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_the_main_thread_answers_even_if_another_could_before_it(tmp_path: Path) -> None:
    with rank_process(tmp_path, 0, BLOCKS) as pid:
        wait_until("the block", lambda: not stack_signal.listens(pid))
        stack_signal.ask(pid)
        answer = tmp_path / stack_signal.file_name(1, 0)
        wait_until("the answer", lambda: "in <module>" in answer.read_text())
        assert any(frame.function == "stand_here" for frame in frames(answer.read_text()))


def test_what_cannot_answer_is_not_waited_for_and_not_killed_by_the_question(
    taken: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, said, _ = taken
    monkeypatch.setattr("jurymast.agent.stacks.LIMIT_S", 1e6)
    with (
        rank_process(tmp_path, 0, SLEEPS, listens=False) as deaf,
        rank_process(tmp_path, 1, SLEEPS) as stopped,
    ):
        assert not stack_signal.listens(deaf)
        assert stack_signal.listens(stopped)
        os.kill(stopped, signal.SIGSTOP)
        wait_until("the stop", lambda: process_state(stopped)[0] == "T")
        asyncio.run(looking.take([deaf, stopped]))
        (message,) = said
        assert message.kinds == (UNKNOWN, UNKNOWN)
        assert "state S" in message.places[0]
        assert "state T" in message.places[1]
        os.kill(deaf, 0)


def test_py_spy_looks_at_what_cannot_answer(
    taken: Taken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of its name says what it was asked, as it would say it of a process that it can read."""
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$@" > "$0.asked"\n'
        """printf 'Thread 811 (idle): "MainThread"\\n    fetch (/home/ada/data.py:9)\\n'\n"""
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    looking, said, _ = taken
    with rank_process(tmp_path, 0, SLEEPS) as stopped:
        os.kill(stopped, signal.SIGSTOP)
        wait_until("the stop", lambda: process_state(stopped)[0] == "T")
        asyncio.run(looking.take([stopped]))
        assert said[0].places == ("in fetch at data.py:9",)
        assert (tmp_path / "bin" / "py-spy.asked").read_text().split() == [
            "dump",
            "--nonblocking",
            "--pid",
            str(stopped),
        ]


def test_a_rank_that_is_gone_is_no_error(taken: Taken) -> None:
    looking, said, _ = taken
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    asyncio.run(looking.take([ended.pid]))
    assert said[0].places == ("without a stack (ended)",)


def test_a_flight_recorder_is_asked_and_a_missing_record_is_seen(taken: Taken) -> None:
    """The ranks' side is played by pipes: NCCL's own needs a GPU."""
    looking, said, directory = taken
    environment = looking.launch(order(1, 1))
    prefix = environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] == environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
    assert environment["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(directory.evidence(1)))
    pipes = []
    for rank in (2, 3):
        os.mkfifo(f"{prefix}{rank}.pipe")
        pipes.append(os.open(f"{prefix}{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK))
    make_folder(ranks_folder(directory.evidence(1), 2))
    Path(f"{environment['TORCH_FR_DUMP_TEMP_FILE']}2").write_bytes(b"record")
    asyncio.run(looking.take([os.getpid(), os.getpid()]))
    assert [os.read(pipe, 100) for pipe in pipes] == [b"1\n", b"1\n"]
    for pipe in pipes:
        os.close(pipe)
    assert (said[0].recorded, said[0].records) == (True, (2,))
    told = stacks.evidence([_event(said[0])])
    assert "no flight record from rank 3" in told


def _event(message: msg.Stacks) -> ev.StacksTaken:
    return ev.StacksTaken(t=0.0, node="n1", **asdict(message))


def test_what_the_user_has_set_stays(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under the older of two names: the newer one would be preferred to it."""
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/home/ada/records/rank_")
    environment = taken[0].launch(order(2, 0))
    assert not environment.keys() & {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    assert "TORCH_FR_BUFFER_SIZE" in environment
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in environment, "newer releases warn about it"
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "10")
    assert "TORCH_FR_BUFFER_SIZE" not in taken[0].launch(order(3, 0))


STARTS_ONE = """
import multiprocessing, sys, time
if __name__ == "__main__":
    worker = multiprocessing.get_context(sys.argv[1]).Process(target=time.sleep, args=(1000,), daemon=True)
    worker.start()
    print(worker.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_that_a_loader_starts_is_a_worker_and_a_server_of_such_is_none(
    tmp_path: Path, method: str
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(STARTS_ONE)
    command = [sys.executable, str(script), method]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        worker = int(rank.stdout.readline())
        # While it is being executed anew, the kernel shows no command.
        wait_until("the worker", lambda: loader_workers(rank.pid) == [worker])
        rank.communicate("")
