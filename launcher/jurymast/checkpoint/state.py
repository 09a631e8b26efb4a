"""Converts the state that the user passes to `Checkpointer` for torch.distributed.checkpoint, and back.

DCP flattens nested dicts to dotted names, turns every key into a string, drops empty dicts, and writes one
rank's value where ranks differ. This module avoids or undoes each of these, so that the restored state equals
the saved one.

Optimizer state is keyed by parameter names, and saving and restoring has no side effects on the optimizer:
torch's functions create missing state by a step with zero gradients and learning rate. That step counts
(for Adam's bias correction), so a training that saved before its first step would differ from one that did
not. This module avoids that step; on restore the checkpoint says what state there is. torch's functions
create the state only if the checkpoint does not say how it is sharded.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from jurymast.checkpoint.names import KnownNames, no_collections
from jurymast.checkpoint.tree import KeyPath, StoredTree, at, decode, digest, encode, has_sharded, is_plain
from jurymast.errors import CheckpointError

if TYPE_CHECKING:
    from torch.optim import Optimizer


Modules = Mapping[str, torch.nn.Module]


# ---- optimizers and modules


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
    return _encoded(_optimizer_tree(optimizer, modules))


def _optimizer_tree(optimizer: Optimizer, modules: Modules) -> dict[str, Any]:
    owner = _owner(optimizer, modules)
    if owner is not None:
        return _named_state(optimizer, owner)
    state = optimizer.state_dict()
    state["state"] = {str(number): value for number, value in state["state"].items()}
    return state


def _encoded(state: dict[str, Any]) -> dict[str, Any]:
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


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the live parameters and persistent buffers by name, sharded ones as DTensor."""
    if next(module.parameters(), None) is None and not module.state_dict():
        return {}  # torch's function raises an error for a module without state
    return get_model_state_dict(module)


# ---- what the script passes

# Values of these modules' types are data and are restored by value. Other objects need a state_dict.
PLAIN_MODULES = frozenset({"builtins", "collections", "datetime", "decimal", "numpy", "pathlib", "torch"})


class RandomState:
    """The random generators of this process (Python's, numpy's, torch's CPU and current GPU's).

    Pass one to `Checkpointer` when dropout or sampling must continue exactly where it was.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states: "python", "torch" and, if in use, "numpy" and "cuda"."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if numpy := sys.modules.get("numpy"):
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises KeyError without "python" or "torch"; a state of a GPU
        is skipped where there is none."""
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            importlib.import_module("numpy").random.set_state(state["numpy"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())


class HeldRandomState(RandomState):
    """A RandomState that is restored only by `apply`, for loops that draw numbers before their first step."""

    def __init__(self) -> None:
        self._held: dict[str, Any] | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._held = state

    def apply(self) -> None:
        """Restore the held state. Does nothing if there is none, or if it was applied already."""
        if self._held is not None:
            super().load_state_dict(self._held)
            self._held = None


@dataclass(frozen=True)
class Captured:
    """A rank's state at one step, in DCP's form. Its tensors are live: save it before training continues.

    `entries` is what the manifest says of each entry; `balanced` has the flat names of replicated tensors
    that are the same on every rank, so that any rank may write them.
    """

    tree: dict[str, Any]
    entries: dict[str, dict[str, Any]]
    balanced: frozenset[str]


@dataclass
class ScriptState:
    """The user's mapping from names to the objects to save; read anew at every save."""

    objects: MutableMapping[str, Any]
    _names: KnownNames = field(default_factory=KnownNames)

    def __post_init__(self) -> None:
        for key, value in self.objects.items():
            if not isinstance(key, str) or not key:
                raise CheckpointError(f"the entry {key!r} has no name: keys must be non-empty strings")
            if kind_of(value) == "value":
                _check_value(key, value, nested=False)

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {key: value for key, value in self.objects.items() if isinstance(value, torch.nn.Module)}

    # ---- saving

    def trees(self) -> dict[str, Any]:
        """Return each entry's state as nested dicts and lists that DCP does not alter.

        Raises whatever an object's own `state_dict` raises.
        """
        with no_collections():
            return self._trees()

    def _trees(self) -> dict[str, Any]:
        modules, names = self._modules(), self._names
        names.keep(modules)
        trees: dict[str, Any] = dict.fromkeys(self.objects)
        for key, module in modules.items():
            state = names.module_state(key, module, partial(module_state, module))
            trees[key] = encode(state) if state else {}
        for key, value in self.objects.items():
            if key in modules:
                continue
            if isinstance(value, torch.optim.Optimizer):
                by_torch = partial(_optimizer_tree, value, modules)
                trees[key] = _encoded(names.optimizer_state(key, value, modules, by_torch))
            elif isinstance(value, torch.Generator):
                trees[key] = value.get_state()
            elif isinstance(value, Stateful):
                trees[key] = encode(value.state_dict())
            else:
                trees[key] = encode(value)
        return trees

    def digests(self, trees: Mapping[str, Any]) -> dict[str, str]:
        """Hash every entry that may differ between ranks. DCP handles modules and optimizers."""
        return {
            key: digest(tree)
            for key, tree in trees.items()
            if not isinstance(self.objects[key], torch.nn.Module | torch.optim.Optimizer)
        }

    def captured(self, trees: dict[str, Any], digests: list[dict[str, str]], rank: int) -> Captured:
        """Capture `trees`, given the `digests` of all ranks, by rank.

        Entries that differ between ranks are saved once per rank, all others once. Raises CheckpointError if
        an entry that differs has sharded tensors.
        """
        tree: dict[str, Any] = {}
        entries: dict[str, dict[str, Any]] = {}
        for key, value in trees.items():
            per_rank = len({theirs.get(key) for theirs in digests}) > 1
            if per_rank and has_sharded(value):
                raise CheckpointError(
                    f"the entry {key!r} differs between ranks and has sharded tensors",
                    hint="make what differs an entry of its own",
                )
            tree[key] = {rank_key(rank): value} if per_rank else value
            entries[key] = {"kind": kind_of(self.objects[key]), "per_rank": per_rank}
        return Captured(tree, entries, frozenset(self.common(trees, scalars=False)))

    def common(self, trees: Mapping[str, Any], *, scalars: bool = True) -> set[str]:
        """Return the flat names of plain tensors that are equal on data-parallel ranks: parameters and
        optimizer state, with or without its tensors without dimensions."""
        names: set[str] = set()
        for key, tree in trees.items():
            if isinstance(self.objects[key], torch.nn.Module):
                names.update(_parameter_names(key, self.objects[key], tree))
            elif isinstance(self.objects[key], torch.optim.Optimizer):
                names.update(_tensor_names(key, tree, scalars=scalars))
        return names

    def entries(self, trees: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Describe each entry without asking other ranks. Entries with a digest may differ between ranks."""
        entries: dict[str, dict[str, Any]] = {key: {"kind": kind_of(self.objects[key])} for key in trees}
        for key, text in self.digests(trees).items():
            entries[key]["digest"] = text
        return entries

    @property
    def settled(self) -> bool:
        """Whether every optimizer has its state, which it gets with its first step."""
        return all(value.state for value in self.objects.values() if isinstance(value, torch.optim.Optimizer))

    # ---- restoring

    def template(
        self, metadata: Metadata, entries: Mapping[str, Mapping[str, Any]], rank: int, world_size: int
    ) -> dict[str, Any]:
        """Return the tree that DCP loads into: a module's live tensors, and otherwise new tensors shaped by
        the checkpoint.

        `world_size` is that of the save. Raises CheckpointError for an entry that the checkpoint lacks.
        """
        stored = StoredTree(metadata)
        modules = self._modules()
        template: dict[str, Any] = {}
        for key, value in self.objects.items():
            if key not in entries:
                raise CheckpointError(f"it has no entry {key!r}")
            if isinstance(value, torch.nn.Module):
                template[key] = encode(module_state(value))
            elif isinstance(value, torch.optim.Optimizer):
                template[key] = optimizer_template(value, modules, stored.under((key,)))
            else:
                path = (key, rank_key(rank % world_size)) if entries[key].get("per_rank") else (key,)
                part = stored.under(path)
                tree = part.tree(_place_like(value) if part.has_tensors() else None)
                template[key] = {path[1]: tree} if len(path) > 1 else tree
        return template

    def apply(self, loaded: dict[str, Any], entries: Mapping[str, Mapping[str, Any]]) -> None:
        """Load DCP's result into the user's objects. Raises whatever their `load_state_dict` raises."""
        modules = self._modules()
        for key, value in list(self.objects.items()):
            tree = loaded[key]
            if entries[key].get("per_rank"):
                (tree,) = tree.values()
            if isinstance(value, torch.nn.Module):
                if state := decode(tree):
                    set_model_state_dict(value, dict(state))  # a copy, because torch renames the keys
            elif isinstance(value, torch.optim.Optimizer):
                load_optimizer_state(value, modules, tree)
            elif isinstance(value, torch.Generator):
                value.set_state(tree.cpu())
            elif isinstance(value, Stateful):
                value.load_state_dict(decode(tree))
            else:
                self.objects[key] = replaced(value, decode(tree))


def _place_like(value: Any) -> Callable[[KeyPath, TensorStorageMetadata], torch.Tensor | None]:
    """Return a function that gives a sharded tensor of `value` to load into, or None."""
    live = encode(value.state_dict()) if isinstance(value, Stateful) else encode(value)

    def place(path: KeyPath, kind: TensorStorageMetadata) -> torch.Tensor | None:
        tensor = at(live, path)
        return tensor if isinstance(tensor, DTensor) and tensor.shape == kind.size else None

    return place


def rank_key(rank: int) -> str:
    return f"rank-{rank:05d}"


def kind_of(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, torch.Generator):
        return "generator"
    return "stateful" if isinstance(value, Stateful) else "value"


def _check_value(key: str, value: Any, *, nested: bool) -> None:
    """Raise CheckpointError for an object that would be pickled whole and restored as an unused copy."""
    if nested and kind_of(value) != "value":
        raise CheckpointError(
            f"the entry {key!r} has a {type(value).__name__} inside", hint="make it an entry of its own"
        )
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        if not _is_plain(value):
            raise CheckpointError(
                f"the entry {key!r} is a {type(value).__name__}, which has no state_dict and load_state_dict",
                hint="for a data loader, use one that is stateful, or save its position",
            )
        return
    for child in value:
        _check_value(key, child, nested=True)


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor | Enum) or is_dataclass(value):
        return True
    return type(value).__module__ in PLAIN_MODULES


def replaced(old: Any, new: Any) -> Any:
    """Return `new`, written into `old` where `old` is a container or tensor to which others may refer."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if _fits_in_place(old, new):
            if old is not new:
                with torch.no_grad():
                    old.copy_(new)
            return old
        return new if old.device.type == "meta" else new.to(old.device)
    if isinstance(old, MutableMapping) and isinstance(new, Mapping):
        for key, item in new.items():
            old[key] = replaced(old[key], item) if key in old else item
        return old
    if type(old) is list and type(new) is list:
        old[:] = [replaced(a, b) for a, b in zip(old, new, strict=False)] + new[len(old) :]
        return old
    return new


def _fits_in_place(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether `new` can be copied into `old`: both are plain or sharded, of equal shape and type, and
    no elements of `old` share memory (as in an expanded tensor)."""
    if not (is_plain(old) and is_plain(new)):
        return isinstance(old, DTensor) and old.shape == new.shape and old.dtype == new.dtype
    expanded = any(size > 1 and not step for size, step in zip(old.shape, old.stride(), strict=True))
    return old.shape == new.shape and old.dtype == new.dtype and not expanded


def _parameter_names(key: str, module: torch.nn.Module, state: Any) -> Iterator[str]:
    """Yield the flat names of the module's parameters. Buffers are left out: under DDP every forward
    broadcasts rank 0's, and those of other ranks may differ before that."""
    places = {parameter.data_ptr() for parameter in module.parameters() if _has_place(parameter)}
    if isinstance(state, dict):
        for name, tensor in state.items():
            if _has_place(tensor) and tensor.data_ptr() in places:
                yield f"{key}.{name}"


def _has_place(value: Any) -> bool:
    """Return whether `value` is a plain tensor that is not empty. Sharded tensors are not replicated."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() > 0


def _tensor_names(prefix: str, tree: Any, *, scalars: bool) -> Iterator[str]:
    """Yield DCP's flat names of the tensors in `tree`; those without dimensions only with `scalars`."""
    if _has_place(tree):
        if tree.dim() or scalars:
            yield prefix
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _tensor_names(f"{prefix}.{key}", value, scalars=scalars)
