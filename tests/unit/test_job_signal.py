"""What a job's `--signal` does to a run, and what is said of it at submission."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from jurymast.cluster.batch import SIGNALS
from jurymast.cluster.planning import signal_note
from jurymast.cluster.sbatch import CommandLine, merged, parse, split_command_line
from jurymast.cluster.signals import JobSignal
from jurymast.supervisor.real_io import RealIo

TRAPS = "#!/bin/bash\ntrap 'touch requeue' SIGTERM USR1\nsrun torchrun train.py\n"
LIMIT_S = 60.0
BARE = "#!/bin/bash\n# trap 'no' TERM\nsrun torchrun train.py\n"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("B:TERM@60", (15, 60.0, True)),
        ("SIGTERM@600", (15, 600.0, False)),
        ("b:usr1", (10, 60.0, True)),
        ("RB:10@5", (10, 5.0, True)),
        ("R:KILL", (9, 60.0, False)),
        ("9@120", (9, 120.0, False)),
    ],
)
def test_the_signal_of_a_job_is_read_as_slurm_reads_it(text: str, read: tuple[int, float, bool]) -> None:
    found = JobSignal.read(text)
    assert found is not None
    assert (found.number, found.seconds, found.to_batch) == read


@pytest.mark.parametrize("text", [None, "", "B:", "B:FROB@60", "TERM@x", "99", "0", "X:TERM", "SIG_DFL"])
def test_what_sbatch_refuses_itself_is_no_signal(text: str | None) -> None:
    assert JobSignal.read(text) is None


@pytest.mark.parametrize(
    ("text", "script", "ends", "told"),
    [
        ("B:USR2@120", None, False, ""),
        ("B:QUIT@120", None, False, ""),
        ("B:URG@60", BARE, False, ""),
        ("CONT@60", None, False, ""),
        ("B:TERM@60", None, False, "does not end the run, which saves before, and goes on"),
        ("B:KILL@60", None, True, "60 s before the time limit it ends the batch process"),
        ("B:STOP@60", None, True, "it stops the batch process"),
        (
            "TERM@600",
            None,
            True,
            "600 s before the time limit it ends all processes of the ranks that do not",
        ),
        ("USR1", None, True, "the ranks are started again; B:USR1 spares them"),
        ("KILL@60", None, True, "of the ranks and of jurymast's agents; the run saves before; B:KILL"),
        ("B:TERM@60", BARE, True, "it ends the script, in which there is no trap for TERM; its trainings"),
        ("B:TERM@60", TRAPS, True, ""),
        ("B:USR1@600", TRAPS, True, ""),
        ("B:USR2@600", TRAPS, True, "it ends the script, in which there is no trap for USR2"),
        ("TERM@60", TRAPS, True, "all processes of the ranks that do not catch TERM"),
    ],
)
def test_what_is_said_of_a_signal(text: str, script: str | None, ends: bool, told: str) -> None:
    found = JobSignal.read(text)
    assert found is not None
    assert found.ends_in(script) is ends
    assert (found.told(script) == "") is (told == "")
    assert told in found.told(script)


def test_the_note_names_the_line() -> None:
    script = parse("#!/bin/sh\n#SBATCH --nodes=2\n#SBATCH --signal=B:TERM@60\nsrun python t.py\n", "a.sh", {})
    told = merged(script, {}, CommandLine())
    assert signal_note(told, script).startswith(
        "a.sh, line 3: --signal=B:TERM@60: 60 s before the time limit"
    )
    assert signal_note(merged(None, {}, split_command_line(["--signal=B:USR1@60"], {})), None) == ""
    assert signal_note(merged(None, {}, CommandLine()), None) == ""


async def test_a_supervisor_hears_of_warnings_and_of_the_end_of_the_job() -> None:
    heard = asyncio.Queue[str]()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    io = RealIo.__new__(RealIo)  # it needs nothing of it
    for number in SIGNALS:  # one that is not heard does not end this process
        signal.signal(number, lambda *_: None)
    try:
        io.on_signals(lambda: heard.put_nowait("warned"), lambda: heard.put_nowait("terminated"))
        for number, how in ((signal.SIGUSR2, "warned"), (signal.SIGTERM, "terminated")):
            os.kill(os.getpid(), number)
            assert await asyncio.wait_for(heard.get(), LIMIT_S) == how
    finally:
        for number, handler in before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
