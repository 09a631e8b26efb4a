"""How a step's batch is shared out, also to fewer ranks than the run has with all its nodes."""

from __future__ import annotations

import pytest

from jurymast.checkpoint.batch import BATCH_VARIABLE, RANKS_VARIABLE, RankBatch, batch
from jurymast.core.state import events as ev
from jurymast.errors import CheckpointError
from jurymast.report.status import doubts
from support.stories import Story


def shares(samples: int, ranks: int, micro: int | None = None) -> list[RankBatch]:
    return [batch(samples, rank, ranks, micro=micro) for rank in range(ranks)]


def wants(monkeypatch: pytest.MonkeyPatch, ranks: int, kept: str = "global") -> None:
    monkeypatch.setenv(RANKS_VARIABLE, str(ranks))
    monkeypatch.setenv(BATCH_VARIABLE, kept)


def test_each_rank_has_its_share_in_one_piece() -> None:
    assert [one.micro for one in shares(8, 2)] == [(range(4),), (range(4, 8),)]
    assert shares(8, 2)[0].scales == (1.0,)


@pytest.mark.parametrize(("samples", "ranks", "micro"), [(24, 3, None), (25, 3, 4), (32, 3, None), (7, 3, 1)])
def test_fewer_ranks_take_the_same_samples_in_more_steps(
    samples: int, ranks: int, micro: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants(monkeypatch, 4)
    found = shares(samples, ranks, micro)
    taken = [sample for one in found for part in one.micro for sample in part]
    assert taken == [*range(samples)]
    assert len({one.accumulation for one in found}) == 1
    most = micro or -(-samples // 4)
    # One more where ranks' shares differ by one: none may be left without a sample.
    assert max(len(part) for one in found for part in one.micro) <= most + (samples % ranks > 0)
    # Gradients are averaged over ranks: each sample counts the same.
    for one in found:
        assert all(scale / len(part) == pytest.approx(ranks / samples)
                   for scale, part in zip(one.scales, one.micro, strict=True))  # fmt: skip


def test_a_constant_local_batch_is_smaller_on_fewer_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    wants(monkeypatch, 4, "local")
    assert [one.micro for one in shares(32, 3)] == [(range(8),), (range(8, 16),), (range(16, 24),)]
    assert shares(32, 3)[0].samples == 24


def test_too_few_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wants(monkeypatch, 4)
    with pytest.raises(CheckpointError, match="3 samples is too small for 4 ranks"):
        batch(3, 0, 3)
    with pytest.raises(CheckpointError, match="at least one"):
        batch(8, 0, 3, micro=0)


def test_a_number_of_ranks_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_VARIABLE, "many")
    with pytest.raises(CheckpointError, match="JURYMAST_RANKS=many"):
        batch(8, 0, 3)


def test_status_says_why_the_batch_is_another_one_until_there_is_another_attempt() -> None:
    story = Story(spares=0).running(3)
    story.feed(ev.BatchDiffers(t=story.t, attempt=1, ranks=2, wanted=3, why="nobody knows its loader"))
    said = "with 2 of 3 ranks the batch of a step is not what it was: nobody knows its loader"
    assert said in doubts(story.state)
    story.state.attempt = 2
    assert said not in doubts(story.state)
