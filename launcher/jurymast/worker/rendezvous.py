"""A rendezvous in which the supervisor decides the ranks, so that no node waits for others to join.

It is registered with torch under `torchrun.handlers`. Each node listens in advance and reports its port, so
that the launch can name rank 0's store: nobody binds a fixed port or finds keys of an earlier attempt. Only
rank 0's node opens a store on its port, because torch's store accepts everybody who reaches it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import SparedRank
from jurymast.wire.addresses import ADDRESS_VARIABLE, listen_at
from jurymast.worker.agent_pipe import AgentPipe
from jurymast.worker.store import store_at

# Rank 0's store listens before the launch is decided, so a slow connection means a lost node.
STORE_CONNECT_S = 10.0


class AgentRendezvous(RendezvousHandler):
    """One node's rendezvous. `launch` is the launch of the attempt last joined."""

    launch: msg.Launch

    def __init__(self, pipe: AgentPipe, run_id: str) -> None:
        self.pipe = pipe
        self._run_id = run_id
        self._closed = False
        self.store: Store | None = None  # the attempt's, once it is reached
        self.spared: tuple[SparedRank, ...] = ()  # of the last attempt; they wait for the next

    def get_backend(self) -> str:
        return "jurymast"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Listen, tell the agent that this node is ready, and wait for the launch. Other nodes' launches are
        not waited for: only rank 0's node has opened its store when this returns.

        Once the run is over, the agent ends this process while it waits.
        """
        self.store = None  # closes the last attempt's server
        with listen_at(os.environ.get(ADDRESS_VARIABLE, "")) as listener:
            order = self.launch = self.pipe.next_launch(listener.getsockname()[1], self.spared)
            served = listener.detach() if order.rank == 0 else None
        address, port = order.master_address, order.master_port
        if served is not None:
            self.store = store_at(address, port, STORE_CONNECT_S, served)
        info = RendezvousStoreInfo(address, port)
        return RendezvousInfo(self.store or HashStore(), order.rank, order.world, info)

    def reach_store(self) -> None:
        """See that this node reaches the store of the attempt whose ranks have started. Raises RuntimeError
        if it does not, long before the ranks would give up."""
        if self.store is None:
            self.store = store_at(self.launch.master_address, self.launch.master_port, STORE_CONNECT_S)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 1 if the supervisor wants this attempt stopped: torch's agent then restarts its workers."""
        return int(self.pipe.stop_asked(self.launch.attempt))

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def handler_factory() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the handler's creator; torch calls this through its entry-point group."""
    return lambda parameters: AgentRendezvous(AgentPipe.from_environment(), parameters.run_id)
