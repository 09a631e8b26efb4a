"""Messages between an agent and its torchrun host: JSON lines over a socket pair. Most of them are also said
to the supervisor, or by it."""

from __future__ import annotations

from collections.abc import Callable

from jurymast.core.state.message import Unreadable, reader
from jurymast.core.state.messages import Failed, Finished, Launch, Ready, Started, Stop, ToAgent


class Apart(ToAgent, frozen=True, kw_only=True):
    """The end of one rank of `attempt` ends no other."""

    attempt: int


_FromHost = Ready | Started | Failed | Finished
FromHosts = _FromHost | Unreadable
HostOrder = Launch | Stop | Apart | Unreadable

read_host: Callable[[bytes], FromHosts] = reader(_FromHost)
read_host_order: Callable[[bytes], HostOrder] = reader(Launch | Stop | Apart)
