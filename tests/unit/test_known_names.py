"""What a save keeps for the next one is names and places, never a tensor, and only while it holds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as by_torch

from jurymast.checkpoint.contents import Contents
from jurymast.checkpoint.image import ImagePlanner, Window
from jurymast.checkpoint.names import no_collections
from jurymast.checkpoint.state import ScriptState
from jurymast.keeper.manifest import Manifest
from support.checkpoints import same

pytestmark = pytest.mark.torch


def net(width: int = 3) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    made.tied = made[0].weight
    return made


def stepped(module: nn.Module, **more: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **more)
    step(module, optimizer)
    return optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()


def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of torch that are called from now on."""
    calls: list[str] = []
    for name in ("get_model_state_dict", "get_optimizer_state_dict"):
        function = getattr(by_torch, name)

        def called(*arguments: Any, name: str = name, function: Any = function) -> Any:
            calls.append(name)
            return function(*arguments)

        monkeypatch.setattr(f"jurymast.checkpoint.state.{name}", called)
    return calls


class Saving:
    def __init__(self, objects: dict[str, Any]) -> None:
        self.state = ScriptState(objects)
        self.planner = ImagePlanner(self.state)
        self.buffer = bytearray(16 << 20)
        self.window = Window(self.buffer)

    def save(self) -> dict[str, bytes]:
        """The payloads of an image, by name."""
        image_plan = self.planner.plan_image(self.state.trees())
        self.window.stage(image_plan)
        manifest = Manifest.from_bytes(image_plan.manifest(1, 1, 0, 1))
        contents = Contents.from_bytes(self.window.data[manifest.contents_at : manifest.size_bytes])
        return {
            item.name: bytes(self.window.data[item.at : item.at + item.length]) for item in contents.items
        }

    def check(self) -> None:
        """What is saved now is what somebody who never saved before would save."""
        assert self.save() == Saving(dict(self.state.objects)).save()


def test_torch_is_asked_once_for_names_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    module = net()
    optimizer = stepped(module)
    saving = Saving({"optimizer": optimizer, "net": module})
    saving.save()
    calls = asked(monkeypatch)
    for _ in range(3):
        step(module, optimizer)
        assert list(saving.state.trees()) == ["optimizer", "net"], "in the user's order"
        saving.save()
    assert calls == []
    saving.check()


@pytest.mark.parametrize(
    "change",
    [
        "grown",
        "another module",
        "another optimizer",
        "other parameters",
        "a group more",
        "renamed",
        "dtype",
        "gone",
    ],
)
def test_names_and_places_are_found_anew_when_anything_changes(change: str) -> None:
    module = net()
    optimizer = stepped(module)
    objects: dict[str, Any] = {"net": module, "optimizer": optimizer}
    saving = Saving(objects)
    for _ in range(2):
        saving.save()
    if change == "grown":
        module.more = nn.Linear(1, 1)
    elif change == "another module":
        objects["net"] = net(5)
        objects["optimizer"] = stepped(objects["net"])
    elif change == "another optimizer":
        objects["optimizer"] = stepped(module, amsgrad=True)
    elif change == "other parameters":
        old, module[0] = module[0], nn.Linear(2, 3)
        module.tied = module[0].weight
        objects["optimizer"] = stepped(module)
        del old
    elif change == "a group more":
        module.more = nn.Linear(1, 1)
        optimizer.add_param_group({"params": list(module.more.parameters())})
        step(module, optimizer)
    elif change == "renamed":
        module.add_module("named", module[2])
        del module[2]
    elif change == "gone":
        del objects["net"]
    else:
        module.half()
    saving.check()
    saving.check()


def torch_keeps_modules() -> bool:
    """As 2.6 does, whose state is asked for."""
    module = net()
    gone = weakref.ref(module)
    by_torch.get_model_state_dict(module)
    del module
    gc.collect()
    return gone() is not None


@pytest.mark.skipif(
    torch_keeps_modules(), reason="this torch itself keeps each module that it was asked about"
)
def test_no_tensor_of_an_earlier_save_is_kept() -> None:
    objects: dict[str, Any] = {"net": net(), "values": {"a": torch.ones(3)}}
    objects["optimizer"] = stepped(objects["net"])
    saving = Saving(objects)
    saving.save()
    gone = [weakref.ref(one) for one in (*objects["net"].parameters(), objects["values"]["a"])]
    gone += [weakref.ref(objects["net"]), weakref.ref(objects["optimizer"])]
    objects.clear()
    gc.collect()
    assert [reference for reference in gone if reference() is not None] == []


class Hooked(nn.Linear):  # type: ignore[misc]
    """A module whose own `state_dict` says something else than torch's function starts from."""

    def state_dict(self, *arguments: Any, **more: Any) -> Any:
        return {"other": torch.full((2,), float(self.weight.detach()[0, 0]))}


def test_a_module_that_writes_its_state_itself_is_asked_each_time() -> None:
    module = Hooked(2, 2)
    saving = Saving({"net": module})
    for value in (1.0, 2.0):
        with torch.no_grad():
            module.weight.fill_(value)
        saved = ScriptState({"net": module}).trees()["net"]
        assert same(saving.state.trees()["net"], saved)
        assert same(saved, {"other": torch.full((2,), value)})


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()

    def saw(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1

    sys.setprofile(saw)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_save_makes_few_calls_for_each_tensor() -> None:
    """Microseconds, that is: counted, because a busy machine has no time to measure."""
    module = nn.ParameterList([torch.ones(2) for _ in range(1000)])
    saving = Saving({"net": module, "optimizer": stepped(module)})
    for _ in range(2):
        saving.save()
    with calls_counted() as found:
        image_plan = saving.planner.plan_image(saving.state.trees())
        saving.window.stage(image_plan)
    assert len(image_plan.tensors) == 4000
    assert sum(found.values()) < 12 * len(image_plan.tensors), found.most_common(8)


def test_no_garbage_is_collected_within_a_save() -> None:
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled(), "the script's own choice"
    finally:
        gc.enable()
