"""Accepts connections of agents and operators, who prove that they know the run's secret.

Everybody on the cluster's network can reach the port. So only a few unproven connections may wait at a time:
they must neither use up the supervisor's open files, of which it needs one per node, nor fill its log.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections import defaultdict
from contextlib import suppress

from jurymast.core.messages import Ask, Hello, Said, Strange, out_of_place, read_said
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.wire import channel, handshake
from jurymast.wire.channel import Channel, Connection

log = logging.getLogger("jurymast.supervisor")

# Unproven connections that may wait besides one per node; all nodes connect at once after a takeover.
STRANGERS_MAX = 256
# The first refusal is logged at once; then their number, at intervals of this many seconds.
TOLD_EVERY_S = 60.0
# Open files besides connections: the journal, the run's files, commands.
OWN_FILES = 128


def allow_files(nodes: int) -> str:
    """Raise this process's limit of open files as far as allowed. Return what to report if that is too low
    for so many nodes, or "".

    Slurm passes on the soft limit of the shell that submitted the job, often 1024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a hard limit above fs.nr_open cannot be set, not even unchanged
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * nodes + STRANGERS_MAX + OWN_FILES
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return ""
    return (
        f"a process may open {allowed} files here, and the supervisor of {nodes} nodes may need {needed}: "
        "raise the hard limit of open files (LimitNOFILE of slurmd, or limits.conf)"
    )


class Acceptor:
    """Accepts connections of the agents of `nodes` nodes, and of operators."""

    def __init__(self, secret: bytes, nodes: int) -> None:
        self._secret = secret
        self._waiting_max = nodes + STRANGERS_MAX
        self._waiting: dict[Connection, None] = {}  # oldest first
        self._waiting_at: defaultdict[str, dict[Connection, None]] = defaultdict(dict)  # by address
        self._told_at = -math.inf
        self._untold = 0

    async def enter(self, come: Connection) -> tuple[Channel[Said], Hello | Ask] | None:
        """Return the authenticated connection and its greeting; None if it was refused, and is closed."""
        self._wait(come)
        late = TimeoutError(f"no greeting within {handshake.HANDSHAKE_LIMIT_S:g} s")
        timer = asyncio.get_running_loop().call_later(handshake.HANDSHAKE_LIMIT_S, come.abort, late)
        try:
            connection = await channel.accept(come, self._secret, read_said)
            self._waits_no_more(come)
            first = await connection.receive()
            if isinstance(first, Hello | Ask):
                return connection, first
            what = first if isinstance(first, Strange) else out_of_place(first)
            raise ProtocolError(f"no greeting: {what}")
        except (OSError, AuthenticationError, ProtocolError) as error:
            if not isinstance(error, ConnectionError):  # an agent that connected faster elsewhere hangs up
                self._tell(come, error)
            come.close()
            return None
        finally:
            timer.cancel()
            self._waits_no_more(come)

    def _wait(self, come: Connection) -> None:
        self._waiting[come] = None
        neighbours = self._waiting_at[come.peer_address]
        neighbours[come] = None
        if len(self._waiting) > self._waiting_max:
            # The oldest, probably a stranger: agents prove themselves within milliseconds. One of the same
            # address, if there is one, so that a crowd from one machine displaces only itself.
            oldest = next(iter(neighbours if len(neighbours) > 1 else self._waiting))
            self._waits_no_more(oldest)
            oldest.abort()

    def _waits_no_more(self, come: Connection) -> None:
        if come in self._waiting:
            del self._waiting[come]
            neighbours = self._waiting_at[come.peer_address]
            del neighbours[come]
            if not neighbours:
                del self._waiting_at[come.peer_address]

    def _tell(self, come: Connection, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._told_at < TOLD_EVERY_S:
            self._untold += 1
            return
        others = f"; {self._untold} more since the last message" if self._untold else ""
        what = f"{type(error).__name__}: {error}{others}"
        log.warning("refused a connection from %s: %s", come.peer_address, what)
        self._told_at, self._untold = now, 0
