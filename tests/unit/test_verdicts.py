"""Verdicts: what a run writes, and what root makes of what it reads. Munge itself is in tests/slurm."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jurymast.cluster import verdicts as written
from jurymast.core.judges.own_health import ProbeLooked
from jurymast.core.state.findings import HARDWARE, Finding
from jurymast.core.state.findings import Verdict as Grade
from jurymast.errors import ClusterUnavailableError
from jurymast.health.once import view
from jurymast.health.probe import Context, xid_finding
from jurymast_site import verdicts
from jurymast_site.healthcheck import Look, confirming, parsed
from jurymast_site.system import Failed
from jurymast_site.verdicts import (
    ABANDONED_S,
    READ_MAX,
    SIZE_MAX,
    Here,
    Refused,
    Verdict,
    check,
    clean,
    decoded,
    taken,
    waiting,
)

NOW = 1_800_000_000.0
BOOT = "0f5c6a2e-0000-4000-8000-000000000001"
FINDING = Finding(
    probe="nvidia", code="xid-79", verdict=Grade.BAD, kind=HARDWARE, message="GPU 3 fell off the bus",
    device="gpu3", at=NOW,
)  # fmt: skip
HONEST = Verdict(
    uid=1000, sealed_at=NOW - 30.0, node="n1", boot_id=BOOT, job="17", kind=HARDWARE, code="xid-79",
    device="gpu3", message="", nonce="0" * 32,
)  # fmt: skip
HERE = Here(node="n1", boot_id=BOOT, now=NOW, max_age_s=1800.0, jobs={"17": 1000, "18": 1001}, nonces={})
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a spool belongs to root")


def test_an_honest_verdict_passes() -> None:
    check(HONEST, HERE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node": "n2"}, "it is about node n2"),
        ({"boot_id": "another"}, "another boot"),
        ({"sealed_at": NOW - 1801.0}, r"sealed 1801 s ago \(limit 1800 s\)"),
        ({"sealed_at": NOW + 61.0}, "sealed -61 s ago"),
        ({"nonce": "f" * 32}, "it was used before"),
        ({"nonce": "F" * 32}, "it was used before"),
        ({"nonce": ""}, "it was used before"),
        ({"job": "18"}, "job 18 is not theirs"),
        ({"job": "19"}, "job 19 is not theirs"),
        ({"uid": 1001}, "uid 1001: job 17 is not theirs"),
        ({"uid": 0}, "uid 0: job 17 is not theirs"),
    ],
)
def test_what_proves_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        check(replace(HONEST, **changes), replace(HERE, nonces={"f" * 32: NOW - 5.0}))


def health(*findings: Finding, verdict: str = "bad") -> str:
    return json.dumps({"verdict": verdict, "findings": [finding.to_json() for finding in findings]})


@pytest.mark.parametrize(
    ("own", "confirmed"),
    [
        (FINDING, True),
        (replace(FINDING, code="gpu-lost"), True),  # the same GPU: root sees it by another sign
        (replace(FINDING, code="gpu-lost", device=""), False),
        (replace(FINDING, device="gpu4"), True),  # numbered otherwise inside the job
        (replace(FINDING, code="gpu-lost", device="gpu4"), False),
        (replace(FINDING, kind="host"), False),
        (replace(FINDING, kind="sympathetic"), False),
        (replace(FINDING, verdict=Grade.SUSPECT), False),
        (replace(FINDING, verdict=Grade.UNKNOWN), False),
    ],
)
def test_roots_own_finding_decides(own: Finding, confirmed: bool) -> None:
    look = parsed(health(own))
    if confirmed:
        assert confirming(look, HONEST)["code"] == own.code
    else:
        with pytest.raises(Refused, match="root's own probes do not find xid-79 gpu3"):
            confirming(look, HONEST)


@pytest.mark.parametrize("kind", ["storage", "sympathetic"])
def test_what_is_no_fault_of_the_node_itself_drains_no_node(kind: str) -> None:
    """Where a site drains for root's own findings, too."""
    assert parsed(health(FINDING, replace(FINDING, kind=kind))).bad == parsed(health(FINDING)).bad
    assert parsed(health(replace(FINDING, kind=kind))) == Look((), False)


@pytest.mark.parametrize("code", [46, 109, 119, 120, 154, 158])
def test_what_a_user_s_program_did_to_a_gpu_that_works_confirms_no_verdict_of_theirs(code: int) -> None:
    """The driver's own state of the GPU does: only a GPU that needs a reset has it."""
    text = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)" if code == 154 else ""
    context = Context(node="n1")
    provoked = xid_finding(code, "gpu3", text, NOW, context)
    assert provoked.verdict is Grade.BAD
    theirs = replace(HONEST, code=provoked.code)
    looked = {"host": ProbeLooked(state="looked")}
    alone = parsed(json.dumps(view([provoked], looked, context)))
    assert alone == Look((), False)
    with pytest.raises(Refused, match=f"root's own probes do not find xid-{code} gpu3"):
        confirming(alone, theirs)
    needs_reset = replace(FINDING, code="gpu-recovery-action")
    both = parsed(json.dumps(view([provoked, needs_reset], looked, context)))
    assert confirming(both, theirs)["code"] == "gpu-recovery-action"


def test_a_verdict_that_names_no_part_is_not_confirmed_by_any_other_trouble() -> None:
    vague = replace(HONEST, code="memory-uncorrectable", device="")
    for own in (FINDING, replace(FINDING, device="")):
        with pytest.raises(Refused, match="root's own probes do not find memory-uncorrectable"):
            confirming(parsed(health(own)), vague)


def test_a_look_that_saw_nothing_confirms_nothing() -> None:
    with pytest.raises(Refused):
        confirming(Look((), False), HONEST)
    assert parsed(health(verdict="unknown")) == Look((), False)
    assert parsed(health(verdict="ok")) == Look((), True)
    for told in ("", "[]", "{}", '{"findings": 1}', '{"findings": [1]}'):
        with pytest.raises(ValueError):
            parsed(told)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    place = tmp_path / "spool"
    place.mkdir()
    place.chmod(0o1733)
    return place


def read(spool: Path) -> list[bytes | str]:
    return [one if isinstance(one, bytes) else str(one) for one in taken(spool, sorted(waiting(spool, "n1")))]


@needs_root
def test_only_small_ordinary_files_of_this_node_are_read(spool: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (spool / "n1.a").write_bytes(b"one")
    (spool / "n1.b").symlink_to(secret)
    os.mkfifo(spool / "n1.c")
    (spool / "n1.d").write_bytes(b"x" * (SIZE_MAX + 1))
    (spool / "n1.e").mkdir()
    os.link(secret, spool / "n1.f")
    (spool / "n11.a").write_bytes(b"another node's")
    (spool / "n2.a").write_bytes(b"another node's")
    found = read(spool)
    assert found[0] == b"one"
    assert [str(one).partition(":")[0] for one in found[1:]] == ["n1.b", "n1.c", "n1.d", "n1.e", "n1.f"]
    assert not any("secret" in str(one) for one in found)
    assert sorted(path.name for path in spool.iterdir()) == ["n11.a", "n2.a"]
    assert secret.read_text() == "secret"


@needs_root
def test_a_heap_of_verdicts_costs_little(spool: Path) -> None:
    for number in range(10 * READ_MAX):
        (spool / f"n1.{number:05d}").write_bytes(b"x")
    assert len(read(spool)) == READ_MAX
    assert list(spool.iterdir()) == []


@needs_root
def test_one_user_s_heap_keeps_no_other_user_from_being_heard(spool: Path) -> None:
    for number in range(2 * READ_MAX):
        (spool / f"n1.{number:05d}").write_bytes(b"x")
    (spool / "n1.b").write_bytes(b"honest")
    os.chown(spool / "n1.b", 2_000_002, -1)
    assert read(spool) == [b"x"] * READ_MAX + [b"honest"]
    assert list(spool.iterdir()) == []


@needs_root
def test_a_heap_that_takes_too_long_is_left_and_nobody_is_last_each_time(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million files cost root minutes: Slurm ends a health check after one."""
    for number in range(9):
        (spool / f"n1.{number}").write_bytes(b"x")
    (spool / "n1.z").write_bytes(b"honest")
    assert "n1.z" in {waiting(spool, "n1")[0] for _ in range(300)}
    monkeypatch.setattr(verdicts, "READ_LIMIT_S", -1.0)
    assert read(spool) == []
    assert len(list(spool.iterdir())) == 10


@needs_root
def test_links_to_a_user_s_files_are_not_counted_as_theirs(spool: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"x")
    os.chown(theirs, 2_000_002, -1)
    for number in range(2 * READ_MAX):
        os.link(theirs, spool / f"n1.a{number}")
    (spool / "n1.b").write_bytes(b"honest")
    os.chown(spool / "n1.b", 2_000_002, -1)
    assert read(spool)[-1] == b"honest"


@needs_root
def test_directories_keep_nobody_from_being_heard(spool: Path) -> None:
    for number in range(2 * READ_MAX):
        (spool / f"n1.a{number}" / "filled").mkdir(parents=True)
    (spool / "n1.b").write_bytes(b"honest")
    assert read(spool) == [b"honest"]
    assert not (spool / "n1.b").exists()


@needs_root
def test_what_no_node_ever_read_goes_away(spool: Path) -> None:
    """Whatever time its owner gave it."""
    for name, at in (("n9.past", 1.0), ("n9.future", 4e9)):
        (spool / name).write_bytes(b"x")
        os.utime(spool / name, (at, at))
    now = time.time()
    clean(spool, now + ABANDONED_S - 60)
    assert len(list(spool.iterdir())) == 2
    clean(spool, now + ABANDONED_S + 60)
    assert list(spool.iterdir()) == []


@needs_root
def test_nobody_heaps_up_files_of_nodes_that_are_not_there(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "HEAP_MAX", 20)
    for number in range(50):
        (spool / f"n9.{number}").write_bytes(b"x")
        os.chown(spool / f"n9.{number}", 2_000_002, -1)
    (spool / "n2.honest").write_bytes(b"x")
    with monkeypatch.context() as no_time:
        no_time.setattr(verdicts, "CLEAN_LIMIT_S", -1.0)
        clean(spool, time.time())
    assert len(list(spool.iterdir())) == 51
    clean(spool, time.time())
    assert len(list(spool.glob("n9.*"))) == 20
    assert (spool / "n2.honest").exists()


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o733, 0o700])
def test_a_spool_that_others_could_tamper_with_is_not_read(spool: Path, mode: int) -> None:
    spool.chmod(mode)
    with pytest.raises(Failed, match="must be root's, with mode 1733"):
        read(spool)


@needs_root
def test_a_spool_that_is_not_roots_or_a_link_is_not_read(spool: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(spool)
    with pytest.raises(Failed):
        read(link)
    os.chown(spool, 65534, 65534)
    with pytest.raises(Failed, match="must be root's"):
        read(spool)
    with pytest.raises(Failed, match="No such file"):
        read(tmp_path / "none")


def test_what_munge_does_not_vouch_for_is_refused() -> None:
    for content in (b"", b"MUNGE:AwQ:", b"\xff" * 100):
        with pytest.raises(Refused):
            decoded(content)


def test_a_verdict_says_all_that_root_asks_for() -> None:
    values = written.verdict("n1", BOOT, "17", "a-run", FINDING, NOW)
    assert set(values) >= {"v", "node", "boot_id", "job", "kind", "code", "device", "message", "nonce"}
    body = {
        key: values[key] for key in ("node", "boot_id", "job", "kind", "code", "device", "message", "nonce")
    }
    check(Verdict(uid=1000, sealed_at=NOW, **body), HERE)
    assert values["nonce"] != written.verdict("n1", BOOT, "17", "a-run", FINDING, NOW)["nonce"]
    long = written.verdict("n1", BOOT, "17", "r", replace(FINDING, message="x" * 100_000), NOW)
    assert len(json.dumps(long)) < SIZE_MAX // 2


def test_without_munge_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    values = written.verdict("n1", BOOT, "17", "a-run", FINDING, NOW)
    with pytest.raises(ClusterUnavailableError, match="munge is not installed on this machine"):
        written.leave(tmp_path, values)
    assert list(tmp_path.iterdir()) == []


def test_without_a_spool_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`munge` only has to say something here; that nobody but root may open it, it is told."""
    program = tmp_path / "munge"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    values = written.verdict("n1", BOOT, "17", "a-run", FINDING, NOW)
    with pytest.raises(ClusterUnavailableError, match=f"cannot leave a verdict in {tmp_path}/none"):
        written.leave(tmp_path / "none", values)
    path = written.leave(tmp_path, values)
    assert path.name == f"n1.{values['nonce']}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "--restrict-uid=0" in path.read_text().split()
