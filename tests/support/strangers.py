"""`python -m support.strangers HOST PORT COUNT [ADDRESS [WORDS]]`: so many connections at a time, from
ADDRESS, of one who has no secret.

Each ends once it has received something and said WORDS: "nothing" or "nonsense"; if it says nothing, once the
server hangs up. Then it begins again. Prints how many have ended, all thousand and in the beginning.
"""

from __future__ import annotations

import resource
import select
import socket
import sys

# Not the agents': whose connections are as old as a neighbour's.
HOME = "127.0.0.2"
PRINTED_EVERY = 100


def main() -> None:
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    home, words = [*sys.argv[4:], *(HOME, "nothing")[len(sys.argv) - 4 :]]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    poll, known, ended = select.epoll(), dict[int, socket.socket](), 0

    def begin() -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.setsockopt(socket.IPPROTO_IP, BIND_ADDRESS_NO_PORT, 1)
        stranger.bind((home, 0))
        stranger.connect_ex((host, port))
        known[stranger.fileno()] = stranger
        poll.register(stranger, select.EPOLLIN)

    def goes_on(stranger: socket.socket) -> bool:
        try:
            if not stranger.recv(4096):
                return False
            if words == "nonsense":
                stranger.send(bytes(64))
            return True
        except OSError:
            return False

    for _ in range(count):
        begin()
    print(ended, flush=True)
    while True:
        for descriptor, _ in poll.poll():
            stranger = known[descriptor]
            if goes_on(stranger):
                continue
            poll.unregister(stranger)
            known.pop(descriptor).close()
            begin()
            ended += 1
            if ended % PRINTED_EVERY == 0:
                print(ended, flush=True)


BIND_ADDRESS_NO_PORT = 24


if __name__ == "__main__":
    main()
