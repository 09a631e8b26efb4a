"""How much memory checkpoints will take, said before a run's first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jurymast.checkpoint.image import ImagePlanner, foreseen_bytes
from jurymast.checkpoint.state import ScriptState
from jurymast.core.checkpoints.checkpoints import Need, Shortages, needs
from jurymast.core.checkpoints.replicas import holders
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Record
from jurymast.core.state.messages import Room

GIB = 1 << 30
NODES = ("n1", "n2")


def kept(*spares: str, copies: int = 1) -> dict[str, tuple[str, ...]]:
    return holders(NODES, spares, {}, copies, ())


# ---- a rank


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),  # has its state from the start
}


@pytest.mark.torch
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_foreseen_is_what_the_first_step_brings(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(500, 400), torch.nn.BatchNorm1d(400), torch.nn.Linear(400, 9))
    model[2].requires_grad_(False)
    optimizer = OPTIMIZERS[name](model.parameters())
    state = {"model": model, "optimizer": optimizer, "more": torch.zeros(70_000)}
    foreseen, own = foreseen_bytes(state)
    assert own == 0
    model(torch.randn(8, 500)).sum().backward()
    optimizer.step()
    whole = ScriptState(state)
    true = ImagePlanner(whole).plan_image(whole.trees()).size_bytes
    assert true - 100_000 < foreseen <= true  # what torch.save writes around some 20 tensors and values
    assert foreseen_bytes(state)[0] == pytest.approx(foreseen, abs=100)  # steps are counted in tensors


# ---- the nodes


def test_two_of_everything_and_replicas_where_they_will_be() -> None:
    room = Room(0, "")
    foreseen = {
        "n1": msg.Foreseen(image_bytes=10, own_bytes=8, room=room),
        "n2": msg.Foreseen(image_bytes=20, own_bytes=16, room=room),
    }
    assert needs(foreseen, NODES, kept()) == {"n1": Need(20, 32), "n2": Need(40, 16)}
    assert needs(foreseen, NODES, kept("s")) == {"n1": Need(20), "n2": Need(40), "s": Need(0, 48)}
    assert needs(foreseen, NODES, kept("s", copies=0)) == {"n1": Need(20), "n2": Need(40)}


class Site:
    def __init__(self, **rooms_gib: int) -> None:
        self.notes: list[tuple[str, str]] = []
        self.shortages = Shortages()
        self.rooms = {node: Room(gib * GIB, f"/{node}/memory.max") for node, gib in rooms_gib.items()}
        for node, room in self.rooms.items():
            self.shortages.on_agent_joined(node, room)

    def hear(self, node: str, image_gib: int, own_gib: int, *spares: str) -> None:
        sizes = {"image_bytes": image_gib * GIB, "own_bytes": own_gib * GIB}
        self.shortages.on_foreseen(node, msg.Foreseen(**sizes, room=self.rooms[node]))
        if self.shortages.complete(NODES):
            for effect in self.shortages.look(NODES, kept(*spares), 1.0):
                assert isinstance(effect, Record)
                assert isinstance(effect.event, ev.Noted)
                self.notes.append((effect.event.node, effect.event.message))


def test_each_shortage_is_told_once_with_its_limit_and_what_follows() -> None:
    site = Site(n1=100, n2=30, s=9)
    site.hear("n1", 20, 4, "s")
    assert site.notes == []  # not all are known
    site.hear("n2", 20, 4, "s")
    assert site.notes == [
        (
            "n2",
            "checkpoints will take 40.0 GiB of this node's memory (two images of each rank 40.0 GiB), but "
            "only 30.0 GiB is available (limit: /n2/memory.max); ask Slurm for more --mem, or all ranks will "
            "save to shared storage",
        ),
        (
            "s",
            "checkpoints will take 16.0 GiB of this node's memory (replicas of other nodes 16.0 GiB), but "
            "only 9.0 GiB is available (limit: /s/memory.max); ask Slurm for more --mem, or replicas will be "
            "kept elsewhere, or only in storage",
        ),
    ]
    for node in NODES:  # another attempt
        site.hear(node, 20, 4, "s")
    assert len(site.notes) == 2


def test_who_left_is_not_counted_and_enough_is_enough() -> None:
    site = Site(n1=56, n2=56, s=0)
    site.shortages.on_node_lost("s")
    for node in NODES:
        site.hear(node, 20, 8)
    assert site.notes == []
    for node in NODES:
        site.hear(node, 20, 9)
    assert [node for node, _ in site.notes] == ["n1", "n2"]
    assert "58.0 GiB of this node's memory (two images of each rank 40.0 GiB, " in site.notes[0][1]
    assert "replicas of other nodes 18.0 GiB)" in site.notes[0][1]
