"""A supervisor that is late blames nobody: real supervisor and sockets, hundreds of simulated agents."""

from __future__ import annotations

import signal
from pathlib import Path

from jurymast.core.state.run import Phase
from jurymast.journal import read, replay
from support.fleet import Supervised, supervised

NODES, MANY, SPARES = 200, 1000, 8
LIMIT_S = 100.0
STILL_S = 5.0
BACK_S = 3.0  # so long it may take thousands of agents to be back: many are not when their hang-ups are read


def running(run: Supervised) -> None:
    assert run.fleet.run_until(lambda: run.fleet.place() is not None, LIMIT_S)
    run.fleet.start(1.0)
    assert run.fleet.run_until(lambda: run.fleet.runs(run.nodes, 1), LIMIT_S), run.log.read_text()
    # A supervisor that takes a launch over begins another.
    assert run.fleet.run_until(lambda: replay(run.directory).phase is Phase.RUNNING, LIMIT_S)


def told(run: Supervised, event: str) -> list[dict[str, object]]:
    return [entry for entry in read(run.directory) if entry.get("event") == event]


def test_a_supervisor_that_stands_still_costs_no_node_and_says_so(tmp_path: Path) -> None:
    with supervised(tmp_path / "fleet", MANY, SPARES) as run:
        running(run)
        run.fleet.reconnect_s = BACK_S
        run.supervisor.send_signal(signal.SIGSTOP)
        run.fleet.run_for(STILL_S)
        run.supervisor.send_signal(signal.SIGCONT)
        assert run.fleet.hung_up > MANY / 2, "they were to look for another supervisor"
        assert run.fleet.run_until(run.fleet.all_in, LIMIT_S)
        run.fleet.run_until(lambda: "paused for" in str(told(run, "Noted")), LIMIT_S)
        run.fleet.run_for(8.0)  # whoever is still expected would be lost by then
        assert run.fleet.all_in()
    assert told(run, "NodeLost") == []
    state = replay(run.directory)
    assert (state.attempt, state.incidents) == (1, [])
    assert any("the supervisor paused for" in text for _, text in state.notes)


def test_a_killed_supervisor_s_successor_hears_all_nodes_again(tmp_path: Path) -> None:
    with supervised(tmp_path / "fleet", NODES, SPARES) as run:
        running(run)
        run.kill()
        run.start()
        run.fleet.run_for(3.0)
        assert run.fleet.run_until(run.fleet.all_in, LIMIT_S)
        run.fleet.run_for(8.0)
    assert told(run, "NodeLost") == []
    assert (replay(run.directory).attempt, replay(run.directory).incidents) == (1, [])


def test_a_lost_node_is_replaced_among_two_hundred(tmp_path: Path) -> None:
    with supervised(tmp_path / "fleet", NODES, SPARES) as run:
        running(run)
        victims = [agent.name for agent in run.fleet.healthy if agent.ranks == "running"][:2]
        run.fleet.crash(victims[0])
        assert run.fleet.run_until(lambda: run.fleet.runs(NODES, 2), LIMIT_S)
        run.fleet.lose_power(victims[1])
        assert run.fleet.run_until(lambda: run.fleet.runs(NODES, 3), LIMIT_S)
    assert [(entry["node"], entry["how"]) for entry in told(run, "NodeLost")] == [
        (victims[0], "closed"), (victims[1], "silent"),
    ]  # fmt: skip
