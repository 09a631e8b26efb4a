"""A rollback that was written to storage while no supervisor could be asked for it."""

from __future__ import annotations

import pytest

from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Journal
from jurymast.core.state.images import StateId
from jurymast.core.state.run import Phase
from jurymast.core.supervision.machine import Supervision
from support.site import Site
from support.stories import Story


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_rollback_that_no_supervisor_was_asked_for_is_made_up_for(attempt: int) -> None:
    """It was written to storage while attempt 1 ran; what that saves is void, so it cannot just go on."""
    story = Story(active=2, spares=1).running()
    story.state.attempt = attempt
    supervision = Supervision(story.state, "/runs/a", story.t)
    effects = supervision.on_storage_read({StateId(5, 1): 9}, [Rollback(5, 1, story.t)], story.t)
    events = [one.event for one in effects if isinstance(one, Journal)]
    asked = [event.what for event in events if isinstance(event, ev.Asked)]
    assert asked == (["rollback"] if attempt == 1 else [])
    assert story.state.phase is (Phase.STOPPING if attempt == 1 else Phase.RUNNING)


def test_a_node_is_told_which_of_its_images_were_rolled_back() -> None:
    site = Site()
    site.save()
    site.ordered(msg.Void)
    site.do(site.checkpoints.on_storage_read({}, [Rollback(5, 1, site.time)], site.time))
    assert {(node, order.step) for node, order in site.ordered(msg.Void)} == {
        (node, 10) for node in ("n1", "n2", "n3")
    }
    site.joined("n2", copies=(site.report(1, at=10),))
    assert [(node, order.step) for node, order in site.ordered(msg.Void)] == [("n2", 10)]
