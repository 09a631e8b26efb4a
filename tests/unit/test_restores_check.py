"""What tests ask of restores can fail: of a run that was done again from its beginning, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.runs import RunUnderTest
from support.saves import check_restores
from support.stories import Story


def planned(story: Story, step: int) -> None:
    story.feed(
        ev.RestorePlanned(
            t=story.t, attempt=story.state.attempt, step=step, tier="shared" if step else "", expected_s=1.0,
            tiers={}, reason="as the test says",
        )
    )  # fmt: skip


def killed(told_to: int, restored: int | None) -> Story:
    """Saved at step 20, a rank killed at 25; the next attempt."""
    story = Story(active=2).allocated()
    planned(story, 0)
    story.ranks_up().restored(0).stepped(1).stepped(20).saved(20).stepped(25)
    story.failed(1, exit_code=-9)
    story.stopped().backed_off()
    planned(story, told_to)
    story.ranks_up()
    if restored is not None:
        story.restored(restored)
    return story.stepped(40)


def check(story: Story, folder: Path, least: int = 0) -> None:
    check_restores(RunUnderTest(story.write(folder / "run").root), least)


def test_a_run_that_restored_what_was_saved(tmp_path: Path) -> None:
    check(killed(20, 20), tmp_path, least=20)


@pytest.mark.parametrize(
    ("told_to", "restored", "least"),
    [(0, 0, 0), (20, 0, 0), (10, 10, 0), (20, None, 0), (20, 20, 21)],
    ids=["from the beginning", "not as told", "an older step", "nothing", "less than wanted"],
)
def test_a_run_that_did_not(tmp_path: Path, told_to: int, restored: int | None, least: int) -> None:
    with pytest.raises(AssertionError):
        check(killed(told_to, restored), tmp_path, least)
