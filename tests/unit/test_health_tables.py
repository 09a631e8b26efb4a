"""The packaged tables of Xid codes and thresholds, the policy on top of them, and findings on their way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jurymast.core.nodes.health import NodeHealth
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Record
from jurymast.core.state.findings import KINDS, Finding, Verdict
from jurymast.core.state.run import RunState
from jurymast.core.state.settings import Settings
from jurymast.errors import PolicyError
from jurymast.health.once import proven
from jurymast.health.probe import READINGS, Context, reading, threshold, xid_finding
from jurymast.policy.resolve import file_layers, resolve
from jurymast.reference import counts_against_node, recovery_action, thresholds, xids


# The classes of the public catalogue, written down apart from the data file.
def _codes(*ranges: int | tuple[int, int]) -> set[int]:
    pairs = ((one, one) if isinstance(one, int) else one for one in ranges)
    return {code for first, last in pairs for code in range(first, last + 1)}


CLASSES = {
    "application": _codes(
        8, 11, 13, 25, 31, 32, (39, 41), 60, 68, 69, (70, 72), (75, 77), 80, (82, 86), (88, 89), (96, 105),
        (126, 135), 137, 139,
    ),
    "contained": {94},
    "informational": _codes(
        37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 141, 148, 152, 153, (160, 166), 170
    ),
    "reset": {46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 149, 150, 155, 156, 158, 171, 172},
    "drain": {74, 79, 151},
    "decode": {144, 145, 146, 147},
    "test": {159, 167, 168, 169},
    "text": {154},
    "support": {54, 61, 122, 123, 124, 125, 157},
}  # fmt: skip
PLAIN = Context()


def test_every_code_has_the_class_that_the_catalogue_gives_it() -> None:
    found: dict[str, set[int]] = {}
    for code, entry in xids().items():
        found.setdefault(entry.group, set()).add(code)
        assert entry.kind in KINDS
        assert entry.meaning
        assert entry.action
        assert entry.source
    assert found == CLASSES


@pytest.mark.parametrize(
    ("code", "verdict", "kind"),
    [
        (79, Verdict.BAD, "hardware"),
        (48, Verdict.BAD, "hardware"),
        (157, Verdict.BAD, "hardware"),
        (144, Verdict.SUSPECT, "hardware"),
        (31, Verdict.UNKNOWN, "application"),
        (45, Verdict.UNKNOWN, "sympathetic"),
        (148, Verdict.UNKNOWN, "sympathetic"),
        (151, Verdict.BAD, "hardware"),
        *((code, Verdict.SUSPECT, "hardware") for code in (159, 167, 168, 169)),
        *((code, Verdict.UNKNOWN, "sympathetic") for code in (160, 161, 162, 163, 164, 165, 166, 170)),
        *((code, Verdict.BAD, "hardware") for code in (171, 172)),
        (9999, Verdict.UNKNOWN, "hardware"),
    ],
)
def test_what_a_code_comes_to(code: int, verdict: Verdict, kind: str) -> None:
    finding = xid_finding(code, "gpu3", "GPU has\n fallen off", 12.0, PLAIN)
    assert (finding.verdict, finding.kind) == (verdict, kind)
    assert (finding.probe, finding.code, finding.device, finding.at) == (
        "nvidia",
        f"xid-{code}",
        "gpu3",
        12.0,
    )
    assert finding.once
    assert "(GPU has fallen off)" in finding.message


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        ("0x0 (None)", Verdict.UNKNOWN),
        ("0x1 (GPU Reset Required)", Verdict.BAD),
        ("0x2 (Node Reboot Required)", Verdict.BAD),
        ("0x3 (Drain P2P)", Verdict.BAD),
        ("0x4 (Drain and Reset)", Verdict.BAD),
        ("0x5 (Recover IMEX Domain)", Verdict.SUSPECT),
        ("0x6 (Bus Reset)", Verdict.BAD),
        ("0x7 (System Reboot)", Verdict.BAD),
        ("0x9 (Something New)", Verdict.SUSPECT),
        ("0x2", Verdict.BAD),
    ],
)
def test_xid_154_follows_the_end_of_its_text(target: str, verdict: Verdict) -> None:
    for before in ("0x0 (None)", "0x2 (Node Reboot Required)"):
        text = f"GPU recovery action changed from {before} to {target}"
        assert reading(154, text, PLAIN) == (verdict, "hardware")


def test_xid_154_without_its_text_says_nothing() -> None:
    for text in ("", "GPU recovery action changed to one that cannot be read (Unknown Error)"):
        assert reading(154, text, PLAIN)[0] is Verdict.UNKNOWN


def test_an_event_and_nvml_s_number_mean_the_same_recovery_action() -> None:
    for number in range(12):
        action = recovery_action(number)
        assert reading(154, f"changed from 0x0 (None) to {number:#x} ({action.words})", PLAIN) == (
            action.verdict,
            "hardware",
        )


@pytest.mark.parametrize(
    ("finding", "counts"),
    [
        *((f"xid-{code}", True) for code in (79, 48, 94, 144, 151, 157, 159, 167, 171)),
        *((f"xid-{code}", False) for code in (13, 31, 43, 45, 63, 137, 154, 160, 9999)),
        *((code, False) for code in ("gpu-lost", "xid-", "xid-x", "48", "ib-link-down")),
    ],
)
def test_only_codes_of_the_hardware_count_in_a_node_s_record(finding: str, counts: bool) -> None:
    assert counts_against_node(finding) is counts


ADVICE = {
    (
        94,
    ): "restart the ranks; the GPU's memory is at fault, not the training's code, and the GPU repairs itself "
    "at its next reset",
    (74, 79, 151): "take the node out of the run and drain it; it needs a reboot, and a look at its hardware",
    (
        159,
        167,
        168,
        169,
    ): "test the node before it is used again; NVIDIA's catalogue names no action for this code alone",
    (
        171,
        172,
    ): "take the node out of the run; the GPU needs a reset, and NVIDIA's support if it comes back after one",
}


@pytest.mark.parametrize("codes", ADVICE)
def test_what_is_advised(codes: tuple[int, ...]) -> None:
    for code in codes:
        assert xid_finding(code, "gpu3", "", 1.0, PLAIN).message.endswith(f"; {ADVICE[codes]}")


def test_which_codes_a_program_can_cause_on_a_gpu_that_works() -> None:
    assert {code for code, entry in xids().items() if entry.by_program} == {46, 109, 119, 120, 154, 158}


def test_a_memory_error_is_not_said_to_be_the_training_s_code() -> None:
    finding = xid_finding(94, "gpu3", "", 1.0, PLAIN)
    assert (finding.verdict, finding.kind) == (Verdict.UNKNOWN, "hardware")
    assert "not the training's code" in finding.message


@pytest.mark.parametrize("word", READINGS)
def test_the_policy_s_reading_wins_and_says_so(word: str) -> None:
    finding = xid_finding(79, "gpu0", "", 1.0, Context(xid={"79": word}))
    assert (finding.verdict, finding.kind) == READINGS[word]
    assert f"the policy reads it as {word}" in finding.message


def test_thresholds_are_complete_and_the_policy_s_win() -> None:
    for name, limit in thresholds().items():
        assert limit.value >= 0
        assert limit.unit
        assert limit.meaning
        assert limit.source
        assert threshold(PLAIN, name) == limit.value
    assert threshold(Context(thresholds={"shm-used": 0.5}), "shm-used") == 0.5
    with pytest.raises(KeyError, match="did you mean shm-used"):
        threshold(PLAIN, "shm_usd")


def policy(folder: Path, text: str) -> Path:
    path = folder / "p.yaml"
    path.write_text(text)
    return path


def test_a_policy_may_name_codes_and_thresholds(tmp_path: Path) -> None:
    path = policy(tmp_path, "health:\n  xid: {79: suspect, '94': bad}\n  thresholds: {shm-used: 0.5}\n")
    settings = resolve(file_layers(path, path.name)).settings()
    assert settings.xid == {"79": "suspect", "94": "bad"}
    assert settings.thresholds == {"shm-used": 0.5}


def test_mistakes_in_a_policy_name_their_line_and_the_nearest_name(tmp_path: Path) -> None:
    path = policy(
        tmp_path,
        "health:\n  xid:\n    7: bad\n    94: awful\n  thresholds:\n    shm-usd: 0.5\n    disk-used: full\n",
    )
    with pytest.raises(PolicyError) as caught:
        resolve(file_layers(path, path.name))
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["p.yaml:3", "health.xid.7"],
        ["p.yaml:4", "health.xid.94"],
        ["p.yaml:6", "health.thresholds.shm-usd"],
        ["p.yaml:7", "health.thresholds.disk-used"],
    ]
    assert "is not an Xid code" in lines[0]
    assert "did you mean shm-used" in lines[2]


class Heard:
    """A supervisor's part in health, and the events it made. `clock`: the nodes'; its own is at 100."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.clock = 100.0
        self.health = NodeHealth()

    def take(self, effects: list[Effect]) -> None:
        self.events += [effect.event for effect in effects if isinstance(effect, Record)]

    def joined(self, node: str, told: list[Finding]) -> None:
        self.take(self.health.on_agent_joined(node, told, self.clock, 100.0))

    def hear(self, node: str, finding: Finding) -> None:
        self.take(self.health.on_finding(node, finding, self.clock, 100.0))

    def found(self) -> list[tuple[str, str, float]]:
        return [(e.node, e.verdict, e.at) for e in self.events if isinstance(e, ev.HealthFound)]


FULL = {"probe": "host", "code": "disk-full", "verdict": "bad", "kind": "host", "message": "full", "at": 1.0}


def words(verdict: str, at: float, **others: object) -> Finding:
    return Finding.from_json({**FULL, "verdict": verdict, "at": at, **others})


def test_a_finding_becomes_one_event_however_often_it_is_told() -> None:
    heard = Heard()
    for values in (words("suspect", 1.0), words("suspect", 1.0), words("bad", 1.0), words("ok", 5.0)):
        heard.hear("n1", values)
    heard.joined("n1", [words("ok", 5.0)])
    heard.joined("n2", [words("suspect", 6.0, device="/tmp")])
    assert heard.found() == [
        ("n1", "suspect", 1.0),
        ("n1", "bad", 1.0),
        ("n1", "ok", 5.0),
        ("n2", "suspect", 6.0),
    ]
    told = heard.events[-1]
    assert ev.from_json(ev.to_json(told)) == told


def test_each_event_of_a_gpu_counts_and_none_twice() -> None:
    heard = Heard()
    first, second = (xid_finding(31, "gpu0", "", at, PLAIN) for at in (1.0, 50.0))
    for values in (first, second):
        heard.hear("n1", values)
    heard.joined("n1", [first, second])  # the agent tells of both again
    assert heard.found() == [("n1", "unknown", 1.0), ("n1", "unknown", 50.0)]


@pytest.mark.parametrize("wrong_s", [-7200.0, 7200.0])
def test_a_finding_is_dated_by_the_supervisor_s_clock(wrong_s: float) -> None:
    """A node's clock may be wrong by hours, and what was before the job, say, counts for nothing."""
    heard = Heard()
    heard.clock += 7200.0 + wrong_s
    heard.hear("n1", words("bad", 7200.0 + wrong_s + 98.0))
    heard.joined("n2", [words("bad", 7200.0 + wrong_s + 97.0), words("bad", 0.0, device="/tmp")])
    assert heard.found() == [("n1", "bad", 98.0), ("n2", "bad", 97.0), ("n2", "bad", 0.0)]


@pytest.mark.parametrize(("ago_s", "counts"), [(300.0, True), (600.0, False)])
def test_what_was_found_while_the_supervisor_could_not_begin_is_of_this_job(
    ago_s: float, counts: bool
) -> None:
    """Storage hung for 400 s after Slurm had started the job; what was found before that is not its."""
    state = RunState(Settings(), active=2)
    begun = ev.AllocationStarted(
        t=1000.0, slurm_job="7", restarts=0, nodes=("n1", "n2"), host="n1", eligible_at=0.0, began_at=600.0
    )
    step(state, begun)
    found = ev.HealthFound(
        t=1000.5, node="n1", probe="nvidia", code="gpu-lost", verdict="bad", kind="hardware", message="m",
        at=1000.0 - ago_s,
    )  # fmt: skip
    step(state, found)
    assert bool(state.nodes["n1"].findings) is counts


def test_an_event_after_the_clock_was_set_back_is_a_new_one() -> None:
    heard = Heard()
    heard.hear("n1", xid_finding(31, "gpu0", "", 60.0, PLAIN))
    heard.clock -= 50.0
    first, second = (xid_finding(31, "gpu0", "", at, PLAIN) for at in (60.0, 49.0))
    heard.hear("n1", second)
    assert heard.found() == [("n1", "unknown", 60.0), ("n1", "unknown", 99.0)]
    heard.clock = 100.0
    heard.joined("n1", [first, second])
    assert len(heard.found()) == 2, "it tells of both again"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {**FULL, "verdict": "awful"},
        {**FULL, "kind": "weather"},
        {**FULL, "at": "noon"},
        {**FULL, "device": 3},
    ],
)
def test_what_is_no_finding_is_not_taken_for_one(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Finding.from_json(values)
    said = json.dumps({"say": "health found", "finding": values, "clock": 1.0}).encode()
    assert isinstance(msg.read_said(said), msg.Unreadable)


def test_a_finding_survives_its_way_as_json() -> None:
    finding = Finding(
        probe="p", code="c", verdict=Verdict.BAD, kind="host", message="m", device="d", at=2.5, once=True
    )
    assert Finding.from_json(finding.to_json()) == finding


@pytest.mark.parametrize(
    ("code", "readings", "verdict"),
    [
        *((code, {}, Verdict.SUSPECT) for code in (46, 109, 119, 120, 158)),
        *((code, {}, Verdict.BAD) for code in (48, 62, 74, 79, 95, 140)),
        (109, {"109": "bad"}, Verdict.BAD),  # the site's own word
        (31, {}, Verdict.UNKNOWN),
        # Follows the program's 109; whether the GPU still needs a reset is what root's probe asks the driver.
        (154, {}, Verdict.SUSPECT),
    ],
)
def test_what_any_program_can_cause_does_not_prove_to_the_site_that_a_node_is_bad(
    code: int, readings: dict[str, str], verdict: Verdict
) -> None:
    """A user who provokes an Xid, and leaves a verdict about it, must not have the node drained."""
    text = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)" if code == 154 else ""
    finding = xid_finding(code, "gpu0", text, 1.0, Context(xid=readings))
    assert proven(finding, readings).verdict is verdict
    lost = Finding(probe="nvidia", code="gpu-lost", verdict=Verdict.BAD, kind="hardware", message="gone")
    assert proven(lost, readings) is lost
