"""The torchrun host's connection to its agent: JSON lines over an inherited socket pair."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading

from jurymast.core.state import host_messages
from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import SparedRank
from jurymast.core.state.message import Strangers, Unreadable, encode
from jurymast.errors import never

FD_VARIABLE = "JURYMAST_HOST_FD"


class AgentPipe:
    """Reads in its own thread, so that the torchrun host can ask at any time whether to stop.

    If the agent is gone, this ends the host at once, because it has nothing left to do.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        os.set_inheritable(descriptor, False)
        self._lock = threading.Lock()
        self._launches: queue.SimpleQueue[msg.Launch] = queue.SimpleQueue()
        self._stop_up_to = 0
        self.grace_s = 0.0  # that of the last order to stop
        self.job_ends = False  # as the last order to stop said
        self.spares = True  # unless the last order to stop said otherwise
        self.apart = 0  # the newest attempt in which the end of one rank ends no other
        self.stop_signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable if a stop is requested
        threading.Thread(target=self._read, name="agent-pipe", daemon=True).start()

    @classmethod
    def from_environment(cls) -> AgentPipe:
        """Open the connection that the environment names. Raises RuntimeError outside an agent."""
        text = os.environ.get(FD_VARIABLE, "")
        if not text.isdigit():
            raise RuntimeError(
                "the jurymast rendezvous works only under a jurymast agent: use `jurymast submit`"
            )
        return cls(int(text))

    def _read(self) -> None:
        strangers = Strangers(lambda sender, text: sys.stderr.write(f"{sender}: {text}\n"))
        with self._socket.makefile("rb") as lines:
            for line in lines:
                order = host_messages.read_host_order(line)
                match order:
                    case msg.Launch():
                        self.spares = True
                        self._launches.put(order)
                    case msg.Stop():
                        self._stop_up_to = max(self._stop_up_to, order.attempt)
                        self.grace_s, self.job_ends = order.grace_s, order.job_ends
                        self.spares = order.spare
                        os.eventfd_write(self.stop_signal, 1)
                    case host_messages.Apart():
                        self.apart = order.attempt
                    case Unreadable():
                        strangers.heard("the agent", order)
                    case _:
                        never(order)
        os._exit(0)

    def tell(self, message: msg.ToSupervisor) -> None:
        line = encode(message) + b"\n"
        with self._lock:
            self._socket.sendall(line)

    def stop_asked(self, attempt: int) -> bool:
        """Return whether the agent wants this attempt stopped, and reset `stop_signal`."""
        try:
            os.eventfd_read(self.stop_signal)
        except BlockingIOError:
            pass
        return self._stop_up_to >= attempt

    def next_launch(self, store_port: int, spared: tuple[SparedRank, ...] = ()) -> msg.Launch:
        """Tell the agent that the next store listens on this port, and which ranks are spared, and wait for
        the next launch."""
        while True:
            self.tell(msg.Ready(store_port=store_port, spared=spared))
            launch = self._launches.get()
            if launch.attempt > self._stop_up_to:
                return launch
