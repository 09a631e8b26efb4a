"""How each system saves and restores a training. All work in a rank, on live tensors, with one thread."""

from __future__ import annotations

import importlib
import mmap
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.tiers.training import Training

NEVER = 10**9  # steps between saves that nobody asked for


class System(ABC):
    """`place`: where its files go, in memory unless a restore says otherwise."""

    def __init__(self, training: Training, place: Path) -> None:
        self.training = training
        self.place = place

    @abstractmethod
    def save(self, step: int) -> bool:
        """What training waits for: afterwards the tensors may change. False when there was no room."""

    def finish(self, step: int) -> None:
        """Wait until the save is whole, then remove the one before. jurymast's agent does both by itself."""
        del step

    def restore(self, step: int) -> int:
        """The step restored, into the live tensors."""
        raise NotImplementedError

    def path(self, step: int) -> Path:
        return self.place / f"step-{step}"

    def file_pages(self, step: int) -> int:
        """Of the files that a save made; a file in memory takes new pages, too, though no fault tells."""
        size = sum(path.stat().st_size for path in self.path(step).rglob("*") if path.is_file())
        return size // mmap.PAGESIZE

    def _keep_only(self, step: int) -> None:
        if dist.get_rank() == 0:
            for path in self.place.glob("step-*"):
                if path != self.path(step):
                    shutil.rmtree(path)


class Jurymast(System):
    """The Checkpointer, with what a script gives it: a module and an optimizer."""

    def __init__(self, training: Training, place: Path) -> None:
        super().__init__(training, place)
        self._checkpoint = self._open({"model": training.model, "optimizer": training.optimizer})
        if self._checkpoint.restore() != 0:
            raise RuntimeError("there was something to restore")

    def _open(self, state: dict[str, Any]) -> Any:
        import jurymast

        return jurymast.Checkpointer(state, directory=self.place / "checkpoints", every=NEVER)

    def save(self, step: int) -> bool:
        return bool(self._checkpoint.save(step))

    def flatten(self) -> None:
        """From now on the same tensors are saved as those of one module: an optimizer's state is made new by
        a restore, but restores are measured into tensors that live."""
        self._checkpoint = self._open({"all": self.training.as_module()})


class JurymastRestoring(Jurymast):
    """A rank that has just been started and restores first of all."""

    def __init__(self, training: Training, place: Path) -> None:
        System.__init__(self, training, place)

    def restore(self, step: int) -> int:
        self.flatten()
        return int(self._checkpoint.restore())


class TorchSave(System):
    def save(self, step: int) -> bool:
        self.path(step).mkdir(parents=True, exist_ok=True)
        torch.save(self.training.tensors, self._file(step))
        return True

    def finish(self, step: int) -> None:
        dist.barrier()
        self._keep_only(step)

    def restore(self, step: int) -> int:
        loaded = torch.load(self._file(step), mmap=True, weights_only=True)
        for name, tensor in self.training.tensors.items():
            tensor.copy_(loaded[name])
        return step

    def _file(self, step: int) -> Path:
        return self.path(step) / f"rank-{dist.get_rank()}.pt"


class Dcp(System):
    def save(self, step: int) -> bool:
        dcp.save(self.training.tensors, storage_writer=dcp.FileSystemWriter(self.path(step)))
        return True

    def finish(self, step: int) -> None:
        dist.barrier()
        self._keep_only(step)

    def restore(self, step: int) -> int:
        dcp.load(self.training.tensors, storage_reader=dcp.FileSystemReader(self.path(step)))
        return step


class DcpAsync(Dcp):
    _saving: Any = None

    def save(self, step: int) -> bool:
        self._saving = dcp.async_save(
            self.training.tensors, storage_writer=dcp.FileSystemWriter(self.path(step))
        )
        return True

    def finish(self, step: int) -> None:
        self._saving.result()
        super().finish(step)


class DcpStaged(Dcp):
    """One stager for all saves, so that its memory is used again. Training waits for the staging."""

    _saving: Any = None

    def __init__(self, training: Training, place: Path) -> None:
        super().__init__(training, place)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )  # fmt: skip

    def save(self, step: int) -> bool:
        self._saving = dcp.async_save(
            self.training.tensors, storage_writer=dcp.FileSystemWriter(self.path(step)),
            async_stager=self._stager,
        )  # fmt: skip
        self._saving.staging_completion.result()
        return True

    def finish(self, step: int) -> None:
        self._saving.upload_completion.result()
        super().finish(step)


class TorchSnapshot(System):
    _saving: Any = None

    def save(self, step: int) -> bool:
        torchsnapshot = importlib.import_module("torchsnapshot")  # installed by the benchmark
        state = {"state": torchsnapshot.StateDict(**self.training.tensors)}
        self._saving = torchsnapshot.Snapshot.async_take(str(self.path(step)), state)
        return True

    def finish(self, step: int) -> None:
        self._saving.wait()
        dist.barrier()
        self._keep_only(step)


KINDS: dict[str, type[System]] = {
    "jurymast": Jurymast,
    "jurymast-restoring": JurymastRestoring,
    "torch.save": TorchSave,
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
    "dcp.async_save-stager": DcpStaged,
    "torchsnapshot": TorchSnapshot,
}


def set_attempt(attempt: int) -> None:
    os.environ["JURYMAST_ATTEMPT"] = str(attempt)
