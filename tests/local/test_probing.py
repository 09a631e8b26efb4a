"""Health probes in their real child process: a third party's, found by entry point, that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from jurymast.agent.health import Probing
from jurymast.core.judges.own_health import OFFSETS
from jurymast.core.state import events as ev
from jurymast.core.state.messages import HealthFound
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.health.probe import Context, Finding
from jurymast.health.watcher import ProbeWatcher
from jurymast.jobs import await_ended, began_at
from jurymast.rundir import RunDirectory
from support.probes import Acme
from support.runs import command_of, jurymast, local_run, wait_gone
from support.waiting import LIMIT_S, wait_until

# Long enough for a busy machine, short enough to wait for it twice.
LOOK_LIMIT_S = 3.0
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Acme]:
    """Makes the package with probes of these names, and has children and this process find it first."""

    def make(*names: str) -> Acme:
        folder = tmp_path / "acme"
        folder.mkdir()
        package = Acme(folder, *names)
        monkeypatch.setenv("PYTHONPATH", package.python_path)
        monkeypatch.syspath_prepend(str(folder))
        return package

    return make


class Watched:
    """A watcher at work, and all that it told of."""

    def __init__(
        self, *names: str, once: bool = False, thresholds: Mapping[str, float] | None = None
    ) -> None:
        self.told: list[Finding] = []
        context = Context(node="n1", thresholds={"look-limit-s": LOOK_LIMIT_S, **(thresholds or {})})
        self.watcher = ProbeWatcher(context, names, self.told.append, once=once)

    async def until(self, what: str, condition: Callable[..., Any], *arguments: Any) -> None:
        end = time.monotonic() + 120.0  # children have the lowest priority
        while not condition(*arguments):
            assert time.monotonic() < end, f"no {what}; told of {self.told}"
            await asyncio.sleep(0.02)

    def codes(self) -> list[tuple[str, str, str]]:
        return [(finding.probe, finding.code, finding.verdict.value) for finding in self.told]

    def said_last(self, code: tuple[str, str, str]) -> bool:
        return self.codes()[-1:] == [code]

    def child(self, name: str) -> psutil.Process:
        return psutil.Process(self.watcher._children[name].pid)


def watch(watched: Watched, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do `work` while the watcher watches; its child is gone afterwards."""

    async def both() -> None:
        watching = asyncio.ensure_future(watched.watcher.run())
        try:
            await work()
        finally:
            await watched.watcher.close()
            await asyncio.wait_for(watching, 120.0)

    asyncio.run(both())
    assert not [p for p in psutil.Process().children() if "jurymast.health" in " ".join(command_of(p))]


def test_a_finding_is_told_when_it_is_new_when_it_changes_and_when_it_is_over(
    acme: Callable[..., Acme],
) -> None:
    package, watched = acme("acme"), Watched("acme")

    async def work() -> None:
        await watched.until("look", lambda: package.looks("acme"))
        for verdict in ("suspect", "bad"):
            package.tell("acme", f"find {verdict}")
            await watched.until(verdict, watched.said_last, ("acme", "acme-high", verdict))
        held = watched.watcher.findings()
        assert [(f.code, f.device, f.at > 0) for f in held] == [("acme-high", "acme0", True)]
        package.tell("acme", "ok")
        await watched.until("end of it", lambda: len(watched.told) == 3)
        assert watched.watcher.findings() == []

    watch(watched, work)
    assert [verdict for _, _, verdict in watched.codes()] == ["suspect", "bad", "ok"]


def test_an_event_is_told_once_and_is_not_over_when_it_is_not_told_again(acme: Callable[..., Acme]) -> None:
    package, watched = acme("acme"), Watched("acme")
    first, later = time.time(), time.time() + 60.0

    async def work() -> None:
        # The same within seconds, as two channels tell of it; then another.
        for at in (first, first + 2.0, later):
            package.tell("acme", f"event {at}")
            seen = len(package.looks("acme"))
            await watched.until("look at it", package.looked_more, "acme", seen + 2)

    watch(watched, work)
    assert [finding.at for finding in watched.told] == [first, later]
    assert [finding.at for finding in watched.watcher.findings()] == [first, later]


# What it says of the node that this probe hangs, and of which kind that is.
HANG = {"acme": ("suspect", "host"), "nvidia": ("bad", "host"), "storage": ("unknown", "storage")}


def test_probes_that_hang_twice_are_findings_and_the_others_go_on(acme: Callable[..., Acme]) -> None:
    package, watched = acme(*HANG, "other"), Watched(*HANG, "other")
    for name in HANG:
        package.tell(name, "hang")
    package.tell("other", "find suspect")
    verdicts = {(name, "driver-wedged", verdict) for name, (verdict, _) in HANG.items()}

    async def work() -> None:
        for name in HANG:
            await watched.until("first child", lambda name=name: package.looks(name) == ["hang"])
        for name in HANG:
            os.kill(package.pid(name), 15)  # deaf to it, and hangs on
        await watched.until("look of the other", lambda: len(package.looks("other")) > 2)
        other = package.pid("other")
        await watched.until("verdicts", lambda: verdicts <= {*watched.codes()})
        seen = len(package.looks("other"))
        await watched.until("look of the other", package.looked_more, "other", seen)
        assert package.pid("other") == other

    watch(watched, work)
    wedged = {finding.probe: finding for finding in watched.told if finding.code == "driver-wedged"}
    assert {name: (one.verdict.value, one.kind) for name, one in wedged.items()} == HANG
    for name, one in wedged.items():
        assert {*package.looks(name)} == {"hang"}
        assert "twice" in one.message
        assert "in state S" in one.message
        assert watched.watcher.probes[name].state == "left out"
    assert ("other", "acme-high", "suspect") in watched.codes()


def test_a_probe_that_hangs_once_is_looked_through_again(acme: Callable[..., Acme]) -> None:
    package, watched = acme("acme"), Watched("acme")
    package.tell("acme", "hang")

    async def work() -> None:
        await watched.until("hang", lambda: package.looks("acme"))
        package.tell("acme", "ok")
        await watched.until("fresh child", lambda: package.looks("acme")[-1] == "ok")
        package.tell("acme", "hang")  # a first time again: it looked well in between
        await watched.until("hang", lambda: package.looks("acme")[-1] == "hang")
        package.tell("acme", "find suspect")
        await watched.until("finding", lambda: watched.told)

    watch(watched, work)
    assert watched.codes() == [("acme", "acme-high", "suspect")]


def test_a_look_that_only_wants_the_processor_is_not_taken_for_one_that_hangs(
    acme: Callable[..., Acme],
) -> None:
    package, watched = acme("nvidia"), Watched("nvidia")
    package.tell("nvidia", f"spin {1.5 * LOOK_LIMIT_S}")

    async def work() -> None:
        await watched.until("look", lambda: package.looks("nvidia"))
        first = package.pid("nvidia")
        package.tell("nvidia", "find suspect")
        await watched.until("finding", lambda: watched.told)
        assert package.pid("nvidia") == first

    watch(watched, work)
    assert watched.codes() == [("nvidia", "acme-high", "suspect")]


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A cgroup whose frozen processes not even SIGKILL ends, as with a driver that holds them."""
    group = FREEZER / f"jurymast-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root and the freezer of cgroups version 1")
    yield group
    (group / "freezer.state").write_text("THAWED")
    wait_until("empty cgroup", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_child_that_survives_sigkill_is_a_finding_at_once(acme: Callable[..., Acme], freezer: Path) -> None:
    package, watched = acme("nvidia", "other"), Watched("nvidia", "other")
    package.tell("nvidia", "hang")

    async def work() -> None:
        await watched.until("hang", lambda: package.looks("nvidia"))
        (freezer / "cgroup.procs").write_text(str(package.pid("nvidia")))
        (freezer / "freezer.state").write_text("FROZEN")
        await watched.until("verdict", lambda: watched.told)
        assert psutil.pid_exists(package.pid("nvidia"))
        (freezer / "freezer.state").write_text("THAWED")
        await watched.until("end", lambda: began_at(package.pid("nvidia")) is None)

    watch(watched, work)
    assert package.looks("nvidia") == ["hang"]
    assert watched.codes() == [("nvidia", "driver-wedged", "bad")]
    assert "SIGKILL did not end it" in watched.told[0].message


def test_a_probe_that_raises_is_heard_of_and_looked_through_again(acme: Callable[..., Acme]) -> None:
    package, watched = acme("acme"), Watched("acme")
    package.tell("acme", "raise")

    async def work() -> None:
        await watched.until("failure", lambda: len(package.looks("acme")) > 2)
        package.tell("acme", "ok")
        await watched.until("end of it", lambda: len(watched.told) == 2)

    watch(watched, work)
    assert watched.codes() == [("acme", "probe-failed", "unknown"), ("acme", "probe-failed", "ok")]
    assert "RuntimeError: acme is out of order" in watched.told[0].message


def test_a_probe_that_crashes_the_child_is_left_out_and_blames_no_node(acme: Callable[..., Acme]) -> None:
    package, watched = acme("acme", "other"), Watched("acme", "other")
    package.tell("acme", "abort")

    async def work() -> None:
        await watched.until("verdict", lambda: watched.told)
        seen = len(package.looks("other"))
        await watched.until("look of the other", package.looked_more, "other", seen)

    watch(watched, work)
    assert package.looks("acme") == ["abort", "abort"]
    assert watched.codes() == [("acme", "probe-crashes", "unknown")]
    assert "signal 6" in watched.told[0].message


def test_a_child_that_somebody_kills_is_replaced_and_blames_nothing(acme: Callable[..., Acme]) -> None:
    package, watched = acme("acme"), Watched("acme")

    async def work() -> None:
        for _ in range(2):
            await watched.until("look", lambda: package.looks("acme"))
            before = package.pid("acme")
            watched.child("acme").kill()
            await watched.until("fresh child", package.has_other_pid, "acme", before)

    watch(watched, work)
    assert watched.told == []


def test_children_that_never_answer_end_in_a_note(
    acme: Callable[..., Acme], monkeypatch: pytest.MonkeyPatch
) -> None:
    acme("acme")
    watched = Watched("acme")
    monkeypatch.setattr("jurymast.core.judges.own_health.PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr("jurymast.processes.sys.executable", "/nonexistent/python")
    asyncio.run(watched.watcher.run())
    assert watched.codes() == [("health", "no-probes", "unknown")]
    assert "ends at once (exit code 127)" in watched.told[0].message


GAINED = ("kept", "acme-gained", "bad")


def replaced(package: Acme, watched: Watched, name: str, how: str) -> Callable[[], Coroutine[Any, Any, None]]:
    """Ends the process of a probe, by `how`, and waits for a look of the next one, which finds nothing."""

    async def work() -> None:
        before = package.pid(name)
        if how == "killed":
            package.tell(name, "ok")
            watched.child(name).kill()
        else:
            package.tell(name, how)
            await watched.until(how, lambda: package.looks(name)[-1] == how)
            package.tell(name, "ok")
        await watched.until("fresh child", package.has_other_pid, name, before)
        seen = len(package.looks(name))
        await watched.until("its looks", package.looked_more, name, seen + 2)

    return work


@pytest.mark.parametrize("how", ["hang", "abort", "killed"])
def test_the_end_of_a_probe_s_process_takes_no_finding_back(acme: Callable[..., Acme], how: str) -> None:
    """A third party's probe that remembers nothing: its next process does not know what there was."""
    package, watched = acme("acme"), Watched("acme")
    package.tell("acme", "find bad")

    async def work() -> None:
        await watched.until("finding", lambda: watched.told)
        await replaced(package, watched, "acme", how)()
        package.tell("acme", "find bad")  # but what it finds itself, it can take back
        seen = len(package.looks("acme"))
        await watched.until("look", package.looked_more, "acme", seen + 1)
        package.tell("acme", "ok")
        await watched.until("its end", watched.said_last, ("acme", "acme-high", "ok"))

    watch(watched, work)
    assert watched.codes() == [("acme", "acme-high", "bad"), ("acme", "acme-high", "ok")]


@pytest.mark.parametrize("how", ["hang", "killed"])
def test_a_baseline_outlives_the_process_of_its_probe(acme: Callable[..., Acme], how: str) -> None:
    package, watched = acme("kept"), Watched("kept")
    package.tell("kept", "count 5")

    async def work() -> None:
        await watched.until("baseline", lambda: len(package.looks("kept")) > 2)
        await replaced(package, watched, "kept", how)()
        package.tell("kept", "count 6")
        await watched.until("gain", watched.said_last, GAINED)
        await replaced(package, watched, "kept", how)()
        package.tell("kept", "count 7")  # it would be the first value of a process without memory
        seen = len(package.looks("kept"))
        await watched.until("look", package.looked_more, "kept", seen + 2)

    watch(watched, work)
    assert [finding.message for finding in watched.watcher.findings()] == ["2 more"]


def test_a_process_that_continued_from_memory_can_say_that_a_finding_is_over(
    acme: Callable[..., Acme],
) -> None:
    package, watched = acme("kept"), Watched("kept")
    package.tell("kept", "count 5")

    async def work() -> None:
        await watched.until("baseline", lambda: len(package.looks("kept")) > 2)
        package.tell("kept", "count 6")
        await watched.until("gain", watched.said_last, GAINED)
        watched.child("kept").kill()
        package.tell("kept", "count 5")
        await watched.until("its end", watched.said_last, ("kept", "acme-gained", "ok"))

    watch(watched, work)


@pytest.mark.parametrize("word", ["raise", "blind acme0", "blind "])
def test_a_look_that_cannot_see_takes_no_finding_back(acme: Callable[..., Acme], word: str) -> None:
    package, watched = acme("acme"), Watched("acme")
    package.tell("acme", "find bad")

    async def work() -> None:
        await watched.until("finding", lambda: watched.told)
        package.tell("acme", word)
        seen = len(package.looks("acme"))
        await watched.until("looks", package.looked_more, "acme", seen + 2)
        assert ("acme-high", "acme0") in [(f.code, f.device) for f in watched.watcher.findings()]
        package.tell("acme", "blind acme1")  # another part
        await watched.until("its end", lambda: ("acme", "acme-high", "ok") in watched.codes())

    watch(watched, work)


def test_a_machine_whose_clock_was_set_does_not_move_the_probes_clock(acme: Callable[..., Acme]) -> None:
    """An hour back, as the probe's process sees it; the finding has the time of the machine's new clock."""
    package, watched = acme("acme"), Watched("acme")
    watched.watcher._epoch += 3600.0
    package.tell("acme", "now")

    async def work() -> None:
        await watched.until("event", lambda: watched.told)

    watch(watched, work)
    finding = watched.told[0]
    assert abs(float(finding.message) - time.time() - 3600.0) < 600.0
    assert abs(finding.at - time.time()) < 600.0


@pytest.mark.parametrize("how", ["long", "many", "nan", "name"])
def test_a_probe_that_finds_what_is_too_much_or_wrong_is_still_heard(
    acme: Callable[..., Acme], how: str
) -> None:
    package, watched = acme("acme"), Watched("acme", once=True)
    package.tell("acme", f"hostile {how}")
    asyncio.run(watched.watcher.run())
    told = watched.watcher.findings()
    assert told
    assert {finding.probe for finding in told} == {"acme"}
    assert all(len(finding.message) <= 500 for finding in told)
    assert ("probe-failed" in {finding.code for finding in told}) == (how in ("many", "nan"))
    assert how not in ("long", "many") or any(f.message.endswith("[cut]") for f in told)
    assert len(told) == (100 if how == "many" else 1)


def test_probes_that_write_to_the_pipe_are_left_out_and_the_others_go_on(acme: Callable[..., Acme]) -> None:
    hostile = ("garbage", "deep", "other", "infinite")
    package, watched = acme(*hostile, "well"), Watched(*hostile, "well")
    for how in hostile:
        package.tell(how, f"hostile {how}")

    async def work() -> None:
        await watched.until("end of them", lambda: len(watched.told) >= len(hostile))
        looks = len(package.looks("well"))
        await watched.until("look of the other", package.looked_more, "well", looks + 2)

    watch(watched, work)
    assert sorted(watched.codes()) == sorted((how, "probe-crashes", "unknown") for how in hostile)


@pytest.mark.parametrize("how", ["leaves", "leaves-and-aborts"])
def test_what_a_probe_started_is_killed_with_it(acme: Callable[..., Acme], tmp_path: Path, how: str) -> None:
    """In its group, in a group of its own, and in a session of its own."""
    package, watched = acme("acme"), Watched("acme")
    package.tell("acme", f"hostile {how}")
    left = tmp_path / "acme" / "acme" / "left"

    async def work() -> None:
        await watched.until("its children", lambda: left.exists() and left.read_text())

    watch(watched, work)
    assert await_ended(map(int, left.read_text().split()), LIMIT_S)


def test_one_look_each_with_probes_that_cannot_or_need_not_be_opened(acme: Callable[..., Acme]) -> None:
    package = acme("acme", "broken", "other")
    package.tell("broken", "refuse")
    package.tell("other", "nothing")
    watched = Watched("acme", "broken", "other", once=True)
    asyncio.run(watched.watcher.run())
    states = {name: probe.state for name, probe in watched.watcher.probes.items()}
    assert states == {"acme": "looked", "broken": "failed", "other": "nothing"}
    assert package.looks("acme") == ["ok"]
    assert watched.codes() == [("broken", "probe-failed", "unknown")]
    assert "no acme library" in watched.told[0].message


def test_a_probe_that_could_not_be_opened_is_tried_again(acme: Callable[..., Acme]) -> None:
    package = acme("acme")
    package.tell("acme", "refuse")
    watched = Watched("acme", thresholds={"open-again-s": 0.2})

    async def work() -> None:
        await watched.until("a refusal", watched.said_last, ("acme", "probe-failed", "unknown"))
        package.tell("acme", "ok")
        await watched.until("its end", watched.said_last, ("acme", "probe-failed", "ok"))
        assert package.looks("acme")

    watch(watched, work)


class Told:
    """An agent's part in health, without a child, and what it says."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        plan = RunPlan(
            run="r1", name="r", directory=str(folder), cluster="local", active=1, spares=0, ranks_per_node=1,
            script="x.py", settings=Settings(**settings),
        )  # fmt: skip
        self.said: list[HealthFound] = []
        self.probing = Probing(RunDirectory(folder), plan, "n1", self.said.append)

    def clocks(self, ahead_s: float) -> None:
        """The supervisor's clock, `ahead_s` behind this node's, often enough to be believed."""
        for _ in range(OFFSETS):
            self.probing.clock(time.time() - ahead_s)


@pytest.mark.parametrize(("ahead_s", "side"), [(60.0, "60.0 s ahead of"), (-60.0, "60.0 s behind")])
def test_a_clock_far_from_the_supervisor_s_is_a_finding_until_it_is_not(
    tmp_path: Path, ahead_s: float, side: str
) -> None:
    told = Told(tmp_path)
    told.clocks(ahead_s)
    (word,) = told.said
    finding = word.finding
    assert (finding.code, finding.verdict.value, finding.kind) == ("clock-offset", "suspect", "host")
    assert side in finding.message
    assert told.probing.known() == (finding,)
    assert told.probing.findings() == [finding]
    told.probing.new_supervisor()  # whose clock may be another
    told.clocks(0.0)
    assert [word.finding.verdict.value for word in told.said] == ["suspect", "ok"]
    assert told.probing.findings() == []
    assert [known.verdict.value for known in told.probing.known()] == ["ok"]


@pytest.mark.torch
def test_a_finding_of_a_run_reaches_its_journal_and_is_over_again(
    acme: Callable[..., Acme], tmp_path: Path
) -> None:
    package = acme("acme")
    train = ("--steps", "160", "--step-time", "0.05", "--checkpoints", str(tmp_path / "own"))
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="train_plain.py",
                   arguments=train) as run:  # fmt: skip

        def found() -> list[ev.HealthFound]:
            return [e for e in run.events() if isinstance(e, ev.HealthFound) and e.probe == "acme"]

        wait_until("look of the agent's child", lambda: package.looks("acme"))
        child = psutil.Process(package.pid("acme"))
        assert child.nice() == min(19, os.nice(0) + 19)
        assert psutil.Process(child.ppid()).ppid() == run.agent_pid(found_node(run.events()))
        package.tell("acme", "find unknown")
        wait_until("finding in the journal", found)
        package.tell("acme", "ok")
        wait_until("end of it in the journal", lambda: len(found()) == 2)
        state = run.wait_end()
        assert (state.exit_code, state.incidents) == (0, [])
        wait_gone(run.directory.root)
    assert [(e.code, e.device, e.verdict, e.kind) for e in found()] == [
        ("acme-high", "acme0", "unknown", "host"), ("acme-high", "acme0", "ok", "host"),
    ]  # fmt: skip
    assert await_ended([child.pid], LIMIT_S)


@pytest.mark.torch
def test_what_devices_use_in_a_run_is_in_its_report(acme: Callable[..., Acme], tmp_path: Path) -> None:
    """Of two nodes; only what was used after their first look counts."""
    package = acme("acme")
    package.tell("acme", "used 5000000")
    over = tmp_path / "over"
    train = ("--steps", "100000", "--step-time", "0.05", "--save-every", "2s", "--until", str(over))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=train) as run:  # fmt: skip
        looked: set[int] = set()

        def used() -> float:
            return run.state().joules

        def both_looked() -> bool:
            if package.looks("acme"):
                looked.add(package.pid("acme"))
            return sum(map(psutil.pid_exists, looked)) == 2  # one that came too slowly was replaced

        run.wait("the first steps", lambda state: state.best_step > 0)
        wait_until("look of both nodes", both_looked)
        seen = len(package.looks("acme"))
        wait_until("their next looks", lambda: package.looked_more("acme", seen + 20))
        assert used() == 0.0
        package.tell("acme", "used 5360000")
        wait_until("joules in the journal", lambda: used() == pytest.approx(720_000.0))
        package.tell("acme", "used 100")  # the driver was loaded anew
        over.touch()
        assert run.wait_end().exit_code == 0
        wait_gone(run.directory.root)
    done = jurymast("report", "--json", str(run.directory.root))
    energy = json.loads(done.stdout)["energy"]
    assert energy["kwh"] == pytest.approx(0.2, rel=0.01)
    assert "energy     at least 0.200 kWh" in jurymast("report", str(run.directory.root)).stdout


def found_node(events: list[ev.Event]) -> str:
    return next(event.node for event in events if isinstance(event, ev.NodeJoined))
