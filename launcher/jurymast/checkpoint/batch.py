"""Which samples of a step's batch a rank trains on, also while a run goes on with fewer nodes than it wants.

No torch here: a script may ask before it loads anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from jurymast.errors import CheckpointError

# What the policy keeps constant, and how many ranks the run has when it has all its nodes; not set where it
# always has.
BATCH_VARIABLE, RANKS_VARIABLE = "JURYMAST_BATCH", "JURYMAST_RANKS"


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of one step. All ranks together train on `samples` in this step, each in as many
    micro-batches.

    `micro` are this rank's, as ranges of the step's samples. Each one's mean loss times its factor in
    `scales`, added up, and averaged over ranks, as DistributedDataParallel and FSDP do with gradients, is the
    mean over all samples.
    """

    samples: int
    ranks: int
    micro: tuple[range, ...]

    @property
    def accumulation(self) -> int:
        """How many micro-batches an update takes."""
        return len(self.micro)

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(len(part) * self.ranks / self.samples for part in self.micro)


def batch(samples: int, rank: int, ranks: int, *, micro: int | None = None) -> RankBatch:
    """Share out a step's batch. `samples`: how many all ranks train on when the run has all its nodes; `rank`
    of the `ranks` that there are; `micro`: how many samples a rank takes at once, one more where shares
    differ; by default its share when the run has all its nodes. Raises CheckpointError if there are too few
    samples for the ranks."""
    wanted = wanted_ranks(ranks)
    if micro is not None and micro < 1:
        raise CheckpointError(f"micro={micro}: a micro-batch has at least one sample")
    if samples < max(ranks, wanted):
        raise CheckpointError(f"a batch of {samples} samples is too small for {max(ranks, wanted)} ranks")
    most = micro or -(-samples // wanted)
    if os.environ.get(BATCH_VARIABLE) == "local":
        samples = samples * ranks // wanted
    # As many on each rank, because sharded parameters are gathered by all ranks together.
    largest = -(-samples // ranks)
    times = min(-(-largest // most), samples // ranks)
    own = part_of(range(samples), rank, ranks)
    return RankBatch(samples, ranks, tuple(part_of(own, number, times) for number in range(times)))


def part_of(whole: range, number: int, count: int) -> range:
    """Part `number` of `count`, which differ by one in size at the most."""
    return whole[len(whole) * number // count : len(whole) * (number + 1) // count]


def is_kept(ranks: int) -> bool:
    """Return whether `ranks` are fewer than the run has with all its nodes, and a step's batch is to stay the
    same."""
    return wanted_ranks(ranks) != ranks and os.environ.get(BATCH_VARIABLE) != "local"


def wanted_ranks(ranks: int) -> int:
    """How many ranks the run has with all its nodes, where it has `ranks` now."""
    text = os.environ.get(RANKS_VARIABLE, "")
    if not text:
        return ranks
    if not text.isdigit() or int(text) < 1:
        raise CheckpointError(f"{RANKS_VARIABLE}={text} is not a number of ranks")
    return int(text)
