"""What the torchrun host hears of the server that forks its ranks."""

from __future__ import annotations

import os
import socket
from typing import Any, cast

import pytest

pytestmark = pytest.mark.torch


def test_a_rank_that_has_started_while_a_spared_one_joins_is_not_missed() -> None:
    """To see whether a spared rank lives, the host reads what the server says, which may be that of another
    one."""
    from jurymast.worker.elastic import RankServer

    class JoinsLate:
        """Spares local rank 1. By the time that it joins, the server has started rank 0."""

        def spared(self, local: int) -> int:
            return 77 if local == 1 else 0

        def starts(self, local: int) -> None:
            theirs.sendall(b'{"started": 70}\n')

        def join(self, local: int, environment: dict[str, str]) -> bool:
            return server.lives(77)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10.0)
        server = RankServer(ours)
        environments = {0: {}, 1: dict(os.environ)}
        nothing: dict[int, Any] = {0: (), 1: ()}
        server.start(environments, nothing, cold=False, ended=(), sparing=cast(Any, JoinsLate()))
        assert server.pids() == {0: 70, 1: 77}


def test_ranks_of_a_start_that_fails_half_way_are_known() -> None:
    """Whoever stops the attempt after that ends them as well."""
    from jurymast.worker.elastic import RankServer

    class CannotStart:
        """Fails for local rank 1. By then the server has been asked for rank 0."""

        def spared(self, local: int) -> int:
            return 0

        def starts(self, local: int) -> None:
            if local == 1:
                theirs.sendall(b'{"started": 70}\n')
                raise OSError("no space left on device")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10.0)
        server = RankServer(ours)
        environments: dict[int, dict[str, str]] = {0: {}, 1: {}}
        nothing: dict[int, Any] = {0: (), 1: ()}
        with pytest.raises(OSError, match="no space"):
            server.start(environments, nothing, cold=False, ended=(), sparing=cast(Any, CannotStart()))
        assert server.pids() == {0: 70}
