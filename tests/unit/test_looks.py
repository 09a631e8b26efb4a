"""What looks through probes come to: news once, and probes that are left out because they hang or crash."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jurymast.core.judges.own_health import PAUSES_S, SAME_EVENT_S, STARVED_MAX, After, ChildEnd, ProbeLooks
from jurymast.core.state.findings import HOST, NOT_OBSERVABLE, STORAGE, Finding, Verdict

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
    gone = ChildEnd("gone", "acme", "killed by signal 9")
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
    assert looks.ended(ChildEnd("gone", "other"), 2.0).pause_s == 0.0
    assert looks.ended(ChildEnd("done", "other"), 3.0).over


def test_a_child_that_only_lacks_a_processor_has_more_time_but_not_for_ever() -> None:
    assert [ProbeLooks([]).starves(limits) for limits in (0, STARVED_MAX - 1, STARVED_MAX)] == [
        True,
        True,
        False,
    ]


BAD = finding("ecc", Verdict.BAD)


@pytest.mark.parametrize("how", ["hung", "crashed", "gone"])
def test_a_new_process_that_remembers_nothing_takes_nothing_back(how: str) -> None:
    """Its baseline begins after the fault: that it finds nothing does not say that all is well."""
    looks = ProbeLooks(["acme"])
    looks.looked("acme", "looked", [BAD], 1.0)
    looks.ended(ChildEnd(how, "acme", "no answer for 90 s"), 100.0)
    for _ in range(3):
        assert looks.looked("acme", "looked", [], 110.0) == []
    assert [one.code for one in looks.findings()] == ["ecc"]
    looks.looked("acme", "looked", [BAD, finding()], 120.0)
    assert told(looks.looked("acme", "looked", [], 130.0)) == [("ecc", "ok", 130.0), ("warm", "ok", 130.0)]


def test_the_end_of_one_probe_s_process_changes_nothing_for_another() -> None:
    looks = ProbeLooks(["acme", "other"])
    looks.looked("acme", "looked", [BAD], 1.0)
    looks.ended(ChildEnd("hung", "other", "no answer for 90 s"), 100.0)
    assert told(looks.looked("acme", "looked", [], 110.0)) == [("ecc", "ok", 110.0)]


def test_a_process_with_the_memory_of_the_last_one_can_take_back_what_that_found() -> None:
    looks = ProbeLooks(["acme"])
    looks.looked("acme", "looked", [BAD], 1.0, memory={"ecc": 5})
    looks.ended(HUNG, 100.0)
    assert looks.memory("acme") == {"ecc": 5}
    assert looks.looked("acme", "looked", [BAD], 110.0, memory={"ecc": 5}) == []
    assert told(looks.looked("acme", "looked", [], 120.0, memory={"ecc": 5})) == [("ecc", "ok", 120.0)]


@pytest.mark.parametrize("state", ["failed", "nothing"])
def test_a_probe_that_could_not_look_takes_nothing_back(state: str) -> None:
    looks = ProbeLooks(["acme"])
    looks.looked("acme", "looked", [BAD], 1.0)
    looks.looked("acme", state, [finding("probe-failed", Verdict.UNKNOWN)], 2.0)
    assert [one.code for one in looks.findings()] == ["ecc", "probe-failed"]


@pytest.mark.parametrize(("device", "over"), [("", False), ("gpu3", False), ("gpu4", True)])
def test_what_could_not_be_seen_is_not_over(device: str, over: bool) -> None:
    looks = ProbeLooks(["acme"])
    looks.looked("acme", "looked", [replace(BAD, device="gpu3")], 1.0)
    unseen = replace(finding(NOT_OBSERVABLE, Verdict.UNKNOWN), device=device)
    news = looks.looked("acme", "looked", [unseen], 2.0)
    assert (("ecc", "ok", 2.0) in told(news)) is over


def test_what_a_probe_found_before_it_was_left_out_holds() -> None:
    looks = ProbeLooks(["acme"])
    looks.looked("acme", "looked", [BAD], 1.0)
    for at in (2.0, 3.0):
        looks.ended(HUNG, at)
    assert [one.code for one in looks.findings()] == ["ecc", "driver-wedged"]
