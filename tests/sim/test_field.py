"""A run's journal gives back the faults that it suffered, as a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.journal import events
from jurymast.sim.cluster.__main__ import main
from jurymast.sim.cluster.cluster import Cluster
from jurymast.sim.cluster.field import CALM_S, read_field
from jurymast.sim.cluster.plans import Fault, Plan
from support.commands import swapped

# Far enough from each other that each is told for itself.
KINDS = [
    Fault(15.0, "rank", node=1),
    Fault(40.0, "hang", node=2, seconds=40.0),
    Fault(100.0, "supervisor"),
    Fault(120.0, "isolate", node=2, seconds=12.0),
    Fault(160.0, "restart"),
    Fault(180.0, "power", node=1, seconds=20.0),
    Fault(230.0, "power", node=2),
    Fault(260.0, "preempted"),
]


def journal_of(plan: Plan) -> list[ev.Event]:
    cluster = Cluster(plan)
    cluster.run()
    return [event for epoch in sorted(cluster.disk.journal) for event in events(cluster.disk.written(epoch))]


@pytest.mark.parametrize("seed", range(4))
def test_a_run_s_journal_gives_its_faults_back(seed: int) -> None:
    found = read_field(journal_of(Plan(seed, 3, 1, 1, 5, 8, tuple(KINDS))))
    kinds = [fault.kind for fault in found.plan.faults]
    assert kinds == [fault.kind for fault in KINDS]
    assert (found.plan.active, found.plan.spares, found.plan.ranks) == (3, 1, 1)
    assert len({found.plan.faults[at].node for at in (0, 1, 3, 5)}) > 1, "on the nodes that had them"
    pauses = [b.at - a.at for a, b in zip(found.plan.faults, found.plan.faults[1:], strict=False)]
    assert max(pauses) <= CALM_S + 0.001


def test_a_journal_of_no_fault_makes_no_plan() -> None:
    with pytest.raises(ValueError, match="shows no fault"):
        read_field(journal_of(Plan(1, 2, 1, 1, 5, 8, (), last_step=20)))
    with pytest.raises(ValueError, match="does not begin with the run's start"):
        read_field([])


def test_the_command_plays_a_run_and_names_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = swapped().write(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["sim", "--run", str(directory.root), "--plans", "2"])
    assert main() == 0
    said = capsys.readouterr().err
    plan = re.search(r"--plan '(.*)'", said)
    assert plan is not None
    assert json.loads(plan[1])["faults"]
    assert "2 plans" in said
    monkeypatch.setattr("sys.argv", ["sim", "--run", str(tmp_path)])
    assert main() == 2
    assert "does not begin with the run's start" in capsys.readouterr().err
