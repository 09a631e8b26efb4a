"""Strikes, exclusions and lemon signals from earlier runs; and reading those runs from their journals."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast import foreign
from jurymast.cluster import earlier
from jurymast.cluster.earlier import forgive, forgiven_nodes, past_runs, summary_file
from jurymast.core.judges.history import (
    BURST_NODES,
    BURST_S,
    STRIKES_MAX,
    WINDOW_S,
    NodeDeparture,
    NodeRecord,
    PastRun,
    Span,
    history,
)
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import DAY_S
from jurymast.rundir import RunDirectory
from support.stories import START, Story

NOW = 1_800_000_000.0
EXPIRE_S = DAY_S


def left(node: str, days_ago: float, *, failed: bool = True, by_hand: bool = False) -> NodeDeparture:
    return NodeDeparture(
        node=node, at=NOW - days_ago * DAY_S, cause="node_lost", evidence="silent", failed=failed,
        by_hand=by_hand,
    )  # fmt: skip


def a_run(*departures: NodeDeparture, run: str = "r1", nodes: tuple[str, ...] = ("n1", "n2")) -> PastRun:
    start = min((d.at for d in departures), default=NOW) - DAY_S
    end = max((d.at for d in departures), default=NOW)
    return PastRun(
        run=run, active=len(nodes), spans=(Span(start=start, end=end, nodes=nodes),), departures=departures
    )


def record(node: str, *runs: PastRun, forgiven: float = 0.0) -> NodeRecord:
    return history(runs, NOW, EXPIRE_S, forgiven={node: forgiven})[node]


@pytest.mark.parametrize(
    ("days_ago", "until_days", "for_good"),
    [
        ((0.5,), 0.5, False),  # a day from the strike on
        ((1.5,), None, False),  # expired
        ((20.0, 0.5), 0.5, False),
        ((20.0, 10.0, 0.5), None, True),  # three within 28 days
        ((40.0, 10.0, 0.5), 0.5, False),  # the first is too old for that
        ((90.0, 80.0, 70.0), None, True),  # for good: not only while the strikes are young
        ((90.0, 60.0, 30.0), None, False),
    ],
)
def test_how_long_strikes_keep_a_node_out(
    days_ago: tuple[float, ...], until_days: float | None, for_good: bool
) -> None:
    runs = [a_run(left("n1", days), run=f"r{number}") for number, days in enumerate(days_ago)]
    found = record("n1", *runs)
    until = None if until_days is None else NOW + until_days * DAY_S
    assert (found.excluded_until, found.for_good) == (until, for_good)
    assert found.strikes == sum(days <= 28 for days in days_ago)
    assert found.excluded == (for_good or until is not None)
    assert not record("n2", *runs).excluded


def test_forgiving_wipes_what_was_and_not_what_comes() -> None:
    runs = [a_run(left("n1", days), run=f"r{days}") for days in (3.0, 2.0, 0.5)]
    assert record("n1", *runs).for_good
    assert not record("n1", *runs, forgiven=NOW - 60.0).excluded
    assert record("n1", *runs, forgiven=NOW - DAY_S).excluded_until == NOW + 0.5 * DAY_S
    assert record("n1", *runs, forgiven=NOW - 60.0).strikes == 3


@pytest.mark.parametrize(
    ("departures", "strikes"),
    [
        ((left("n1", 0.1), left("n2", 0.1)), 1),
        ((left("n1", 0.1), left("n2", 0.1), left("n3", 0.1)), 0),  # a switch, not three nodes
        ((left("n1", 0.1), left("n2", 0.2), left("n3", 0.3)), 1),
        ((left("n1", 0.1, by_hand=True),), 0),
        ((left("n1", 0.1, failed=False),), 0),  # suspected only
    ],
)
def test_who_is_blamed(departures: tuple[NodeDeparture, ...], strikes: int) -> None:
    found = record("n1", a_run(*departures, nodes=("n1", "n2", "n3")))
    assert found.strikes == strikes
    assert found.excluded == bool(strikes)
    assert len(found.departures) == 1


def test_lemon_signals_and_their_evidence() -> None:
    xids = ((NOW - 5 * DAY_S, "n1", "xid-79"), (NOW - DAY_S, "n1", "xid-79"), (NOW - DAY_S, "n2", "xid-13"))
    first = PastRun(
        run="a", active=2, spans=(Span(start=NOW - 6 * DAY_S, end=NOW, nodes=("n1", "n2")),), xids=xids,
        departures=(left("n1", 5),), excluded=("n1",),
    )  # fmt: skip
    second = PastRun(
        run="b", active=2, spans=(Span(start=NOW - DAY_S, end=NOW, nodes=("n1", "n2")),),
        departures=(left("n1", 0.5), left("n2", 0.5)), excluded=("n1",),
    )  # fmt: skip
    found = history([first, second], NOW, EXPIRE_S, out_s={"n1": 30 * 3600.0})
    shows = {signal.name: signal.shows for signal in found["n1"].signals}
    assert shows == {
        "exclusions": True, "xids": True, "hours_out": True, "failures_with_others": False,
        "failures_alone": False, "failure_rate": True,
    }  # fmt: skip
    assert found["n1"].lemon_score == 4
    assert found["n2"].lemon_score == 0
    told = {signal.name: signal.evidence for signal in found["n1"].signals}
    assert (told["xids"], told["failure_rate"]) == ("xid-79 x 2", "failed 2 of 2 runs")
    old = history([first, second], NOW + WINDOW_S + 7 * DAY_S, EXPIRE_S)
    assert old["n1"].lemon_score == 0
    assert (old["n1"].runs, round(old["n1"].node_days, 6)) == (2, 7.0)


DEPARTURES = st.lists(
    st.builds(
        left, st.sampled_from(["n1", "n2", "n3", "n4"]), st.floats(0.0, 60.0), failed=st.booleans(),
        by_hand=st.booleans(),
    )
)  # fmt: skip


@given(st.lists(DEPARTURES, max_size=5))
def test_nobody_is_kept_out_without_a_strike(runs: list[list[NodeDeparture]]) -> None:
    past = [a_run(*found, run=f"r{i}", nodes=("n1", "n2", "n3", "n4")) for i, found in enumerate(runs)]
    for node, found in history(past, NOW, EXPIRE_S).items():
        own = [d for run in runs for d in run if d.node == node and d.failed and not d.by_hand]
        if found.excluded:
            assert own
            assert found.why
        if found.for_good:
            assert len(own) >= STRIKES_MAX
        if found.excluded_until is not None:
            assert NOW < found.excluded_until <= NOW + EXPIRE_S


# Journals.


def swapped(day: int = 0) -> Story:
    story = Story(active=2, spares=1)
    story.t += day * DAY_S
    story.running(40).saved(40)
    story.lost("n3")
    story.stopped()
    return story.recovered(40, 60).finished()


def test_a_run_is_read_from_its_journal_once(tmp_path: Path) -> None:
    swapped().write(tmp_path / "run-1")
    (run,) = past_runs(tmp_path)
    (departure,) = run.departures
    assert (departure.node, departure.cause, departure.failed) == ("n3", "node_lost", True)
    assert departure.evidence == "silent for 1.6 s"
    assert (run.run, run.active, run.ended, len(run.failures)) == ("20261117-100000-gpt-abcd", 2, True, 1)
    (span,) = run.spans
    assert (span.nodes, span.start < departure.at < span.end) == (("n1", "n2", "n3"), True)
    journal = next((tmp_path / "run-1" / "journal").iterdir())
    before = journal.stat()
    journal.write_bytes(b" " * before.st_size)
    os.utime(journal, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert past_runs(tmp_path) == [run], "what was read is kept"
    os.utime(journal, ns=(1, 1))
    (changed,) = past_runs(tmp_path)
    assert changed.departures == (), "until the journal changes"
    summary = summary_file(tmp_path)
    before_that = summary.read_text()
    for damaged in ('{"v": 1, "entries": [', before_that.replace('"departures"', '"earlier-name"')):
        summary.write_text(damaged)
        assert past_runs(tmp_path) == [changed]
        assert summary.read_text() == before_that


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("how", ["file", "link"])
def test_a_summary_that_somebody_else_put_there_is_not_believed(tmp_path: Path, how: str) -> None:
    swapped().write(tmp_path / "a-run")
    honest = past_runs(tmp_path)
    summary = summary_file(tmp_path)
    summary.write_text(summary.read_text().replace("n3", "n4"))
    assert past_runs(tmp_path) != honest, "ours is believed"
    theirs = tmp_path / "theirs" if how == "link" else summary
    summary.rename(theirs)
    os.chown(theirs, 65534, 65534)
    if how == "link":
        summary.symlink_to(theirs)
    assert past_runs(tmp_path) == honest


def test_what_is_no_run_on_slurm_is_left_out(tmp_path: Path) -> None:
    assert past_runs(tmp_path / "nowhere") == []
    directory = swapped().write(tmp_path / "local-run")
    plan = json.loads(directory.plan_file.read_text())
    directory.plan_file.write_text(json.dumps({**plan, "cluster": "local"}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "plan.json").write_text("{")
    (tmp_path / "a-file").touch()
    assert past_runs(tmp_path) == []


def test_a_drain_by_hand_is_no_strike_and_a_lost_spare_is(tmp_path: Path) -> None:
    story = Story(active=2, spares=2).running(40).saved(40)
    story.asked("drain", "n2" if "n2" in story.state.placement else "n3")
    story.stopped()
    story.recovered(40, 60)
    spare = next(n for n in story.state.nodes if n not in story.state.placement)
    story.feed(ev.NodeLost(t=story.t + 1, node=spare, how="closed", silent_s=0.0))
    story.write(tmp_path / "run-1")
    (run,) = past_runs(tmp_path)
    by_hand = {d.node: d.by_hand for d in run.departures}
    assert True in by_hand.values()
    records = history([run], run.until + 60.0, EXPIRE_S)
    assert not any(records[name].excluded for name, hand in by_hand.items() if hand)


def test_forgiven_nodes_are_remembered(tmp_path: Path) -> None:
    assert forgiven_nodes(tmp_path) == {}
    forgive(tmp_path, "n1", 5.0)
    forgive(tmp_path, "n2", 7.5)
    assert forgiven_nodes(tmp_path) == {"n1": 5.0, "n2": 7.5}


def test_what_is_forgiven_is_not_forgotten_because_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgive(tmp_path, "n1", 5.0)

    def failing(path: Path, most: int) -> bytes:
        raise OSError(errno.EIO, "no luck", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(foreign, "read_own", failing)
        with pytest.raises(OSError, match="no luck"):
            forgive(tmp_path, "n2", 7.5)
    assert forgiven_nodes(tmp_path) == {"n1": 5.0}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_s_with_that_name_keeps_nobody_from_forgiving(tmp_path: Path) -> None:
    theirs = earlier.forgiven_file(tmp_path)
    theirs.write_text("{}")
    os.chown(theirs, 65534, 65534)
    forgive(tmp_path, "n1", 5.0)
    assert forgiven_nodes(tmp_path) == {"n1": 5.0}


def test_the_journals_of_two_hundred_runs_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 64 nodes each."""
    read, reads = earlier._read, list[str]()

    def counted(directory: RunDirectory) -> PastRun | None:
        reads.append(directory.root.name)
        return read(directory)

    monkeypatch.setattr(earlier, "_read", counted)
    story = Story(active=62, spares=2).running(40)
    for step in range(50, 350):
        story.stepped(step)
    story.lost("n5")
    first = story.write(tmp_path / "run-000")
    for number in range(1, 200):
        copy = tmp_path / f"run-{number:03d}"
        (copy / "journal").mkdir(parents=True)
        os.link(first.plan_file, copy / "plan.json")
        for path in first.journal_files():
            os.link(path, copy / "journal" / path.name)
    assert len(past_runs(tmp_path)) == len(reads) == 200
    again = past_runs(tmp_path)
    assert (len(again), len(reads)) == (200, 200)
    history(again, START + DAY_S, EXPIRE_S)


def test_the_burst_rule_is_what_its_words_say() -> None:
    """One node more than the limit, just within the time, and nobody is blamed."""
    names = tuple(f"n{number}" for number in range(BURST_NODES + 1))
    together = [left(name, 1.0 - number * BURST_S / len(names) / DAY_S) for number, name in enumerate(names)]
    found = history([a_run(*together, nodes=names)], NOW, 2 * DAY_S)
    assert not any(node.excluded for node in found.values())
    found = history([a_run(*together[1:], nodes=names)], NOW, 2 * DAY_S)
    assert sum(node.excluded for node in found.values()) == BURST_NODES
