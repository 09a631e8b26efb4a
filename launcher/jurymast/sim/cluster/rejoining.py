"""From which state simulated ranks go on that live, and whether that is one, whole, and the newest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jurymast.core.judges import rejoining
from jurymast.core.judges.rejoining import GoBack, GoOn, Rejoiner

if TYPE_CHECKING:
    from jurymast.sim.cluster.training import SimGroup
    from jurymast.sim.cluster.world import Token

ONE_STATE = "47: ranks that go on have one state, and each the part of it that is its own"
NO_STEP_LOST = "48: no step is lost that ranks have whole"

# How a model is spread over ranks: all have all of it, two have each part, or each has a part of its own.
WHOLE, TWINS, APART = SPREADS = ("", "twins", "apart")


def part(spread: str, number: int, world: int) -> str:
    """Of the model, on the rank with this number."""
    if spread == APART:
        return str(number)
    return str(number % (world // 2)) if spread == TWINS and world % 2 == 0 else ""


def has_twin(spread: str, world: int) -> bool:
    return not rejoining.has_no_twin([part(spread, number, world) for number in range(world)])


@dataclass
class _Has:
    """What one rank has: the state after a step; what is its own, and another rank's, of such a state."""

    live: Token | None
    own: Token | None
    kept: Token | None
    ward: int
    part: str


def newest_live(group: SimGroup) -> Token | None:
    """The state from which all ranks go on; None: from a save."""
    ranks = _ranks(group)
    needs_own = any(rank.live is not None for rank in ranks)
    told = [
        Rejoiner(_step(rank.live), _steps(rank.own), needs_own, rank.part, rank.ward, _steps(rank.kept))
        for rank in ranks
    ]
    found = rejoining.newest_whole(told, group.order.chosen)
    newest = max((_step(rank.live) for rank in ranks), default=-1)
    oracle = group.cluster.oracle
    whole = _whole(ranks, newest) if newest >= max(0, group.order.chosen) else None
    if whole is not None and (not isinstance(found, GoOn) or found.step != newest):
        oracle.fail(NO_STEP_LOST, f"{whole} is whole, and attempt {group.attempt}: {found}")
    if isinstance(found, GoBack):
        return None
    held = (member.host.live for member in group.members.values())
    token = next(one for one in held if one is not None and one.step == found.step)
    if not _goes_on(ranks, found, _as_done(token)):
        oracle.fail(ONE_STATE, f"attempt {group.attempt} goes on from {token}: {found} of {ranks}")
    return token


def _as_done(token: Token | None) -> Token | None:
    """The state as of the group that did its last step: one that restored it, and did none, has the same."""
    if token is None:
        return None
    done_by = token.history[-1:]
    if len(token.history) > 2 and token.history[-2] == token.step:
        done_by = token.history[-3:-2]
    return replace(token, history=done_by)


def _ranks(group: SimGroup) -> list[_Has]:
    each, world = group.cluster.ranks_per_node, group.world
    found = []
    for number in range(world):
        host = group.members[number // each].host
        lives = number % each in host.alive
        found.append(
            _Has(
                live=_as_done(host.live) if lives else None,
                own=_as_done(host.own),
                kept=_as_done(host.kept) if lives else None,
                ward=(number - each) % world,
                part=part(group.cluster.wanted.spread, number, world),
            )
        )
    return found


def _step(token: Token | None) -> int:
    return token.step if token is not None else -1


def _steps(token: Token | None) -> tuple[int, ...]:
    return (token.step,) if token is not None else ()


def _whole(ranks: list[_Has], step: int) -> Token | None:
    """The state after this step, if ranks have all of it."""
    tokens = {rank.live for rank in ranks if rank.live is not None and rank.live.step == step}
    if len(tokens) != 1:
        return None
    (token,) = tokens
    there = {rank.part for rank in ranks if rank.live == token}
    kept = {rank.ward for rank in ranks if rank.kept == token}
    own = all(rank.own == token or number in kept for number, rank in enumerate(ranks))
    return token if own and all(rank.part in there for rank in ranks) else None


def _goes_on(ranks: list[_Has], found: GoOn, token: Token | None) -> bool:
    givers = {taker: giver for giver, takers in found.takers.items() for taker in takers}
    for number, rank in enumerate(ranks):
        giver = ranks[givers[number]] if number in givers else rank
        keeper = ranks[found.records[number]] if number in found.records else None
        own = rank.own if keeper is None else keeper.kept if keeper.ward == number else None
        if (giver.live, giver.part, own) != (token, rank.part, token):
            return False
    return True
