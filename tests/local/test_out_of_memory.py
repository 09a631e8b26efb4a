"""The memory of a node runs out, in a real cgroup with a limit: whom the kernel kills first, what the run is
told, and that no bit of the training is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from jurymast.processes import OOM_SCORE_FIRST
from jurymast.wire import endpoint
from support.cgroups import kills, leave_bytes
from support.runs import RunUnderTest, local_run, processes_of, result, tree, wait_gone

pytestmark = pytest.mark.torch

# What processes load when they are first needed fits into it as well.
SPARE_BYTES = 700 << 20
ENDLESS = ("--steps", "1000000", "--step-time", "0.05", "--save-every", "10 steps")


def inside(cgroup: Path) -> tuple[str, ...]:
    """The command that starts another one in the cgroup."""
    return ("sh", "-c", f'echo 0 > {cgroup}/cgroup.procs && exec "$@"', "sh")


def score(process: psutil.Process) -> int:
    return int(Path(f"/proc/{process.pid}/oom_score_adj").read_text())


def set_score(process: psutil.Process, value: int) -> None:
    Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(value))


def recovered(number: int, state: RunState) -> bool:
    return state.attempt == number + 1 and state.incident is None and state.step > 0


def check_end(run: RunUnderTest, out: Path, plain: Callable[..., str]) -> None:
    """It has been let end."""
    assert run.wait_end().exit_code == 0, run.story()
    wait_gone(run.directory.root)
    found = result(out)
    assert found["sha256"] == plain("--steps", str(found["steps"]))


def test_what_leaks_dies_and_the_job_is_told_so(
    tmp_path: Path, memory_cgroup: Path, trained_plainly: Callable[..., str]
) -> None:
    out, enough, now = tmp_path / "out.json", tmp_path / "end", tmp_path / "now"
    train = (*ENDLESS, "--until", str(enough), "--out", str(out))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*train, "--leak-once", f"{now}:1:rank,loader,child"),
                   within=inside(memory_cgroup)) as run:  # fmt: skip
        for number in (1, 2, 3):
            run.wait_safe((run.state().step if number > 1 else 0) + 20)
            leave_bytes(memory_cgroup, SPARE_BYTES)
            Path(f"{now}.{number}").touch()
            incident = run.wait("the recovery", partial(recovered, number)).incidents[number - 1]
            assert kills(memory_cgroup) == number, "whoever else was killed was killed for nothing"
            assert (incident.cause, incident.charged, incident.action) == (
                "out_of_memory", "application", "restart",
            ), run.story()  # fmt: skip
            assert "1 out-of-memory kill in the node's cgroup" in incident.evidence
        assert not [e for e in run.events() if isinstance(e, ev.NodeLost)]
        enough.touch()
        check_end(run, out, trained_plainly)


@pytest.mark.long
def test_an_agent_that_is_killed_for_want_of_memory_is_told_as_what_it_was(
    tmp_path: Path, memory_cgroup: Path, trained_plainly: Callable[..., str]
) -> None:
    """Its node stays: another agent starts there at once, and the other node has what it held."""
    out, enough, now = tmp_path / "out.json", tmp_path / "end", tmp_path / "now"
    # Images make the agent larger than helpers that start later.
    train = (*ENDLESS, "--until", str(enough), "--buffer-mib", "100", "--out", str(out))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*train, "--leak-once", f"{now}:1:rank"),
                   within=inside(memory_cgroup)) as run:  # fmt: skip
        state = run.wait_safe(20)
        node = state.placement[1]
        agent = psutil.Process(run.agent_pid(node))
        for process in processes_of(run.directory.root):  # as if nothing had been done about it
            with suppress(OSError):  # it has ended by now
                set_score(process, 0)
        set_score(agent, 1000)
        leave_bytes(memory_cgroup, 2 * SPARE_BYTES)
        Path(f"{now}.1").touch()
        state = run.wait("the recovery", partial(recovered, 1))
        incident = state.incidents[0]
        assert (incident.cause, incident.charged, incident.node) == (
            "out_of_memory", "application", node,
        ), run.story()  # fmt: skip
        assert run.agent_pid(node) != agent.pid
        assert node in state.placement, run.story()
        assert state.excluded == {}
        enough.touch()
        check_end(run, out, trained_plainly)


def test_all_that_ranks_start_dies_before_those_who_tell_of_it(tmp_path: Path) -> None:
    train = (*ENDLESS, "--until", str(tmp_path / "end"))
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="train_tiny.py",
                   arguments=train) as run:  # fmt: skip
        run.wait("a checkpoint on storage", lambda s: "shared" in s.saved)
        agent, rank = psutil.Process(run.agent_pid("local-1")), psutil.Process(run.pids("local-1")[0])
        place = endpoint.find(run.directory.epochs)
        assert place is not None
        spared = [agent, *agent.parents()[:2], psutil.Process(place.pid)]  # its guard, the batch process
        assert max(map(score, spared)) < OOM_SCORE_FIRST
        storage, others = set[int](), set[int]()
        for process in tree(agent.pid):
            with suppress(psutil.NoSuchProcess, OSError):  # it has ended by now
                if process != agent:
                    (storage if "jurymast.storage" in process.cmdline() else others).add(score(process))
        assert max(storage) < OOM_SCORE_FIRST
        assert others == {OOM_SCORE_FIRST}
        assert score(rank) == OOM_SCORE_FIRST
        (tmp_path / "end").touch()
        run.wait_end()
