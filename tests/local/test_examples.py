"""The examples of docs/examples: a rank of each is killed, and it ends with the same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state.run import Phase
from support.runs import ROOT, local_run, result

pytestmark = pytest.mark.torch

EXAMPLES = ROOT / "docs" / "examples"
LIMIT_S = 300.0
STEPS = ("--steps", "60")
# With what it needs besides torch. hsdp.py is fsdp2.py with another mesh.
NEEDS = {
    "accelerate_loop.py": "accelerate", "ddp.py": "torchdata", "fabric_loop.py": "lightning",
    "hsdp.py": "torchdata", "torchtitan_style.py": "torchdata",
}  # fmt: skip


def test_every_example_is_tested() -> None:
    assert {*NEEDS, "fsdp2.py", "small.py"} == {path.name for path in EXAMPLES.glob("*.py")}


LONG = ("ddp.py", "fabric_loop.py", "hsdp.py")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in NEEDS]
)
def test_an_example_ends_with_the_same_bits_when_a_rank_was_killed(
    name: str, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    pytest.importorskip(NEEDS[name])
    nodes, ranks = (2, 2) if name == "hsdp.py" else (1, 2)
    policy = tmp_path / "policy.yaml"
    policy.write_text("checkpoint: {cadence: 10 steps}\n")
    sizes = ("--nodes", str(nodes), "--nproc-per-node", str(ranks), "--spares", "0")
    train = (*STEPS, "--step-time", "0.05", "--out", str(tmp_path / "out.json"))
    with local_run(
        tmp_path / "runs", *sizes, "--policy", str(policy), script=str(EXAMPLES / name),
        arguments=train,
    ) as run:  # fmt: skip
        run.wait_saved(10, LIMIT_S)
        os.kill(run.pids("local-1")[1], signal.SIGKILL)
        state = run.wait_end(LIMIT_S)
    assert state.phase is Phase.SUCCEEDED, run.story()
    assert (state.incidents[0].step_restored or 0) >= 10, run.story()
    plain = trained_plainly(*STEPS, nodes=nodes * ranks, each=ranks, script=str(EXAMPLES / name))
    assert result(tmp_path / "out.json")["sha256"] == plain
