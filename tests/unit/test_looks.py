"""What looks through probes come to: news once, and probes that are left out because they hang or crash."""

from __future__ import annotations

import pytest

from jurymast.core.nodes.findings import HOST, STORAGE, Finding, Verdict
from jurymast.core.nodes.own_health import PAUSES_S, SAME_EVENT_S, STARVED_MAX, After, ChildEnd, ProbeLooks

HUNG = ChildEnd("hung", "acme", "no answer for 3 s, in state S")


def finding(
    code: str = "warm", verdict: Verdict = Verdict.SUSPECT, at: float = 0.0, *, once: bool = False
) -> Finding:
    return Finding(probe="acme", code=code, verdict=verdict, kind=HOST, message=code, at=at, once=once)


def told(news: list[Finding] | tuple[Finding, ...]) -> list[tuple[str, str, float]]:
    return [(one.code, one.verdict.value, one.at) for one in news]


def test_a_finding_is_news_when_it_comes_changes_and_goes() -> None:
    looks = ProbeLooks(["acme"])
    assert told(looks.looked("acme", "looked", [finding()], 10.0)) == [("warm", "suspect", 10.0)]
    assert looks.looked("acme", "looked", [finding()], 20.0) == []
    assert [one.at for one in looks.findings()] == [10.0], "since then"
    worse = looks.looked("acme", "looked", [finding(verdict=Verdict.BAD)], 30.0)
    assert told(worse) == [("warm", "bad", 10.0)]
    assert told(looks.looked("acme", "looked", [], 40.0)) == [("warm", "ok", 40.0)]
    assert looks.findings() == []


def test_an_event_is_news_once_whichever_channel_tells_of_it() -> None:
    looks = ProbeLooks(["acme"])
    first = finding("xid", at=100.0, once=True)
    assert looks.looked("acme", "looked", [first], 101.0) == [first]
    again = finding("xid", at=100.0 + SAME_EVENT_S / 2, once=True)
    later = finding("xid", at=100.0 + 2 * SAME_EVENT_S, once=True)
    assert looks.looked("acme", "looked", [again, later], 130.0) == [later]
    assert looks.findings() == [first, later]


def test_a_hang_is_believed_when_another_child_meets_it_too() -> None:
    looks = ProbeLooks(["acme", "other"])
    assert looks.ended(HUNG, 5.0) == After()
    assert looks.wanted() == ["acme", "other"]
    (wedged,) = looks.ended(HUNG, 9.0).news
    assert (wedged.code, wedged.verdict, wedged.at) == ("driver-wedged", Verdict.SUSPECT, 9.0)
    assert looks.wanted() == ["other"]


def test_a_look_between_two_hangs_takes_the_first_back() -> None:
    looks = ProbeLooks(["acme"])
    looks.ended(HUNG, 5.0)
    looks.looked("acme", "looked", [], 6.0)
    assert looks.ended(HUNG, 9.0) == After()


@pytest.mark.parametrize(
    ("end", "verdict", "kind"),
    [
        (ChildEnd("hung", "nvidia", undead=True), Verdict.BAD, HOST),
        (ChildEnd("hung", "nvidia", on_storage=True, undead=True), Verdict.UNKNOWN, STORAGE),
        (ChildEnd("crashed", "nvidia", undead=True), Verdict.UNKNOWN, HOST),
    ],
)
def test_what_cannot_be_doubted_counts_at_once_for_what_it_says(
    end: ChildEnd, verdict: Verdict, kind: str
) -> None:
    (found,) = ProbeLooks(["nvidia"]).ended(end, 1.0).news
    assert (found.verdict, found.kind) == (verdict, kind)


def test_children_that_never_say_anything_are_started_less_often_and_then_no_more() -> None:
    looks = ProbeLooks(["acme"])
    gone = ChildEnd("gone", detail="killed by signal 9")
    assert [looks.ended(gone, 1.0).pause_s for _ in PAUSES_S] == list(PAUSES_S)
    after = looks.ended(gone, 2.0)
    assert after.over
    assert [one.code for one in after.news] == ["no-probes"]


def test_one_that_did_is_followed_by_another_soon() -> None:
    looks = ProbeLooks(["acme"])
    for _ in range(2 * len(PAUSES_S)):
        looks.looked("acme", "looked", [], 1.0)
        assert looks.ended(ChildEnd("gone", "acme"), 2.0) == After(pause_s=PAUSES_S[0])


def test_one_look_each_is_enough_when_no_more_are_wanted() -> None:
    looks = ProbeLooks(["acme", "other"], once=True)
    looks.looked("acme", "nothing", [], 1.0)
    assert looks.wanted() == ["other"]
    assert looks.ended(ChildEnd("gone"), 2.0).pause_s == 0.0
    assert looks.ended(ChildEnd("done"), 3.0).over


def test_a_child_that_only_lacks_a_processor_has_more_time_but_not_for_ever() -> None:
    assert [ProbeLooks([]).starves(limits) for limits in (0, STARVED_MAX - 1, STARVED_MAX)] == [
        True,
        True,
        False,
    ]
