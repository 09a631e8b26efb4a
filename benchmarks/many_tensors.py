#!/usr/bin/env python3
"""What a state of many small tensors costs: a mixture of experts of 30 billion parameters under FSDP2 has
18,900 parameters, so 75,600 tensors on each rank.

A rank saves such a state; and a keeper with the images of eight such ranks takes them in, lends them, and has
them written to a shared directory. `--tensors` and `--ranks` change the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target
from jurymast.agent.io import Phases
from jurymast.agent.storage_processes import StorageProcesses, lent_image
from jurymast.checkpoint.contents import Contents, Item
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import Room, WritePhase
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.manifest import Manifest, RankRecord, SlotRecord, SlotWord, Word
from jurymast.keeper.real_io import RealKeeperIo
from jurymast.storage.orders import Done, WriteShared
from jurymast.wire.protocol import Access
from jurymast.worker import link

TENSORS = 75_600
QUICK_TENSORS = 6_000
RANKS = 8
SAVES = 5
TENSOR_BYTES = 64
EXPERTS = 128
TICK_S = 0.002
# A node that is silent for this long looks lost; its heartbeat needs some of it.
STAND_TARGET_S = 0.2
TENSOR_TARGET_US = 20.0
PEERS_LIMIT_S = 600.0
# Others take minutes for all of them.
PEERS_TENSORS = 2000


# ---- a rank


def rank_main(tensors: int, saves: int) -> None:
    """Save again and again, as a rank does, and print what it took as JSON."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from jurymast.checkpoint.image import ImagePlanner, Window
    from jurymast.checkpoint.names import no_collections
    from jurymast.checkpoint.state import ScriptState

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    experts = tensors // 12  # of three parameters, each with two moments and a count of steps

    def expert() -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("gate", "up", "down")})

    layers = [nn.Sequential(*(expert() for _ in range(EXPERTS))) for _ in range(max(1, experts // EXPERTS))]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (1,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = ScriptState({"model": model, "optimizer": optimizer})
    planner = ImagePlanner(state)
    image_plan = planner.plan_image(state.trees())
    window = Window(mmap.mmap(-1, image_plan.room()))

    def save() -> None:
        trees = state.trees()
        with no_collections():
            window.stage(planner.plan_image(trees))

    def stalls(work: Callable[[], Any], times: int, skipped: int = 1) -> list[float]:
        """The times of all but the first ones, which also prepare."""
        found = []
        for _ in range(skipped + times):
            began = time.perf_counter()
            work()
            found.append(time.perf_counter() - began)
        return found[skipped:]

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        flat = {f"{number}": one for number, one in enumerate(image_plan.tensors[:PEERS_TENSORS])}
        places = [torch.empty_like(one) for one in image_plan.tensors]
        answer = {
            "tensors": len(image_plan.tensors),
            "copy": stalls(
                lambda: [a.copy_(b) for a, b in zip(places, image_plan.tensors, strict=True)], saves
            ),
            "jurymast": stalls(save, saves),
            "torch.save": stalls(lambda: torch.save(flat, f"{folder}/whole"), 1, 0),
            "dcp.save": stalls(lambda: dcp.save(flat, checkpoint_id=f"{folder}/dcp"), 1, 0),
        }
    sys.stdout.write(json.dumps(answer))


# ---- a node


def _image(rank: int, ranks: int, tensors: int) -> tuple[bytes, int]:
    """An image whose tensors are sharded over all ranks, and where its contents begin."""
    size = TENSOR_BYTES // 4
    items = tuple(
        Item(
            name=f"optimizer.state.layers.{number // EXPERTS}.experts.{number % EXPERTS}.gate.weight.exp_avg",
            path=("optimizer", "state", f"layers.{number // EXPERTS}.{number % EXPERTS}.weight", "exp_avg"),
            at=TENSOR_BYTES * number, length=TENSOR_BYTES, dtype="float32", shape=(size * ranks,),
            offsets=(size * rank,), sizes=(size,), raw=TENSOR_BYTES * number,
        )
        for number in range(tensors)
    )  # fmt: skip
    payload = bytes([rank]) * (TENSOR_BYTES * tensors)
    return payload + Contents({"optimizer": {"kind": "optimizer"}}, items).to_bytes(), len(payload)


class Loop:
    """Measures how long the event loop stands still."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._beating = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began - TICK_S)

    @contextmanager
    def standing(self, found: dict[str, float], what: str) -> Iterator[None]:
        self.longest_s, began = 0.0, time.monotonic()
        yield
        found[f"{what}: the loop's longest stand"] = self.longest_s
        found[what] = time.monotonic() - began


async def _node(tensors: int, ranks: int, root: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    told: list[Any] = []
    room = Room(1 << 50, "enough")
    keeper = Keeper(RealKeeperIo(Access(b"k" * 32), "a", ranks, lambda: room), told.append)
    await keeper.start()
    keeper.launch(1, list(range(ranks)), ranks, None)
    page = link.open_page(keeper.io.page_path)
    assert page is not None
    slots = [
        await _written(keeper, RankRecord(page, rank), rank, ranks, *_image(rank, ranks, tensors))
        for rank in range(ranks)
    ]
    storage = StorageProcesses()
    loop = Loop()
    with loop.standing(found, "taking images in"):
        for slot in slots:
            slot[SlotWord.SEQ] = slot[SlotWord.FREED] + 2
        keeper.look()
        while len([message for message in told if isinstance(message, msg.Held)]) < ranks:
            await asyncio.sleep(TICK_S)
    with loop.standing(found, "writing them to storage"):
        loans = [loan for rank in range(ranks) if (loan := await keeper.lend(10, 1, rank)) is not None]
        order = WriteShared(
            root=str(root), step=10, attempt=1, world=ranks, images=tuple(map(lent_image, loans)),
            nonce="00ab", lead=True, run_directory=str(root),
        )  # fmt: skip

        def reached(phase: WritePhase) -> None:
            turn = msg.ContinueWrite(id="0", phase=WritePhase(phase + 1), parts=(0,))
            phases.turns.put_nowait(turn)

        phases = Phases(reached)
        answer = await storage.carry_out(order, phases)
    assert isinstance(answer, Done), answer
    found["storage process, at most"] = max(
        _peak_bytes(child.pid) for child in psutil.Process().children()
    ) / (1 << 20)
    for loan in loans:
        loan.give_back()
    await storage.close()
    await keeper.close()
    return found


def _peak_bytes(pid: int) -> int:
    """The largest resident memory of the process so far, without pages of mapped images."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


async def _written(
    keeper: Keeper, record: RankRecord, rank: int, ranks: int, data: bytes, contents_at: int
) -> SlotRecord:
    """The slot with the image of a rank, which has not published it yet."""
    manifest = Manifest(10, 1, rank, ranks, "2", len(data), 0, contents_at, contents_at).to_bytes()
    record[Word.WANT] = len(data) + 2 * len(manifest)
    slot = record.slot(0)
    while not slot.writable:
        keeper.look()
        await asyncio.sleep(TICK_S)
    slot[SlotWord.SEQ] = slot[SlotWord.FREED] + 1
    descriptor = os.open(f"/proc/{os.getpid()}/fd/{slot[SlotWord.FD]}", os.O_RDWR | os.O_CLOEXEC)
    with mmap.mmap(descriptor, slot[SlotWord.CAPACITY]) as place:
        place[: len(data)] = data
        place[len(data) : len(data) + len(manifest)] = manifest
    os.close(descriptor)
    slot[SlotWord.STEP], slot[SlotWord.IMAGE], slot[SlotWord.MANIFEST] = 10, len(data), len(manifest)
    return slot


# ---- what is printed


def _row(case: str, system: str, metric: str, unit: str, samples: list[float], note: str = "") -> Row:
    found = common.spread(list(samples))
    return Row(case, system, metric, unit, found.median, found.low, found.high, found.n, note, list(samples))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer tensors")
    parser.add_argument("--tensors", type=int, help=f"of each rank [{TENSORS}]")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"of the node [{RANKS}]")
    parser.add_argument("--saves", type=int, default=SAVES, help=f"measured saves [{SAVES}]")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tensors = arguments.tensors or (QUICK_TENSORS if arguments.quick else TENSORS)
    if arguments.as_rank:
        rank_main(tensors, arguments.saves)
        return 0
    about = {**common.machine(), "tensors_of_a_rank": tensors, "ranks": arguments.ranks}
    common.progress(f"a rank with {tensors} tensors")
    command = [
        sys.executable,
        __file__,
        "--as-rank",
        "--tensors",
        f"{tensors}",
        "--saves",
        f"{arguments.saves}",
    ]
    told = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=PEERS_LIMIT_S).stdout
    )
    case, count = f"a rank, {told['tensors']} tensors", told["tensors"]
    rows = [_row(case, common.JURYMAST, "stall", "s", told["jurymast"])]
    rows.append(_row(case, "copy_ of each tensor", "stall", "s", told["copy"]))
    each_us = [1e6 * seconds / count for seconds in told["jurymast"]]
    rows.append(_row(case, common.JURYMAST, "stall for each tensor", "us", each_us))
    for system in ("torch.save", "dcp.save"):
        peers = min(count, PEERS_TENSORS)
        theirs = [1e6 * seconds / peers for seconds in told[system]]
        rows.append(_row(case, system, "stall for each tensor", "us", theirs, f"of {peers} tensors"))
    common.progress(f"a node with {arguments.ranks} such ranks")
    root = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        node = asyncio.run(_node(tensors, arguments.ranks, root))
    finally:
        shutil.rmtree(root)
    case = f"a node of {arguments.ranks} such ranks"
    for metric, value in node.items():
        rows.append(_row(case, common.JURYMAST, metric, "MiB" if "at most" in metric else "s", [value]))
    stand = max((value for metric, value in node.items() if "stand" in metric), default=math.nan)
    targets = [
        Target("longest_stand_of_the_agents_loop_s", stand, STAND_TARGET_S, "lower", case),
        Target("stall_of_a_tensor_us", common.spread(each_us).median, TENSOR_TARGET_US, "lower"),
    ]
    common.print_report("many_tensors", rows, targets, about, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
