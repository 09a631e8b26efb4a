"""The state of ranks that live, without a save: whether ranks that should be are alike, what is a rank's own,
and how one rank gives to another what is alike.

Alike are modules and optimizers, on ranks that have the same part of the model: on all if they are
data-parallel, on those with the same shard in HSDP. A rank's own is all else, such as random generators and
the position of a loader, and those buffers of modules that change, such as the statistics of a batch norm,
which are kept only on the rank that made them.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.stateful import Stateful

from jurymast.checkpoint import image, shards, ward
from jurymast.checkpoint.state import ScriptState, replaced
from jurymast.checkpoint.tree import is_plain
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import Manifest

BUFFERS = "buffers of modules"
ALIKE = (torch.nn.Module, torch.optim.Optimizer)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LiveState:
    """The live state of one rank, whose objects the script has given to its Checkpointer."""

    def __init__(self, objects: MutableMapping[str, Any]) -> None:
        self._objects = objects
        # Each persistent buffer: its name, the module that has it, and its name there.
        self._places = self._find_buffers()
        self._constant: dict[str, str] = {}  # buffers that no step changes, and their hashes
        self._began: dict[str, str] = {}  # the hashes of all buffers before the first step
        self._entries: dict[str, tuple[weakref.ref[Any] | None, str]] = {}  # see `_entry`

    # ---- what is alike

    def alike(self) -> dict[str, Any]:
        return {key: value for key, value in self._objects.items() if isinstance(value, ALIKE)}

    def _modules(self) -> dict[str, torch.nn.Module]:
        return {key: one for key, one in self._objects.items() if isinstance(one, torch.nn.Module)}

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for module in self._modules().values() for parameter in module.parameters()]

    def _entry(self, value: Any) -> tuple[weakref.ref[Any] | None, str]:
        """What is another for another module or optimizer, or if it is sharded in another way."""
        if not isinstance(value, ALIKE):
            return None, ""
        return weakref.ref(value), shards.part_of({"": value}) if isinstance(value, torch.nn.Module) else ""

    def made(self) -> set[str]:
        """Return the entries that are new since `begin`, and the modules and optimizers that are others."""
        return {key for key, value in self._objects.items() if self._entry(value) != self._entries.get(key)}

    def versions(self) -> list[int]:
        """Two numbers for each parameter, one of which changes when it is changed in place."""
        held = self._parameters()
        return [one._version for one in held] + [shards.local(one)._version for one in held]

    def part(self) -> str:
        """Return what is the same on ranks that should be alike."""
        return shards.part_of(self._modules())

    def why_not(self) -> str:
        """Why this state may not outlive a step that is cut short; "" if it may."""
        return shards.why_not(self._modules().values())

    def settle(self) -> None:
        """Forget what a step that was cut short has left."""
        shards.settle(self._modules().values())
        for parameter in self._parameters():
            parameter.grad = None
        for value in self._objects.values():
            if isinstance(value, torch.optim.Optimizer):
                value.zero_grad(set_to_none=True)

    @torch.no_grad()
    def digest(self) -> str:
        """A hash of all parameters and the optimizers' state as this rank has them; "" for tensors of other
        kinds. A sum for each tensor, taken on its device, makes it up: a state differs in all."""
        hashed = xxhash.xxh3_64()
        held = self._parameters()
        for value in self._objects.values():
            if isinstance(value, torch.optim.Optimizer):
                state = (value.state.get(one, {}) for group in value.param_groups for one in group["params"])
                held += [one for each in state for one in each.values() if isinstance(one, torch.Tensor)]
        for tensor in map(shards.local, held):
            if not is_plain(tensor):
                return ""
            words = tensor.detach().contiguous().view(-1).view(_WORDS.get(tensor.element_size(), torch.uint8))
            hashed.update(f"{tuple(tensor.shape)} {int(words.sum(dtype=torch.int64))} ".encode())
        return hashed.hexdigest()

    # ---- what is a rank's own

    def _find_buffers(self) -> list[tuple[str, torch.nn.Module, str]]:
        return [
            (f"{key}.{path}.{name}", part, name)
            for key, module in self._modules().items()
            for path, part in module.named_modules()
            for name in part._buffers.keys() - part._non_persistent_buffers_set
        ]

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers of all modules by name, as they are now: a script may replace one."""
        held = ((name, module._buffers[key]) for name, module, key in self._places)
        return {name: one for name, one in held if one is not None and one.numel()}

    def begin(self) -> None:
        """Note the entries, and their buffers before the first step."""
        self._entries = {key: self._entry(value) for key, value in self._objects.items()}
        self._places = self._find_buffers()
        self._began, self._constant = _hashes(self._buffers()), {}

    def first_step_done(self) -> None:
        """Buffers that the first step has not changed count as constant; `constants_hold` looks again."""
        now = _hashes(self._buffers())
        self._constant = {name: text for name, text in now.items() if self._began.get(name) == text}

    def constants_hold(self) -> bool:
        now = _hashes({name: one for name, one in self._buffers().items() if name in self._constant})
        return now == self._constant

    @property
    def has_own(self) -> bool:
        return len(self.alike()) < len(self._objects) or bool(self._changing())

    def _changing(self) -> dict[str, torch.Tensor]:
        return {name: one for name, one in self._buffers().items() if name not in self._constant}

    def own(self) -> bytes:
        """Return what is this rank's own now. Raises whatever taking or pickling it raises."""
        alike, own = self.alike(), dict[str, Any]()
        for key, value in self._objects.items():
            if key not in alike:
                if isinstance(value, torch.Generator):
                    own[key] = value.get_state()
                else:
                    own[key] = value.state_dict() if isinstance(value, Stateful) else value
        own[BUFFERS] = self._changing()
        return ward.dumps(own)

    @torch.no_grad()
    def set_own(self, data: bytes, *, foreign: bool = False) -> None:
        """Make what `own` returned this rank's own again. Unless it is `foreign`, and came over the network,
        only this user's processes can have written it."""
        own: Mapping[str, Any] = ward.plain_loads(data) if foreign else pickle.loads(data)
        live = self._buffers()
        for name, saved in own[BUFFERS].items():
            live[name].copy_(saved)
        for key in own.keys() - {BUFFERS}:
            value = self._objects[key]
            if isinstance(value, torch.Generator):
                value.set_state(own[key])
            elif isinstance(value, Stateful):
                value.load_state_dict(own[key])
            else:
                self._objects[key] = replaced(value, own[key])

    # ---- from rank to rank

    def give(self, takers: tuple[int, ...], step: int, group: Any) -> int:
        """Send what is alike to these ranks; return its size in bytes."""
        state = ScriptState(self.alike())
        plan = image.ImagePlanner(state).plan_image(state.trees())
        data = bytearray(plan.size_bytes)
        image.Window(data).stage(plan)
        manifest = plan.manifest(step, 0, 0, 1)
        parts = [torch.frombuffer(bytearray(manifest), dtype=torch.uint8)]
        parts += [torch.frombuffer(data, dtype=torch.uint8)]
        for taker in takers:
            dist.send(torch.tensor([len(one) for one in parts]), taker, group=group)
            for part in parts:
                dist.send(part, taker, group=group)
        return plan.size_bytes

    def take(self, giver: int, step: int, group: Any) -> int:
        """Take what `give` sends; return its size in bytes. Raises CheckpointError if it does not fit."""
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.recv(sizes, giver, group=group)
        manifest, data = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
        dist.recv(manifest, giver, group=group)
        dist.recv(data, giver, group=group)
        described = Manifest.from_bytes(manifest.numpy().tobytes())
        if described.step != step:
            raise CheckpointError(f"rank {giver} gives step {described.step}, not {step}")
        state = ScriptState(self.alike())
        image.load(memoryview(data.numpy()).cast("B"), described, state, foreign=True)
        return int(sizes[1])


@torch.no_grad()
def _hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    found = {}
    for name, one in tensors.items():
        plain = shards.local(one).detach().cpu().contiguous().view(-1).view(torch.uint8)
        found[name] = xxhash.xxh3_64_hexdigest(plain.numpy())
    return found
