"""Another user of the machine, who besets ports: `hostile_neighbour.py PORT...`, with streams that it has
overheard (lines of hexadecimal) on stdin. Prints how many connections it has made, until it is ended."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

NOBODY = 65534
BYTES = 1 << 16
HELLO = BYTES  # more than any


def replay(stranger: socket.socket, heard: bytes) -> None:
    stranger.sendall(heard)


def replay_in_disorder(stranger: socket.socket, heard: bytes) -> None:
    half = len(heard) // 2
    stranger.sendall(heard[half:] + heard[:half])


def begin_a_frame(stranger: socket.socket, heard: bytes) -> None:
    stranger.sendall(heard[: len(heard) // 2])


def end_at_once(stranger: socket.socket, heard: bytes) -> None:
    stranger.sendall(heard)
    stranger.shutdown(socket.SHUT_WR)


def claim_much(stranger: socket.socket, heard: bytes) -> None:
    """As the length of a frame, and as the proof before it."""
    stranger.sendall(heard[:64] + b"\xff" * 4 + bytes(BYTES))


def claim_nothing(stranger: socket.socket, heard: bytes) -> None:
    stranger.sendall(heard[:64] + bytes(4) + bytes(BYTES))


ACTS: list[Callable[[socket.socket, bytes], None]] = [
    replay, replay_in_disorder, begin_a_frame, end_at_once, claim_much, claim_nothing,
]  # fmt: skip


def main() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ports = [int(word) for word in sys.argv[1:]]
    streams = [bytes.fromhex(line) for line in sys.stdin] or [bytes(BYTES)]
    held: list[socket.socket] = []
    for count in itertools.count(1):
        act, heard = ACTS[count % len(ACTS)], streams[count // len(ACTS) % len(streams)]
        for port in ports:
            with suppress(OSError):
                stranger = socket.socket()  # not create_connection, which imports what this user cannot read
                held.append(stranger)
                stranger.settimeout(2.0)
                stranger.connect(("127.0.0.1", port))
                stranger.recv(HELLO)
                act(stranger, heard)
        for stranger in held[:-50]:
            stranger.close()
        del held[:-50]
        print(count, flush=True)


if __name__ == "__main__":
    main()
