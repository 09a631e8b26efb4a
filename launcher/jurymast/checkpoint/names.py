"""The names that torch gives to a model's state and an optimizer's, kept from one save to the next.

torch's functions find the names anew at every call: for a mixture of experts with 18,900 parameters this
takes seconds. The names change only with the modules themselves, so later saves take them from here, and ask
modules and optimizers for nothing but their tensors. What does not certainly have the same names is given to
torch's functions again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

Tree = dict[str, Any]


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep the garbage collector from running: the many small objects of a save would start it again and
    again, at the price of all objects of the process, and none of them is in a cycle."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass
class _OfModule:
    """`names` are torch's for the `keys` of the module's own `state_dict`, in the same order."""

    module: weakref.ref[Any]
    keys: list[str]
    names: list[str]


@dataclass
class _OfOptimizer:
    optimizer: weakref.ref[Any]
    parameters: list[weakref.ref[Any]]  # of its groups, in their order
    names: list[str]  # of these


@dataclass
class KnownNames:
    """By the name of the entry in the user's state."""

    _modules: dict[str, _OfModule] = field(default_factory=dict)
    _optimizers: dict[str, _OfOptimizer] = field(default_factory=dict)

    def keep(self, modules: Collection[str]) -> None:
        """Forget the modules that the user's state no longer has."""
        if gone := self._modules.keys() - modules:
            self._optimizers.clear()
            for key in gone:
                del self._modules[key]

    def module_state(self, key: str, module: torch.nn.Module, by_torch: Callable[[], Tree]) -> Tree:
        """Return what `by_torch`, get_model_state_dict, would: live tensors by name."""
        known = self._modules.get(key)
        if known is not None and _refers(known.module, module):
            live: Tree = module.state_dict(keep_vars=True)
            if list(live) == known.keys:
                return dict(zip(known.names, live.values(), strict=True))
        self._optimizers.clear()  # its parameters may have other names, too
        self._modules.pop(key, None)
        state = by_torch()
        if _plain(module):
            own = module.state_dict()
            if _renamed(own, state):
                self._modules[key] = _OfModule(weakref.ref(module), list(own), list(state))
        return state

    def optimizer_state(
        self, key: str, optimizer: Optimizer, modules: Collection[str], by_torch: Callable[[], Tree]
    ) -> Tree:
        """Return what `by_torch`, get_optimizer_state_dict, would, for parameters of these modules. Call it
        after `module_state` of each of them."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._optimizers.get(key)
        if (
            known is not None
            and _refers(known.optimizer, optimizer)
            and len(known.parameters) == len(parameters)
            and all(map(_refers, known.parameters, parameters))
        ):
            return _with_names(optimizer.state_dict(), known.names)
        self._optimizers.pop(key, None)
        state = by_torch()
        names = [name for group in state["param_groups"] for name in group["params"]]
        numbers_fit = self._modules.keys() >= set(modules) and len(names) == len(parameters)
        if numbers_fit and _same(_with_names(optimizer.state_dict(), names), state):
            references = [weakref.ref(one) for one in parameters]
            self._optimizers[key] = _OfOptimizer(weakref.ref(optimizer), references, names)
        return state


def _refers(reference: weakref.ref[Any], thing: object) -> bool:
    return reference() is thing


def _plain(module: torch.nn.Module) -> bool:
    """Return whether torch's function does nothing but rename what `state_dict` returns."""
    if type(module).state_dict is not torch.nn.Module.state_dict:
        return False
    return not any(isinstance(one, FullyShardedDataParallel) for one in module.modules())


@torch.no_grad()
def _renamed(own: Tree, state: Tree) -> bool:
    """Return whether `state` has the tensors of `own` in the same order, under these or other names."""
    return len(own) == len(state) and all(
        name.endswith(_EXTRA_STATE_KEY_SUFFIX) or _is_one(a, b)
        for name, a, b in zip(own, own.values(), state.values(), strict=True)
    )


def _is_one(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.placements == b.placements and _is_one(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return type(a) is type(b) and a.shape == b.shape and a.data_ptr() == b.data_ptr()
    return a is b


def _with_names(state: Tree, names: list[str]) -> Tree:
    """Replace the numbers of parameters in an optimizer's own `state_dict`, as torch's function does."""
    groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return {"state": {names[number]: of for number, of in state["state"].items()}, "param_groups": groups}


@torch.no_grad()
def _same(a: Tree, b: Tree) -> bool:
    """Return whether two states of an optimizer are one, in the same order."""
    groups = [(list(one), one["params"]) for one in a["param_groups"]]
    if groups != [(list(one), one["params"]) for one in b["param_groups"]]:
        return False
    if list(a["state"]) != list(b["state"]):
        return False
    return all(
        list(ours) == list(theirs) and all(map(_is_one, ours.values(), theirs.values()))
        for ours, theirs in zip(a["state"].values(), b["state"].values(), strict=True)
    )
