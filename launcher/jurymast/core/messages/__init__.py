"""Messages between agents, the supervisor and commands: every kind of message is a class here.

`read_said`, `read_order` and `read_answer` parse them from bytes where they arrive; anything else becomes a
Strange. Code that distinguishes them uses `match` and ends with `errors.never`, so that mypy reports kinds
that were forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

from jurymast.core.message import (
    Strange,
    ToAgent,
    ToSupervisor,
    encode,
    out_of_place,
    reader,
)
from jurymast.core.messages.checkpoints import (
    AboutCheckpoints,
    AskSources,
    CancelWrite,
    CheckpointOrder,
    Committed,
    CopyReport,
    Dropped,
    Foreseen,
    Forget,
    ForgetNewer,
    FromKeeper,
    GiveSlotsUp,
    Held,
    KeeperOrder,
    Member,
    MemberReport,
    Prefetched,
    Refused,
    Replicate,
    Restore,
    Source,
    Sources,
    Unreplicated,
    Unrestorable,
    Void,
    Write,
    Written,
)
from jurymast.core.messages.nodes import (
    Beat,
    CadenceReport,
    HealthFound,
    LeaveVerdict,
    Look,
    Looked,
    RankReport,
    Stacks,
    TestAlone,
    TestedAlone,
    TestedPair,
    TestOver,
    TestPair,
    Times,
    VerdictLeft,
    beat_of,
)
from jurymast.core.messages.run import (
    Accepted,
    Ask,
    CadenceSet,
    Condition,
    Declined,
    Dismiss,
    Endpoint,
    Failed,
    Finished,
    GoOn,
    HangsUp,
    Hello,
    Launch,
    Leave,
    Leaving,
    Moved,
    RankEvent,
    RanksState,
    Ready,
    Started,
    Stop,
    Stopped,
    Terminated,
)

__all__ = [
    "AboutCheckpoints", "Accepted", "Answer", "Ask", "AskSources", "Beat", "CadenceSet", "CadenceReport",
    "CancelWrite", "CheckpointOrder", "Committed", "Condition", "CopyReport", "Declined", "Dismiss",
    "Dropped", "Endpoint", "Failed", "Finished", "Foreseen", "Forget", "ForgetNewer", "FromKeeper",
    "GiveSlotsUp", "GoOn", "HangsUp", "HealthFound", "Held", "Hello", "KeeperOrder", "Kept", "Launch",
    "Leave", "LeaveVerdict", "Leaving", "Look", "Looked", "Member", "MemberReport", "Moved", "Order",
    "Prefetched", "RankEvent", "RankReport", "RanksState", "Ready", "Refused", "Replicate", "Restore", "Said",
    "Source", "Sources", "Stacks", "Started", "Stop", "Stopped", "Strange", "Terminated", "TestAlone",
    "TestOver", "TestPair", "TestedAlone", "TestedPair", "Times", "ToAgent", "ToSupervisor", "Unreplicated",
    "Unrestorable", "VerdictLeft", "Void", "Write", "Written", "beat_of", "encode", "out_of_place",
    "read_answer", "read_order", "read_said",
]  # fmt: skip

# Messages that an agent repeats over its next connection unless they were acknowledged: no hello contains
# them.
Kept = Failed | RankEvent | AskSources | Unrestorable | Written

_Said = (
    Hello | Ready | Started | Failed | Stopped | Finished | RankEvent | Terminated | HangsUp | Leaving
    | Looked | Stacks | HealthFound | VerdictLeft | TestedAlone | TestedPair | AboutCheckpoints | Ask
)  # fmt: skip
_Order = (
    Launch | Stop | Dismiss | CadenceSet | GoOn | Moved | Leave | Look | LeaveVerdict | TestAlone | TestPair
    | TestOver | CheckpointOrder
)  # fmt: skip
_Answer = Accepted | Declined | Condition

# Readers for the supervisor, an agent, and a command.
Said = Beat | _Said | Strange
Order = _Order | Strange
Answer = _Answer | Strange

_read_beat: Callable[[bytes], Beat | Strange] = reader(Beat)
_read_words: Callable[[bytes], Said] = reader(_Said)
read_order: Callable[[bytes], Order] = reader(_Order)
read_answer: Callable[[bytes], Answer] = reader(_Answer)


def read_said(payload: bytes) -> Said:
    return _read_beat(payload) if payload[:1] == b"[" else _read_words(payload)
