"""Trainings by frameworks that go on with fewer ranks, and with all of them again, as if nothing had
happened: each step has the samples that it has on all ranks, the loss of each is the same, and so are
schedules and the weights of the end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers", minversion="5")

from support.constant_batch import compare, steps, train

# Each starts a dozen processes that load a framework.
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run"), pytest.mark.timeout(900)]

CASES = [
    "trainer", "trainer --accumulate 2", "tokens --accumulate 2", "lightning", "lightning --accumulate 2",
    "manual", "accelerate", "accelerate --accumulate 2",
]  # fmt: skip
# The others take as long, a minute or two each; tests/slurm/test_shrink.py has Accelerate.
FIRST = ("trainer --accumulate 2",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FIRST else pytest.mark.long) for case in CASES]
)
def test_from_three_ranks_to_two_and_back(case: str, tmp_path: Path) -> None:
    framework, *options = case.split()
    updates = 2 if options and framework != "accelerate" else 4  # of an epoch; with Accelerate, batches
    second = 2 * updates - (2 if framework == "accelerate" else 1)  # where gradients are applied
    apart, whole = tmp_path / "apart", tmp_path / "whole"
    train(apart, framework, 3, *options, "--stop-at", str(updates // 2))
    train(apart, framework, 2, *options, "--stop-at", str(second))
    train(apart, framework, 3, *options)
    train(whole, framework, 3, *options)
    compare(apart, whole)


def test_the_trainer_finds_its_place_with_other_batches(tmp_path: Path) -> None:
    """Of an epoch's 31 samples 18 are used by three ranks, the rest by two, and later ones by two alone."""
    train(tmp_path, "trainer", 3, "--stop-at", "2", policy="local")
    train(tmp_path, "trainer", 2, policy="local")
    used = {number: one.samples for number, one in steps(tmp_path).items()}
    assert [len(used[step]) for step in sorted(used)] == [9, 9] + [6] * 15
    for first, last in ((0, 4), (5, 10), (11, 16)):
        epoch = [sample for step in range(first, last + 1) for sample in used[step]]
        assert set(epoch) == set(range(31))
        assert len(epoch) == 36, "Accelerate fills the last batch up"


@pytest.mark.parametrize(("framework", "options", "policy", "why"), [
    ("accelerate", ("--dispatch",), "global", "rank 0 reads the batches of all ranks (dispatch_batches)"),
    ("accelerate", (), "local", ""),
])  # fmt: skip
def test_a_batch_that_is_not_kept(
    framework: str, options: tuple[str, ...], policy: str, why: str, tmp_path: Path
) -> None:
    told = train(tmp_path, framework, 2, *options, "--epochs", "1", policy=policy)
    said = "with 2 of 3 ranks the batch of a step is not what it was"
    assert told.count(said) == bool(why)
    assert why in told
    assert len(steps(tmp_path)[0].samples) == 6, "each rank's as it was"
