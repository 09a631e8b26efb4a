"""Flight records: who never entered a collective, from what real ranks recorded, and from made up groups."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from jurymast.agent.stacks import read
from jurymast.core.judges.stacks import Missing, entered, missing
from jurymast.core.state.evidence import Entered

# Every rank records what it entered, and is gone. Rank 1 leaves the second collective out.
RANKS = """
import os, sys
import torch, torch.distributed as dist
from pathlib import Path

def rank(number, folder, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=3)
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    if number != 1:
        dist.all_reduce(torch.ones(2), async_op=True)
    Path(folder, str(number)).write_bytes(torch._C._distributed_c10d._dump_fr_trace())
    os._exit(0)

children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        rank(number, sys.argv[1], sys.argv[2])
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.torch
def test_real_ranks_records_say_who_never_came(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        pytest.skip("this torch records collectives on GPUs only")
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANKS, str(tmp_path), str(tmp_path / "store")]
    subprocess.run(command, env=environment, check=True, timeout=100)
    seen = [one for rank in range(3) for one in read(tmp_path / str(rank), rank)]
    found = missing(seen)
    assert found is not None, seen
    assert (found.collective, found.ranks, found.waiting) == ("all_reduce", (1,), (0, 2))


def at(rank: int, number: int, *, group: str = "0", waits: bool = False) -> Entered:
    return Entered(rank, group, number, "all_reduce", waits)


def test_a_rank_that_waits_elsewhere_is_held_up_and_not_the_root() -> None:
    """Rank 2 is missing in the tensor group of 3; 0 and 1 wait for 3 in the data group, which waits for 2."""
    seen = [
        at(0, 7, group="data", waits=True), at(3, 6, group="data"),
        at(3, 9, group="tensor", waits=True), at(2, 8, group="tensor"),
    ]  # fmt: skip
    assert missing(seen) == Missing("all_reduce", 9, "tensor", (2,), (3,))
    assert missing(reversed(seen)) == missing(seen)


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [at(0, 5, waits=True), at(1, 5, waits=True)],  # all are in it: the network, or a mismatch
        [at(0, 5), at(1, 4)],  # nobody waits: one is just slower
    ],
)
def test_when_the_records_do_not_tell(seen: list[Entered]) -> None:
    assert missing(seen) is None


def test_a_member_that_entered_nothing_is_missing() -> None:
    groups = {"g": {"name": "g", "desc": "data", "ranks": "[4, 5]"}}
    first = {
        "process_group": ("g", "data"), "collective_seq_id": 1, "profiling_name": "nccl:all_gather",
        "state": "started", "is_p2p": False, "retired": False,
    }  # fmt: skip
    waits = entered(4, {"entries": [first, {**first, "is_p2p": True}], "pg_config": groups})
    assert waits == [Entered(4, "g", 1, "all_gather", True)]
    assert msgspec.convert(msgspec.to_builtins(waits[0]), Entered) == waits[0]
    never = entered(5, {"entries": [], "pg_config": groups})
    assert missing([*waits, *never]) == Missing("all_gather", 1, "g", (5,), (4,))
    completed = entered(4, {"entries": [{**first, "state": "completed"}], "pg_config": groups})
    assert missing([*completed, *never]) is None


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"record", pickle.dumps([]), pickle.dumps({"entries": 3}), pickle.dumps({"entries": [{}]}),
        pickle.dumps({"entries": [], "pg_config": 3}),
        pickle.dumps({"entries": [Evil()]}),
        pickle.dumps({"version": "2.4", "entries": []})[:-5],
    ],
)  # fmt: skip
def test_what_is_no_record_says_nothing_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "0").write_bytes(content)
    assert read(tmp_path / "0", 0) == []
    assert read(tmp_path / "nowhere", 0) == []
    assert not (tmp_path / "evil").exists()
