"""What the function of `Checkpointer.run` makes itself has to be restored there, and only there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from jurymast.checkpoint import Checkpointer, RandomState
from jurymast.checkpoint.inprocess import Member
from jurymast.checkpoint.live import LiveState
from jurymast.errors import CheckpointError
from jurymast.worker.sparing import Pipes, RankSide, Sparing

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run", "one_rank")]


@pytest.fixture
def side() -> Iterator[RankSide]:
    """This rank's way to a host, which is this process as well."""
    host = Sparing(1, lambda pid: pid == os.getpid())
    pipes = Pipes.of(host.environment(0))
    assert pipes is not None
    yield RankSide(pipes, 0)
    os.close(host._orders[0][1])  # the rank's thread ends


def member(checkpoint: Checkpointer, side: RankSide) -> Member:
    return Member(checkpoint, LiveState(checkpoint.objects), side, (), b"key")


def made() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(1, 2)).sum().backward()
    state["optimizer"].step()


def one_more_step(folder: Path, side: RankSide, done: int) -> list[torch.Tensor]:
    """Train, `done` steps having been done; return the weights before and after."""
    state: dict[str, Any] = {"random": RandomState()}
    checkpoint = Checkpointer(state, directory=folder, every="1 steps")

    def weights() -> torch.Tensor:
        return next(state["model"].parameters()).full_tensor().clone()

    def train(start: int) -> list[torch.Tensor]:
        state.update(made())
        assert checkpoint.restore() == start == done
        assert checkpoint.restore() == done, "nothing was made since"
        before = weights()
        step(state)
        checkpoint.step(done + 1)
        return [before, weights()]

    return member(checkpoint, side).run(train)


def test_what_train_adds_and_restores_is_saved_and_restored_there(tmp_path: Path, side: RankSide) -> None:
    begun, stepped = one_more_step(tmp_path / "saved", side, 0)
    restored, _ = one_more_step(tmp_path / "saved", side, 1)
    assert not torch.equal(begun, stepped)
    assert torch.equal(stepped, restored)


def test_a_step_of_what_nobody_restored_is_refused(tmp_path: Path, side: RankSide) -> None:
    state: dict[str, Any] = {}
    checkpoint = Checkpointer(state, directory=tmp_path / "saved")

    def train(_start: int) -> None:
        state.update(made())
        step(state)
        checkpoint.step(1)

    with pytest.raises(CheckpointError, match="has made the entry 'model'") as raised:
        member(checkpoint, side).run(train)
    assert "call restore()" in raised.value.hint


@pytest.mark.parametrize("shards", [False, True])
def test_what_was_there_before_run_stays_what_it_was(tmp_path: Path, side: RankSide, shards: bool) -> None:
    model = nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model}
    checkpoint = Checkpointer(state, directory=tmp_path / "saved")

    def train(_start: int) -> None:
        if shards:
            fully_shard(model)
        else:
            state.update(made())
        checkpoint.restore()

    with pytest.raises(CheckpointError, match="'model' of the state was there before `run`"):
        member(checkpoint, side).run(train)
