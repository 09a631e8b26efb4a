"""Process groups that are made anew in the place of old ones, and FSDP2's modules after a step that was cut
short, in one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from jurymast.checkpoint import regroup
from jurymast.checkpoint.live import LiveState
from jurymast.checkpoint.tree import TreeShape

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_rank")]


def hybrid() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("copy", "shard"))


def sharded(mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def step(state: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 4)).square().sum().backward()
    state["optimizer"].step()


class CutShort(Exception):
    pass


def cut_short(state: dict[str, Any]) -> None:
    """Leave a step once the last layer has its gradients and the first has not."""

    def leave(_: torch.Tensor) -> None:
        raise CutShort

    def arm(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(leave)

    hook = state["model"][1].register_forward_hook(arm)
    with pytest.raises(CutShort):
        step(state, 99)
    hook.remove()


def used_groups(mesh: DeviceMesh) -> set[int]:
    """Whatever a script or torch keeps of a mesh's groups."""
    return {id(mesh.get_group(name)) for name in ("copy", "shard")}


def test_meshes_and_what_refers_to_their_groups_go_on_with_new_ones() -> None:
    mesh = hybrid()
    state = sharded(mesh)
    kept = {"by name": mesh.get_group("copy"), "listed": [mesh.get_group("shard")]}
    captured = mesh.get_group("shard")
    group_of: Callable[[], Any] = lambda: captured  # noqa: E731
    old = used_groups(mesh)
    groups = regroup.GroupsBefore()
    step(state, 1)
    made = dist.new_group([0])
    groups.leave()
    groups.make()
    assert not used_groups(mesh) & old
    assert {id(kept["by name"]), id(kept["listed"][0])} == used_groups(mesh)
    assert id(group_of()) in used_groups(mesh)
    step(state, 2)
    assert dist.new_group([0]).group_name == made.group_name, "new ranks count on"
    undisturbed = sharded(hybrid())
    step(undisturbed, 1)
    step(undisturbed, 2)
    assert LiveState(state).digest() == LiveState(undisturbed).digest() != ""


def test_a_step_that_was_cut_short_leaves_nothing_behind() -> None:
    state, undisturbed = sharded(hybrid()), sharded(hybrid())
    step(state, 1)
    live = LiveState(state)
    before = live.versions()
    cut_short(state)
    live.settle()
    assert live.versions() == before, "parameters are those after the last step"
    step(state, 2)
    step(undisturbed, 1)
    step(undisturbed, 2)
    assert LiveState(state).digest() == LiveState(undisturbed).digest() != ""


def test_an_update_of_a_shard_changes_its_version() -> None:
    state = sharded(hybrid())
    step(state, 1)
    live = LiveState(state)
    before = live.versions()
    state["optimizer"].step()
    stepped = live.versions()
    assert stepped != before
    with torch.no_grad():
        next(state["model"].parameters()).to_local().view(-1)[0] += 1.0
    assert live.versions() != stepped


def test_a_mesh_made_anew_is_not_taken_for_the_one_before() -> None:
    """torch keeps what it found out of DTensors, with their mesh, for those of a mesh that equals it."""
    groups, shapes = regroup.GroupsBefore(), []
    regroup.forget_meshes()  # of other tests
    for _ in range(2):
        mesh = hybrid()
        state = sharded(mesh)
        step(state, 1)
        parameter = next(state["model"].parameters())
        moment = state["optimizer"].state[parameter]["exp_avg"]
        assert parameter.device_mesh is mesh
        assert moment.device_mesh is mesh
        assert (2 * moment).device_mesh is mesh
        shapes.append(TreeShape({"m": ("m",)}, [moment]))  # that of a save
        before = weakref.ref(mesh)
        del mesh, state, parameter, moment
        regroup.forget_meshes()
        gc.collect()
        assert before() is None
        groups.leave()
        groups.make()


def test_a_layout_is_found_again_only_for_the_mesh_that_it_was_made_for() -> None:
    one, other = (sharded(init_device_mesh("cpu", (1,), mesh_dim_names=(name,))) for name in "ab")
    trees = [{"w": next(state["model"].parameters())} for state in (one, other)]
    shape = TreeShape({"w": ("w",)}, [trees[0]["w"]])
    assert shape.leaves(trees[0]) is not None
    assert shape.leaves(trees[1]) is None


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: None, ""),
        (hybrid, ""),
        (lambda: dist.new_group([0]), "the script makes process groups before `run`"),
        (lambda: dist.all_reduce(torch.zeros(1)), "ranks talk to each other before `run`"),
        (lambda: dist.all_reduce(torch.zeros(1), group=hybrid().get_group("shard")), "ranks talk to each"),
    ],
)
def test_groups_that_cannot_be_made_anew_are_named(make: Callable[[], Any], why: str) -> None:
    held = make()
    found = regroup.why_not()
    assert found.startswith(why)
    assert bool(found) == bool(why), held


def test_fsdp1_is_refused() -> None:
    assert LiveState(
        {"model": FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))}
    ).why_not()
