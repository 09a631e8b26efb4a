"""Notes that come again and again."""

from __future__ import annotations

from jurymast.core.judges.repeats import KEPT_MAX, Repeats
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Journal
from support.stories import Story
from support.successor import Successor


def told(repeats: Repeats, node: str, text: str, t: float) -> str:
    note = repeats.as_told(ev.Noted(t=t, node=node, message=text))
    return note.message if note is not None else ""


def test_notes_that_differ_in_numbers_alone_are_written_three_times_in_ten_minutes() -> None:
    repeats = Repeats()
    texts = [told(repeats, "n1", f"no memory for a replica of rank {n}: {n} MiB", n) for n in range(900)]
    assert [n for n, text in enumerate(texts) if text] == [0, 1, 2, 602, 603, 604]
    assert texts[2].endswith("(not said again for 10 minutes)")
    assert not texts[1].endswith(")")


def test_what_is_not_said_again_for_ten_minutes_is_not() -> None:
    repeats = Repeats()
    texts = {t: told(repeats, "n1", "no memory", t) for t in range(0, 3600, 240)}
    last = [t for t, text in texts.items() if text.endswith("minutes)")]
    assert last
    for t in last:
        assert not any(texts[later] for later in texts if t < later < t + 600)


def test_a_supervisor_says_again_how_long_it_waits() -> None:
    repeats = Repeats()
    texts = [told(repeats, "", f"nodes are kept: {t} %", t) for t in range(0, 600, 30)]
    assert all(texts)


def test_other_nodes_and_other_words_are_news() -> None:
    repeats = Repeats()
    for _ in range(9):
        told(repeats, "n1", "the link to n2 is down", 5.0)
    assert told(repeats, "n2", "the link to n2 is down", 5.0)
    assert told(repeats, "n1", "the link to n2 is slow", 5.0)


def test_what_is_remembered_is_bounded() -> None:
    repeats = Repeats()
    for n in range(KEPT_MAX + 100):
        assert told(repeats, f"{'x' * (n // 100)}n", "z" * (n % 100), 1.0) == "z" * (n % 100)
    assert len(repeats._noted) == KEPT_MAX


def test_a_node_without_memory_for_replicas_fills_no_journal() -> None:
    story = Story(active=2, spares=1).running()
    made = Successor(story)
    for node in story.state.placement:
        made.joins(node)
    lines = []
    for step in range(10, 300, 10):
        said = msg.Refused(why=f"no memory for a replica of rank 1, {step} MiB: 5 MiB available")
        lines += [one for one in made.hears(made.nodes[0], said) if isinstance(one, Journal)]
        made.waits(1.0)
    assert len(lines) == 3
