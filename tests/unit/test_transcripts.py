"""What people read of a run, whole: to be read aloud whenever it changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state.events import RestorePlanned
from jurymast.core.state.images import LIVE
from support.commands import RUN, Place, crash_loop, swapped
from support.stories import Story

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "transcripts"


def requeued() -> Story:
    """A save that fails, a rank that hangs, two nodes lost with one spare, and the job begun again."""
    story = (
        Story(active=4, spares=1).running(40).saved(40).saved(45, ok=False, error="no space left at /lustre")
    )
    story.hung((2,), "n4")
    story.stopped()
    story.recovered(40, 60).saved(60)
    story.lost("n2")
    story.stopped()
    story.recovered(60, 80)
    story.lost("n3")
    story.stopped()
    story.allocated("n1", "n4", "n5", "n6", "n7", restarts=1, queue_s=40.0)
    return story.recovered(60, 100).saved(100).finished()


def spared() -> Story:
    """A rank that fails, after which the others go on; another, after which they go back; and a restart."""
    story = Story(active=2, ranks_per_node=2).running(40).saved(40).stepped(47)
    story.failed(2, -9)
    story.stopped(spared={0: 47, 1: 47, 3: 47}).backed_off().ranks_up()
    story.feed(planned(story, 40))
    story.restored(47, 0.1, LIVE).stepped(48).stepped(60)
    story.failed(1, -9)
    story.stopped(spared={0: 60, 2: 60, 3: 60}).backed_off().ranks_up()
    story.feed(planned(story, 40))
    story.restored(40, 0.1, "memory", "what is the own of rank 1 after step 60 is not there")
    story.stepped(41).stepped(70)
    story.failed(0, -9)
    return story.stopped().recovered(40, 80).finished()


def planned(story: Story, step: int) -> RestorePlanned:
    return RestorePlanned(
        t=story.t, attempt=story.state.attempt, step=step, tier="memory", expected_s=0.1, tiers={}, reason=""
    )


STORIES: dict[str, Callable[[], Story]] = {
    "swapped": swapped, "crash-loop": crash_loop, "requeued": requeued, "spared": spared,
}  # fmt: skip


@pytest.mark.parametrize("command", ["status", "events", "report"])
@pytest.mark.parametrize("story", STORIES)
def test_a_run_reads_as_it_did(tmp_path: Path, story: str, command: str) -> None:
    """With JURYMAST_UPDATE_GOLDEN it reads as it does now."""
    place = Place(tmp_path)
    place.story(STORIES[story]())
    shown = place.good(command, RUN).replace(str(tmp_path), "/home/ada")
    golden = GOLDEN / f"{story}-{command}.txt"
    if os.environ.get("JURYMAST_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(shown)
    assert shown == golden.read_text()
