"""When a finding makes a node leave, when it does not, and what is told instead."""

from __future__ import annotations

import ast
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.core.judges import attribution, loops
from jurymast.core.judges.attribution import exception_class
from jurymast.core.judges.blame import HOUR_S, PER_HOUR, acts, escalated
from jurymast.core.run import ladder, machine, recovery
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Instruction, RaiseAlert, Requeue, StopWorkers
from jurymast.core.state.findings import APPLICATION, HARDWARE, SYMPATHETIC, Finding, Verdict
from jurymast.core.state.incident import AHEAD, CAUSES, FROM_FINDINGS
from jurymast.core.state.run import Phase, Role
from jurymast.core.state.settings import Settings
from jurymast.journal import initial_state
from jurymast.report.liveness import Liveness
from jurymast.report.sentences import is_routine, sentence
from jurymast.report.status import read_status, status_blocks
from jurymast.report.text import render
from support.findings import FINDINGS
from support.scenario_table import SCENARIOS
from support.stories import Story

DAY_S = 86_400.0


def found(
    story: Story,
    node: str,
    like: str,
    device: str = "gpu0",
    *,
    verdict: str = "",
    code: str = "",
    at: float = 0.0,
) -> list[Instruction]:
    """A finding `like` one of the table's, under its own `code` if given."""
    probe, usual, kind = FINDINGS[like]
    story.t += 0.1
    return story.feed(
        ev.HealthFound(
            t=story.t, node=node, probe=probe, code=code or like, verdict=verdict or usual, kind=kind,
            message=f"about {like}", device=device, at=at or story.t,
        )
    )  # fmt: skip


def role(story: Story, node: str) -> Role:
    return story.state.nodes[node].role


def test_a_bad_node_is_swapped_out_excluded_and_stays_out_when_its_agent_comes_back() -> None:
    story = Story(active=2, spares=2).running()
    (stop,) = found(story, "n3", "xid-79", "gpu3")
    assert isinstance(stop, StopWorkers)
    assert stop.reason == "n3 leaves because of xid-79 on gpu3: about xid-79"
    story.stopped()
    incident = story.incident
    assert (incident.cause, incident.node, incident.action) == ("gpu_bad", "n3", "swap")
    assert incident.charged == "infrastructure"
    assert "xid-79 on gpu3" in incident.reason
    assert story.state.excluded["n3"].reason == "xid-79 on gpu3: about xid-79"
    story.feed(ev.NodeJoined(t=story.t, node="n3", address="10.0.0.3", incarnation="another"))
    story.feed(ev.NodeReady(t=story.t, node="n3", store_port=1))
    assert story.state.nodes["n3"].role is Role.FAILED


def test_the_step_that_was_done_after_a_fault_counts() -> None:
    story = Story().running(40)
    stepped_at = story.state.stepped_at
    found(story, "n3", "xid-79", at=story.t - 8.0)
    assert story.incident.fault_at == pytest.approx(stepped_at)


def test_what_is_told_again_is_one_finding() -> None:
    story = Story(active=2, spares=0).running()
    at = story.t
    found(story, "n2", "xid-31", at=at)
    for again in (at, at + 3.0):  # a hello to a supervisor that takes over; the kernel log, later
        assert found(story, "n2", "xid-31", at=again) == []
    assert len(story.state.seen["n2"]) == 1


def test_exclusions_outlive_requeues_and_end() -> None:
    story = Story(active=2, spares=0, settings=Settings(exclusion_s=DAY_S)).running()
    found(story, "n2", "xid-79")
    story.stopped()
    assert story.last(Requeue).exclude == ("n2",)
    story.allocated("n1", "n3", restarts=1).ranks_up().restored(0).stepped(20)
    story.wait(3600.0)
    story.lost("n3")
    story.stopped()
    assert story.last(Requeue).exclude == ("n2", "n3")
    story.allocated("n1", "n4", restarts=2).ranks_up().restored(0).stepped(40)
    story.wait(DAY_S)
    story.lost("n4")
    story.stopped()
    assert story.last(Requeue).exclude == ("n4",)
    assert [blame.node for blame in story.state.blames] == ["n2"], "kept for the node's history"


def test_who_was_blamed_first_is_cleared_when_many_show_the_same() -> None:
    story = Story(active=20, spares=2).running()
    found(story, "n3", "xid-119")
    story.stopped()
    story.recovered(10, 20)
    assert story.state.nodes["n3"].bad
    alerts = [i for n in range(4, 9) for i in found(story, f"n{n}", "xid-119") if isinstance(i, RaiseAlert)]
    assert story.state.excluded == {}
    assert story.state.nodes["n3"].role is Role.SUSPECT
    assert story.state.blames == []
    many = [alert for alert in alerts if "many nodes" in alert.reason]
    assert len(many) == 1, "told once"
    assert set(many[0].nodes) == {"n3", "n4", "n5"}
    assert list(story.state.alerts[-1].nodes) == ["n3", "n4", "n5", "n6", "n7", "n8"]
    assert story.state.phase is Phase.RUNNING


def test_of_many_bad_nodes_only_so_many_leave_in_an_hour() -> None:
    """Every one has another fault, so they have nothing in common."""
    story = Story(active=396, spares=4, settings=Settings(excluded_fraction=0.05)).running()
    for number in range(6):
        found(story, f"n{10 + number}", "xid-79", f"gpu{number}", code=f"xid-{700 + number}")
        if story.state.phase is Phase.STOPPING:
            story.stopped()
            story.recovered(story.state.best_step, story.state.best_step + 10)
    assert sorted(story.state.excluded) == ["n10", "n11", "n12", "n13"]
    assert "4 nodes were blamed within an hour" in story.state.alerts[-1].message
    assert list(story.state.alerts[-1].nodes) == ["n14", "n15"], "one alert for what comes together"


def test_a_bad_spare_that_the_limits_keep_in_is_the_last_to_be_used() -> None:
    story = Story(active=2, spares=3).running()
    assert [node.name for node in story.state.spare_nodes()] == ["n4", "n5", "n1"]
    found(story, "n5", "xid-79")
    found(story, "n4", "xid-64")
    assert role(story, "n4") is Role.SPARE
    assert [node.name for node in story.state.spare_nodes()] == ["n1", "n4"]


@pytest.mark.parametrize(
    ("kind", "order"),
    [(SYMPATHETIC, ["n4", "n5", "n1"]), (APPLICATION, ["n4", "n5", "n1"]), (HARDWARE, ["n5", "n1", "n4"])],
)
def test_what_is_no_node_s_fault_puts_no_spare_behind_others(kind: str, order: list[str]) -> None:
    story = Story(active=2, spares=3).running()
    seen = Finding(probe="nvidia", code="xid-0", verdict=Verdict.SUSPECT, kind=kind, message="told")
    story.state.nodes["n4"].findings = {"nvidia xid-0 gpu0": seen}
    assert [node.name for node in story.state.spare_nodes()] == order


def test_a_bad_node_leaves_with_one_that_is_lost_as_the_ranks_stop_for_it() -> None:
    story = Story(active=2, spares=3).running()
    found(story, "n3", "xid-79")
    story.lost("n2")
    story.stopped()
    assert set(story.state.placement) == {"n4", "n5"}
    assert role(story, "n3") is Role.FAILED


def test_a_finding_that_is_over_gives_the_node_back_as_a_suspect() -> None:
    story = Story(active=2, spares=2).running()
    found(story, "n4", "ib-device-gone", "mlx5_0:1")
    assert role(story, "n4") is Role.FAILED
    found(story, "n4", "ib-device-gone", "mlx5_0:1", verdict="ok")
    assert role(story, "n4") is Role.SUSPECT
    assert story.state.excluded == {}


def test_five_fatal_ones_on_a_gpu_are_the_vendors() -> None:
    story = Story(settings=Settings(bad_nodes="report")).running()
    for number in range(5):
        found(story, "n3", "xid-79", code=f"xid-{(48, 64, 79, 95, 119)[number]}")
        story.wait(600.0)
    assert "contact the vendor's support" in story.state.alerts[-1].message
    assert all("support" not in alert.message for alert in story.state.alerts[:-1])


def test_a_suspect_that_passed_its_tests_is_not_set_aside_for_the_same_again() -> None:
    story = Story(active=2, spares=2).running()
    found(story, "n3", "gpu-hot")
    story.stopped()
    story.recovered(10, 20)
    assert role(story, "n3") is Role.SUSPECT
    story.feed(ev.NodeTested(t=story.t, node="n3", verdict="ok", slowness=1.0, message="as the others"))
    assert role(story, "n3") is Role.SPARE
    assert story.state.nodes["n3"].findings == {}


def test_a_node_is_never_alone_blamed_for_a_page_fault_that_another_gpu_shows() -> None:
    story = Story().running()
    for node in ("n2", "n3", "n3"):
        found(story, node, "xid-31")
        story.wait(60.0)
    raw = next(iter(story.state.nodes["n3"].findings.values()))
    assert escalated(story.state, "n3", raw) == raw


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("OSError: [Errno 28] No space left on device: '/lustre/ckpt/x'", "storage_full"),
        ("OSError: [Errno 28] No space left on device: '/tmp/x'", "disk_full"),
        ("OSError: [Errno 28] No space left on device: '/lustre/tmp/x'", "storage_full"),
        ("OSError: [Errno 28] No space left on device: '/scratch/7/x'", "disk_full"),
        ("OSError: [Errno 122] Disk quota exceeded", "storage_full"),
        ("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/data'", "storage_failed"),
        ("OSError: [Errno 107] Transport endpoint is not connected", ""),
        ("TimeoutError: [Errno 110] Connection timed out", ""),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu_bad"),
        ("AcceleratorError: CUDA error: device-side assert triggered", "gpu_exception"),
        ("RuntimeError: CUDA error: unspecified launch failure", "gpu_exception"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "gpu_out_of_memory"),
        ("RuntimeError: No CUDA-capable device is detected", "gpu_unavailable"),
        ("ImportError: libcudnn.so.9: cannot open shared object file", "import_failed"),
        ("RuntimeError: Caught ModuleNotFoundError in DataLoader worker process 0.", "import_failed"),
        ("MemoryError: ", "out_of_memory"),
        ("ArrowMemoryError: malloc of size 1024 failed", "out_of_memory"),
        ("RuntimeError: Caught MemoryError in DataLoader worker process 0.", "out_of_memory"),
        ("RuntimeError: std::bad_alloc", "out_of_memory"),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
            "gpu_out_of_memory",
        ),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "gpu_out_of_memory"),
        ("ValueError: no memoryerror", ""),
        ("ValueError: importerror", ""),
        ("KeyError: 5", ""),
    ],
)
def test_what_exceptions_speak_of(text: str, expected: str) -> None:
    assert exception_class(text, ("/tmp", "/dev/shm", "/scratch")) == expected


def test_every_class_that_the_code_can_name_is_in_the_table_and_the_reverse() -> None:
    """Classes are the words in the sources that look like one; what somebody asks for is put together."""
    named = (
        set(FROM_FINDINGS)
        | {AHEAD}
        | {f"{asked}_asked" for asked in ("relaunch", "restart", "drain", "rollback")}
    )
    for module in (attribution, loops, ladder, recovery, machine):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        words = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        likely = re.compile(r"[a-z]+(_[a-z]+)+|hang|straggler|communication|preempted")
        named |= {word for word in words if likely.fullmatch(word)}
    assert named - (set(attribution.FAILED_JOBS) - set(CAUSES)) == set(CAUSES)
    assert {scenario.cause for scenario in SCENARIOS if scenario.cause} <= set(CAUSES)


def test_every_cause_says_what_happened_and_who_pays() -> None:
    for cause in CAUSES.values():
        assert cause.meaning
        assert not cause.meaning.endswith(".")
        assert cause.charged in ("infrastructure", "application", "preemption", "nobody")
        assert cause.todo or cause.charged == "nobody"


def test_people_are_told_what_was_found_who_was_not_blamed_and_what_it_means(tmp_path: Path) -> None:
    story = Story(active=20, spares=2).running()
    for number in range(3, 7):
        found(story, f"n{number}", "xid-45")
    for number in (1, 2, 3):
        story.failed(0, exit_code=-11)
        story.stopped()
        if number < 3:
            story.backed_off().ranks_up().restored(0)
    watcher = read_status(story.write(tmp_path / story.plan.run))
    view = watcher.view(Liveness("ended"), story.t)
    (alert,) = view["alerts"]
    assert alert["nodes"] == ["n3", "n4", "n5", "n6"]
    assert view["incidents"][-1]["meaning"] == CAUSES["worker_crash"].meaning
    shown = render(status_blocks(view, now=story.t), terminal=False)
    assert "on n3, n4, n5, n6: xid-45 on many nodes within 180 s" in shown
    assert f"meaning    {CAUSES['worker_crash'].meaning}; " in shown
    told = [sentence(ev.to_json(e)) for e in story.events if isinstance(e, ev.HealthFound)]
    assert told[0] == "node n3: seen, xid-45 on gpu0: about xid-45 (sympathetic, nvidia probe)"


def test_events_leave_out_what_probes_could_not_see() -> None:
    entry = {"event": "HealthFound", "verdict": "unknown", "kind": "host"}
    assert is_routine(entry)
    assert not is_routine({**entry, "kind": "application"})
    assert not is_routine({**entry, "verdict": "suspect"})


# Whatever probes tell: no node leaves without a reason of its own, and never too many.

NODES = tuple(f"n{number}" for number in range(1, 61))
CODES = tuple(FINDINGS)
moments = st.tuples(
    st.sampled_from([0.1, 1.0, 30.0, Settings().together_s, HOUR_S / 2]), st.sampled_from(NODES),
    st.sampled_from(CODES), st.sampled_from(["gpu0", "gpu1"]), st.sampled_from(["", "", "", "ok"]),
    st.integers(0, 9),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(moments, max_size=60), st.sampled_from([0.0, 0.02, 0.05]))
def test_nobody_leaves_without_a_finding_and_never_too_many(
    drawn: list[tuple[float, str, str, str, str, int]], fraction: float
) -> None:
    story = Story(active=50, spares=10, settings=Settings(excluded_fraction=fraction)).running()
    limit = max(1, int(fraction * 60))
    told: dict[str, set[str]] = {}
    for wait_s, node, code, device, over, chance in drawn:
        story.t += wait_s
        found(story, node, code, device, verdict=over)
        if not over:
            told.setdefault(node, set()).add(code)
        if story.state.phase is Phase.STOPPING and chance < 8:
            story.stopped()
        if story.state.phase in (Phase.WAITING, Phase.LAUNCHING):
            story.recovered(story.state.best_step, story.state.best_step + 1)
        check_blames(story, told, limit)
    again = initial_state(story.plan)
    for event in story.events:
        step(again, ev.from_json(ev.to_json(event)))
    assert asdict(again) == asdict(story.state)


def check_blames(story: Story, told: dict[str, set[str]], limit: int) -> None:
    state = story.state
    can_act = {code for code, (probe, verdict, kind) in FINDINGS.items() if acts(
        Finding(probe=probe, code=code, verdict=Verdict(verdict), kind=kind, message="")
    )} | {"xid-13", "xid-31"}  # fmt: skip
    out = {node.name for node in state.nodes.values() if node.role in (Role.FAILED, Role.SUSPECT)}
    for name in out:
        assert told.get(name, set()) & can_act, f"{name}: {state.nodes[name].reason}"
    blamed = {name for name in out if not state.nodes[name].reason.startswith(("cleared", "no longer"))}
    assert len(blamed) <= limit
    assert len({b.node for b in state.blames if b.at > state.now - HOUR_S}) <= PER_HOUR


def test_a_full_shared_disk_raises_an_alert_on_a_single_node_too() -> None:
    story = Story(active=1, spares=0).running()
    (alert,) = found(story, "n1", "storage-full", "/runs")
    assert isinstance(alert, RaiseAlert)
    assert alert.reason.startswith("storage-full on /runs: ")
    assert role(story, "n1") is Role.ACTIVE
    assert story.state.incidents == []


def test_a_process_that_stands_still_while_its_node_s_storage_hangs_speaks_against_no_node() -> None:
    """The node's own look says so first; the others' may be late."""
    story = Story(active=4, spares=1).running(50)
    node = story.state.placement[1]
    found(story, node, "storage-hangs", "/runs")
    assert found(story, node, "clock-offset", "pid 9", code="process-stuck") == []
    assert role(story, node) is Role.ACTIVE
    found(story, node, "storage-hangs", "/runs", verdict="ok")
    story.failed(2, exit_code=-9)
    story.stopped()
    assert role(story, node) is Role.SUSPECT, "now it has no other reason"
