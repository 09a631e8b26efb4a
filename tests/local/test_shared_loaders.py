"""Loaders whose batches are dealt out to fewer ranks yield what they would on all ranks together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

pytest.importorskip("accelerate")

from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.state import AcceleratorState, GradientState
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import jurymast
from jurymast.checkpoint.batch import BATCH_VARIABLE, RANKS_VARIABLE, is_kept
from jurymast.checkpoint.loaders import (
    MicroBatches,
    NotShared,
    as_it_was,
    share_distributed,
    share_prepared,
)

pytestmark = pytest.mark.torch

WORLDS = [(3, 2), (3, 1), (4, 3), (8, 7), (2, 1)]
SIZES = [(31, 3), (32, 4), (7, 1), (5, 4)]
Batches = list[list[int]]


@pytest.fixture(autouse=True)
def _wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    monkeypatch.setenv(BATCH_VARIABLE, "global")


def distributed(count: int, size: int, rank: int, ranks: int, *, drop_last: bool) -> Any:
    sampler = DistributedSampler(range(count), ranks, rank, shuffle=True, seed=5)
    sampler.set_epoch(2)
    return DataLoader(range(count), size, sampler=sampler, drop_last=drop_last)


def prepared(count: int, size: int, rank: int, ranks: int, *, drop_last: bool) -> Any:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    batches = BatchSampler(order, size, drop_last)
    shard = BatchSamplerShard(batches, ranks, rank) if ranks > 1 else batches
    return DataLoaderShard(range(count), batch_sampler=shard)


def share(loader: Any, rank: int, ranks: int) -> Any:
    if isinstance(loader, DataLoaderShard):
        return share_prepared(loader, world=ranks, rank=rank, in_parts=True)
    return share_distributed(loader, world=ranks, in_parts=True)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("count", "size"), SIZES)
@pytest.mark.parametrize(("wanted", "ranks"), WORLDS)
@pytest.mark.parametrize("make", [distributed, prepared])
def test_batches_are_those_of_all_ranks(
    make: Any,
    wanted: int,
    ranks: int,
    count: int,
    size: int,
    drop_last: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, str(wanted))
    all_ = [make(count, size, rank, wanted, drop_last=drop_last) for rank in range(wanted)]
    expected = [torch.cat(batch).double() for batch in zip(*(list(one) for one in all_), strict=True)]
    loaders = [make(count, size, rank, ranks, drop_last=drop_last) for rank in range(ranks)]
    shares = [share(one, rank, ranks) for rank, one in enumerate(loaders)]
    assert {len(one) for one in loaders} == {len(expected)}
    assert shares[0].samples == size * wanted
    found = list(zip(*(list(one) for one in loaders), strict=True))
    assert len(found) == len(expected)
    for number, (parts, samples) in enumerate(zip(found, expected, strict=True)):
        mean = 0.0
        used: list[int] = []
        for batch, of in zip(parts, shares, strict=True):
            assert isinstance(batch, MicroBatches)
            assert len(batch) == shares[0].parts, "as many on each rank, as sharded parameters need it"
            for part, scale in zip(batch, of.scales(number), strict=True):
                assert len(part) <= size
                mean += scale * float(part.double().mean()) / ranks
                used += part.tolist() if scale else []
        assert sorted(used) == sorted(samples.int().tolist())
        assert mean == pytest.approx(float(samples.mean()))


def test_an_undone_loader_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, "3")
    loader = distributed(31, 3, 1, 2, drop_last=False)
    before = [batch.tolist() for batch in loader]
    share(loader, 1, 2)
    assert [type(batch) for batch in loader] == [MicroBatches] * 4
    as_it_was(loader)
    assert [batch.tolist() for batch in loader] == before


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [DistributedSampler, StatefulDistributedSampler])
@pytest.mark.parametrize("done", [1, 3])
def test_a_place_is_the_same_on_any_number_of_ranks(
    done: int, kind: type, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place of one of three ranks is gone on from by two, and theirs by three."""
    monkeypatch.setenv(RANKS_VARIABLE, "3")

    def loaders(ranks: int) -> list[Any]:
        made = []
        for rank in range(ranks):
            sampler = kind(range(31), ranks, rank, shuffle=True, seed=5)
            made.append(StatefulDataLoader(range(31), 3, sampler=sampler, num_workers=workers))
            if ranks < 3:
                share_distributed(made[-1], world=ranks, in_parts=False)
        return made

    def rest(made: list[Any], place: Any) -> list[list[int]]:
        for one in made:
            one.load_state_dict(place)
        batches = zip(*(list(one) for one in made), strict=True)
        return [sorted(torch.cat(batch).tolist()) for batch in batches]

    def place(loader: Any) -> Any:
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        return loader.state_dict()

    expected = [
        sorted(torch.cat(batch).tolist()) for batch in zip(*(list(one) for one in loaders(3)), strict=True)
    ][done:]
    of_three, of_two = place(loaders(3)[0]), place(loaders(2)[0])
    for from_, to in itertools.product((of_three, of_two), (3, 2)):
        assert rest(loaders(to), from_) == expected


def test_what_cannot_be_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, "3")
    with pytest.raises(NotShared, match="SequentialSampler, no DistributedSampler"):
        share_distributed(DataLoader(range(8), 2), world=2, in_parts=True)
    uneven = BatchSamplerShard(BatchSampler(range(8), 2, False), 2, 0, even_batches=False)
    with pytest.raises(NotShared, match="even_batches"):
        share_prepared(DataLoaderShard(range(8), batch_sampler=uneven), world=2, rank=0, in_parts=True)


@pytest.mark.usefixtures("no_run")
@pytest.mark.parametrize("asks", [False, True])
def test_a_loop_that_does_not_ask_for_its_part_is_told(
    asks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, "3")
    checkpoint = jurymast.Checkpointer({"step": 0}, directory=tmp_path)
    if asks:
        checkpoint.batch(6)
    for step in (1, 2):
        checkpoint.step(step)
    said = [text for text in caplog.messages if "with 1 of 3 ranks the batch of a step" in text]
    assert len(said) == (not asks)
    assert all("does not ask Checkpointer.batch" in text for text in said)


@pytest.mark.parametrize(("wanted", "ranks", "policy", "kept"), [
    ("3", 2, "global", True), ("3", 3, "global", False), ("3", 2, "local", False), ("", 2, "", False),
])  # fmt: skip
def test_when_the_batch_is_kept(
    wanted: str, ranks: int, policy: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, wanted)
    monkeypatch.setenv(BATCH_VARIABLE, policy)
    assert is_kept(ranks) is kept
