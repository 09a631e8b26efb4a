"""How large a rank's image will be, before its optimizers have their state: what can be known by then.

Only a torch optimizer's own kinds of state are foreseen; for any other what is here already counts, so that
the true size may be larger. A parameter that never gets a gradient makes it smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# Tensors of a parameter's own size and type that these keep for each.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def foreseen_bytes(objects: Mapping[str, Any]) -> tuple[int, int]:
    """(all of the image, the part of it that no other rank has)."""
    total = own = 0
    for value in objects.values():
        for tensor, times in _tensors(value):
            sharded = isinstance(tensor, DTensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            count = times * local.numel() * local.element_size()
            total += count
            own += count if sharded else 0
    return total, own


def _tensors(value: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """What is saved of an entry: tensors, and how many like each there will be."""
    if isinstance(value, torch.nn.Module):
        yield from ((tensor, 1) for tensor in (*value.parameters(), *value.buffers()))
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            for parameter in group["params"]:
                if present := value.state.get(parameter):
                    yield from ((one, 1) for one in present.values() if isinstance(one, torch.Tensor))
                elif parameter.requires_grad:
                    yield parameter, _moments(value, group)
    elif isinstance(value, torch.Tensor):
        yield value, 1


def _moments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    if isinstance(optimizer, _ADAMS):
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group.get("momentum") else 0
    return 0
