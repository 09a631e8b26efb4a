"""What a rank of the benchmark has to save: a module in bfloat16 and float32, and its Adam."""

from __future__ import annotations

import mmap
import random

import torch
import xxhash

PARAMETERS = 66  # with two moments each, and Adam's counters beside them
ROW = 512
ALIGNMENT = 64
TILE_BYTES = (4 << 20) + 4099  # not a multiple of anything here: no two tensors are alike


class Weights(torch.nn.Module):  # type: ignore[misc]
    """Parameters whose names no other rank has, so that nobody takes them for copies of each other."""

    def __init__(self, size_bytes: int, rank: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict()
        for number in range(PARAMETERS):
            dtype = torch.bfloat16 if number % 2 else torch.float32
            rows = max(1, size_bytes // (3 * PARAMETERS) // dtype.itemsize // ROW)
            parameter = torch.nn.Parameter(torch.empty(rows, ROW, dtype=dtype))
            self.weights[f"rank{rank}_layer{number:02d}"] = parameter


class Training:
    """`tensors`: all there is, by name, the live ones; a system that takes a dict gets this one."""

    def __init__(self, size_bytes: int, rank: int) -> None:
        self.rank = rank
        self.model = Weights(size_bytes, rank)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            moments = {
                kind: torch.empty_like(parameter, requires_grad=False) for kind in ("exp_avg", "exp_avg_sq")
            }
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
            self.tensors[f"model.{name}"] = parameter.detach()
            for kind, value in self.optimizer.state[parameter].items():
                self.tensors[f"optimizer.{name}.{kind}"] = value
        for tensor, content in zip(self.tensors.values(), _contents(self.tensors), strict=True):
            _fill(tensor, content)
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def as_module(self) -> torch.nn.Module:
        """The live tensors as parameters."""
        module = torch.nn.Module()
        for name, tensor in self.tensors.items():
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            module.register_parameter(name.replace(".", "_"), parameter)
        return module

    def digests(self) -> list[str]:
        """Of every tensor's bytes."""
        return [
            xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy())
            for tensor in self.tensors.values()
        ]

    def wreck(self) -> None:
        """Every byte becomes another; all memory is touched."""
        for tensor in self.tensors.values():
            tensor.fill_(-7)


def _contents(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """For each tensor where in a pattern it begins."""
    chance = random.Random(1)
    pattern = torch.frombuffer(bytearray(chance.randbytes(2 * TILE_BYTES)), dtype=torch.uint8)
    starts = [chance.randrange(TILE_BYTES) for _ in tensors]
    return [pattern[start : start + TILE_BYTES] for start in starts]


def _fill(tensor: torch.Tensor, content: torch.Tensor) -> None:
    flat = tensor.reshape(-1).view(torch.uint8)
    for at in range(0, flat.numel(), TILE_BYTES):
        piece = flat[at : at + TILE_BYTES]
        piece.copy_(content[: piece.numel()])


class Window:
    """Touched shared memory, to copy a training's tensors into and back: what nobody can be faster than.

    Smaller than the state where there is no room for a whole copy besides; then it is used several times.
    """

    def __init__(self, training: Training, size_bytes: int) -> None:
        largest = max(tensor.nbytes for tensor in training.tensors.values())
        whole = training.size_bytes + ALIGNMENT * len(training.tensors)
        buffer = torch.frombuffer(
            mmap.mmap(-1, whole if size_bytes >= training.size_bytes else max(size_bytes, largest)),
            dtype=torch.uint8,
        )
        buffer.fill_(1)
        self._buffer, self._size_bytes = buffer, size_bytes
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.look(training)

    def look(self, training: Training) -> None:
        at = 0
        self._pairs = []
        for tensor in training.tensors.values():
            at = 0 if at + tensor.nbytes > self._size_bytes else at
            place = self._buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._pairs.append((tensor, place))
            at += (
                -(-tensor.nbytes // 64) * 64 if at + tensor.nbytes + 64 <= self._size_bytes else tensor.nbytes
            )

    def copy(self) -> None:
        for tensor, place in self._pairs:
            place.copy_(tensor)

    def copy_back(self) -> None:
        for tensor, place in self._pairs:
            tensor.copy_(place)
