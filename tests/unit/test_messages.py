"""What agents and the supervisor say: it survives its way, and what is no message ends nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from jurymast.agent.real_io import NodeIo, node_agent
from jurymast.cluster.allocation import Allocation
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.evidence import Entered, NodeTimes, RankPlace
from jurymast.core.state.findings import Finding, Verdict
from jurymast.core.state.host_messages import read_host
from jurymast.core.state.incident import Alert
from jurymast.core.state.message import Strangers
from jurymast.core.state.messages import Endpoint, Room
from jurymast.core.state.schedule import Schedule
from jurymast.core.state.settings import RunPlan
from jurymast.journal import JournalWriter, events, read
from jurymast.rundir import RunDirectory
from jurymast.supervisor.real_io import RealIo
from jurymast.supervisor.supervisor import Hold, Supervisor
from jurymast.wire import channel, endpoint
from jurymast.wire.channel import Channel
from jurymast.wire.handshakes import Proven
from support.reports import hello
from support.stories import Story
from support.wire import served

LIMIT_S = 90.0
FINDING = Finding(probe="host", code="disk-full", verdict=Verdict.BAD, kind="host", message="full", at=1.5)
COPY = msg.CopyReport(
    tier="peer", step=10, attempt=1, rank=0, world=2, part="own", size_bytes=9, stall_s=0.1,
    common_bytes=4, common_id="x",
)  # fmt: skip
PLACE = Endpoint(2, ("n2", "10.0.0.2"), 7, "n2", "17.0", 1)
PLAIN = msg.Source(tier="peer", node="n2", hosts=("10.0.0.2",), port=7, part="all", rank=1)
SOURCE = msgspec.structs.replace(PLAIN, part="own", rank=0)
ALERT = Alert("s", 1.0, 2.0, "m", {"n1": None})
ENTERED = Entered(0, "default_pg", 7, "all_reduce", True)

SAID: list[msg.ToSupervisor] = [
    hello("n1", copies=(COPY,), room=Room(5, "/x"), health=(FINDING,), domain="a.b", pids=(1, 2)),
    msg.Ready(store_port=1),
    msg.Started(attempt=1, pids=(4, 5)),
    msg.Failed(attempt=1, rank=2, exit_code=-9, error="E", oom_kills=None, shm_used=0.5),
    msg.Stopped(attempt=1, store_port=0),
    msg.Finished(attempt=1),
    msg.RankEvent(attempt=1, event=within.Saved(step=5, tier="shared", ok=True, stall_s=0.5)),
    msg.RankEvent(attempt=1, event=within.Restored(step=5, tier="memory", seconds=1.0, skipped=("a",))),
    msg.RankEvent(attempt=1, event=within.ColdStart(local_rank=3, why="it sets them", seconds=2.0)),
    msg.RankEvent(attempt=1, event=within.Skipped(step=5, why=within.Skip.BUSY)),
    msg.Terminated(),
    msg.HangsUp(),
    msg.HangsUp(newer=PLACE),
    msg.Leaving(why="x"),
    msg.Looked(
        attempt=1, number=2, stands={0: RankPlace("code", "in f"), 7: RankPlace("collective", "in g")}
    ),
    msg.Stacks(attempt=1, ranks=(0,), kinds=("code",), places=("in f",), folder="e", flights=(ENTERED,)),
    msg.HealthFound(finding=FINDING, clock=1.0),
    msg.VerdictLeft(why="no munge"),
    msg.TestedAlone(port=4, found=NodeTimes({"gloo latency": 0.1}, "wrong", "error")),
    msg.TestedPair(name="0-a-b", times={"gloo latency": 0.1}),
    msg.Held(copies=(COPY,)),
    msg.Dropped(copy=COPY, why="corrupt"),
    msg.Refused(why="full"),
    msg.Foreseen(image_bytes=9, own_bytes=8, room=Room(5, "/x")),
    msg.Prefetched(step=1, attempt=1, rank=0, tiers={"peer": 9}, seconds=0.1, passed_over=("a",)),
    msg.Unrestorable(attempt=2, rank=0, step=1, of=1, why="gone"),
    msg.AskSources(step=1, attempt=1, rank=0),
    msg.Unreplicated(step=1, attempt=1, rank=0, part="all", why="gone"),
    msg.WriteReached(id="7", phase=msg.WritePhase.ANNOUNCE),
    msg.WriteProgress(id="7", size_bytes=1 << 40),
    msg.Written(id="7", tier="shared", ok=False, why="full"),
    msg.Ask(what="rollback", by="ada", step=7),
]
ORDERS: list[msg.ToAgent] = [
    msg.Launch(
        attempt=2, rank=1, world=4, master_address="a", master_port=5, mtbf_s=1.5, cold=True,
        restore=msg.Restore(step=10, attempt=1, ranks={0: (SOURCE, PLAIN), 1: ()}),
    ),
    msg.Stop(attempt=1, stacks=True),
    msg.Dismiss(),
    msg.CadenceSet(attempt=1, schedule=Schedule(1, 2, 3, 4), decided=-1),
    msg.GoOn(time=1.5, patience_s=2.5, heard=3),
    msg.JobGoesOn(),
    msg.Leave(over=True),
    msg.Moved(place=PLACE),
    msg.Look(attempt=1, number=2),
    msg.LeaveVerdict(job="17", finding=FINDING),
    msg.TestAlone(limit_s=5.0),
    msg.TestPair(name="x", host="h", port=1, rank=0, limit_s=5.0),
    msg.TestOver(),
    msg.Replicate(step=1, attempt=1, rank=0, part="all", sources=(PLAIN,)),
    msg.Sources(step=1, attempt=1, rank=0, sources=(PLAIN,)),
    msg.Committed(step=1, attempt=1),
    msg.Void(step=1, attempt=1),
    msg.ForgetNewer(step=1),
    msg.GiveSlotsUp(),
    msg.Write(id="7", tier="shared", step=1, attempt=1, ranks=(0,), world=2, lead=True),
    msg.ContinueWrite(id="7", phase=msg.WritePhase.SHARE_OUT, parts=(0, 8)),
    msg.CancelWrite(id="7"),
]  # fmt: skip
ANSWERS: list[msg.Accepted | msg.Declined | msg.Condition] = [
    msg.Accepted(gives_up="step 9"),
    msg.Declined(why="no such node"),
    msg.Condition(
        state="running",
        waits="",
        journal="No space",
        step=9,
        alerts=(Alert("s", 1.0, 2.0, "m", {"n1": None}),),
    ),
]


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work, LIMIT_S)

    asyncio.run(limited())


def test_every_kind_survives_its_way() -> None:
    for said in SAID:
        assert msg.read_said(msg.encode(said)) == said
    for order in ORDERS:
        assert msg.read_order(msg.encode(order)) == order
    for answer in ANSWERS:
        assert msg.read_answer(msg.encode(answer)) == answer
    for kinds, samples in ((msg.Said, SAID), (msg.Order, ORDERS), (msg.Answer, ANSWERS)):
        assert set(get_args(kinds)) - {msg.Beat, msg.Unreadable} == {type(sample) for sample in samples}


def test_kinds_are_called_as_their_classes_are_and_say_what_they_mean() -> None:
    assert json.loads(msg.encode(msg.CancelWrite(id="7"))) == {"do": "cancel write", "id": "7"}
    for kind in {*get_args(msg.Said), *get_args(msg.Order), *get_args(msg.Answer)}:
        assert kind.__doc__, kind
        assert kind is msg.Unreadable or kind.__struct_config__.frozen


def test_a_message_for_many_is_encoded_once() -> None:
    committed = msg.Committed(step=1, attempt=1)
    assert msg.encode(committed) is msg.encode(committed)
    assert msg.encode(msg.Void(step=1, attempt=1)) != msg.encode(committed)


DEEPER = 300_000  # than any Python's parsers go
NONSENSE = [
    (b'{"say":"dance"}', "dance"),
    (b'{"say":"held"}', "held"),
    (b'{"say":"held","copies":[{}]}', "held"),
    (msg.encode(msg.Held(copies=(COPY,))).replace(b'"own"', b'"most"'), "held"),
    (msg.encode(msg.Held(copies=(COPY,))).replace(b'"peer"', b'"attic"'), "held"),
    (b'{"say":"written","id":7,"tier":"shared","ok":true}', "written"),
    (
        msg.encode(msg.HealthFound(finding=FINDING, clock=1.0)).replace(b'"host"', b'"weather"'),
        "health found",
    ),
    (b'["beat","one",[]]', ""),
    (b'["bet",1,[]]', ""),
    (b'{"do":"leave"}', "leave"),
    (b'{"say":["dance"]}', ""),
    (b'{"say":"ready","store_port":1,"x":' + b"[" * DEEPER + b"]" * DEEPER + b"}", ""),
    (b"7", ""),
    (b"", ""),
    (b"\xff\xfe", ""),
    (b'{"say":"rea', ""),
]


@pytest.mark.parametrize(("payload", "kind"), NONSENSE)
def test_what_is_no_message_is_named_as_well_as_can_be(payload: bytes, kind: str) -> None:
    found = msg.read_said(payload)
    assert isinstance(found, msg.Unreadable)
    assert (found.kind, bool(found.why)) == (kind, True)


def test_fields_that_are_not_known_are_left_out() -> None:
    assert msg.read_said(b'{"say":"ready","store_port":1,"colour":"red"}') == msg.Ready(store_port=1)


def test_each_sender_s_first_is_told_and_the_number_of_all() -> None:
    notes: list[tuple[str, str]] = []
    strangers = Strangers(lambda sender, text: notes.append((sender, text)))
    dance, held = msg.Unreadable("dance", "not here"), msg.Unreadable("held", "a field is missing")
    for what in (dance, held, dance):
        strangers.heard("n1", what)
    strangers.heard("n2", held)
    assert notes == [
        ("n1", "an unknown message was ignored: dance: not here"),
        ("n2", "an unknown message was ignored: held: a field is missing"),
    ]
    for sender in ("n1", "n1", "n2", "n3"):
        strangers.left(sender)
    assert notes[2:] == [("n1", "3 unknown messages were ignored: dance 2, held 1")]
    strangers.heard("n1", dance)  # it is back
    strangers.left("n1")
    assert notes[3:] == [("n1", "4 unknown messages were ignored: dance 3, held 1")]


def say(connection: Channel[Any], payload: bytes) -> None:
    connection._connection.write(connection._frames.seal(payload))


async def test_an_agent_that_talks_nonsense_stays_connected_and_is_noted_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    story = Story(active=2, spares=1).running()
    io = RealIo(directory, Allocation("17", 0, ("n1",), "n1", 0.0), lambda: story.state)
    journal = JournalWriter(directory.journal, 9)

    supervisor = Supervisor(io, story.state, journal, Hold(io, 9))

    async def serve(proven: Proven) -> None:
        await supervisor.serve(Channel.of(proven, msg.read_said), lambda error: None)

    async with served(serve, directory.secret()) as port:
        agent = await channel.connect("127.0.0.1", port, directory.secret(), msg.read_order)
        agent.send(hello("n1", allocation="17.0", attempt=1, ranks="running"))
        for payload, _ in NONSENSE:
            say(agent, payload)
        agent.send(hello("n1", allocation="17.0"))  # it has said so
        agent.send(msg.Refused(why="that is the end"))
        while not any("the end" in note for note in noted(directory, journal)):
            await asyncio.sleep(0.01)
        assert supervisor.is_connected("n1")
        agent.close()
        while not any("were ignored" in note for note in noted(directory, journal)):
            await asyncio.sleep(0.01)
    first, end, count = noted(directory, journal)
    assert first.startswith("an unknown message was ignored: dance: ")
    assert "the end" in end
    assert count.startswith(f"{len(NONSENSE) + 1} unknown messages were ignored: ")
    assert "held 4" in count


def noted(directory: RunDirectory, journal: JournalWriter) -> list[str]:
    journal.flush()
    return [event.message for event in events(read(directory)) if isinstance(event, ev.Noted)]


def test_a_supervisor_that_talks_nonsense_keeps_its_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    allocation = Allocation("17", 0, ("n1",), "n1", 0.0)
    allocation.save(directory)
    plan = RunPlan(
        run="r", name="r", directory=str(directory.root), cluster="local", active=1, spares=0,
        ranks_per_node=1, script="x", python=sys.executable,
    )  # fmt: skip
    agent = node_agent(directory, plan, "n1", None)
    io = agent._io
    assert isinstance(io, NodeIo)
    agent.machine.ranks.host_starts = 1  # nothing is to be started
    came: list[msg.Said] = []

    async def supervise(proven: Proven) -> None:
        connection = Channel.of(proven, msg.read_said)
        came.extend([await connection.receive(), await connection.receive()])
        for payload in (b'{"do":"dance"}', b'{"do":"write","id":7}', b"\xff", b'{"say":"hangs up"}'):
            say(connection, payload)
        connection.send(msg.Leave(over=True))

    async def work() -> None:
        with open(io.ranks.events_path, "wb", buffering=0) as pipe:
            pipe.write(
                b'{"event": "Sung"}\n{"event": "Skipped", "step": 7, "why": "both memory slots are busy"}\n'
            )
        io.ranks.read()
        async with served(supervise, directory.secret()) as port:
            place = endpoint.Endpoint(1, ("127.0.0.1",), port, "n1", allocation.key, os.getpid())
            endpoint.announce(directory.epochs, place)
            await agent.run()

    run(work())
    greeting, unsaid = came
    assert isinstance(greeting, msg.Hello)
    assert unsaid == msg.RankEvent(attempt=0, event=within.Skipped(step=7, why=within.Skip.BUSY))
    of_rank, first, count = caplog.messages
    assert of_rank.startswith("a rank: an unknown message was ignored: Sung: ")
    assert first.startswith("127.0.0.1: an unknown message was ignored: dance: ")
    assert "4 unknown messages were ignored: " in count


def test_nonsense_between_the_agent_and_its_host_ends_neither() -> None:
    """The host's side in a process of its own: it ends with its agent."""
    code = (
        "import sys\n"
        "from jurymast.worker.agent_pipe import AgentPipe\n"
        "pipe = AgentPipe(int(sys.argv[1]))\n"
        "print(pipe.next_launch(1).attempt, flush=True)\n"
    )
    ours, theirs = socket.socketpair()
    launch = msg.Launch(
        attempt=3,
        rank=0,
        world=1,
        master_address="a",
        master_port=1,
        mtbf_s=0.0,
        cold=False,
        saved=0,
        environment={},
    )
    nonsense = [b'{"do":"dance"}', b'{"do":"launch"}', b"\xff", b""]
    with ours:
        ours.sendall(b"".join(line + b"\n" for line in [*nonsense, msg.encode(launch)]))
        with theirs:
            done = subprocess.run(
                [sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()], text=True,
                capture_output=True, timeout=LIMIT_S, check=True,
            )  # fmt: skip
    assert done.stdout == "3\n"
    assert done.stderr.startswith("the agent: an unknown message was ignored: dance: ")
    for said in (
        msg.Ready(store_port=1), msg.Started(attempt=1, pids=(2,)), msg.Finished(attempt=1),
        msg.Failed(attempt=1, rank=0, exit_code=1, error="E"),
    ):  # fmt: skip
        assert read_host(msg.encode(said)) == said
    strange = read_host(b'{"say":"dance"}')
    assert isinstance(strange, msg.Unreadable)
    assert strange.kind == "dance"
