"""What ranks leave behind, with real processes: who belongs to it, and who is told to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jurymast.processes import is_tracker
from support.semaphores import abandoned, semaphores
from support.waiting import wait_until

# An agent with a helper, below which a rank has started what outlives it.
AGENT = """
import json, os, signal, subprocess, sys, time
from jurymast import processes
processes.adopt_orphans()
SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
SLEEP += "; print(1, flush=True); time.sleep(600)"
helper = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.DEVNULL)
rank = os.fork()
if rank == 0:
    os.setsid()
    {rank}
{then}
done = processes.end_strays({limit})
print(json.dumps({{"done": done, "helper": helper.poll() is None, "rank": rank}}), flush=True)
helper.kill(); helper.wait()
"""


def agent(rank: str, then: str = "os.waitpid(rank, 0)", limit: float = 60.0) -> dict[str, Any]:
    code = AGENT.format(rank=rank.replace("\n", "\n    "), then=then, limit=limit)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def starts(folder: Path, *words: str) -> str:
    """Python that starts a child for each word, and waits until it runs: "session": in a session of its own,
    "daemon": init would adopt it."""
    return f"""
for word in {words!r}:
    if word == "daemon" and (pid := os.fork()):
        os.waitpid(pid, 0)
        continue
    child = subprocess.Popen([sys.executable, "-c", SLEEP], stdout=subprocess.PIPE,
                             start_new_session=word != "plain")
    child.stdout.read(1)
    open({str(folder)!r} + f"/{{child.pid}}", "w").close()
    if word == "daemon":
        os._exit(0)
os._exit(0)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_a_rank_started_ends_wherever_it_hides_and_our_own_helpers_stay(tmp_path: Path) -> None:
    found = agent(starts(tmp_path, "plain", "session", "daemon"))
    assert found["done"]
    assert found["helper"]
    left = [int(path.name) for path in tmp_path.iterdir()]
    assert len(left) == 3
    assert not any(map(lives, left))


def test_named_memory_of_a_killed_rank_is_removed(tmp_path: Path) -> None:
    """Python's resource tracker does that, if it is not killed with the rank's process group."""
    name = f"jurymast-test-{os.getpid()}-{tmp_path.name}"  # one that no earlier run can have left
    rank = f"""
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory({name!r}, create=True, size=4096)
open({str(tmp_path / "made")!r}, "w").close()
time.sleep(600)
"""
    made = f"while not os.path.exists({str(tmp_path / 'made')!r}): time.sleep(0.01)\n"
    found = agent(rank, made + "processes.kill_group(rank); os.waitpid(rank, 0)")
    assert found["done"]
    wait_until("the end of the segment", lambda: not Path("/dev/shm", name).exists())


@pytest.mark.torch
@pytest.mark.parametrize("again", [False, True])
def test_memory_that_torch_shares_by_files_is_removed_and_holds_no_rank_up(
    tmp_path: Path, again: bool
) -> None:
    """torch's own manager removes it, in two seconds, if it is not killed with the rank's other processes."""
    rank = f"""
import torch.multiprocessing
torch.multiprocessing.set_sharing_strategy("file_system")
import torch
shared = torch.zeros(1 << 18).share_memory_()
names = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{{os.getpid()}}_")]
open({str(tmp_path / "part")!r}, "w").write(names[0])
os.rename({str(tmp_path / "part")!r}, {str(tmp_path / "name")!r})
time.sleep(600)
"""
    shared = f"while not os.path.exists({str(tmp_path / 'name')!r}): time.sleep(0.01)\n"
    killed = f"{shared}processes.kill_group(rank); os.waitpid(rank, 0)"
    found = agent(rank, f"{killed}\nprocesses.end_strays(again=True)" if again else killed)
    name = Path("/dev/shm", (tmp_path / "name").read_text())
    assert found["done"]
    assert not name.exists()


MAKES_A_SEMAPHORE = """
import multiprocessing, sys
from multiprocessing import resource_tracker
lock = multiprocessing.get_context("spawn").Lock()
print(resource_tracker._resource_tracker._pid, "sem." + lock._semlock.name[1:], flush=True)
sys.stdin.read()
"""


def test_a_semaphore_is_abandoned_once_nobody_has_it_and_its_tracker_was_killed() -> None:
    """This is what the tests of runs look for at their ends; the maker has the file under another name."""
    with subprocess.Popen(
        [sys.executable, "-c", MAKES_A_SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        tracker, name = maker.stdout.readline().split()
        file = Path("/dev/shm", name)
        assert file in semaphores()
        assert not abandoned([file])
        assert is_tracker(int(tracker))
        os.kill(int(tracker), signal.SIGKILL)
        maker.kill()
    assert abandoned([file]) == {file}
    file.unlink()


BELOW = """
import os, subprocess, sys
from jurymast import processes
processes.adopt_orphans()
child = subprocess.Popen([sys.executable, "-c", "import os, subprocess, sys; os.setpgid(0, 0); {mark}"
    "p = subprocess.Popen(['sleep', '600'], stdout=-3, stderr=-3, {how});"
    "print(p.pid, flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
pid = int(child.stdout.readline())
{then}
print(os.path.exists(f"/proc/{{pid}}"), child.poll(), pid)
child.kill(); child.wait()
"""


def below(how: str, then: str, mark: str = "") -> list[str]:
    code = BELOW.format(how=how, then=then, mark=mark)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("how", ["start_new_session=True", "preexec_fn=os.setpgrp", ""])
def test_what_a_probe_started_ends_with_it_in_whatever_session_or_group(how: str) -> None:
    then = "processes.kill_below(child.pid)"
    then += "\nwhile open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'Z': pass"
    assert below(how, then)[:2] == ["True", "None"], "it has ended, and the probe itself has not"


@pytest.mark.parametrize("marked", [True, False])
def test_what_a_probe_of_a_killed_agent_has_left_in_its_session_is_ended_too(marked: bool) -> None:
    """By the guard, which runs no probe and none of our other processes then."""
    mark = "from jurymast.processes import die_first; die_first();" if marked else ""
    then = "child.kill(); child.wait(); print(processes.end_strays(5.0, probes=True))"
    told = below("preexec_fn=os.setpgrp", then, mark)
    assert told[:2] == ["True", str(not marked)]
    if not marked:
        os.kill(int(told[3]), signal.SIGKILL)
