"""`python -m support.strangers HOST PORT COUNT`: so many connections at a time of one who has no secret.

He says nothing, and comes again as soon as he is hung up on. Prints a line once all have been made once.
"""

from __future__ import annotations

import resource
import select
import socket
import sys

# Not the agents': whose connections are as old as a neighbour's.
HOME = "127.0.0.2"


def main() -> None:
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    poll, known = select.epoll(), dict[int, socket.socket]()

    def come() -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.bind((HOME, 0))
        stranger.connect_ex((host, port))
        known[stranger.fileno()] = stranger
        poll.register(stranger, select.EPOLLIN)

    for _ in range(count):
        come()
    sys.stdout.write("here\n")
    sys.stdout.flush()
    while True:
        for descriptor, _ in poll.poll():
            stranger = known[descriptor]
            try:
                if stranger.recv(4096):
                    continue
            except OSError:
                pass
            poll.unregister(stranger)
            known.pop(descriptor).close()
            come()


if __name__ == "__main__":
    main()
