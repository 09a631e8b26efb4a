"""The report's rework is that of the script, counted by the script itself, or it is said to be unknown: for
trainings of many styles, killed at random steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from support.runs import jurymast, local_run

pytestmark = pytest.mark.torch

STEPS = 60
# Style, optimizer, and whether the report can know the rework.
STYLES = [
    ("none", "sgd", True),
    ("none", "adamw", True),
    ("own", "adamw", True),
    ("own", "sgd", False),
    ("own", "momentum", False),
    ("file", "sgd", False),
    ("tensors", "sgd", False),
    ("numpy", "sgd", False),
    ("copied", "sgd", False),
    ("epochs", "adamw", True),
    ("weights", "adamw", False),
    ("told", "sgd", True),
    ("seldom", "sgd", True),
    ("epoch", "sgd", False),
    ("older", "adamw", True),
    ("restores", "adamw", True),
    ("restores", "sgd", True),
    ("steps", "sgd", True),
]


# How a script saves what another one saves in another way.
LONG = ("tensors", "numpy", "copied", "seldom", "epoch", "older", "steps")


@pytest.mark.parametrize(
    ("style", "optimizer", "known"),
    [
        pytest.param(*one, id="-".join(map(str, one)), marks=[pytest.mark.long] * (one[0] in LONG))
        for one in STYLES
    ],
)
def test_rework_is_true_or_said_to_be_unknown(
    tmp_path: Path, style: str, optimizer: str, known: bool
) -> None:
    dice = random.Random(f"{style} {optimizer}")
    die = [dice.randint(32, 42), dice.randint(43, 55)]
    truth, folder = tmp_path / "truth", tmp_path / "own"
    folder.mkdir()
    with local_run(
        tmp_path / "runs", "--nodes", "1", "--nproc-per-node", "2", "--spares", "0", script="train_styles.py",
        arguments=(
            "--style", style, "--optimizer", optimizer, "--steps", str(STEPS), "--truth", str(truth),
            "--folder", str(folder), "--die", *map(str, die),
        ),
    ) as run:  # fmt: skip
        state = run.wait_end()
    assert state.exit_code == 0, run.story()
    done = [tuple(map(int, line.split())) for line in truth.read_text().splitlines()]
    assert {attempt for attempt, _ in done} == {1, 2, 3}
    again = len(done) - len({step for _, step in done})
    report = json.loads(jurymast("report", str(run.directory.root), "--json").stdout)
    steps = report["steps"]
    told = (done, steps, state.incidents)
    assert steps["in_all_attempts"] == pytest.approx(len(done), rel=0.05), told
    check_ratios(report, known)
    check_others_agree(report, known)
    if known:
        assert steps["again"] == steps["again_at_most"] == pytest.approx(again, rel=0.05, abs=1), told
        assert steps["done"] == STEPS
    else:
        assert steps["again"] <= again <= steps["again_at_most"], told
    for incident in report["incidents"]:
        assert incident["rework_known"] is known, told


def check_others_agree(report: dict[str, Any], known: bool) -> None:
    """What `ps` and `status` show is what the report shows."""
    directory = Path(report["provenance"]["directory"])
    (row,) = json.loads(jurymast("ps", "--json", "--runs", str(directory.parent)).stdout)
    ratios = [report[name]["runtime_goodput"] for name in ("ratios", "ratios_at_most")]
    assert [row["goodput"], row["goodput_at_most"]] == ratios
    for command in (("ps", "--runs", str(directory.parent)), ("status", str(directory))):
        shown = jurymast(*command).stdout
        assert (" ?+" in shown or "begun at a step that is not known" in shown) is not known, shown


def check_ratios(report: dict[str, Any], known: bool) -> None:
    """A range, unless they are known; and the shares of time agree with the counts of steps."""
    low, high = report["ratios"]["runtime_goodput"], report["ratios_at_most"]["runtime_goodput"]
    assert (low == high) is known
    assert ("maybe_rework" in report["categories"]) is not known
    text = jurymast("report", report["provenance"]["directory"]).stdout
    headline = next(line for line in text.splitlines() if line.startswith("runtime goodput"))
    assert (" to " in headline.split("   ")[0] + headline.split("%")[1]) is not known, headline
