"""A framework's loader whose batches stay the same, over all ranks together, while a run goes on with fewer
ranks.

Each batch of the loader on one rank is that rank's part of the batch that all ranks together would have if
the run had all its nodes. So an epoch has as many batches, a position in it means the same, and schedules go
on as they would; only which rank trains on a sample differs. A part that is larger than a rank's own batch is
dealt out in micro-batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from jurymast.checkpoint.batch import part_of, wanted_ranks


class MicroBatches(list[Any]):
    """A batch in parts, each collated by itself: what frameworks do with lists, they do with its parts."""


class NotShared(Exception):
    """This loader's batches cannot be dealt out anew; the text says why."""


@dataclass(frozen=True)
class Share:
    """A rank's part of each batch. `batch`: how many samples a rank takes when the run has all `wanted`
    ranks; `total`: how many samples an epoch has on all ranks, None if each batch is full; `parts`: in how
    many micro-batches the part is taken, as many on each rank."""

    batch: int
    wanted: int
    ranks: int
    rank: int
    parts: int
    total: int | None = None

    @property
    def samples(self) -> int:
        """Of a batch, over all ranks."""
        return self.batch * self.wanted

    def own(self, samples: int) -> slice:
        """This rank's part of so many samples."""
        part = part_of(range(samples), self.rank, self.ranks)
        return slice(part.start, part.stop)

    def scales(self, number: int = 0) -> tuple[float, ...]:
        """The factors of the mean losses of the epoch's batch `number`. Added up over its parts, and averaged
        over ranks, these losses are the mean over all samples."""
        samples = self.samples
        if self.total is not None:
            samples = min(samples, self.total - number * self.samples)
        own = self.own(samples)
        parts = _in_parts(range(own.start, own.stop), self.parts)
        return tuple(len(one) * self.ranks / samples for one in parts)


@dataclass(frozen=True)
class Divided:
    """Collates a batch in parts."""

    collate: Callable[[list[Any]], Any]
    parts: int

    def __call__(self, samples: list[Any]) -> MicroBatches:
        taken = (samples[one.start : one.stop] for one in _in_parts(range(len(samples)), self.parts))
        # A part without samples takes part all the same, with any of them: its factor is 0.
        return MicroBatches(self.collate(one or samples[:1]) for one in taken)


def _in_parts(own: range, parts: int) -> list[range]:
    return [part_of(own, number, parts) for number in range(parts)]


class SharedSampler(Sampler[list[int]]):
    """Yields a rank's part of the batches that `whole` yields for all ranks. Else it is like the sampler that
    it stands for."""

    def __init__(
        self, original: Any, share: Share, whole: Callable[[], Iterator[list[int]]], length: int
    ) -> None:
        self.original, self.share, self._whole, self._length = original, share, whole, length
        self.batch_size, self.num_processes = share.batch, share.wanted  # of which Accelerate makes the total

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        return (whole[self.share.own(len(whole))] for whole in self._whole())

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # not yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.original, name)


class PlacedSampler(SharedSampler):
    """Stands for one of torchdata's, with whose places it begins and ends."""

    def __iter__(self) -> Iterator[list[int]]:
        return _Placed(self, super().__iter__())


class _Placed(Iterator[list[int]]):
    """As torchdata's iterator of batches, with the place that one has on each rank when there are all."""

    def __init__(self, of: PlacedSampler, parts: Iterator[list[int]]) -> None:
        self._of, self._parts, self._number = of, parts, 0

    def __next__(self) -> list[int]:
        part = next(self._parts)
        self._number += 1
        return part

    def state_dict(self) -> dict[str, Any]:
        share = self._of.share
        assert share.total is not None
        yielded = min(self._number * share.batch, share.total // share.wanted)
        place: dict[str, Any] = {"samples_yielded": yielded}
        if hasattr(self._of.original.sampler, "load_state_dict"):
            place["sampler_state"] = {"yielded": yielded}
        return place

    def load_state_dict(self, place: dict[str, Any]) -> None:
        for _ in range(-(-place["samples_yielded"] // self._of.share.batch) - self._number):
            next(self)


# ---- the two kinds of loaders


def share_distributed(loader: Any, *, world: int, in_parts: bool) -> Share:
    """Deal out a loader whose sampler is torch's DistributedSampler anew, in place. `world`: how many ranks
    there are. Raises NotShared."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    if not isinstance(loader, DataLoader) or not isinstance(batches, BatchSampler):
        raise NotShared("the loader has no sampler of batches")
    # Others, as Lightning's around a script's own sampler, may draw anew whenever they begin.
    is_torchdata = type(sampler).__module__.startswith("torchdata.")
    if not isinstance(sampler, DistributedSampler) or not (
        is_torchdata or type(sampler).__iter__ is DistributedSampler.__iter__
    ):
        raise NotShared(f"the loader's sampler is a {type(sampler).__name__}, no DistributedSampler")
    wanted = _wanted(sampler.num_replicas, world)
    count = len(sampler.dataset)
    each = count // wanted if sampler.drop_last else -(-count // wanted)
    total = each * wanted
    share = _share(batches.batch_size, wanted, sampler.num_replicas, sampler.rank, in_parts, total)
    length = each // share.batch if batches.drop_last else -(-each // share.batch)

    def whole() -> Iterator[list[int]]:
        one = copy.copy(sampler)  # with the epoch that is set by now
        one.num_replicas, one.rank, one.num_samples, one.total_size = 1, 0, total, total
        if hasattr(one, "next_yielded"):
            one.next_yielded = None
        return iter(BatchSampler(one, share.samples, batches.drop_last))

    by_torchdata = type(batches).__module__.startswith("torchdata.")
    _replace(loader, (PlacedSampler if by_torchdata else SharedSampler)(batches, share, whole, length), share)
    return share


def share_prepared(loader: Any, *, world: int, rank: int, in_parts: bool) -> Share:
    """Deal out a loader that Accelerate has prepared anew, in place. Raises NotShared."""
    base, shard = getattr(loader, "base_dataloader", None), getattr(loader, "batch_sampler", None)
    if type(loader).__name__ != "DataLoaderShard" or not isinstance(base, DataLoader):
        raise NotShared("rank 0 reads the batches of all ranks (dispatch_batches)")
    if not isinstance(shard, BatchSampler) or isinstance(getattr(base, "sampler", None), BatchSampler):
        raise NotShared("the loader has no sampler of batches, as with an iterable data set")
    ranks, rank = getattr(shard, "num_processes", 1), getattr(shard, "process_index", 0)
    if ranks != world and (ranks > 1 or hasattr(shard, "num_processes")):
        raise NotShared("several ranks have the same batches")
    if not getattr(shard, "even_batches", True):
        raise NotShared("ranks may have different numbers of batches (even_batches)")
    inner = getattr(shard, "batch_sampler", shard)
    share = _share(getattr(inner, "batch_size", None), _wanted(world, world), world, rank, in_parts, None)
    drops = bool(getattr(inner, "drop_last", False))

    def whole() -> Iterator[list[int]]:
        return _groups(inner, share.wanted, share.samples, drops)

    length = len(inner) // share.wanted if drops else -(-len(inner) // share.wanted)
    _replace(base, SharedSampler(shard, share, whole, length), share)
    return share


def _groups(batches: Any, wanted: int, samples: int, drops: bool) -> Iterator[list[int]]:
    """The batches of `wanted` ranks together, the last one filled up with the first samples, as by
    Accelerate."""
    first: list[int] = []
    group: list[int] = []
    number = 0
    for number, batch in enumerate(batches, 1):
        if number <= wanted:
            first += batch
        group += batch
        if number % wanted == 0 and len(group) == samples:
            yield group
            group = []
    if group and not drops:
        while len(first) < samples:
            first += first
        yield group + first[: samples - len(group)]


def _wanted(ranks: int, world: int) -> int:
    """How many ranks have batches of their own when the run has all its nodes, where `ranks` of `world`
    have."""
    wanted, rest = divmod(wanted_ranks(world) * ranks, world)
    if rest:
        raise NotShared(f"{ranks} of {world} ranks have batches of their own")
    return wanted


def _share(batch: int | None, wanted: int, ranks: int, rank: int, in_parts: bool, total: int | None) -> Share:
    if not isinstance(batch, int):
        raise NotShared("batches differ in size")
    largest = -(-batch * wanted // ranks)
    return Share(batch, wanted, ranks, rank, -(-largest // batch) if in_parts else 1, total)


def _replace(loader: Any, sampler: SharedSampler, share: Share) -> None:
    vars(loader)["batch_sampler"] = sampler  # a loader lets nobody set it
    if share.parts > 1:
        loader.collate_fn = Divided(loader.collate_fn, share.parts)


def as_it_was(loader: Any) -> None:
    """Undo what was changed in a loader."""
    vars(loader)["batch_sampler"] = loader.batch_sampler.original
    if isinstance(loader.collate_fn, Divided):
        loader.collate_fn = loader.collate_fn.collate
