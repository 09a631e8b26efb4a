"""A rank's state as an image: every item is what torch.save writes, and what is loaded is what was saved."""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import resource
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from jurymast.checkpoint import RandomState, image
from jurymast.checkpoint.contents import Contents
from jurymast.checkpoint.gpu_copies import owned_by_optimizers
from jurymast.checkpoint.image import ImagePlan, ImagePlanner, Window
from jurymast.checkpoint.state import ScriptState
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import Manifest
from support.checkpoints import Holder, assert_special_tensors_are_back, same, special_tensors

pytestmark = pytest.mark.torch

ROOM = 1 << 20


class Taken:
    """An image in memory that was dirty before, with its manifest as the agent reads it."""

    def __init__(
        self, planner: ImagePlanner, state: ScriptState, *, step: int = 5, window: Window | None = None
    ) -> None:
        self.image_plan: ImagePlan = planner.plan_image(state.trees())
        self.window = window or Window(bytearray(b"\xa5" * (self.image_plan.size_bytes + ROOM)))
        self.window.stage(self.image_plan)
        self.manifest = Manifest.from_bytes(self.image_plan.manifest(5, 2, 0, 1))
        self.image = self.window.data[: self.manifest.size_bytes]
        self.contents = Contents.from_bytes(self.image[self.manifest.contents_at :])

    def __getitem__(self, name: str) -> Any:
        """As stock torch reads it."""
        (item,) = (item for item in self.contents.items if item.name == name)
        return torch.load(io.BytesIO(self.image[item.at : item.at + item.length]), weights_only=False)


def taken(objects: dict[str, Any]) -> Taken:
    state = ScriptState(objects)
    return Taken(ImagePlanner(state), state)


def load(source: Taken, objects: dict[str, Any]) -> dict[str, Any]:
    image.load(source.image, source.manifest, ScriptState(objects))
    return objects


VALUES: dict[str, Any] = {
    "bf16": torch.randn(3, 5).to(torch.bfloat16),
    "fp8": torch.randn(17).to(torch.float8_e4m3fn),
    "complex": torch.randn(2, 3, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "int8": torch.tensor([[[-1]]], dtype=torch.int8),
    "float64": torch.tensor([float("nan"), float("-inf")], dtype=torch.float64),
    "no dimension": torch.tensor(-0.0),
    "empty": torch.empty(0),
    "empty too": torch.empty(3, 0, 2, dtype=torch.int16),
    "turned": torch.arange(6).reshape(2, 3).t(),
    "part": torch.arange(1000)[::100],
    "expanded": torch.ones(1).expand(4),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "trained": torch.randn(2, requires_grad=True),
    "list": [torch.ones(2), {"deep": [1, "x"]}, torch.empty(0)],
    "only empty": [torch.empty(0)],
    "opaque": {3: torch.ones(1), "x": {}},
    "numbers": [0.0, -0.0, float("nan"), 1, True, None, "1", b"1", 1j],
}


def test_stock_torch_reads_every_item() -> None:
    got = taken({"it": Holder(VALUES)})
    for item in got.contents.items:
        expected: Any = VALUES
        for key in item.path[2:]:
            expected = expected[key]
        if isinstance(expected, torch.Tensor):
            expected = expected.detach().resolve_conj()
        read = got[item.name]
        if item.name != "it.value.opaque.3" and not isinstance(read, tuple):
            assert same(read, expected), item.name
        if item.raw >= 0:
            assert item.raw % image.ALIGNMENT == 0
            values = bytes(got.image[item.raw : item.raw + expected.numel() * expected.element_size()])
            flat = expected.contiguous().flatten().view(torch.uint8)
            assert values == bytes(flat.tolist())
    fresh = load(got, {"it": Holder()})["it"].value
    assert same(fresh, {**VALUES, "conjugate": VALUES["conjugate"].resolve_conj()})


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|quantize|TypedStorage)")
def test_tensors_that_are_more_than_their_bytes() -> None:
    got = taken({"it": Holder(special_tensors()), "values": special_tensors()})
    back = load(got, {"it": Holder(), "values": {}})
    assert_special_tensors_are_back(back["it"].value)
    assert_special_tensors_are_back(back["values"])


def test_items_are_apart_aligned_and_whole() -> None:
    got = taken({"net": nn.Linear(7, 9), "it": Holder(VALUES)})
    items = sorted(got.contents.items, key=lambda item: item.at)
    assert [item.at % image.ALIGNMENT for item in items] == [0] * len(items)
    for item, following in zip(items, items[1:], strict=False):
        gap = bytes(got.image[item.at + item.length : following.at])
        assert gap == bytes(len(gap))
        assert len(gap) < image.ALIGNMENT
    assert got.manifest.common_bytes == next(i.at for i in items if not i.name.startswith("net."))


def test_the_manifest_is_what_its_own_class_writes() -> None:
    got = taken({"net": nn.Linear(2, 3), "it": Holder(VALUES), "n": 7})
    assert [item.path[:2] for item in got.contents.items[:3]] == [
        ("net", "weight"),
        ("net", "bias"),
        ("it", "value"),
    ]
    _, _, text = got.image_plan.manifest(5, 2, 0, 1).partition(b"\n")
    assert json.loads(text) == json.loads(json.dumps(asdict(got.manifest)))
    assert got.manifest.torch == torch.__version__
    assert {key: entry["kind"] for key, entry in got.contents.entries.items()} == {
        "net": "module",
        "it": "stateful",
        "n": "value",
    }
    assert set(got.contents.entries["n"]) == {"kind", "digest"}


def test_stock_dcp_loads_an_image_as_a_file(tmp_path: Path) -> None:
    net, optimizer = trained("adamw", 1)
    got = taken({"net": net, "optimizer": optimizer, "it": Holder(VALUES)})
    (tmp_path / "__0_0.distcp").write_bytes(got.image)
    described: Metadata = image._metadata(got.contents)
    described.storage_data = {
        MetadataIndex(item.name, torch.Size(item.offsets) if item.is_tensor else None): _StorageInfo(
            "__0_0.distcp", item.at, item.length
        )
        for item in got.contents.items
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
    into = {"net": {name: torch.zeros_like(value) for name, value in net.named_parameters()}}
    dcp.load(into, checkpoint_id=tmp_path)
    assert same(into["net"], dict(net.named_parameters()))


def test_payloads_beyond_four_gib() -> None:
    """The zip format has other headers for them; they are made without touching that much memory."""
    size = (5 << 30) + 1
    before, after = image.shell(torch.uint8, (size,))
    descriptor = os.memfd_create("sparse")
    try:
        os.pwrite(descriptor, before, 0)
        os.pwrite(descriptor, b"\x07", len(before) + size - 1)
        os.pwrite(descriptor, after, len(before) + size)
        read = torch.load(f"/proc/self/fd/{descriptor}", mmap=True, weights_only=True)
        assert read.shape == (size,)
        assert (int(read[0]), int(read[-1])) == (0, 7)
    finally:
        os.close(descriptor)


# ---- one save after another


def test_later_saves_hold_later_values_and_earlier_ones_stay() -> None:
    net = nn.BatchNorm1d(4)
    holder = Holder({"n": 1, "t": torch.zeros(3)})
    state = ScriptState({"net": net, "it": holder})
    planner = ImagePlanner(state)
    first = Taken(planner, state)
    before = bytes(first.image)
    with torch.no_grad():
        net.weight.fill_(7)
        net.running_mean.fill_(8)
    holder.value["n"] = 2
    holder.value["t"] += 9
    assert bytes(first.image) == before
    assert same(first["net.weight"], torch.ones(4))
    second = Taken(planner, state)
    assert second.image_plan.layout is first.image_plan.layout
    assert bytes(first.image) == before
    assert same(second["net.weight"], torch.full((4,), 7.0))
    assert same(second["net.running_mean"], torch.full((4,), 8.0))
    assert same((second["it.value.n"], second["it.value.t"]), (2, torch.full((3,), 9.0)))
    assert same((first["it.value.n"], first["it.value.t"]), (1, torch.zeros(3)))
    third = Taken(planner, state, window=first.window)
    assert bytes(third.image) == bytes(second.image)


def test_constants_are_told_apart() -> None:
    holder = Holder([0.0])
    state = ScriptState({"it": holder})
    planner = ImagePlanner(state)
    for value in (0.0, -0.0, 0, False, 1, True, 1.0, "1", b"1", (1,), (True,), [1], float("nan"), None):
        holder.value = [value, (value, [value])]
        assert same(Taken(planner, state)["it.value"], holder.value)


def test_state_that_grows_and_shrinks_in_the_same_memory() -> None:
    holder = Holder({"a": torch.ones(2)})
    state = ScriptState({"it": holder})
    planner = ImagePlanner(state)
    window = Window(bytearray(ROOM))
    shapes: list[dict[str, Any]] = [
        {"a": torch.full((2,), 2.0)},
        {"a": torch.full((2,), 2.0), "b": torch.ones(50, 50), "c": ["x" * 500, {1: 2}]},
        {"a": torch.full((2,), 3.0, dtype=torch.bfloat16), "b": torch.ones(2500)},
        {"a": torch.full((1, 2), 4.0)},
        {"a": "no tensor"},
    ]
    for value in shapes:
        holder.value = value
        got = Taken(planner, state, window=window)
        assert same(load(got, {"it": Holder()})["it"].value, value)
        dirty = Taken(ImagePlanner(state), state)
        assert bytes(got.image) == bytes(dirty.image), "the same state gives the same bytes"


def test_saving_again_takes_no_memory() -> None:
    net = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(8)])
    state = ScriptState({"net": net, "n": 1})
    planner = ImagePlanner(state)
    window = Window(mmap.mmap(-1, planner.plan_image(state.trees()).size_bytes + ROOM))
    for _ in range(3):
        Taken(planner, state, window=window)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        Taken(planner, state, window=window)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert pages * mmap.PAGESIZE < (4 << 20), "three times 32 MiB were copied"


# ---- models and optimizers


class Net(nn.Module):  # type: ignore[misc]  # torch's types are not followed
    """Two types of weights, buffers, an empty one, tied weights, one nobody uses, an extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.second = nn.Linear(6, 3).to(torch.bfloat16)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("nothing", torch.empty(0))
        self.note = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.tied(self.norm(self.first(x)).relu()).to(torch.bfloat16)).float()

    def get_extra_state(self) -> dict[Any, Any]:
        return {"note": self.note, 7: ()}

    def set_extra_state(self, state: dict[Any, Any]) -> None:
        self.note = state["note"]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "groups": lambda p: torch.optim.RMSprop([{"params": [q], "lr": 0.1 / (n + 2)} for n, q in enumerate(p)]),
}


def step(net: Net, optimizer: torch.optim.Optimizer, number: int) -> None:
    net(torch.randn(5, 6, generator=torch.Generator().manual_seed(number))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(name: str, seed: int, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    optimizer = OPTIMIZERS[name](net.parameters())
    for number in range(steps):
        step(net, optimizer, number)
    return net, optimizer


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("steps", [0, 2])
def test_training_goes_on_with_the_same_bits(name: str, steps: int) -> None:
    net, optimizer = trained(name, 1, steps)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    got = taken({"net": net, "optimizer": optimizer, "schedule": schedule, "random": RandomState()})
    expected = torch.rand(3)
    fresh, fresh_optimizer = trained(name, 2, 0)
    fresh_schedule = torch.optim.lr_scheduler.StepLR(fresh_optimizer, 5)
    load(
        got,
        {"net": fresh, "optimizer": fresh_optimizer, "schedule": fresh_schedule, "random": RandomState()},
    )
    assert same(torch.rand(3), expected)
    assert fresh.note == 1
    assert fresh.tied.weight is fresh.first.weight
    for number in range(2, 5):
        step(net, optimizer, number)
        step(fresh, fresh_optimizer, number)
    assert same(list(fresh.state_dict().values())[:-1], list(net.state_dict().values())[:-1])


def test_what_optimizers_work_on_is_the_common_part() -> None:
    taken_of = []
    for seed in (0, 1):
        net, optimizer = trained("adamw", 1)
        with torch.no_grad():
            net.norm.running_mean.fill_(seed)
        taken_of.append(
            taken({"data": Holder({"at": torch.tensor([seed])}), "net": net, "optimizer": optimizer})
        )
    one, two = (each.manifest.with_blocks(each.image) for each in taken_of)
    assert one.common_id
    assert one.common_id == two.common_id
    assert one.blocks["own"] != two.blocks["own"]
    digests = {each.contents.entries["data"]["digest"] for each in taken_of}
    assert len(digests) == 2
    common = {item.name for item in taken_of[0].contents.items if item.at < one.common_bytes}
    assert {"net.first.weight", "net.tied.weight", "optimizer.state.second.bias.exp_avg"} <= common
    assert "optimizer.state.first.weight.step" in common
    assert not any("norm.running" in name or "data" in name or "param_groups" in name for name in common)


def test_what_only_an_optimizer_changes() -> None:
    """Copies from a GPU of these may go on until its next step; a CUDA graph's steps cannot be waited for."""
    net, optimizer = trained("adamw", 1)
    owned = owned_by_optimizers([net, optimizer, 3])
    assert {parameter.data_ptr() for parameter in net.parameters()} <= owned
    assert optimizer.state[net.second.bias]["exp_avg"].data_ptr() in owned
    assert net.norm.running_mean.data_ptr() not in owned
    capturable = torch.optim.SGD(net.parameters())
    capturable.param_groups[0]["capturable"] = True
    assert owned_by_optimizers([capturable]) == set()


# ---- loading


def test_what_was_loaded_does_not_lie_in_the_image() -> None:
    net, optimizer = trained("adamw", 1)
    objects = {
        "net": net,
        "optimizer": optimizer,
        "t": torch.arange(3),
        "it": Holder({"x": torch.ones(3), 1: 2}),
    }
    got = taken(objects)
    fresh, fresh_optimizer = trained("adamw", 2, 0)
    loaded = load(got, {"net": fresh, "optimizer": fresh_optimizer, "t": None, "it": Holder()})
    got.window.bytes.fill_(0x5A)
    for number in range(2, 4):
        step(net, optimizer, number)
        step(fresh, fresh_optimizer, number)
    assert same(list(fresh.state_dict().values())[:-1], list(net.state_dict().values())[:-1])
    assert same(loaded["t"], torch.arange(3))
    assert same(loaded["it"].value, {"x": torch.ones(3), 1: 2})


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ({"net": nn.Linear(3, 4)}, "'net.weight': shape is"),
        ({"net": nn.Sequential(nn.Linear(3, 3))}, "no 'net.0.weight'"),
        ({"net": nn.Linear(3, 3), "other": 1}, "no entry 'other'"),
    ],
)
def test_what_does_not_fit_is_named(now: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        load(taken({"net": nn.Linear(3, 3)}), now)
