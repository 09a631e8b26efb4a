"""Who is at fault: the cause, not the loudest cascade."""

from __future__ import annotations

import pytest
from msgspec import structs

from jurymast.core.judges.attribution import Surroundings, attribute, describe_exit
from jurymast.core.judges.leaving import NEWS_S
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Finish, StopWorkers
from jurymast.core.state.events import Asked, NodeLost, RanksHung, WorkerFailed
from jurymast.core.state.findings import NETWORK, Finding, Verdict
from jurymast.core.state.run import LEAVE_S, failure_rate
from jurymast.errors import RunFailedError
from support.attribution import found
from support.stories import Story
from support.successor import Successor


def failed(rank: int, exit_code: int = 1, error: str = "", message: str = "", node: str = "") -> WorkerFailed:
    return WorkerFailed(
        t=float(rank), node=node or f"n{rank}", attempt=1, rank=rank, exit_code=exit_code, error=error,
        message=message,
    )  # fmt: skip


def lost(node: str, how: str = "silent") -> NodeLost:
    return NodeLost(t=0.0, node=node, how=how, silent_s=1.6, limit_s=1.5)


def asked(what: str) -> Asked:
    return Asked(t=0.0, what=what, by="ada", node="n1" if what == "drain" else "")


def hung(*ranks: int) -> RanksHung:
    return RanksHung(
        t=0.0, attempt=1, ranks=ranks, node="n1" if ranks else "", silent_s=9.0, limit_s=8.0, evidence="quiet"
    )


KILLED = failed(1, -9)
RAISED = failed(2, 1, "ValueError", "loss is nan")
CRASHED = failed(3, -11)
EXITED = failed(4, 3)
GLOO = failed(0, 1, "RuntimeError", "[gloo] Connection closed by peer [10.0.0.7]:4711")

TIMED_OUT = failed(0, 1, "RuntimeError", "Timed out waiting 1800000ms for recv operation to complete")
WATCHDOG = "[rank0]:[E] Watchdog caught collective operation timeout: ALLREDUCE ran for 600000 ms"
EARLIER = structs.replace(GLOO, t=-1.0)  # than the hang was noticed


@pytest.mark.parametrize(
    ("lost_", "asked_", "failures", "hung_", "expected"),
    [
        ([lost("n7")], asked("restart"), [GLOO, RAISED], None, ("node_lost", "infrastructure", "n7")),
        ([lost("n7", "closed")], None, [], None, ("node_crash", "infrastructure", "n7")),
        ([], asked("drain"), [KILLED], None, ("drain_asked", "nobody", "n1")),
        ([], None, [GLOO, RAISED, KILLED], None, ("worker_killed", "infrastructure", "n1")),
        ([], None, [GLOO, RAISED], hung(1), ("rank_frozen", "infrastructure", "n1")),
        ([], None, [GLOO, RAISED], None, ("worker_exception", "application", "n2")),
        ([], None, [GLOO, EXITED], None, ("worker_exit", "application", "n4")),
        ([], None, [GLOO, CRASHED], None, ("worker_crash", "application", "n3")),
        ([], None, [EARLIER], hung(), ("communication", "infrastructure", "n0")),
        ([], None, [GLOO], hung(), ("hang", "infrastructure", "")),
        ([], None, [], hung(), ("hang", "infrastructure", "")),
    ],
)
def test_order_of_belief(
    lost_: list[NodeLost], asked_: Asked | None, failures: list[WorkerFailed], hung_: RanksHung | None,
    expected: tuple[str, str, str],
) -> None:  # fmt: skip
    cause = attribute(found(*failures, lost=lost_, asked=asked_, hung=hung_))
    assert (cause.kind, cause.charged, cause.node) == expected
    assert cause.evidence


def test_nothing_found_has_no_cause() -> None:
    with pytest.raises(ValueError, match="without any finding"):
        attribute(found())


def test_several_ranks_with_the_same_end_name_no_node() -> None:
    cause = attribute(found(failed(0, 1, "OSError", "x"), failed(1, 1, "OSError", "x")))
    assert cause.nodes == ("n0", "n1")
    assert (cause.node, cause.rank) == ("", 0)
    assert cause.evidence == "rank 0 on n0: OSError: x (and 1 more rank)"


def test_several_lost_nodes_are_all_named() -> None:
    cause = attribute(found(lost=[lost("n1"), lost("n2", "closed")]))
    assert cause.nodes == ("n1", "n2")
    assert cause.evidence == "n1: silent for 1.6 s (limit 1.5 s); n2: its agent's connection was reset"


def test_the_same_cause_has_the_same_signature_and_another_one_has_not() -> None:
    first = attribute(found(failed(0, 1, "ValueError", "a")))
    again = attribute(found(failed(5, 1, "ValueError", "a")))
    other = attribute(found(failed(0, 1, "ValueError", "b")))
    assert first.signature == again.signature != other.signature


def test_ports_and_addresses_make_no_other_signature() -> None:
    texts = [
        "[gloo] Connection closed by peer [10.0.0.7]:4711",
        "[gloo] Connection closed by peer [10.0.0.9]:47",
    ]
    first, again = (attribute(found(failed(0, 1, "RuntimeError", text))) for text in texts)
    assert first.signature == again.signature


@pytest.mark.parametrize(
    ("error", "message", "expected"),
    [
        (
            "RuntimeError",
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer",
            True,
        ),
        ("DistBackendError", "NCCL error: ncclRemoteError: remote process exited", True),
        ("DistNetworkError", "The client socket has timed out", True),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", True),
        ("BrokenPipeError", "[Errno 32] Broken pipe", True),
        ("RuntimeError", "CUDA out of memory", False),
        ("KeyError", "'peer'", False),
        ("AssertionError", "loss went up", False),
    ],
)
def test_what_sounds_like_the_other_sides_end(error: str, message: str, expected: bool) -> None:
    cause = attribute(found(failed(0, 1, error, message)))
    assert (cause.kind in ("communication", "collective_timeout")) is expected


@pytest.mark.parametrize(
    ("end", "kind", "charged", "node"),
    [
        (TIMED_OUT, "collective_timeout", "nobody", ""),
        (structs.replace(TIMED_OUT, error="DistStoreError", message="wait timeout after 1800000ms"),
         "collective_timeout", "nobody", ""),
        (structs.replace(TIMED_OUT, message="[gloo] Application timeout caused pair closure"),
         "collective_timeout", "nobody", ""),
        (structs.replace(TIMED_OUT, exit_code=-6, error="", message="", log=WATCHDOG),
         "collective_timeout", "nobody", ""),
        (structs.replace(TIMED_OUT, message="[gloo] Read error [10.0.0.7]:471: Connection timed out"),
         "communication", "infrastructure", "n0"),
    ],
)  # fmt: skip
def test_a_rank_whose_time_out_ended_its_wait_is_not_where_the_fault_is(
    end: WorkerFailed, kind: str, charged: str, node: str
) -> None:
    cause = attribute(found(end))
    assert (cause.kind, cause.charged, cause.node, cause.rank) == (kind, charged, node, 0)
    suspect = Finding(
        probe="infiniband", code="ib-down", verdict=Verdict.SUSPECT, kind=NETWORK, message="down", at=0.0
    )
    cause = attribute(found(end), Surroundings(near=[("n5", suspect)]))
    assert (cause.kind, cause.node) == ("network_suspect", "n5"), "evidence names a node"


def test_time_outs_that_nobody_explains_dismiss_no_node_and_end_the_run_after_three() -> None:
    story = Story(active=2, spares=2).running(100)
    placement = story.state.placement
    for _ in range(3):
        assert story.state.placement == placement
        story.feed(
            structs.replace(TIMED_OUT, t=story.t, node=placement[1], rank=1, attempt=story.state.attempt)
        )
        story.stopped()
        if not story.state.ended:
            story.wait(1.0)
            story.ranks_up().restored(90)
    assert [i.charged for i in story.state.incidents] == ["nobody"] * 3
    assert "crash loop: the same failure 3 times" in story.state.end_reason
    rate = failure_rate(story.state, story.t)
    assert rate is not None
    assert rate.incidents == 0.0
    assert not story.state.excluded


def test_a_killed_process_is_never_a_communication_failure() -> None:
    assert attribute(found(failed(0, -9, "", "connection closed"))).kind == "worker_killed"


@pytest.mark.parametrize(
    ("code", "told"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-64, "killed by signal 64")],
)
def test_exit_codes_in_words(code: int, told: str) -> None:
    assert describe_exit(code) == told


def test_a_rank_whose_failure_is_told_late_has_not_ended_early() -> None:
    story = Story(active=3).running()
    lost = "Connection closed by peer [10.0.0.3]:4711"
    story.failed(0, error="RuntimeError", message=lost)
    story.feed(ev.RanksEnded(t=story.t, attempt=story.state.attempt, ranks=(1,)))
    story.failed(1, error="RuntimeError", message=lost)
    story.stopped()
    assert story.incident.cause == "communication"


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize(
    ("caught_in", "ago_s", "action"), [(1, 0.0, "restart"), (2, 0.0, "stop"), (2, 1000.0, "restart")]
)
def test_ranks_that_leave_after_a_signal_that_they_catch_end_the_training(
    hangs: bool, caught_in: int, ago_s: float, action: str
) -> None:
    """As under srun: a trap in the script waits for that, to have the job requeued."""
    story = Story(active=3).running()
    for attempt in (1, 2):
        if attempt == 2:
            story.failed(0, exit_code=1)
            story.wait(NEWS_S)
            story.stopped()
            story.backed_off().ranks_up()
        if attempt == caught_in:
            story.feed(ev.Signalled(t=story.t - ago_s, signal=ev.CAUGHT))
    if hangs:
        story.hung()
    else:
        story.failed(0, error="RuntimeError", message="Connection closed by peer [10.0.0.3]:4711")
    story.wait(NEWS_S)
    story.feed(ev.RanksEnded(t=story.t, attempt=story.state.attempt, ranks=(1,)))
    story.stopped()
    assert (story.incident.cause, story.incident.action) == ("worker_exit", action)
    assert ("caught a signal" in story.incident.why) is (action == "stop")


CLOSED = "Connection closed by peer [10.0.0.3]:4711"


@pytest.mark.parametrize(
    ("code", "error"), [(143, ""), (1, "RuntimeError")], ids=["by the signal", "for its peer"]
)
def test_ranks_save_until_they_leave_though_others_have_left_before(code: int, error: str) -> None:
    """After a signal that they caught. Then the run ends, as a step would, and with its exit code."""
    story = Story(active=3).running()
    story.feed(ev.Signalled(t=story.t, signal=ev.CAUGHT))
    assert story.failed(0, exit_code=code, error=error, message=CLOSED if error else "") == []
    if code == 1:
        story.feed(ev.RanksEnded(t=story.t, attempt=1, ranks=(2,)))
    failed, *others = story.state.placement
    assert story.feed(ev.WorkersStopped(t=story.t, node=failed, attempt=1, store_port=29000)) == []
    assert story.wait(LEAVE_S / 2) == []
    for node in others:
        story.feed(ev.NodeFinished(t=story.t, node=node, attempt=1))
    story.feed(ev.RanksEnded(t=story.t, attempt=1, ranks=(1, 2)))
    story.stopped()
    assert (story.incident.action, story.state.attempt, story.state.exit_code) == ("stop", 1, code)


def test_who_takes_over_names_the_rank_that_left_and_not_the_one_that_lost_it() -> None:
    """No heartbeat tells it any more: its node has finished."""
    story = Story(active=2, spares=0).running()
    story.feed(ev.Signalled(t=story.t, signal=ev.CAUGHT))
    left, lost = story.state.placement
    after = Successor(story)
    after.joins(left, attempt=1, ranks="finished")
    failed = msg.Failed(attempt=1, rank=1, exit_code=1, error="RuntimeError", message=CLOSED)
    after.joins(lost, attempt=1, ended=(failed,))
    for node in (left, lost):
        after.hears(node, msg.Stopped(attempt=1, store_port=29001))
    assert (story.incident.cause, story.incident.rank, story.incident.action) == ("worker_exit", 0, "stop")


def test_who_takes_over_knows_who_had_left_also_when_that_node_stops_first() -> None:
    """No signal was told of, so a rank that leaves early is the script's fault, and not the network's."""
    story = Story(active=2, spares=0).running()
    left, lost = story.state.placement
    after = Successor(story)
    after.joins(left, attempt=1, ranks="finished")
    after.joins(lost, attempt=1, ranks="running")
    after.hears(lost, msg.Failed(attempt=1, rank=1, exit_code=1, error="RuntimeError", message=CLOSED))
    for node in (left, lost):
        after.hears(node, msg.Stopped(attempt=1, store_port=29001))
    incident = story.incident
    assert (incident.cause, incident.charged, incident.rank) == ("worker_exit", "application", 0)


@pytest.mark.parametrize("left", [False, True])
def test_a_rank_that_fails_after_a_signal_ends_the_others_if_they_do_not_leave(left: bool) -> None:
    story = Story(active=3).running()
    story.feed(ev.Signalled(t=story.t, signal=ev.CAUGHT))
    assert story.failed(0, error="RuntimeError", message=CLOSED) == []
    if left:
        story.feed(ev.RanksEnded(t=story.t, attempt=1, ranks=(2,)))
        assert story.wait(LEAVE_S - 10.0) == []
    stop = [one for one in story.wait(10.0 if left else NEWS_S) if isinstance(one, StopWorkers)]
    assert [set(one.nodes) for one in stop] == [{*story.state.placement}]


@pytest.mark.parametrize("hangs", [False, True])
def test_a_rank_that_ends_early_is_the_scripts_fault_and_no_node_goes(hangs: bool) -> None:
    """The others lose their connections, or wait for it for ever."""
    story = Story(active=3).running()
    for action in ("restart", "restart", "stop"):
        if hangs:
            story.hung()
        else:
            story.failed(0, error="RuntimeError", message="Connection closed by peer [10.0.0.3]:4711")
        story.feed(ev.RanksEnded(t=story.t, attempt=story.state.attempt, ranks=(1,)))
        story.stopped()
        incident = story.incident
        assert (incident.cause, incident.charged, incident.rank) == ("worker_exit", "application", 1)
        assert incident.evidence.startswith("rank 1 ended early, with exit code 0; the others ")
        assert incident.action == action
        if action == "restart":
            story.backed_off().ranks_up()
    assert story.last(Finish).exit_code == (RunFailedError.exit_code if hangs else 1), "as under srun"
