"""A rank that comes to life too late to hear that its server has ended."""

from __future__ import annotations

import os
import select
import time
import warnings

import pytest

from jurymast.worker import rank as rank_start

LIMIT_S = 90.0


@pytest.mark.parametrize("lives", [True, False])
def test_a_rank_ends_whose_server_was_gone_before_it_could_hear_of_it(lives: bool) -> None:
    """This process is the host, and lives on: as when its threads have not all ended yet."""
    told_r, told_w = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: pytest has a thread
        server = os.fork()
    if server == 0:
        _serve(told_w, lives)
    os.close(told_w)
    try:
        assert select.select([told_r], [], [], LIMIT_S)[0]
        assert os.read(told_r, 9) == (b"lives" if lives else b"")  # at its end nothing more comes
    finally:
        os.close(told_r)
        os.waitpid(server, 0)


def _serve(told_w: int, lives: bool) -> None:
    """Fork a rank that says so when it comes through; unless `lives`, be gone before it tries."""
    try:
        server = os.getpid()
        rank = os.fork()
        if rank == 0:
            end = time.monotonic() + LIMIT_S
            while not lives and os.getppid() == server and time.monotonic() < end:
                os.sched_yield()
            rank_start._bind_to_host(server)
            os.write(told_w, b"lives")
        elif lives:
            os.waitpid(rank, 0)
    finally:
        os._exit(0)
