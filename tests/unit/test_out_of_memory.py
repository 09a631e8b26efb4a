"""The memory of a node runs out: who is told to be at fault, whatever the kernel chose to kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from jurymast.agent.guard import RESTARTS_MAX
from jurymast.agent.storage_processes import StorageProcesses
from jurymast.cluster import earlier
from jurymast.core.judges import explained, loops
from jurymast.core.judges.attribution import attribute
from jurymast.core.judges.history import PastRun, judged
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Finish, Launch, Requeue
from jurymast.core.state.run import Phase, Role
from jurymast.jobs import await_ended
from jurymast.storage import orders
from support.attribution import found
from support.cgroups import kills, limit_file, new_cgroup
from support.stories import Story

# What ranks report.


def failed(
    error: str, message: str = "", *, rank: int = 1, code: int = 1, kills: int | None = 1
) -> ev.WorkerFailed:
    return ev.WorkerFailed(
        t=float(rank), node=f"n{rank}", attempt=1, rank=rank, exit_code=code, error=error, message=message,
        oom_kills=kills,
    )  # fmt: skip


LOADER = "DataLoader worker (pid(s) 4711) is killed by signal: Killed. "
GLOO = failed("RuntimeError", "[gloo] Connection closed by peer [10.0.0.7]:4711", rank=0, kills=0)


@pytest.mark.parametrize(
    "report",
    [
        failed("", code=-9),
        failed("TorchrunHostDied", rank=-1, code=-9),
        failed("RuntimeError", LOADER),
        failed("CalledProcessError", "Command 'tokenise' died with <Signals.SIGKILL: 9>."),
        failed("BrokenProcessPool", "A process in the process pool was terminated abruptly"),
        failed("", code=137),
        failed("EOFError"),
        failed("ConnectionResetError", "[Errno 104] Connection reset by peer"),
    ],
)
def test_whatever_a_kill_for_memory_leads_to_is_the_programs(report: ev.WorkerFailed) -> None:
    cause = attribute(found(GLOO, report))
    assert (cause.kind, cause.charged) == ("out_of_memory", "application")
    assert "after 1 out-of-memory kill in the node's cgroup" in cause.evidence
    again = attribute(found(failed("", rank=2, code=-9)))
    assert cause.signature == again.signature, "the kernel chooses another process each time"


def test_an_allocation_in_c_that_ends_a_rank_is_one_of_memory() -> None:
    report = msgspec.structs.replace(
        failed("", code=-6, kills=0), log="terminate called ... | what():  std::bad_alloc"
    )
    assert attribute(found(report)).kind == "out_of_memory"
    assert attribute(found(failed("", code=-6, kills=0))).kind == "worker_crash"


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        (failed("RuntimeError", LOADER, kills=0), "worker_exception"),
        (failed("RuntimeError", LOADER, kills=None), "worker_exception"),
        (failed("", code=-11), "worker_crash"),
        (failed("OutOfMemoryError", "CUDA out of memory."), "gpu_out_of_memory"),
    ],
)
def test_other_ends_stay_what_they_are(report: ev.WorkerFailed, kind: str) -> None:
    assert attribute(found(GLOO, report)).kind == kind


# An agent that was killed.


def joins_again(story: Story, node: str, kills: int = 1) -> None:
    story.feed(
        ev.NodeJoined(
            t=story.t, node=node, address="10.0.0.9", incarnation=f"{node}@{story.t}", pid=9, oom_kills=kills
        )
    )  # fmt: skip


def closed(story: Story, node: str) -> None:
    story.feed(ev.NodeLost(t=story.t, node=node, how="closed", silent_s=0.3, limit_s=0.25))


def past(story: Story, tmp_path: Path) -> PastRun:
    """As a later run reads the journal."""
    return earlier.past_runs(story.write(tmp_path / "run").root.parent)[0]


def departures(story: Story, tmp_path: Path) -> list[bool]:
    """Whether each departure is a strike."""
    return [struck for _, struck, _ in judged(past(story, tmp_path).departures)]


def test_an_agent_killed_for_memory_that_is_back_at_once_is_the_programs_failure(tmp_path: Path) -> None:
    story = Story(active=2, spares=0).running()
    node = story.state.placement[1]
    joins_again(story, node)
    story.stopped()
    incident = story.incident
    assert (incident.cause, incident.charged, incident.action) == ("out_of_memory", "application", "restart")
    assert (
        incident.evidence == f"{node}: its agent was killed after 1 out-of-memory kill in the node's cgroup"
    )
    story.feed(ev.NodeReady(t=story.t, node=node, store_port=1))
    for name in story.state.placement:
        story.feed(ev.NodeReady(t=story.t, node=name, store_port=1))
    assert set(story.last(Launch).placement) == set(story.state.nodes), "the node is used again"
    assert departures(story, tmp_path) == []


def test_without_a_spare_the_word_of_a_killed_agent_is_waited_for() -> None:
    story = Story(active=2, spares=0).running()
    node = story.state.placement[1]
    closed(story, node)
    story.stopped(explained_yet=False)
    assert story.state.phase is Phase.STOPPING
    story.wait(explained.LIMIT_S / 2)
    joins_again(story, node)
    story.stopped()
    assert (story.incident.cause, story.state.nodes[node].role) == ("out_of_memory", Role.JOINING)
    assert not [one for one in story.entries if isinstance(one, Requeue)]


def test_a_node_that_does_not_come_back_is_replaced_after_a_moment() -> None:
    story = Story(active=2, spares=0).running()
    closed(story, story.state.placement[1])
    story.stopped(explained_yet=False)
    story.wait(explained.LIMIT_S + 1.0)
    assert story.incident.cause == "node_crash"
    story.last(Requeue)


def test_a_ready_spare_waits_for_no_explanation_and_the_node_is_cleared_when_it_comes(tmp_path: Path) -> None:
    story = Story(active=2, spares=1).running()
    node = story.state.placement[1]
    closed(story, node)
    story.stopped()
    assert node not in story.last(Launch).placement
    assert story.incident.cause == "node_crash", "nothing else is known"
    joins_again(story, node)
    incident = story.incident
    assert (incident.cause, incident.charged) == ("out_of_memory", "application")
    assert story.state.nodes[node].role is Role.JOINING
    assert story.state.excluded == {}
    assert not any(departures(story, tmp_path)), "no strike"


def test_too_few_spares_for_the_lost_nodes_wait_for_the_word_of_their_next_agents() -> None:
    story = Story(active=3, spares=1).running()
    one, other = story.state.placement[1:]
    closed(story, one)
    closed(story, other)
    story.stopped(explained_yet=False)
    assert story.state.phase is Phase.STOPPING
    joins_again(story, one)
    joins_again(story, other)
    story.stopped()
    assert (story.incident.cause, story.incident.charged) == ("out_of_memory", "application")
    assert not [entry for entry in story.entries if isinstance(entry, Requeue)]


def test_the_word_that_comes_after_the_recovery_corrects_what_was_told(tmp_path: Path) -> None:
    story = Story(active=2, spares=1).running()
    node = story.state.placement[1]
    closed(story, node)
    story.stopped().recovered(5, 20)
    assert (story.state.incident, story.incident.charged) == (None, "infrastructure")
    assert story.state.restores() == (1, 1)
    joins_again(story, node, kills=2)
    assert story.state.restores() == (0, 0), "no failure of the infrastructure"
    incident = story.incident
    assert (incident.cause, incident.charged, incident.node) == ("out_of_memory", "application", node)
    assert "2 out-of-memory kills in the node's cgroup; before that was known: " in incident.evidence
    assert (story.state.phase, story.state.nodes[node].role) == (Phase.RUNNING, Role.JOINING)
    run = past(story, tmp_path)
    assert (run.failures, run.excluded) == ((), ())
    assert [struck for _, struck, _ in judged(run.departures)] == [False]


def test_the_word_that_comes_after_the_requeue_lifts_the_exclusion(tmp_path: Path) -> None:
    story = Story(active=2, spares=0).running()
    node = story.state.placement[1]
    closed(story, node)
    story.stopped(explained_yet=False).wait(explained.LIMIT_S + 1.0)
    assert list(story.state.excluded) == [node]
    assert story.state.expected_times(story.state.nodes[node]) > 1.0
    joins_again(story, node)
    assert story.state.excluded == {}
    assert story.state.expected_times(story.state.nodes[node]) == 1.0
    assert (story.incident.cause, story.incident.charged) == ("out_of_memory", "application")
    run = past(story, tmp_path)
    assert (run.failures, run.excluded) == ((), ())
    assert [struck for _, struck, _ in judged(run.departures)] == [False]


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_each_of_several_nodes_that_were_lost_is_explained_for_itself(how: str) -> None:
    """One that runs out of memory may be silent for a while before."""
    story = Story(active=3, spares=2).running()
    one, other = story.state.placement[1:]
    for node in (one, other):
        story.feed(ev.NodeLost(t=story.t, node=node, how=how, silent_s=1.6, limit_s=1.5))
    story.stopped()
    incident, kind = story.incident, {"closed": "node_crash", "silent": "node_lost"}[how]
    assert (incident.cause, incident.node) == (kind, "")
    joins_again(story, one)
    assert (incident.cause, incident.charged, incident.node) == (kind, "infrastructure", other)
    joins_again(story, other)
    assert (incident.cause, incident.charged) == ("out_of_memory", "application")
    assert "and 1 more node" in incident.evidence


def test_a_node_that_was_lost_by_itself_explains_no_incident() -> None:
    story = Story(active=2, spares=2).running()
    closed(story, story.state.placement[1])
    story.stopped()
    (spare,) = (node.name for node in story.state.spare_nodes())
    closed(story, spare)
    joins_again(story, spare)
    assert story.incident.cause == "node_crash"


def swapped(story: Story) -> str:
    """The agent of the second place's node is killed, and a ready spare takes over; that node."""
    node = story.state.placement[1]
    story.t += 1.0
    closed(story, node)
    story.stopped().backed_off()
    return node


def test_a_program_that_fills_the_memory_of_node_after_node_is_stopped_by_the_word_of_the_last() -> None:
    """Each time a spare has taken over before the next agent tells."""
    story = Story(active=2, spares=2).running()
    for number in range(1, loops.SAME_APPLICATION_ERROR + 1):
        node = swapped(story)
        story.told().ranks_up()
        assert not story.state.ended
        joins_again(story, node, kills=number)
        story.feed(ev.NodeReady(t=story.t, node=node, store_port=1))
    finish = story.last(Finish)
    assert (finish.state, finish.exit_code) == ("failed", 137)
    assert "its agent was killed after 3 out-of-memory kills" in finish.reason
    assert "crash loop: the same failure 3 times without a new step" in finish.reason
    assert story.incident.action == "stop"


def test_words_that_come_after_the_next_loss_stop_it_as_well() -> None:
    story = Story(active=2, spares=4).running()
    before = ""
    for number in range(1, loops.SAME_APPLICATION_ERROR + 2):
        node = swapped(story)
        story.told().ranks_up()
        if before:
            joins_again(story, before, kills=number)
        before = node
    assert story.incident.cause == "node_crash", "nothing else is known of the last"
    assert "crash loop: the same failure 3 times" in story.last(Finish).reason


def test_a_program_that_fills_the_memory_now_and_then_spends_its_budget() -> None:
    story = Story(active=2, spares=4).running()
    most = story.state.settings.application.count
    assert most is not None
    for number in range(1, most + 2):
        assert not story.state.ended
        node = swapped(story)
        story.ranks_up().restored(number * 10).stepped(number * 10 + 11)
        joins_again(story, node)
    finish = story.last(Finish)
    assert f"the application budget of {most} failures per 3600 s is spent: out_of_memory" in finish.reason
    assert story.incident.action == "swap", "it did go on after that"


def test_a_program_that_fills_the_memory_each_time_is_stopped() -> None:
    story = Story(active=2, spares=0).running()
    for number in range(loops.SAME_APPLICATION_ERROR):
        node = story.state.placement[1]
        story.feed(
            ev.NodeJoined(t=story.t, node=node, address="a", incarnation=f"{number}", pid=9, oom_kills=2)
        )
        story.stopped()
        if story.state.ended:
            break
        story.backed_off()
        for name in story.state.placement:
            story.feed(ev.NodeReady(t=story.t, node=name, store_port=1))
        story.told().ranks_up()
    finish = story.last(Finish)
    assert (finish.state, finish.exit_code) == ("failed", 137)
    assert "crash loop" in finish.reason


# The guard, and the kernel's own kills.

GUARDED = """
import json, os, sys, time
from jurymast.agent import guard
def agent(kills):
    print(json.dumps([os.getpid(), kills]), flush=True)
    {body}
sys.exit(guard.run(agent))
"""


def guarded(body: str, cgroup: Path | None = None) -> subprocess.Popen[str]:
    enter = f'echo 0 > "{cgroup}/cgroup.procs" && ' if cgroup is not None else ""
    words = ["sh", "-c", f'{enter}exec "$@"', "sh", sys.executable, "-c", GUARDED.format(body=body)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)


def said(guard: subprocess.Popen[str]) -> list[int]:
    assert guard.stdout is not None
    pid, kills = json.loads(guard.stdout.readline())
    return [pid, kills]


LEAKS = "x = [bytearray(b'x') * (1 << 20) for _ in range(1000)]"
LEAKS_ONCE = f"if kills: return 7\n    {LEAKS}"
LEAVES = 'import subprocess; left = subprocess.Popen(["sleep", "600"], start_new_session=True)'
LEAVES += "; print(json.dumps([left.pid, 0]), flush=True)"


@pytest.mark.parametrize("limited", ["job", "step"])
def test_an_agent_that_the_kernel_killed_for_memory_is_followed_by_one_that_knows_it(limited: str) -> None:
    """Slurm limits the memory of the job and of each of its steps, whose cgroups are below the job's."""
    with new_cgroup() as job, new_cgroup(job) as step:
        limit_file(job if limited == "job" else step).write_text(str(128 << 20))
        with guarded(LEAKS_ONCE, step) as guard:
            first, second = said(guard), said(guard)
            assert guard.wait(60.0) == 7
            assert first[0] != second[0]
            assert (first[1], second[1]) == (0, kills(step))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_that_somebody_kills_stays_dead(number: signal.Signals) -> None:
    with guarded("time.sleep(600)") as guard:
        pid, _ = said(guard)
        os.kill(pid, number)
        assert guard.wait(60.0) == -number


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_ranks_of_a_killed_agent_leave_in_other_sessions_ends_with_its_guard(
    number: signal.Signals,
) -> None:
    with guarded(f"{LEAVES}; time.sleep(600)") as guard:
        agent, _ = said(guard)
        stray, _ = said(guard)
        os.kill(agent, number)
        assert guard.wait(60.0) == -number
        assert await_ended([stray], 0.0), "it has ended before the guard"


def test_what_ranks_of_an_agent_that_ran_out_of_memory_leave_ends_before_the_next_one_has_ranks() -> None:
    with new_cgroup() as job:
        limit_file(job).write_text(str(128 << 20))
        with guarded(f"if kills: return time.sleep(600)\n    {LEAVES}\n    {LEAKS}", job) as guard:
            said(guard)
            stray, _ = said(guard)
            second, seen = said(guard)
            try:
                assert seen == kills(job)
                assert await_ended([stray], 30.0), "and the next agent lives"
            finally:  # the guard then ends what is left
                os.kill(second, signal.SIGKILL)
            assert guard.wait(60.0) == -signal.SIGKILL


def test_the_end_of_the_batch_process_reaches_the_agent() -> None:
    """Only its guard is told, by the kernel; a signal to all of a step reaches the agent itself."""
    starter = "import subprocess, sys; from jurymast.cluster.batch import end_with_us\n"
    starter += f"subprocess.Popen([sys.executable, '-c', {GUARDED.format(body='time.sleep(600)')!r}], "
    starter += "preexec_fn=end_with_us, start_new_session=True).wait()"
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as batch:
        agent = psutil.Process(said(batch)[0])
        guard = agent.parent()
        assert guard is not None
        guard.send_signal(signal.SIGTERM)  # as to each process of a step; the agent decides for itself
        batch.kill()
        assert await_ended([agent.pid, guard.pid], 60.0)


def test_a_storage_process_that_was_killed_for_memory_is_told_so(tmp_path: Path) -> None:
    async def work(oom_kills: Callable[[], int | None]) -> str:
        storage = StorageProcesses(oom_kills=oom_kills)
        writing = asyncio.ensure_future(storage.carry_out(orders.Warm()))
        child = None
        while child is None:
            await asyncio.sleep(0)
            child = storage._tiers[orders.Warm().tier]._child if storage._tiers else None
        os.kill(child.pid, signal.SIGKILL)
        answer = await writing
        await storage.close()
        assert isinstance(answer, orders.StorageFailed)
        return answer.why

    assert "the memory of the job on this node ran out" in asyncio.run(work(lambda: 1))
    assert asyncio.run(work(lambda: 0)) == "the storage process was killed by SIGKILL"


def test_an_agent_that_is_killed_again_and_again_at_its_start_is_given_up() -> None:
    code = (
        "import itertools, os, signal, sys\n"
        "from jurymast.agent import guard\n"
        "counts = itertools.count()\n"
        "guard.oom_kills = lambda _: next(counts)  # as of a kill between any two looks\n"
        "def agent(kills):\n"
        "    os.write(1, b'began\\n')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(guard.run(agent))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, timeout=60.0)
    assert (done.stdout, done.returncode) == (b"began\n" * (1 + RESTARTS_MAX), -signal.SIGKILL)
