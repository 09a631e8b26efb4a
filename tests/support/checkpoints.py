"""What tests of checkpoints compare, and how they damage files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class Holder:
    """A `Stateful` that holds any value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def bits(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def same(a: Any, b: Any) -> bool:
    """Equal in value, type, and the bits of tensors and floats."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and isinstance(b, torch.Tensor)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and bits(a) == bits(b)
        )
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


class OwnTensor(torch.Tensor):  # type: ignore[misc]  # torch's types are not followed
    """As frameworks have them: a tensor with a class of its own."""


def special_tensors() -> dict[str, torch.Tensor]:
    """Tensors that are more than a type, a shape and bytes."""
    return {
        "sparse": torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 3), check_invariants=True),
        "rows": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.tensor([1.0, 2.5]), 0.5, 0, torch.qint8),
        "own class": torch.full((3,), 5.0).as_subclass(OwnTensor),
        "meta": torch.empty(2, 3, device="meta"),
    }


def assert_special_tensors_are_back(found: dict[str, torch.Tensor]) -> None:
    expected = special_tensors()
    assert {name: (type(t), t.layout, t.dtype, t.shape, t.device) for name, t in found.items()} == {
        name: (type(t), t.layout, t.dtype, t.shape, t.device) for name, t in expected.items()
    }
    for name in ("sparse", "rows", "own class"):
        assert found[name].to_dense().tolist() == expected[name].to_dense().tolist()
    assert found["quantized"].dequantize().tolist() == [1.0, 2.5]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def differences(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Yield where two states differ."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from differences(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple) and type(a) is type(b) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif not same(a, b):
        yield f"{where}: {a} without a stop, {b} after a restore"
