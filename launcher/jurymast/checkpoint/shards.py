"""Models of which each rank has a part (FSDP2, HSDP, other DTensors): which part that is, and what a step
that was cut short leaves behind in FSDP2's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import xxhash
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, without a copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def part_of(modules: Mapping[str, torch.nn.Module]) -> str:
    """Return what is the same on ranks that have the same part of the same parameters, and before a step was
    done."""
    hashed = xxhash.xxh3_64()
    for key, module in modules.items():
        for name, parameter in module.named_parameters():
            where: Any = ""
            if isinstance(parameter, DTensor):
                at = parameter.device_mesh.get_coordinate() or []
                where = [
                    (repr(placement), place)
                    for placement, place in zip(parameter.placements, at, strict=False)
                    if not placement.is_replicate()
                ]
            hashed.update(f"{key}.{name} {tuple(parameter.shape)} {where} ".encode())
    return hashed.hexdigest()


def why_not(modules: Iterable[torch.nn.Module]) -> str:
    """Why a step cannot be cut short in these modules; "" if it can."""
    for module in modules:
        if any(isinstance(one, FullyShardedDataParallel) for one in module.modules()):
            return "FSDP1 cannot go on after a step that was cut short; use fully_shard"
        for root in _roots(module):
            known = hasattr(root, "reset_iter_state") and hasattr(_state(root), "_fsdp_param_groups")
            if not known:
                return "fully_shard of this release of torch cannot go on after a step that was cut short"
    return ""


@torch.no_grad()
def settle(modules: Iterable[torch.nn.Module]) -> None:
    """Have FSDP2's modules forget a step that was cut short: parameters are shards again, and the gradients
    that it had are gone. torch's function alone leaves gradients of whole parameters behind, to which the
    next step would add its own."""
    for module in modules:
        for root in _roots(module):
            root.reset_iter_state()
            for one in root.modules():
                for group in _state(one)._fsdp_param_groups if isinstance(one, FSDPModule) else ():
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter._unsharded_param.grad = None


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _roots(module: torch.nn.Module) -> Iterator[Any]:
    """The outermost modules that `fully_shard` was called with."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots(child)
