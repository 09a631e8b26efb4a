"""What people read of a run, whole: to be read aloud whenever it changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

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


STORIES: dict[str, Callable[[], Story]] = {"swapped": swapped, "crash-loop": crash_loop, "requeued": requeued}


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
