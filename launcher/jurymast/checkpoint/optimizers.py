"""Saves and restores optimizer state keyed by parameter names, without side effects on the optimizer.

torch's functions create missing state by a step with zero gradients and learning rate. That step counts
(for Adam's bias correction), so a training that saved before its first step would differ from one that did
not. This module avoids that step; on restore the checkpoint says what state there is. torch's functions
create the state only if the checkpoint does not say how it is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from jurymast.checkpoint.tree import StoredTree, decode, encode

if TYPE_CHECKING:
    from torch.optim import Optimizer

Modules = Mapping[str, torch.nn.Module]


class _Joined(torch.nn.Module):
    """Several modules as one module, for an optimizer with parameters of more than one."""

    def __init__(self, modules: Modules) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(f"entry_{name.replace('.', '_')}", module)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _owner(optimizer: Optimizer, modules: Modules) -> torch.nn.Module | None:
    """Return the module with all of the optimizer's parameters, or None if the user did not pass it."""
    wanted = {id(parameter) for parameter in _parameters(optimizer)}
    for module in modules.values():
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return module
    if wanted <= {id(parameter) for module in modules.values() for parameter in module.parameters()}:
        return _Joined(modules)
    return None


def _is_fsdp1(owner: torch.nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in owner.modules())


@contextmanager
def _no_initial_step(optimizer: Optimizer) -> Iterator[None]:
    """Keep torch from stepping the optimizer, which it does if the optimizer has no state at all."""
    parameters = _parameters(optimizer)
    if optimizer.state or not parameters:
        yield
        return
    optimizer.state[parameters[0]] = {}
    try:
        yield
    finally:
        if not optimizer.state.get(parameters[0]):
            optimizer.state.pop(parameters[0], None)


def _named_state(optimizer: Optimizer, owner: torch.nn.Module) -> dict[str, Any]:
    if _is_fsdp1(owner):  # FSDP1 names the state only once it exists
        return get_optimizer_state_dict(owner, optimizer)
    with _no_initial_step(optimizer):
        return get_optimizer_state_dict(owner, optimizer)


def optimizer_state(optimizer: Optimizer, modules: Modules) -> dict[str, Any]:
    """Return {"state": {parameter name: {name: value}}, "param_groups": [...]} with the live tensors.

    If no module in `modules` has the parameters, their numbers (as strings) replace their names.
    """
    owner = _owner(optimizer, modules)
    if owner is None:
        state = optimizer.state_dict()
        state["state"] = {str(number): value for number, value in state["state"].items()}
    else:
        state = _named_state(optimizer, owner)
    state["state"] = {name: value for name, value in state["state"].items() if value}
    if not state["state"]:
        del state["state"]
    encoded: dict[str, Any] = encode(state)
    return encoded


def optimizer_template(optimizer: Optimizer, modules: Modules, stored: StoredTree) -> dict[str, Any]:
    """Return a tree into which DCP loads the state in `stored`, allocated where the state will be used."""
    owner = _owner(optimizer, modules)
    if owner is None:
        template: dict[str, Any] = stored.tree()
        return template
    names = [name for group in _named_state(optimizer, owner)["param_groups"] for name in group["params"]]
    parameters = dict(zip(names, _parameters(optimizer), strict=False))
    if _is_fsdp1(owner) or not all(_placeable(parameters, path, kind) for path, kind in stored.leaves()):
        return _template_by_torch(optimizer, owner, stored)

    def place(path: tuple[str | int, ...], kind: TensorStorageMetadata) -> torch.Tensor | None:
        parameter = parameters.get(str(path[1])) if len(path) > 2 and path[0] == "state" else None
        if parameter is None or parameter.shape != kind.size or not kind.size:
            return None
        return torch.empty_like(parameter, dtype=kind.properties.dtype, requires_grad=False)

    tree: dict[str, Any] = stored.tree(place)
    return tree


def _placeable(parameters: Mapping[str, torch.Tensor], path: tuple[str | int, ...], kind: Any) -> bool:
    """Return False for a tensor whose shape differs from its sharded parameter's: its sharding is unknown."""
    if not isinstance(kind, TensorStorageMetadata) or path[0] != "state":
        return True
    parameter = parameters.get(str(path[1]))
    return not isinstance(parameter, DTensor) or not kind.size or kind.size == parameter.shape


def _template_by_torch(optimizer: Optimizer, owner: torch.nn.Module, stored: StoredTree) -> dict[str, Any]:
    """Return the optimizer's state, created by torch if missing, for parameters with state in `stored`."""
    template: dict[str, Any] = get_optimizer_state_dict(owner, optimizer)
    present = {path[1] for path, _ in stored.leaves() if path[0] == "state"}
    template["state"] = {name: value for name, value in template["state"].items() if name in present}
    encoded: dict[str, Any] = encode(template)
    return encoded


def load_optimizer_state(optimizer: Optimizer, modules: Modules, loaded: dict[str, Any]) -> None:
    """Load `loaded` into the optimizer. Raises ValueError or KeyError if groups or parameters do not fit."""
    state = decode(loaded)
    values = state.setdefault("state", {})
    owner = _owner(optimizer, modules)
    if owner is None:
        state["state"] = {int(number): value for number, value in values.items()}
        optimizer.load_state_dict(state)
        return
    if _is_fsdp1(owner):
        set_optimizer_state_dict(owner, optimizer, state)
        return
    own_groups = _named_state(optimizer, owner)["param_groups"]
    names = [name for group in own_groups for name in group["params"]]
    _claim_groups(state["param_groups"], own_groups)
    for name in names:
        # a parameter that never had a gradient has no state; torch would call the checkpoint incomplete
        values.setdefault(name, {})
    with _no_initial_step(optimizer):
        set_optimizer_state_dict(owner, optimizer, state)
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        _complete(optimizer.state[parameter], values[name], parameter)
        if not optimizer.state[parameter]:
            del optimizer.state[parameter]


def _claim_groups(saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Where ranks have different parameters (pipeline stages), one rank's groups were saved for all ranks:
    use them, by position, for this rank's parameters."""
    known = {name for group in saved for name in group["params"]}
    if len(saved) == len(own) and not known.issuperset(name for group in own for name in group["params"]):
        for group, mine in zip(saved, own, strict=True):
            group["params"] = mine["params"]


def _complete(present: dict[str, Any], saved: Mapping[str, Any], parameter: torch.Tensor) -> None:
    """Correct what torch's function changed in the state of one parameter.

    It casts state to the parameter's type, although float32 moments of bfloat16 weights must stay float32,
    and it leaves out the state of parameters that need no gradient.
    """
    for name, value in saved.items():
        now = present.get(name)
        if name not in present:
            moves = isinstance(value, torch.Tensor) and value.dim() > 0
            present[name] = value.to(parameter.device) if moves else value
        elif isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            present[name] = value.to(now.device)
