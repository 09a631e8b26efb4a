"""Whatever comes over the network or lies in a file: a parser takes it, or refuses it in its own words.

Each gets what is right, cut short, repeated, with bytes changed, with other values in its fields, nested
without end, and noise. JURYMAST_FUZZ=N has N examples of each instead of a few.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jurymast import journal
from jurymast.agent import stacks
from jurymast.checkpoint import group as ranks
from jurymast.checkpoint.contents import HASH_BYTES, Contents, Item
from jurymast.checkpoint.directory import BadCheckpoint, CheckpointDirectory, FileRecord
from jurymast.checkpoint.directory import CheckpointManifest as StoredManifest
from jurymast.checkpoint.owner import OWNER, owner
from jurymast.cluster.earlier import past_runs, summary_file
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.host_messages import read_host
from jurymast.core.state.images import ImageId
from jurymast.core.state.message import Unreadable
from jurymast.core.state.settings import RunPlan
from jurymast.errors import (
    AuthenticationError,
    CheckpointError,
    PolicyError,
    ProtocolError,
    RunDirectoryError,
)
from jurymast.health.probe import Context
from jurymast.keeper import transfer as keepers
from jurymast.keeper.copies import trusted
from jurymast.keeper.manifest import BadImage, Manifest
from jurymast.policy.resolve import file_layers, resolve
from jurymast.rundir import RunDirectory
from jurymast.storage import orders
from jurymast.storage.object_store import BucketKey
from jurymast.storage.orders import StorageFailure
from jurymast.wire import endpoint
from jurymast.wire.protocol import Frames, Seal
from jurymast.worker import endings
from jurymast_host.kernel_log import KernelLog
from jurymast_site import healthcheck, verdicts
from support.reports import hello

EXAMPLES = int(os.environ.get("JURYMAST_FUZZ", "40"))
IMAGE = ImageId(10, 1, 0)
STEP = 10
Check = Callable[[bytes, Path], None]


def image_manifest() -> bytes:
    made = Manifest(10, 1, 0, 1, "2.13.0", 128, 100, 120, 110)
    return made.with_blocks(memoryview(bytes(128))).to_bytes()


def image_contents() -> bytes:
    items = (Item("a", ("a",), 0, 100, "float32", (5,), (0,), (5,), 64), Item("b", ("b", 1), 100, 28))
    return Contents({"a": {"how": "x", "digest": "1"}}, items).to_bytes()


PLAN = RunPlan(
    run="r", name="n", directory="/d", cluster="slurm", active=2, spares=1, ranks_per_node=8, script="t.py"
)


@dataclass(frozen=True)
class Parser:
    """`check` raises for anything that the parser must not do with these bytes; `right`: what it takes."""

    check: Check
    right: tuple[bytes, ...]


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """What is in here may be refused so, with a reason, and in no other way."""
    try:
        yield
    except kinds as error:
        if not str(error):
            raise AssertionError("it is refused without a reason") from error


def messages(read: Callable[[bytes], Any]) -> Check:
    def check(data: bytes, _folder: Path) -> None:
        got = read(data)
        assert isinstance(got, Unreadable) or msg.encode(got)

    return check


def frames(data: bytes, _folder: Path) -> None:
    """Of somebody without the key, of which nothing is ever heard."""
    frames = Frames(b"k" * 32, b"k" * 32)
    with refusing(AuthenticationError, ProtocolError):
        assert frames.open(bytearray(data)) is None, "a frame of somebody without the key was let in"


def of_ranks(data: bytes, _folder: Path) -> None:
    """Over connections that know no authentication."""
    with refusing(CheckpointError):
        ranks.from_bytes(data)


def of_bucket(data: bytes, _folder: Path) -> None:
    with refusing(StorageFailure):
        BucketKey(b"k" * 32, "run-1").vouched(STEP, b"{}", data)
        raise AssertionError("what this run has not sealed is vouched for")


def of_errors(data: bytes, folder: Path) -> None:
    (folder / "error").write_bytes(data)
    assert set(endings.read_error(str(folder / "error"))) <= {"error", "message", "traceback"}


def of_owner(data: bytes, folder: Path) -> None:
    (folder / OWNER).write_bytes(data)
    with refusing(CheckpointError):
        owner(folder)


def of_journal(data: bytes, folder: Path) -> None:
    path = folder / "epoch-000001.jsonl"
    path.write_bytes(data)
    with refusing(RunDirectoryError):  # of another version
        for entry in journal.read_file(path):
            for event in journal.events_of(entry):
                assert isinstance(event, ev.Event)


def of_policy(data: bytes, folder: Path) -> None:
    path = folder / "policy.yaml"
    path.write_bytes(data)
    with refusing(PolicyError):
        resolve(file_layers(path, "policy.yaml")).settings()


def of_plan(data: bytes, folder: Path) -> None:
    (folder / "plan.json").write_bytes(data)
    with refusing(RunDirectoryError):
        RunDirectory(folder).plan()


def of_image(data: bytes, _folder: Path) -> None:
    with refusing(BadImage):
        manifest = trusted(data, IMAGE)
        assert manifest.image == IMAGE
        assert manifest.to_bytes()


def of_contents(data: bytes, _folder: Path) -> None:
    with refusing(BadImage):
        assert Contents.from_bytes(data).to_bytes()
    text = data[HASH_BYTES:]
    with refusing(BadImage):
        assert Contents.from_bytes(xxhash.xxh3_64_hexdigest(text).encode() + text).to_bytes()


def of_checkpoint(data: bytes, _folder: Path) -> None:
    with refusing(BadCheckpoint):
        manifest = StoredManifest.from_bytes(data)
        assert all("/" not in record.name for record in manifest.files)


def of_rollbacks(data: bytes, folder: Path) -> None:
    (folder / "rollback.json").write_bytes(data)
    with refusing(BadCheckpoint):
        CheckpointDirectory(folder).void(10, 1)


def of_flight(data: bytes, folder: Path) -> None:
    (folder / "record").write_bytes(data)
    assert isinstance(stacks.read(folder / "record", 0), list)


def of_endpoint(data: bytes, folder: Path) -> None:
    (folder / endpoint.NEWEST).write_bytes(data)
    (folder / endpoint.PULSE).write_bytes(data)
    endpoint.find(folder)
    assert endpoint.newest_epoch(folder) >= 0


def of_earlier_runs(data: bytes, folder: Path) -> None:
    summary_file(folder).write_bytes(data)
    assert past_runs(folder) == []


def of_kernel(data: bytes, folder: Path) -> None:
    (folder / "dev").mkdir(exist_ok=True)
    (folder / "dev/kmsg").write_bytes(data)
    log = KernelLog(folder, Context(started_at=0.0))
    try:
        for finding in log.look(time.time()):
            assert len(finding.message) < 1000
    finally:
        log.close()


def of_verdict(data: bytes, _folder: Path) -> None:
    told = "STATUS: 0\nENCODE_TIME: 100\nUID: 1000\n\n" + data.decode(errors="replace")
    with pytest.MonkeyPatch.context() as munge, refusing(verdicts.Refused):
        munge.setattr(verdicts, "run", lambda *words, **more: told)
        verdict = verdicts.decoded(b"")
        assert verdict.uid == 1000
        verdicts.check(verdict, verdicts.Here("n1", "boot", 100.0, 1800.0, {}, {}))
        raise AssertionError("a verdict of nobody's job")


def of_probes(data: bytes, _folder: Path) -> None:
    with refusing(ValueError):
        healthcheck.parsed(data.decode(errors="replace"))


VERDICT = dict.fromkeys(verdicts._TEXT, "x") | {"v": 1, "node": "n1", "boot_id": "boot", "nonce": "0" * 32}
NOTED = {"v": journal.VERSION, "epoch": 1, "n": 1, **ev.to_json(ev.Noted(t=1.0, message="x"))}
FOUND = {"verdict": "bad", "kind": "hardware", "code": "x", "device": "gpu1"}
COLLECTIVE = {
    "process_group": ("0", "x"), "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
    "state": "completed", "retired": True,
}  # fmt: skip
FLIGHT = {"entries": [COLLECTIVE], "pg_config": {"0": {}}}
EARLIER = {"v": 1, "entries": {"run-1": {"stamp": [], "run": None}}}
FOLLOW = keepers.BytesFollow(length=1, way="x")
STORED = StoredManifest(10, 1, 1, "2.13.0", (FileRecord("a", 1, "0" * 16),))
ENDPOINT = {"epoch": 1, "hosts": ["a"], "port": 1, "node": "n", "allocation": "1", "pid": 1}
POLICY = b"spares: 2\nnetwork: {encrypt: on}\ncheckpoint: {cadence: 10m, tiers: {memory: off}}\n"
XID = b"6,2,2,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, x\n"
GET = keepers.GetBytes(image=keepers.ImageName(step=1, attempt=1, rank=0), at=0, length=1)


REACHED = msg.WriteReached(id="7", phase=msg.WritePhase.ANNOUNCE)
TURN = msg.ContinueWrite(id="7", phase=msg.WritePhase.SHARE_OUT, parts=(0, 8))
GO_ON = orders.Continue(id=1, phase=msg.WritePhase.SHARE_OUT, parts=(0, 8))
DONE = orders.Reached(id=1, phase=msg.WritePhase.ANNOUNCE)


def right(*values: Any) -> tuple[bytes, ...]:
    return tuple(
        value if isinstance(value, bytes)
        else msg.encode(value) if isinstance(value, msgspec.Struct)
        else json.dumps(value).encode()
        for value in values
    )  # fmt: skip


PARSERS = {
    "frames": Parser(frames, right(b"\0\0\0\2" + Seal(b"x" * 32).tag(b"{}") + b"{}", b"\xff" * 64)),
    "what agents say": Parser(
        messages(msg.read_said), right(hello("n1"), REACHED, msg.Ask(what="how", by="x"))
    ),
    "orders": Parser(messages(msg.read_order), right(msg.Committed(step=1, attempt=1), TURN, msg.Leave())),
    "orders to storage": Parser(messages(orders.read_told), right(orders.Warm(id=1), GO_ON)),
    "what storage answers": Parser(messages(orders.read_answer), right(orders.Done(id=1, bytes=9), DONE)),
    "answers": Parser(messages(msg.read_answer), right(msg.Accepted())),
    "what keepers ask": Parser(messages(keepers.read_request), right(GET)),
    "what keepers answer": Parser(messages(keepers.read_served), right(FOLLOW)),
    "what ranks say": Parser(messages(within.read_rank), right({"event": "Image", "local_rank": 0})),
    "what hosts say": Parser(messages(read_host), right(msg.Ready(store_port=1))),
    "what ranks tell each other": Parser(
        of_ranks, right(["tuple", ["dict", ["tuple", "a", ["list", 1]]], True])
    ),
    "seals of buckets": Parser(of_bucket, (BucketKey(b"m" * 32, "run-1").seal(STEP, b"{}", {"a": "00"}),)),
    "errors of ranks": Parser(of_errors, right({"message": {"message": "E: x", "extraInfo": {}}})),
    "owners": Parser(of_owner, right({"run": "run-1", "directory": "/runs/run-1"})),
    "journal": Parser(of_journal, right(json.dumps(NOTED).encode() + b"\n")),
    "policy": Parser(of_policy, right(POLICY)),
    "plan": Parser(of_plan, right(PLAN.to_json())),
    "image manifests": Parser(of_image, right(image_manifest())),
    "image contents": Parser(of_contents, right(image_contents())),
    "checkpoint manifests": Parser(of_checkpoint, right(STORED.to_bytes())),
    "rollbacks": Parser(of_rollbacks, right({"rollbacks": [{"step": 5, "attempt": 1, "at": 1.0}]})),
    "flight records": Parser(of_flight, right(pickle.dumps(FLIGHT))),
    "endpoints": Parser(of_endpoint, right(ENDPOINT, b"3:7")),
    "earlier runs": Parser(of_earlier_runs, right(EARLIER)),
    "kernel log": Parser(of_kernel, right(b"3,1,1000000,-;EDAC MC0: 1 UE x\n SUBSYSTEM=pci\n", XID)),
    "verdicts": Parser(of_verdict, right(VERDICT)),
    "probes": Parser(of_probes, right({"verdict": "bad", "findings": [FOUND]})),
}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("9" * 400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
DEEP = (
    b"[" * 100_000,
    b'["list",' * 900 + b"0" + b"]" * 900,
    b'{"a":' * 100_000,
    b"{" * 1000 + b"}" * 1000,
    b"- " * 1000,
    b"1" * 100_000,
)


@st.composite
def wrong(draw: st.DrawFn, right: tuple[bytes, ...]) -> bytes:
    """Most of it like what is right."""
    data = draw(st.sampled_from(right))
    how = draw(st.sampled_from(("cut", "flip", "splice", "again", "value", "noise")))
    at = draw(st.integers(0, len(data)))
    if how == "cut":
        return data[:at]
    if how == "flip":
        return (
            data[:at] + bytes(byte ^ draw(st.integers(1, 255)) for byte in data[at : at + 1]) + data[at + 1 :]
        )
    if how == "splice":
        return data[:at] + draw(st.binary(max_size=20)) + data[draw(st.integers(at, len(data))) :]
    if how == "again":
        return data * draw(st.integers(2, 50))
    if how == "value":
        return other_value(draw, data)
    return draw(st.binary(max_size=300))


def other_value(draw: st.DrawFn, data: bytes) -> bytes:
    """With another value somewhere, where it is JSON."""
    try:
        values = json.loads(data)
    except ValueError:
        return data
    inside = values
    while isinstance(inside, dict) and inside:
        key = draw(st.sampled_from(sorted(inside)))
        if not isinstance(inside[key], dict) or draw(st.booleans()):
            inside[key] = draw(VALUES)
            break
        inside = inside[key]
    return json.dumps(values).encode()


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_what_is_right_and_refuses_what_is_not(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    for data in (*parser.right, b"", *DEEP):
        parser.check(data, tmp_path)

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(wrong(parser.right))
    def fuzz(data: bytes) -> None:
        parser.check(data, tmp_path)

    fuzz()


@pytest.mark.parametrize("image", [(11, 1, 0), (10, 0, 0), (10, 2, 0), (10, 1, 1)])
def test_the_manifest_of_another_image_is_not_taken(image: tuple[int, int, int]) -> None:
    """Of an earlier attempt that saved the same step, say."""
    assert trusted(image_manifest(), IMAGE).image == IMAGE
    with pytest.raises(BadImage):
        trusted(image_manifest(), ImageId(*image))


@pytest.mark.parametrize("length", [1, 5])
def test_frames_are_heard_once_and_in_their_order(length: int) -> None:
    """Of somebody on the way, who has all that was sent and plays it as he likes."""
    seal = Seal(b"k" * 32)
    said = [b'{"number": %d}' % number for number in range(length)]
    sent = [struct.pack(">I", len(one)) + seal.tag(one) + one for one in said]

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(st.lists(st.integers(0, length - 1), max_size=10))
    def fuzz(order: list[int]) -> None:
        came = bytearray().join(sent[number] for number in order)
        frames = Frames(b"o" * 32, b"k" * 32)
        heard = []
        with refusing(AuthenticationError):
            while (payload := frames.open(came)) is not None:
                heard.append(payload)
        assert heard == said[: len(heard)]
        assert len(heard) == next((n for n, number in enumerate(order) if n != number), len(order))

    fuzz()
