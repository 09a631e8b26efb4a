"""The state of modules, by torch's own functions: the same names with and without DDP, FSDP or compile."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


def module_state(module: torch.nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers by name: the live tensors, sharded ones as DTensor."""
    if next(module.parameters(), None) is None and not module.state_dict():
        return {}  # torch's function takes this for a mistake
    return get_model_state_dict(module)


def load_module_state(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Raises RuntimeError or ValueError when names or shapes do not fit."""
    if state:
        # a copy, for torch renames its keys
        set_model_state_dict(module, dict(state))
