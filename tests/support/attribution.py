"""The findings of an incident, put together by hand."""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.core.state.events import Asked, NodeLost, RanksHung, WorkerFailed
from jurymast.core.state.run import Findings


def found(
    *failures: WorkerFailed, lost: Sequence[NodeLost] = (), asked: Asked | None = None,
    hung: RanksHung | None = None,
) -> Findings:  # fmt: skip
    by_rank = {(one.node, one.rank, one.error): one for one in failures}
    return Findings(lost=[*lost], failures=by_rank, hung=hung, asked=asked)
