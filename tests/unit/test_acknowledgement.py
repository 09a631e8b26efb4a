"""Which messages every later supervisor will know of."""

from __future__ import annotations

import math

from jurymast.core.nodes.acknowledgement import Disk, Known


def ticks(known: Known, *seen: tuple[float, Disk]) -> float:
    for now, disk in seen:
        known.on_time(disk, now)
    return known.until


def test_nothing_is_known_before_a_look() -> None:
    assert ticks(Known(), (1.0, Disk()), (2.0, Disk()), (3.0, Disk())) == -math.inf


def test_a_look_that_began_after_all_was_written_makes_it_known() -> None:
    known = Known()
    first = ticks(
        known, (1.0, Disk(0.0, 3, 0, 0.5)), (2.0, Disk(0.0, 4, 3, 1.5)), (3.0, Disk(0.0, 4, 4, 1.9))
    )
    assert first == -math.inf, "a look that began before the tick that saw them written"
    assert ticks(known, (4.0, Disk(0.0, 4, 4, 2.5))) == 1.0
    assert ticks(known, (5.0, Disk(0.0, 9, 4, 4.5))) == 2.0, "later entries do not hold up earlier ones"


def test_what_is_not_on_the_disk_is_not_known_however_often_one_looks() -> None:
    known = Known()
    seen = [(float(t), Disk(0.0, 5 + t, 4, t - 0.1)) for t in range(1, 20)]
    assert ticks(known, *seen) == -math.inf


def test_a_journal_that_never_rests_is_known_with_some_delay() -> None:
    known = Known()
    seen = [(t / 10, Disk(0.0, 100 + t, 99 + t, t / 10 - 0.05)) for t in range(1, 100)]
    assert 9.0 < ticks(known, *seen) < 9.8


def test_storage_that_hangs_makes_nothing_known() -> None:
    known = Known()
    before = ticks(known, *((t / 10, Disk(0.0, 5, 5, t / 10)) for t in range(1, 20)))
    assert ticks(known, *((t / 10, Disk(t / 10 - 2, 5, 5, 1.9)) for t in range(20, 90))) <= 1.9
    assert before <= 1.9
