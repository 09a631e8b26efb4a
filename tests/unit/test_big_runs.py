"""Runs of many nodes: what is written together, what is summed up, where the ranks' files are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.journal import JournalWriter, events, initial_state, nodes_in, read, replay, single, together
from jurymast.report.liveness import JournalTail
from jurymast.report.sentences import sentence
from jurymast.rundir import RANKS_A_FOLDER, RunDirectory
from support.big_runs import INCIDENTS, RANKS, BigRun
from support.commands import RUN, Place
from support.outputs import checked

NODES = 150


@pytest.fixture(scope="module")
def run() -> BigRun:
    return BigRun(NODES).train(hours=1.0)


@pytest.fixture(scope="module")
def place(run: BigRun, tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("big"))
    run.write(made.runs / RUN, log_lines=2)
    return made


@pytest.fixture(scope="module")
def directory(place: Place) -> RunDirectory:
    return RunDirectory(place.runs / RUN)


def test_what_many_nodes_say_alike_is_one_line_and_loses_nothing(
    run: BigRun, directory: RunDirectory
) -> None:
    assert len(run.state.incidents) == len(INCIDENTS)
    assert list(events(read(directory))) == run.events
    entries = list(together(run.entries))
    told = [event for entry in entries for event in events([entry])]
    assert told == run.events
    started = [entry for entry in entries if entry.get("event") == "WorkersStarted"]
    assert [nodes_in(entry) for entry in started] == [NODES] * (1 + len(INCIDENTS))
    size_bytes = sum(len(json.dumps(entry)) for entry in entries)
    assert size_bytes < 0.6 * sum(len(json.dumps(ev.to_json(event))) for event in run.events)


def test_a_state_is_the_same_whether_events_come_together_or_one_by_one(
    run: BigRun, directory: RunDirectory
) -> None:
    tail = JournalTail(directory)
    tail.poll()
    one_by_one = initial_state(directory.plan())
    for event in run.events:
        step(one_by_one, event)
    assert replay(directory) == tail.state == one_by_one == run.state


def test_a_line_of_many_may_end_a_phase_or_come_late(tmp_path: Path) -> None:
    """All lines that a writer may make of an order of events lead to the same state, wherever they end."""
    story = BigRun(20)
    story._started()
    story.lost(story.state.placement[3])
    story.stopped()
    story.backed_off()
    late = [event for event in story.events if isinstance(event, ev.WorkersStopped | ev.WorkersStarted)]
    told = [*story.events, *late]
    for size in (1, 7, 8, 9, 33, len(told)):
        directory = RunDirectory(tmp_path / str(size))
        directory.create()
        directory.save_plan(story.plan)
        writer = JournalWriter(directory.journal, 1)
        for number, event in enumerate(told):
            writer.event(event)
            if number % size == size - 1:
                assert writer.flush(5.0)
        writer.close()
        state = initial_state(story.plan)
        for event in told:
            step(state, event)
        assert replay(directory) == state, size


def test_what_differs_is_never_written_together() -> None:
    def failed(node: int, error: str) -> ev.WorkerFailed:
        return ev.WorkerFailed(
            t=float(node), node=f"n{node}", attempt=1, rank=node, exit_code=1, error=error, message=f"m{node}"
        )

    told = [failed(n, "ValueError" if n == 20 else "RuntimeError") for n in range(40)]
    entries = list(together(told))
    assert [nodes_in(entry) for entry in entries] == [20, 1, 19]
    assert [ev.from_json(one) for entry in entries for one in single(entry)] == told
    assert sentence(entries[0]) == "rank 0 on n0 failed: RuntimeError: m0 (and 19 more nodes)"
    assert [nodes_in(entry) for entry in together(told[:5])] == [1] * 5, "a few nodes keep their lines"


def test_status_and_report_of_many_nodes_name_only_what_differs(place: Place, run: BigRun) -> None:
    shown = place.good("status", RUN)
    assert len(shown.splitlines()) < 50
    assert f"and {NODES} active" in shown
    lost = [node.name for node in run.state.nodes.values() if node.role.value not in ("active", "spare")]
    assert lost
    assert all(name in shown for name in lost)
    assert len(place.good("status", RUN, "--all").splitlines()) > NODES
    assert len(place.json("status", RUN)["nodes"]) == run.plan.nodes
    assert len(place.good("report", RUN).splitlines()) < 100
    page = place.root / "page.html"
    place.good("report", RUN, "--html", str(page))
    assert page.stat().st_size < 1_000_000


def test_events_count_the_nodes_that_say_the_same(place: Place, run: BigRun) -> None:
    shown = place.good("events", RUN).splitlines()
    assert sum("joined" in line for line in shown) == 3
    assert f"{run.plan.nodes - 3} more nodes reported the same until then (--all)" in "\n".join(shown)
    assert sum("tokenize at data.py:31" in line for line in shown) >= 1, "the one that differs is shown"
    everything = place.good("events", RUN, "--all").splitlines()
    assert sum("joined" in line for line in everything) == run.plan.nodes
    told = place.good("events", RUN, "--json").splitlines()
    as_json = [checked(json.loads(line), "events") for line in told]
    assert len(as_json) == len(run.entries)


def test_logs_of_many_ranks_are_spread_and_a_few_are_shown(place: Place, directory: RunDirectory) -> None:
    attempt = directory.newest_attempt()
    logs = directory.rank_logs(attempt)
    assert [int(path.stem[-5:]) for path in logs] == list(range(NODES * RANKS))
    folders = {path.parent for path in logs}
    assert folders == {directory.attempt_logs(attempt), directory.attempt_logs(attempt) / "ranks-01000"}
    assert max(len(list(folder.iterdir())) for folder in folders) <= RANKS_A_FOLDER + 1
    done = place.run("logs", RUN)
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"[r0]"}
    assert f"rank 0 of {NODES * RANKS} (--rank R, or --all)" in done.stderr
    assert place.good("logs", RUN, "--rank", "1100").count("[r1100] step") == 2
    everything = place.good("logs", RUN, "--all", "-n", "1").splitlines()
    assert len(everything) == NODES * RANKS
    assert "exclude each other" in place.run("logs", RUN, "--all", "--rank", "1").stderr
